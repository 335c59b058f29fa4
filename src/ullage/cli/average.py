"""``ullage average``: mean or moving average of the weights of checkpoints, as safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ullage.cli.convert import Dtype

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def average_checkpoints(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINTS...", help="Two or more checkpoints of one model, oldest first.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A folder that does not exist.")],
    weights: Annotated[
        str | None,
        typer.Option(metavar="X,X...", help="The share of each, such as 0.5,0.3,0.2; by default all are equal."),
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option(metavar="X", help="An exponential moving average, with this share for what was there before."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights that are written.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads; by default 2 per processor, at most 8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a report.")] = False,
) -> None:
    """Average the weights of checkpoints, summed in float64, into a folder of safetensors with the model's config.

    The folder is whole or not there. Names and shapes must be the same in all.
    """
    from ullage.checkpoint import average
    from ullage.cli.convert import progress_bar
    from ullage.errors import UsageError
    from ullage.units import size

    try:
        shares = None if weights is None else [float(word) for word in weights.split(",")]
    except ValueError:
        raise UsageError("--weights takes numbers with commas between them", found=weights) from None
    with progress_bar("averaging", shown=not as_json) as progress:
        report = average(
            list(checkpoints), out, weights=shares, ema=ema, dtype=dtype.value if dtype else None, workers=workers,
            progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
        return
    typer.echo(f"safetensors: {report.target}")
    typer.echo(f"the mean of {len(checkpoints)} checkpoints: {report.num_tensors:,} tensors, {size(report.num_bytes)}")
    for name, _, number in report.not_finite:
        typer.echo(f"not finite: {number:,} elements of {name} are NaN or Inf")
    for note in report.notes:
        typer.echo(f"note: {note}")
