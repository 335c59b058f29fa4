"""The picture of a run of ``ullage train``: its log while it trains, its page at the end, and what the library logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ullage.errors import UllageError

if TYPE_CHECKING:
    from ullage.cli.train.settings import TrainCommand
    from ullage.training.run_log import RunLog


def run_log(command: TrainCommand, trainer: Any) -> RunLog:
    """The callback that writes the log of the run."""
    from ullage.training.run_log import RunLog

    return RunLog(trainer.meter, layout=_axes(command))


def _axes(command: TrainCommand) -> str | None:
    """The axes of a run over ``ullage.engines.fsdp``, in words; None for one of the Trainer's."""
    parallel, number = command.parallel, command.training.world_size
    if not parallel.asked:
        return None
    sizes = {"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp, "dp_replicate": parallel.dp_replicate}
    axes = " ".join(f"{name} {size}" for name, size in sizes.items() if size is not None and size != 1)
    return f"{number} process{'es' if number != 1 else ''}, FSDP{f', {axes}' if axes else ''}"


def show_log(command: TrainCommand) -> None:
    """Show the library's own records where ``--log_level`` asks for them; transformers' are its own affair."""
    logger = logging.getLogger("ullage")
    if "log_level" not in command.given or logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(command.training.get_process_log_level())
    logger.propagate = False


def leave_page(command: TrainCommand, first: bool, say: Callable[[str], None]) -> None:
    """Write the page of the run into its folder, and say where; one rank does. What fails is said and ends nothing."""
    if not first:
        return
    try:
        from ullage.report.run import read_run
        from ullage.report.run_page import PAGE, write_run_page

        page = command.folder / PAGE
        write_run_page([read_run(command.folder)], page)
    except UllageError as error:
        say(f"no report was written: {error}")
    except Exception as error:  # a picture that cannot be drawn is no reason to fail a run that went well
        say(f"no report was written: {type(error).__name__}: {error}")
    else:
        say(f"report: {page}")
