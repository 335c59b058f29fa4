"""Help and completion of ``ullage train``, drawn by typer as for every other verb.

The verb passes its arguments on to transformers' parser. For help and completion a command is made that has all of
them as options of typer's; it is never called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from ullage.cli.train.options import Option, options

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
        return command_of(options(), everything=True, completing=True).params

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Names as they are typed: with underscores, or with dashes where there is one already."""
        dashed = "-" in incomplete[2:]
        items = super().shell_complete(ctx, incomplete)
        return [item for item in items if item.value == _ALL or ("-" in item.value[2:]) == dashed]


def command_of(found: Sequence[Option], *, everything: bool, completing: bool = False) -> Any:
    """A command with ``found`` as its options, in a panel per section.

    ``everything``: not only those of the short help. ``completing``: also what help leaves out, namely spellings with
    dashes and arguments that turn another one off.
    """
    shown = [one for one in found if (one.first or everything) and (completing or not one.negates)]
    off = {one.negates: one.spellings[0] for one in found if one.negates}
    app = typer.Typer(add_completion=False)
    rest = sum(not one.negates for one in found) - len(shown)
    more = f"{rest} more, most of them the Hugging Face Trainer's: ullage train {_ALL}"
    parameters = [_parameter(one, off.get(one.name), completing) for one in shown]
    app.command("train", help=ABOUT, epilog=None if everything else more)(_function([*parameters, _HELP_ALL]))
    return typer.main.get_command(app)


def _function(parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """A function of these parameters, from which typer makes options."""

    def never_called(**_: object) -> None: ...

    never_called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return never_called


def _parameter(one: Option, off: str | None, dashes: bool) -> inspect.Parameter:
    kind: Any = str | None if one.metavar else bool
    text = one.help if off is None else f"{one.help} {off} turns it off."
    settings: dict[str, Any] = {"help": escape(text), "rich_help_panel": one.section}
    if one.metavar:
        settings |= {"metavar": one.metavar, "autocompletion": _values(one.values) if one.values else None}
    option = Annotated[kind, typer.Option(*(one.spellings if dashes else one.spellings[:1]), **settings)]
    # Names of arguments may be keywords of Python.
    default = one.default if one.metavar else False
    return inspect.Parameter(f"given_{one.name}", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)


def _values(values: Sequence[str]) -> Callable[[str], list[str]]:
    def completed(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return completed
