"""A run live in a terminal: curves in text, redrawn as the run logs; a line per row where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import InputError
from ullage.training.log_file import LOG

if TYPE_CHECKING:
    from ullage.report.run import Run

#: Seconds between two looks at the log.
_INTERVAL = 0.5


def _numbers() -> tuple[tuple[str, str, Callable[[float], str]], ...]:
    """What is shown of a row: its name in the log, for people, and how it is written."""
    from ullage.report.page import percent
    from ullage.units import rate

    return (
        ("loss", "loss", lambda value: f"{value:.4g}"),
        ("eval_loss", "held-out loss", lambda value: f"{value:.4g}"),
        ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
        ("padding_computed", "padding computed", percent),
        ("capacity_unused", "capacity unused", percent),
        ("imbalance", "imbalance", lambda value: f"{value:.3f}"),
        ("flops_per_second", "model FLOPs", rate),
        ("mfu", "MFU", percent),
        ("learning_rate", "learning rate", lambda value: f"{value:.3g}"),
    )


def follow_run(folder: Path, interval: float = _INTERVAL) -> None:
    """Show the run in ``folder`` until it ends. Raises ``InputError`` where no log is or will be.

    ``interval``: seconds between two looks at the log.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        _print_rows(updates(folder, interval), console)
        return
    run = None
    with Live(console=console, auto_refresh=False) as live:
        for run in updates(folder, interval, always=True):
            live.update(_drawn(run, folder, console.width), refresh=True)


def updates(folder: Path, interval: float = _INTERVAL, *, always: bool = False) -> Iterator[Run | None]:
    """The run as it stands, each time that its log has grown, until it has ended; None before its first line.

    ``always``: give it after every interval, grown or not.
    """
    from ullage.report.run import STATE, read_run

    if not folder.is_dir():
        raise InputError("no such folder to follow", where=str(folder), hint="start the run first; it makes the folder")
    if not (folder / LOG).exists() and (any(folder.glob(f"checkpoint-*/{STATE}")) or (folder / STATE).exists()):
        raise InputError(
            "this run leaves no log to follow",
            where=str(folder),
            expected=LOG,
            hint="ullage train writes it; for a Trainer: trainer.add_callback(RunLog(trainer.meter))",
        )
    seen, run = None, None
    while True:
        if not folder.is_dir():
            raise InputError("the folder of the run is gone", where=str(folder))
        now = _size(folder / LOG)
        if now != seen:
            seen, run = now, read_run(folder, with_plan=False) if now else None
            yield run
        elif always:
            yield run
        if run is not None and run.has_ended:
            return
        time.sleep(interval)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _print_rows(runs: Iterator[Run | None], console: Any) -> None:
    """A line for each row that is new."""
    told: set[tuple[int, int]] = set()
    for run in runs:
        if run is None:
            continue
        # Of one step the row of training comes first, then its evaluation, then its checkpoint.
        lines = [(row["step"], 0, _written(row)) for row in run.rows]
        lines += [(row["step"], 1, _written(row)) for row in run.evaluations]
        lines += [(step, 2, f"checkpoint-{step}") for step in run.saved]
        for step, kind, line in sorted(lines):
            if (step, kind) not in told:
                told.add((step, kind))
                console.print(f"step {step:,}: {line}", markup=False, soft_wrap=True)
        if run.has_ended:
            console.print(f"{run.folder}: {run.progress}", markup=False, soft_wrap=True)


def _written(row: dict[str, Any]) -> str:
    return ", ".join(f"{title} {form(row[name])}" for name, title, form in _numbers() if row.get(name) is not None)


def _drawn(run: Run | None, folder: Path, width: int) -> Any:
    """What is shown of the run at the moment."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ullage.report.curves import sparkline
    from ullage.units import duration

    if run is None:
        return Text(f"{folder}: waiting for the first line of {LOG}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for name, title, form in _numbers():
        values = [value for _, value in run.values(name)]
        if values:
            table.add_row(title, form(values[-1]), sparkline(values, max(10, min(80, width - 45))))
    # A run that was killed writes no end: the age of its last line tells.
    age = (
        ""
        if run.has_ended or run.written is None
        else f"; last line {duration(max(1.0, time.time() - run.written))} ago"
    )
    last = f"last checkpoint: step {run.saved[-1]:,}" if run.saved else "no checkpoint yet"
    on = f", on {run.spans[-1].layout}" if run.spans else ""
    state = run.progress if run.has_ended else f"{run.step:,} of {run.max_steps or '?'} steps"
    return Group(Text(f"{run.folder}: {state}{on}{age}"), table, Text(last))
