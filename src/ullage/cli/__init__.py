"""The command line: one file or folder per verb, loaded only when its verb is called.

Exit status 0 done, 1 a problem with the data (said in one line), 2 wrong usage, 130 interrupted, 143 terminated. A
verb is a module ``ullage.cli.<verb>`` with a ``typer.Typer`` named ``app`` that has one command.
"""

from __future__ import annotations

import atexit
import importlib
import signal
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ullage.cli.leaving import can_leave, leave_at_once
from ullage.errors import UllageError
from ullage.extras import needed_by

#: Verb -> the line that ``ullage --help`` shows, so that help loads no verb.
VERBS = {
    "quickstart": "See the whole in a few minutes: train packed, stop, convert, go on with other processes.",
    "train": "Train a model on text of unequal lengths, with the Hugging Face Trainer's own arguments.",
    "plan": "Plan one step: where sequences of these lengths go, and how near the ideal that is.",
    "report": "Show a run: its curves, the plan of a step, its checkpoints; beside another run, or live.",
    "pack": "Pack a file of sequences into rows of one capacity, for any trainer that reads packed rows.",
    "audit": "Show that a model keeps packed sequences apart: outputs, gradients, and that nothing leaks.",
    "inspect": "Say what a checkpoint holds, whether it is whole, and where its padding lies.",
    "convert": "Convert a checkpoint to universal, safetensors, dcp or torch_dist, for any number of ranks.",
    "verify": "Compare a converted checkpoint with its source, byte by byte.",
    "diff": "Say which tensors of two checkpoints differ, and by how much.",
    "average": "Average the weights of checkpoints, or take their moving average, as safetensors.",
}


class _LazyGroup(TyperGroup):
    """A group that knows its verbs by name, and imports a verb when it is called or its arguments are completed."""

    def __init__(self, **settings: Any) -> None:
        # Lists, completions and near misses of names want no more than names and lines.
        settings["commands"] = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}
        super().__init__(**settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or name not in VERBS:
            return name, command, rest
        command = typer.main.get_command(importlib.import_module(f"ullage.cli.{name}").app)
        command.name = name
        if isinstance(command, TyperCommand):
            command.rich_markup_mode = self.rich_markup_mode  # one look for all
        # Only train has more to show than its help does; so that it need not be known which verb has.
        return name, command, rest if name == "train" else ["--help" if word == "--help-all" else word for word in rest]


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """Training on sequences of unequal length, from the batch to the checkpoint."""
    if version:
        from ullage import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line and exit with its status, once the process groups that it formed have ended."""
    # Python gives Ctrl-C its deadly meaning back while it ends; the work is done then, and its status stands.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        _run()
    except SystemExit as leaving:
        status = _status(leaving.code)
        # Ending the interpreter joins its threads, which may wait for a rank that never comes: then it is not ended.
        if can_leave(status):
            raise
        leave_at_once(status)
    except BaseException as error:
        if can_leave(1):
            raise
        # ``os._exit`` skips the interpreter's own report of the error, so it is printed first.
        sys.excepthook(type(error), error, error.__traceback__)
        leave_at_once(1)


def _run() -> None:
    try:
        with needed_by(" ".join(["ullage", *(verb for verb in sys.argv[1:2] if verb in VERBS)])):
            app()
    except UllageError as error:
        typer.echo(f"ullage: {error}", err=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)


def _status(code: Any) -> int:
    """The exit status that Python makes of what ``SystemExit`` holds; a message is printed."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
