"""Options of every verb, read from the parsers themselves, for the reference page of the command line.

``python docs/site/list_options.py`` writes them into docs/reference/cli.md, below the line that says so, and those of
``ullage train`` into the table that its help reads. Tests compare both.
"""

import importlib
import re
import textwrap
from pathlib import Path

import typer

from ullage.cli import VERBS
from ullage.cli.train.help import FIRST, OTHERS, TABLE, Option, read_sections, table_text

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"
MARK = "<!-- Everything below is written by docs/site/list_options.py. -->\n"


def written() -> str:
    """The page with its options as they are now."""
    kept = PAGE.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    return "\n\n".join([kept, MARK.rstrip(), *(part for verb in VERBS for part in _verb(verb))]) + "\n"


def _verb(verb: str) -> list[str]:
    title = [f"## ullage {verb}", VERBS[verb]]
    if verb == "train":
        return [*title, *_train(read_sections())]
    command = typer.main.get_command(importlib.import_module(f"ullage.cli.{verb}").app)
    context = typer.Context(command, info_name=verb)
    records = [(param.name, param.get_help_record(context)) for param in command.params]
    # Bullets are sorted as the help is: arguments first, then options.
    return [*title, "\n".join(_bullet(*record) for _, record in records if record is not None)]


def _train(found: dict[str, list[Option]]) -> list[str]:
    """The arguments of a first run by section, then the names of the others."""
    parts = []
    for section, names in FIRST.items():
        listed = [_bullet(f"--{one.name} {one.metavar}", _with_default(one)) for one in found[section][: len(names)]]
        parts += [f"### {section}", "\n".join(listed)]
    for section, actions in found.items():
        rest = [one.name for one in actions[len(FIRST.get(section, ())) :]]
        if rest:
            title = section if section == OTHERS else f"{section}: more"
            parts += [f"### {title}", _wrapped(", ".join(f"`--{name}`" for name in rest) + ".")]
    return parts


def _with_default(one: Option) -> str:
    return one.help if one.default is None else f"{one.help} [default: {one.default}]"


def _bullet(name: str, text: str) -> str:
    spelled = re.sub(r" <bool>$", "", name.strip())
    what = " ".join(text.split()).replace("*", r"\*")
    return _wrapped(f"- `{spelled}`: {what}", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    TABLE.write_text(table_text(), encoding="utf-8")
    PAGE.write_text(written(), encoding="utf-8")
