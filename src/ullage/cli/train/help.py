"""Help of ``ullage train``, drawn by typer as for every other verb, and completion of the arguments used first.

The verb passes its arguments on to transformers' parser. For help a command is made that has all of them as options of
typer's; it is never called. Reading them from the parser takes the import of torch and transformers, five seconds of a
processor. So they are written down in ``options.json``, which ``docs/site/list_options.py`` writes and a test compares;
where another transformers is installed than it was written with, the parser is asked. A shell that completes is given
the names that stand here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from typer.core import TyperCommand

ABOUT = """\
Train a causal language model on texts of unequal length, without padding.

Without arguments: a small LSTM on the docstrings of this Python's standard library.

  ullage train --output_dir runs/first
  ullage train --data texts.jsonl --text_column body --model gru-512x2
  ullage train --data chats.jsonl --model ORG/NAME --use_peft --packing_capacity 8192
  ullage train --config run.yaml --learning_rate 1e-3
  ullage train --output_dir runs/first --resume_from_checkpoint
  torchrun --nproc_per_node 2 -m ullage train --packing_capacity 8192 --zero 2
  torchrun --nproc_per_node 8 -m ullage train --dp 2 --cp 2 --tp 2 --bf16

What is resumed keeps its settings, on any number of processes and at any ZeRO stage.
"""
_HELP, _ALL = ("-h", "--help"), "--help-all"
_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option(_ALL, help="Show every argument and exit.")],
)
#: The section of all that nobody named below: Trainer's own.
OTHERS = "Other arguments of the Hugging Face Trainer"
#: The arguments that people use first, by section, in the order of the help.
FIRST = {
    "Data": ("data", "text_column", "eval_data", "max_length"),
    "Model": ("model",),
    "Training": (
        "num_train_epochs",
        "max_steps",
        "dry_run",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "packing_capacity",
        "bf16",
        "seed",
    ),
    "Output": (
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "logging_steps",
        "save_steps",
        "report_to",
        "config",
    ),
    "LoRA": ("use_peft",),
    "Several processes": ("zero", "dp", "cp", "tp"),
}
#: The sections of what the dataclasses of ``settings`` hold beside those.
_SECTIONS = {
    "DataArguments": "Data",
    "ModelArguments": "Model",
    "OutputArguments": "Output",
    "RunArguments": "Training",
    "ParallelArguments": "Several processes",
    "AdapterArguments": "LoRA",
}
#: What stands for the value of arguments of which the type says little.
_METAVARS = {"model": "MODEL", "output_dir": "FOLDER", "packing_capacity": "TOKENS", "report_to": "NAMES"}
#: Choices are shown instead of a word where they are not longer than this.
_SHOWN_CHOICES = 16
#: Defaults that are not the same on every machine, or say nothing by themselves.
_TOLD = {"use_cpu": "True where there is no accelerator"}


#: The options by section, and the version of transformers that they were read from.
TABLE = Path(__file__).with_name("options.json")


class Option(NamedTuple):
    """An argument as help shows it.

    Attributes:
        name: without its dashes.
        help: what it does, as a sentence with its choices.
        default: as text; None where it says nothing.
        metavar: what stands for its value; empty for a flag without one.
    """

    name: str
    help: str
    default: str | None
    metavar: str


def sections() -> dict[str, list[Option]]:
    """The options by section, those that people use first at the head of each; none that negates one."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    try:
        is_another = metadata.version("transformers") != table["transformers"]
    except metadata.PackageNotFoundError:
        is_another = False
    if is_another:
        return read_sections()
    return {section: [Option(*fields) for fields in rows] for section, rows in table["sections"].items()}


def table_text() -> str:
    """The content of the table as it ought to be: a line per option."""
    rows = [
        f"  {json.dumps(section)}: [\n"
        + ",\n".join(f"   {json.dumps(each, ensure_ascii=False)}" for each in options)
        + "\n  ]"
        for section, options in read_sections().items()
    ]
    version = metadata.version("transformers")
    return f'{{\n "transformers": "{version}",\n "sections": {{\n' + ",\n".join(rows) + "\n }\n}\n"


def read_sections() -> dict[str, list[Option]]:
    """:func:`sections` as the parser has them, which loads torch and transformers."""
    import transformers

    from ullage.cli.train.arguments import KINDS, Parser

    upstream = transformers.TrainingArguments.__dataclass_fields__
    actions = {action.dest: action for action in reversed(Parser()._actions) if action.option_strings}
    kind_of = {name: kind for kind in KINDS for name in kind.__dataclass_fields__}
    found = {section: [actions.pop(name) for name in names] for section, names in FIRST.items()}
    found[OTHERS] = []
    for name, action in sorted(actions.items()):
        # What we added to Trainer's arguments is about training too.
        ours = "Training" if name not in upstream else OTHERS
        found[_SECTIONS.get(kind_of[name].__name__, ours) if name in kind_of else ours].append(action)
    return {section: [_option_of(action) for action in listed] for section, listed in found.items()}


def _option_of(action: Any) -> Option:
    return Option(action.dest, _help_of(action), _default_of(action), _metavar_of(action))


def _help_of(action: Any) -> str:
    text, values = " ".join((action.help or "").split()), [*map(str, action.choices or ())]
    if values and _metavar_of(action) not in "|".join(values) and "one of" not in text:
        text = f"{text.rstrip('.')}. One of {', '.join(values)}"
    return (text[:1].upper() + text[1:]).rstrip(".") + "."


def _default_of(action: Any) -> str | None:
    empty = action.nargs == 0 or action.default in (None, "", "==SUPPRESS==") or action.default == []
    return _TOLD.get(action.dest, None if empty else str(action.default))


def _metavar_of(action: Any) -> str:
    if action.nargs == 0:
        return ""
    words = {"int": "N", "float": "X", "string_to_bool": "BOOL"}
    choices = "|".join(map(str, action.choices or ()))
    word = words.get(getattr(action.type, "__name__", ""), "VALUE")
    if choices:
        word = choices if len(choices) <= _SHOWN_CHOICES else "NAME"
    word = _METAVARS.get(action.dest) or action.metavar or word
    return {"?": f"[{word}]", "+": f"{word}...", "*": f"[{word}...]"}.get(action.nargs, word)


class TrainVerb(TyperCommand):
    """The verb, whose arguments are those of transformers' parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not {*_HELP, _ALL}.isdisjoint(args):
            command = _command(everything=_ALL in args)
            # The context of the verb itself knows no option for help.
            names = typer.Context(command, info_name=ctx.info_name, parent=ctx.parent, help_option_names=[*_HELP])
            typer.echo(command.get_help(names))
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        # The shell asks what could follow: it parses with resilience, and calls nothing.
        if not ctx.resilient_parsing:
            return super().get_params(ctx)
        names = (name for section in FIRST.values() for name in section)
        return _make_command([_parameter(name, str, None, typer.Option(f"--{name}")) for name in names]).params


def _command(everything: bool) -> Any:
    """A command with the arguments as its options, in a panel per section; ``everything``: beyond those used first."""
    found = sections()
    parameters = [
        _parameter(
            option.name,
            str if option.metavar else bool,
            option.default if option.metavar else False,
            typer.Option(
                f"--{option.name}",
                help=escape(option.help),
                metavar=option.metavar or None,
                rich_help_panel=section,
            ),
        )
        for section, options in found.items()
        for option in (options if everything else options[: len(FIRST.get(section, ()))])
    ]
    rest = sum(map(len, found.values())) - len(parameters)
    more = f"{rest} more, most of them the Hugging Face Trainer's: ullage train {_ALL}"
    return _make_command(parameters, epilog=None if everything else more)


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    # Names of arguments may be keywords of Python.
    annotation = Annotated[kind if kind is bool else kind | None, option]
    return inspect.Parameter(f"given_{name}", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make_command(parameters: Sequence[inspect.Parameter], epilog: str | None = None) -> Any:
    """A command of typer's with these parameters."""

    def never_called(**_: object) -> None: ...

    never_called.__signature__ = inspect.Signature([*parameters, _HELP_ALL])  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command("train", help=ABOUT, epilog=epilog)(never_called)
    return typer.main.get_command(app)
