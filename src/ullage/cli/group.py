"""The verbs as one ``typer`` command: a verb is loaded only when it is called.

A verb is a module ``ullage.cli.<verb>`` with a ``typer.Typer`` named ``app`` that has one command. Its errors, Ctrl-C
and a missing package end here, in one line and with an exit status.
"""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ullage.cli.interruption import STATUS, becomes_exception, say
from ullage.cli.verbs import VERBS
from ullage.core.errors import UllageError, UsageError
from ullage.core.extras import needed_by


class _LazyGroup(TyperGroup):
    """A group that knows its verbs by name, and imports a verb when it is called or its arguments are completed."""

    def __init__(self, **settings: Any) -> None:
        # Lists, completions and near misses of names want no more than names and lines.
        settings["commands"] = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}
        super().__init__(**settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            with needed_by(" ".join(["ullage", *(verb for verb in sys.argv[1:2] if verb in VERBS)])):
                return super().invoke(ctx)
        except UllageError as error:
            typer.echo(f"ullage: {error}", err=True)
            raise typer.Exit(error.exit_status) from error
        except KeyboardInterrupt:  # of a verb that has no more to say about it
            say()
            raise typer.Exit(STATUS) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and not get_close_matches(args[0], VERBS):
            hint = f"There are {', '.join(VERBS)}: ullage --help says what each does"
            raise UsageError(f"there is no command {args[0]!r}", hint=hint)
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or name not in VERBS:
            return name, command, rest
        command = typer.main.get_command(importlib.import_module(f"ullage.cli.{name}").app)
        command.name = name
        if isinstance(command, TyperCommand):
            command.rich_markup_mode = self.rich_markup_mode  # one look for all
        becomes_exception()  # the verb is loaded; what it begins, it may have to clean up
        # Only train has more to show than its help does; so that it need not be known which verb has.
        return name, command, rest if name == "train" else ["--help" if word == "--help-all" else word for word in rest]


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Of a name hyphens and underscores are one; what a verb inherits.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """Training on sequences of unequal length, from the batch to the checkpoint."""
    if version:
        from ullage import __version__

        typer.echo(__version__)
        raise typer.Exit
