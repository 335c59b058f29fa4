"""``ullage diff``: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ullage.cli.options import AllRows, AsJson, Workers, print_list, progress_bar

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def diff_checkpoints(
    first: Annotated[
        Path, typer.Argument(metavar="FIRST", help="A checkpoint of any format that `ullage inspect` reads.")
    ],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one, perhaps of another format.")],
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave the optimizer's state and steps out.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
    all_rows: AllRows = False,
) -> None:
    """Compare two checkpoints tensor by tensor: what differs, in how many elements, by how much at most.

    Tensors are paired by name and state, whatever the formats; both are read in chunks. Exit status 0 where everything
    is the same, 1 where anything differs.
    """
    from ullage.checkpoint import diff

    with progress_bar("comparing", shown=not as_json) as progress:
        report = diff(first, second, weights_only=weights_only, workers=workers, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        print_list(report.differences, all_rows)
        compared = f"{report.num_tensors:,} tensors with {report.num_elements:,} elements compared"
        typer.echo(f"{compared}: {f'{len(report.differences):,} differences' if report else 'all the same'}")
    if report:
        raise typer.Exit(1)
