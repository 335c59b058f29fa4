"""Options of every verb, read from the parsers themselves, for the reference page of the command line.

``python docs/site/list_options.py`` writes them into docs/reference/cli.md, below the line that says so; a test
compares them.
"""

import dataclasses
import importlib
import re
import textwrap
from pathlib import Path

import typer

from ullage.cli import VERBS
from ullage.cli.train import Arguments, DataArguments, ModelArguments

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"
MARK = "<!-- Everything below is written by docs/site/list_options.py. -->\n"


def written() -> str:
    """The page with its options as they are now."""
    kept = PAGE.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    return "\n\n".join([kept, MARK.rstrip(), *(part for verb in VERBS for part in _verb(verb) if part)]) + "\n"


def _verb(verb: str) -> list[str]:
    title = [f"## ullage {verb}", VERBS[verb]]
    if verb == "train":
        return [*title, *_train()]
    command = typer.main.get_command(importlib.import_module(f"ullage.cli.{verb}").app)
    context = typer.Context(command, info_name=verb)
    records = [(param.name, param.get_help_record(context)) for param in command.params]
    # Bullets are sorted as the help is: arguments first, then options.
    return [*title, "\n".join(_bullet(*record) for _, record in records if record is not None)]


def _train() -> list[str]:
    """The arguments of a first run; the others are transformers' and ours in ``TrainingArguments``."""
    parts = []
    for kind in (DataArguments, ModelArguments, Arguments):
        own = [each for each in dataclasses.fields(kind) if each.name in kind.__annotations__]
        defaults = ["" if each.default in (None, False) else f" [default: {each.default}]" for each in own]
        bullets = [_bullet(f"--{each.name}", each.metadata["help"] + told) for each, told in zip(own, defaults)]
        parts += [f"### {(kind.__doc__ or '').rstrip('.')}", "\n".join(bullets)]
    return parts


def _bullet(name: str, text: str) -> str:
    spelled = re.sub(r" <bool>$", "", name.strip())
    what = " ".join(text.split()).replace("*", r"\*")
    return _wrapped(f"- `{spelled}`: {what}", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
