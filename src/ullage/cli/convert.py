"""``ullage convert``: conversion of a checkpoint, each byte read once and written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

import typer

from ullage.cli.options import AsJson, StorageOption, Workers, progress_bar, storage_options

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

#: What ``--to`` and ``--dtype`` take.
Format = Literal["universal", "safetensors", "dcp", "trainer", "zero1", "zero2", "zero3"]
Dtype = Literal["float32", "bfloat16", "float16"]


def _names(kind: Any) -> str:
    *most, last = get_args(kind)
    return f"{', '.join(most)} or {last}"


@app.command()
def convert_checkpoint(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A checkpoint: the tag's folder, or its parent with `latest`; or a URL."),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A folder that does not exist; its parents are made.")
    ],
    to: Annotated[
        Format, typer.Option(metavar="FORMAT", help=f"The format of the target: {_names(Format)}.")
    ] = "universal",
    dtype: Annotated[
        Dtype | None,
        typer.Option(metavar="DTYPE", help=f"Cast weights to {_names(Dtype)} (not in universal and trainer)."),
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer's state out.")] = False,
    workers: Workers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prove and plan, write nothing, say what to expect.")
    ] = False,
    ranks: Annotated[int | None, typer.Option(metavar="N", help="Data-parallel ranks (zero1, zero2, zero3).")] = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Convert a checkpoint, so that any number of ranks, any ZeRO stage or another library can load it.

    Nothing is written before every tensor is proved whole. All work goes to TARGET.partial, which is renamed when it
    is complete and synced; an interrupted conversion goes on from there.
    """
    from ullage.checkpoint import convert, read
    from ullage.core.errors import UsageError

    if to in ("universal", "trainer") and (dtype or weights_only):
        raise UsageError(
            f"a {to} checkpoint keeps its dtypes and its optimizer state",
            found=f"--dtype {dtype}" if dtype else "--weights-only",
            hint="use --to safetensors or --to dcp",
        )
    storage = storage_options(storage_option)
    inventory = read(source, storage_options=storage)
    options: dict[str, Any] = {"dtype": dtype, "optimizer": not weights_only}
    options |= {"ranks": ranks, "storage_options": storage}
    if dry_run:
        report = convert(inventory, target, format=to, workers=workers, dry_run=True, **options)
        _say(report.to_dict(), as_json, _dry_lines)
        return
    with progress_bar("converting", shown=not as_json) as progress:
        report = convert(inventory, target, format=to, workers=workers, progress=progress, **options)
    _say(report.to_dict() | {"bytes_per_second": report.bytes_per_second}, as_json, _report_lines)


def _say(report: dict[str, Any], as_json: bool, lines: Callable[[dict[str, Any]], Iterator[str]]) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    for line in lines(report):
        typer.echo(line)


def _report_lines(report: dict[str, Any]) -> Iterator[str]:
    from ullage.core.display import size

    rate = f" ({size(report['bytes_per_second'])}/s)" if report["bytes_per_second"] else ""
    yield f"{report['format']}: {report['target']}"
    yield (
        f"{report['num_tensors']:,} tensors in {report['num_files']:,} files, {size(report['num_bytes'])}, "
        f"in {report['seconds']:.1f} s{rate} with {report['workers']} workers"
    )
    if report["bytes_resumed"]:
        yield f"{size(report['bytes_resumed'])} were done already, by an interrupted run"
    if report["records_checked"]:
        yield f"the checksums of {report['records_checked']:,} records of the source agree"
    for name, key, number in report["not_finite"]:
        yield f"not finite: {number:,} elements of {name} {key} are NaN or Inf"
    yield from (f"note: {note}" for note in report["notes"])
    if report["format"].startswith("zero"):
        folder, _, tag = report["target"].rpartition("/")
        yield f'load it: engine.load_checkpoint("{folder}", tag="{tag}")'


def _dry_lines(report: dict[str, Any]) -> Iterator[str]:
    from ullage.core.display import size

    yield f"would write {report['format']} to {report['target']}"
    yield f"{report['num_tensors']:,} tensors, {report['num_files']:,} files, {size(report['num_bytes'])}"
    yield from (f"note: {note}" for note in report["notes"])
