"""Help of ``ullage train``, drawn by typer as for every other verb, and completion of the arguments used first.

The verb passes its arguments on to transformers' parser. For help a command is made that has all of them as options of
typer's; it is never called. Reading them from the parser takes the import of torch and transformers, about three
seconds, which is too long for a shell that completes: it is given the names that stand here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

ABOUT = """\
Train a causal language model on texts of unequal length, without padding.

Without arguments: a small LSTM on the docstrings of this Python's standard library.

  ullage train --output_dir runs/first
  ullage train --data texts.jsonl --text_column body --model gru-512x2
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
    "Several processes": ("zero", "dp", "cp", "tp"),
}
#: The sections of what the dataclasses of ``settings`` hold beside those.
_SECTIONS = {
    "DataArguments": "Data",
    "ModelArguments": "Model",
    "OutputArguments": "Output",
    "RunArguments": "Training",
    "ParallelArguments": "Several processes",
}
#: What stands for the value of arguments of which the type says little.
_METAVARS = {"model": "MODEL", "output_dir": "FOLDER", "packing_capacity": "TOKENS", "report_to": "NAMES"}
#: Choices are shown instead of a word where they are not longer than this.
_SHOWN_CHOICES = 16
#: Defaults that are not the same on every machine, or say nothing by themselves.
_TOLD = {"use_cpu": "True where there is no accelerator"}


@dataclass(frozen=True)
class Option:
    """One argument, ``--name``.

    ``first``: whether the short help shows it. ``metavar``: empty for a flag without a value. ``negates``: the argument
    that this one turns off, which help does not list by itself.
    """

    name: str
    section: str
    first: bool = True
    metavar: str = "VALUE"
    help: str = ""
    default: str | None = None
    negates: str | None = None


def options() -> list[Option]:
    """All arguments, by section, those that people use first at the head of each."""
    import transformers

    from ullage.cli.train.arguments import KINDS, Parser

    upstream = transformers.TrainingArguments.__dataclass_fields__
    sections = {name: section for section, names in FIRST.items() for name in names}
    first = list(sections)
    for kind in KINDS:
        for name in kind.__dataclass_fields__:
            # What we added to Trainer's arguments is about training too.
            ours = _SECTIONS.get(kind.__name__, "Training" if name not in upstream else OTHERS)
            sections.setdefault(name, ours)
    actions = [action for action in Parser()._actions if action.option_strings]
    found = [_option(action, sections[action.dest], action.dest in first) for action in actions]
    rank = {name: place for place, name in enumerate([*FIRST, OTHERS])}
    return sorted(found, key=lambda one: (rank[one.section], first.index(one.name) if one.first else len(first)))


def _option(action: Any, section: str, first: bool) -> Option:
    name = action.option_strings[0].lstrip("-")
    negates = action.dest if name != action.dest else None
    values = tuple(map(str, action.choices)) if action.choices is not None else ()
    metavar = _metavar(action)
    text = " ".join((action.help or "").split())
    if values and metavar not in (said := "|".join(values)) and "one of" not in text:
        text = f"{text.rstrip('.')}. One of {said.replace('|', ', ')}"
    empty = action.nargs == 0 or action.default in (None, "", "==SUPPRESS==") or action.default == []
    return Option(
        name=name,
        section=section,
        first=first and negates is None,
        metavar=metavar,
        help=(text[:1].upper() + text[1:]).rstrip(".") + ".",
        default=_TOLD.get(name, None if empty else str(action.default)),
        negates=negates,
    )


def _metavar(action: Any) -> str:
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
            command = command_of(options(), everything=_ALL in args)
            # The context of the verb itself knows no option for help.
            names = typer.Context(command, info_name=ctx.info_name, parent=ctx.parent, help_option_names=[*_HELP])
            typer.echo(command.get_help(names))
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        # The shell asks what could follow: it parses with resilience, and calls nothing.
        if not ctx.resilient_parsing:
            return super().get_params(ctx)
        named = [Option(name, section) for section, names in FIRST.items() for name in names]
        return command_of(named, everything=True).params


def command_of(found: Sequence[Option], *, everything: bool) -> Any:
    """A command with ``found`` as its options, in a panel per section; ``everything``: beyond those used first."""
    listed = [one for one in found if not one.negates]
    shown = [one for one in listed if one.first or everything]
    off = {one.negates: one.name for one in found if one.negates}
    app = typer.Typer(add_completion=False)
    more = f"{len(listed) - len(shown)} more, most of them the Hugging Face Trainer's: ullage train {_ALL}"
    parameters = [_parameter(one, off.get(one.name)) for one in shown]
    app.command("train", help=ABOUT, epilog=None if everything else more)(_function([*parameters, _HELP_ALL]))
    return typer.main.get_command(app)


def _function(parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """A function of these parameters, from which typer makes options."""

    def never_called(**_: object) -> None: ...

    never_called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return never_called


def _parameter(one: Option, off: str | None) -> inspect.Parameter:
    kind: Any = str | None if one.metavar else bool
    text = one.help if off is None else f"{one.help} --{off} turns it off."
    settings: dict[str, Any] = {"help": escape(text), "rich_help_panel": one.section}
    option = Annotated[kind, typer.Option(f"--{one.name}", **settings, metavar=one.metavar or None)]
    # Names of arguments may be keywords of Python.
    default = one.default if one.metavar else False
    return inspect.Parameter(f"given_{one.name}", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
