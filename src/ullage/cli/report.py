"""``ullage report RUN``: the picture of a run, as a page, a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
) -> None:
    """Show a run: loss, speed, padding, imbalance and the layouts that it was trained on.

    RUN is the output folder of `ullage train`, of the Trainer, or of any Trainer of transformers.
    """
    from ullage.cli.writing import require_ours, write_output
    from ullage.report.run import COMPARISON, PAGE, read_run, run_page, run_record

    if html is not None:
        require_ours("page", html)
    runs = [read_run(folder) for folder in (run, *(others or ()))]
    if as_json:
        typer.echo(json.dumps({"runs": [run_record(each) for each in runs]}, indent=2))
    else:
        show(runs)
    if html is None and as_json:
        return
    text = run_page(runs)
    page = html or run / (COMPARISON if others else PAGE)
    hint = None if html is not None else "--html FILE writes the page elsewhere"
    write_output("page", page, lambda file: file.write(text), hint=hint)
    typer.echo(f"report: {page}", err=as_json)


def show(runs: Sequence[Run]) -> None:
    """Print the figures of the runs and their losses."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ullage.report.curves import sparkline
    from ullage.report.run import run_figures, short_names

    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    names = short_names(runs)
    for each in runs:
        say(f"{each.folder}: {each.progress}")
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
