"""``ullage verify``: comparison of a converted checkpoint with its source, byte by byte."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

_SHOWN = 20


@app.command()
def verify_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The checkpoint that was converted: a folder, or a URL.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The converted checkpoint, likewise.")],
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads; by default 2 per processor, at most 8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="List every difference.")] = False,
    storage_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of fsspec, for URLs; may be repeated.")
    ] = None,
) -> None:
    """Compare a converted checkpoint with its source: every byte of every tensor, and every file that a loader reads.

    Casts are repeated, then compared. Exit status 1 if anything differs.
    """
    from ullage.checkpoint import read, verify
    from ullage.cli.convert import progress_bar, storage_options

    storage = storage_options(storage_option)
    ours, theirs = read(source, storage_options=storage), read(target, storage_options=storage)
    with progress_bar("comparing", shown=not as_json) as progress:
        problems = verify(ours, theirs, workers=workers, progress=progress)
    if as_json:
        report = {"source": str(ours.folder), "target": str(theirs.folder), "problems": [str(p) for p in problems]}
        typer.echo(json.dumps(report | {"equal": not problems}))
    elif not problems:
        typer.echo(f"equal: {theirs.folder} holds every byte of {ours.folder}")
    else:
        for problem in problems if all_rows else problems[:_SHOWN]:
            typer.echo(str(problem))
        if not all_rows and len(problems) > _SHOWN:
            typer.echo(f"and {len(problems) - _SHOWN:,} more (--all)")
    if problems:
        raise typer.Exit(1)
