"""``ullage report RUN``: the picture of a run, as a page, a table, JSON, or live while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.errors import InputError, UsageError
from ullage.training.log_file import LOG

if TYPE_CHECKING:
    from ullage.report.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run, or one of its checkpoints.")],
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="[OTHER]...", help="Other runs, drawn over it and compared with it.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="The page. Default: report.html in RUN, comparison.html with others."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; a page is written if --html says where.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the run while it trains, until it ends.")
    ] = False,
) -> None:
    """Show a run: loss, speed, padding, imbalance, the plan of a step, its checkpoints and layouts.

    RUN is the output folder of `ullage train`, of the Trainer, or of any Trainer of transformers.
    """
    if follow:
        if others or html is not None or as_json:
            raise UsageError("--follow shows one run, and writes nothing", hint="leave out others, --html and --json")

        follow_run(run)
        return
    from ullage.cli.writing import require_ours, write_output
    from ullage.report.run import read_run, run_record

    if html is not None:
        require_ours("page", html)
    runs = [read_run(folder) for folder in (run, *(others or ()))]
    if as_json:
        typer.echo(json.dumps({"runs": [run_record(each) for each in runs]}, indent=2))
    else:
        show(runs)
    if html is None and as_json:
        return
    from ullage.report.run_page import COMPARISON, PAGE, run_page

    text = run_page(runs)
    page = html or run / (COMPARISON if others else PAGE)
    hint = None if html is not None else "--html FILE writes the page elsewhere"
    write_output("page", page, lambda file: file.write(text), hint=hint)
    typer.echo(f"report: {page}", err=as_json)


def show(runs: Sequence[Run]) -> None:
    """Print the figures of the runs, and the first one's losses, layouts and checkpoints."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ullage.report.curves import sparkline
    from ullage.report.run import differing_settings, names_of, run_figures

    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    run, names = runs[0], names_of(runs)
    for each in runs:
        say(f"{each.folder}: {each.progress}{_on(each)}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in [*names, *("difference" if len(runs) == 2 else f"{name}, difference" for name in names[1:])]:
        table.add_column(name, justify="right", overflow="fold")
    for row in run_figures(runs):
        table.add_row(*row)
    console.print(table)
    for each, name in zip(runs, names, strict=True):
        losses = [value for _, value in each.values("loss")]
        if len(losses) > 1:
            say(f"loss{f' of {name}' if len(runs) > 1 else ''}  {sparkline(losses, 60)}")
    if run.checkpoints:
        say(f"checkpoints: {_listed([path.name for path in run.checkpoints])}")
    for name, values in differing_settings(runs):
        say(f"{name}: {', '.join(values)}")


def _on(run: Run) -> str:
    return f", on {', then on '.join(span.layout for span in run.spans)}" if run.spans else ""


def _listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names if len(names) <= most else [f"{len(names) - most} older ones", *names[-most:]])


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
