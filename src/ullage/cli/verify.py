"""``ullage verify``: comparison of a converted checkpoint with its source, byte by byte."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ullage.cli.options import AllRows, AsJson, StorageOption, Workers, print_list, progress_bar, storage_options

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def verify_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The checkpoint that was converted: a folder, or a URL.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The converted checkpoint, likewise.")],
    workers: Workers = None,
    as_json: AsJson = False,
    all_rows: AllRows = False,
    storage_option: StorageOption = None,
) -> None:
    """Compare a converted checkpoint with its source: every byte of every tensor, and every file that a loader reads.

    Casts are repeated, then compared. Exit status 1 if anything differs.
    """
    from ullage.checkpoint import read, verify

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
        print_list(problems, all_rows)
    if problems:
        raise typer.Exit(1)
