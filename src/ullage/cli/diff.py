"""``ullage diff``: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

_SHOWN = 20


@app.command()
def diff_checkpoints(
    first: Annotated[
        Path, typer.Argument(metavar="FIRST", help="A checkpoint of any format that `ullage inspect` reads.")
    ],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one, perhaps of another format.")],
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave the optimizer's state and steps out.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads; by default 2 per processor, at most 8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="List every difference.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor: what differs, in how many elements, by how much at most.

    Tensors are paired by name and state, whatever the formats; both are read in chunks. Exit status 0 where everything
    is the same, 1 where anything differs.
    """
    from ullage.checkpoint import diff
    from ullage.cli.convert import progress_bar

    with progress_bar("comparing", shown=not as_json) as progress:
        report = diff(first, second, weights_only=weights_only, workers=workers, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        shown = report.differences if all_rows else report.differences[:_SHOWN]
        for difference in shown:
            typer.echo(str(difference))
        if len(report.differences) > len(shown):
            typer.echo(f"and {len(report.differences) - len(shown):,} more (--all)")
        compared = f"{report.num_tensors:,} tensors with {report.num_elements:,} elements compared"
        typer.echo(f"{compared}: {f'{len(report.differences):,} differences' if report else 'all the same'}")
    if report:
        raise typer.Exit(1)
