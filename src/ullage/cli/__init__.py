"""The command line: one file or folder per verb, loaded only when its verb is called.

Exit status 0 done, 1 a problem with the data (said in one line), 2 wrong usage, 130 interrupted, 143 terminated. A
verb is a module ``ullage.cli.<verb>`` with a ``typer.Typer`` named ``app`` that has one command.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ullage.cli.leaving import can_leave, leave_at_once
from ullage.errors import UllageError

#: Verb -> the line that ``ullage --help`` shows, so that help loads no verb.
VERBS = {
    "quickstart": "See the whole in a few minutes: train packed, stop, convert, go on with other processes.",
    "train": "Train a model on text of unequal lengths, with the Hugging Face Trainer's own arguments.",
    "plan": "Plan one step: where sequences of these lengths go, and how near the ideal that is.",
    "pack": "Pack a file of sequences into rows of one capacity, for any trainer that reads packed rows.",
    "audit": "Show that a model keeps packed sequences apart: outputs, gradients, and that nothing leaks.",
    "inspect": "Say what a checkpoint holds, whether it is whole, and where its padding lies.",
    "convert": "Convert a checkpoint to universal, safetensors, dcp or torch_dist, for any number of ranks.",
    "verify": "Compare a converted checkpoint with its source, byte by byte.",
    "diff": "Say which tensors of two checkpoints differ, and by how much.",
    "average": "Average the weights of checkpoints, or take their moving average, as safetensors.",
}


class _LazyGroup(TyperGroup):
    """A group that knows its verbs by name and imports a verb when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        # click asks for every command when it lists them; importing all would load torch and transformers for a help.
        if sys.argv[1:2] != [cmd_name]:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        command = typer.main.get_command(importlib.import_module(f"ullage.cli.{cmd_name}").app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
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
