"""``ullage pack IN OUT``: a file of sequences into a file of packed rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def pack(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Sequences: .jsonl, .json, .parquet, .csv or .txt (one text per line).")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Packed rows: a name ending in .parquet.")],
    capacity: Annotated[
        int, typer.Option("--capacity", "-c", min=1, metavar="N", help="Tokens of a packed row at most.")
    ],
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The column of token ids or text. Default: input_ids, else the text."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For text: a name or folder for AutoTokenizer. Default: ByT5's bytes."),
    ] = None,
    oversize: Annotated[
        Literal["error", "truncate", "drop"], typer.Option(help="What becomes of a sequence above the capacity.")
    ] = "error",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the order of rows.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT where it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as JSON on standard output.")] = False,
) -> None:
    """Pack a file of sequences into rows of one capacity.

    Rows hold input_ids, labels, position_ids (transformers' padding-free models tell sequences apart by them) and
    seq_lengths (TRL does). Sequences are never cut unless --oversize says so, and every token is counted.
    """
    from ullage.cli.writing import require_not_input
    from ullage.core.errors import InputError
    from ullage.datasets.packing import pack_file

    require_not_input(target, [str(source)])
    if target.exists() and not overwrite:
        raise InputError("the output exists", where=str(target), hint="give another name, or --overwrite")
    report = pack_file(
        source,
        target,
        capacity,
        column=column,
        tokenizer=tokenizer,
        oversize=oversize,
        seed=seed,
        progress=None,  # bars where a person looks on, none into a file
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    typer.echo(
        f"{target}: {report.num_sequences:,} sequences, {report.num_tokens:,} tokens in {report.num_rows:,} rows "
        f"of {capacity:,} (at least {report.lower_bound:,}), ullage {report.ullage:.2%}"
    )
    for count, what in (
        (report.num_empty, "empty, left out"),
        (report.num_truncated, f"truncated, by {report.truncated_tokens:,} tokens"),
        (report.num_dropped, f"dropped, with {report.dropped_tokens:,} tokens"),
    ):
        if count:
            typer.echo(f"{count:,} sequence{'s' if count > 1 else ''} {what}")
