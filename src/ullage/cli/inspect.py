"""``ullage inspect``: content of a checkpoint, whether it is whole, where its padding lies. Reads no tensor data."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ullage.cli.options import SHOWN, AllRows, AsJson, StorageOption, print_list, storage_options

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

#: Width of the names of facts; a space at which no line is folded.
_LABEL, _KEPT = 12, "\u00a0"
#: Columns of numbers, which end below each other; columns whose cells are clear without their heading.
_RIGHT = ("group", "parameters", "elements", "shards", "per shard", "padding", "bytes", "fragments")
_CLEAR = ("name", "shape", "dtype", "states", "bytes")


@app.command()
def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint: the tag's folder, or its parent with `latest`; or a URL."
        ),
    ],
    as_json: AsJson = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw shards, fragments and padding on this page.")
    ] = None,
    all_rows: AllRows = False,
    summary: Annotated[bool, typer.Option("--summary", help="Leave the list of tensors out.")] = False,
    storage_option: StorageOption = None,
) -> None:
    """List what a checkpoint holds and say whether it is whole, without loading it and without running code from it.

    Exit status 1 if it is not whole.
    """
    from ullage.checkpoint import read
    from ullage.cli.writing import require_ours, write_output

    if html is not None:
        require_ours("page", html)
    inventory = read(checkpoint, storage_options=storage_options(storage_option))
    problems = inventory.problems()
    written = None
    if html is not None:
        from ullage.report.checkpoint import checkpoint_page

        page = checkpoint_page(inventory, problems)
        written = write_output("page", html, lambda file: file.write(page))
    if as_json:
        typer.echo(json.dumps(inventory_data(inventory, problems)))
    else:
        _print(inventory, problems, None if all_rows else SHOWN, tensors=not summary)
    if written is not None:
        typer.echo(written, err=as_json)
    if problems:
        raise typer.Exit(1)


def inventory_data(inventory: Any, problems: Any) -> dict[str, Any]:
    """The inventory as plain data: what ``--json`` prints."""
    written_by = inventory.written_by
    return {
        "folder": str(inventory.folder),
        "format": inventory.format,
        "stage": written_by.stage,
        "optimizer_wrapper": written_by.wrapper,
        **_fields(written_by, "dp", "tp", "pp", "ep", "experts"),
        "num_files": len(inventory.files),
        **_fields(inventory, "num_file_bytes", "num_bytes", "padding", "keys"),
        "steps": {str(group): step for group, step in inventory.steps.items()},
        "aliases": dict(inventory.aliases),
        "groups": [
            {
                **_fields(group, "index", "model_rank", "ep_rank"),
                "parameters": list(group.names),
                **_fields(group, "size", "shard_size", "num_shards", "padding"),
                "padding_by_rank": {str(r): int(n) for r, n in enumerate(group.padding_of()) if n},
            }
            for group in inventory.groups
        ],
        "tensors": [
            _fields(tensor, "name", "key", "kind", "group", "shape", "dtype", "num_bytes", "num_fragments")
            for tensor in inventory.tensors
        ],
        "notes": list(inventory.notes),
        "problems": [str(problem) for problem in problems],
        "optimizer_problems": [str(problem) for problem in inventory.optimizer_problems],
    }


def _fields(of: Any, *names: str) -> dict[str, Any]:
    found = {name: getattr(of, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _print(inventory: Any, problems: Any, limit: int | None, tensors: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    console = Console(highlight=False)
    for name, value in _facts(inventory, limit):
        for k, line in enumerate(_folded(re.sub(r" (?=[kMGT]?B\b)", _KEPT, value), console.width - _LABEL)):
            label = ("" if k else name).ljust(_LABEL)
            console.print(Text.assemble((label, "dim"), line), soft_wrap=True)
    if inventory.groups:
        _print_table(console, "Groups", _group_rows(inventory, limit), len(inventory.groups))
    if tensors:
        number = len({tensor.name for tensor in inventory.tensors})
        _print_table(console, "Parameters and buffers", _tensor_rows(inventory, limit), number)
    for note in inventory.notes:
        console.print(f"note: {escape(note)}", style="dim", soft_wrap=True)
    for problem in inventory.optimizer_problems[:limit]:
        console.print(f"the weights only can be converted: {escape(str(problem))}", style="yellow", soft_wrap=True)
    if not problems:
        console.print("whole: every element of every tensor lies in exactly one fragment", style="green")
        return
    console.print(f"{len(problems):,} problem{'s' if len(problems) != 1 else ''}", style="red")
    print_list(problems, limit is None, "  ")


def _facts(inventory: Any, limit: int | None) -> Iterator[tuple[str, str]]:
    """What the checkpoint is, by name, in the order in which it is printed."""
    from ullage.core.display import size
    from ullage.report.checkpoint import by_name

    written_by = inventory.written_by
    stage = f" stage {written_by.stage}" if written_by.stage is not None else ""
    # The plain optimizer of a stage is named as the stage is; only another one says something new.
    wrapper = f", {written_by.wrapper}" if written_by.wrapper and written_by.wrapper != f"ZeRO{stage}" else ""
    # What holds each tensor once, for any layout, tells of no ranks and has no padding.
    is_sharded = inventory.format == "zero" or inventory.groups
    yield "checkpoint", str(inventory.folder)
    yield "format", f"{inventory.format}{stage}{wrapper}"
    if is_sharded:
        yield "ranks", f"dp {written_by.dp} × tp {written_by.tp} × pp {written_by.pp} = {written_by.world_size}"
    if written_by.experts:
        number, sizes = (" or ".join(map(str, dict.fromkeys(n))) for n in (written_by.experts, written_by.ep))
        layers = f"{number} in each of {len(written_by.experts)} layers"
        yield "experts", layers + (f", ep {sizes}" if sizes else ", none trained")
    yield "files", f"{len(inventory.files):,}, {size(inventory.num_file_bytes)}"
    buffers = ", buffers among them" if any(tensor.kind == "buffer" for tensor in inventory.tensors) else ""
    yield "parameters", f"{len(by_name(inventory)):,}{buffers}"
    yield "tensors", f"{len(inventory.tensors):,}, the states of each counted, {size(inventory.num_bytes)}"
    held = dict.fromkeys(inventory.keys, 0)  # bytes of each state, the weights first
    for tensor in inventory.tensors:
        held[tensor.key] = held.get(tensor.key, 0) + tensor.num_bytes
    yield "states", ", ".join(f"{key} {size(held[key])}" for key in held)
    yield "dtype", ", ".join(dict.fromkeys(tensor.dtype for tensor in inventory.tensors))
    if is_sharded:
        yield "padding", f"{inventory.padding:,} elements"
    if inventory.aliases:
        yield "tied", ", ".join(f"{alias} is {name}" for alias, name in list(inventory.aliases.items())[:limit])
    if inventory.steps:
        yield "step", ", ".join(str(step).removesuffix(".0") for step in dict.fromkeys(inventory.steps.values()))


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most ``width`` letters, folded between words; a word is broken where it alone is longer."""
    lines = textwrap.wrap(text, max(width, _LABEL), subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(_KEPT, " ") for line in lines or [""]]


def _print_table(console: Any, title: str, table: list[list[str]], number: int) -> None:
    """Print rows, of which the first holds the headings, and how many of ``number`` are left out.

    In a terminal that is too narrow for the columns, the cells of a row stand under its first one.
    """
    from ullage.core.display import in_columns

    headings, *rows = table
    lines = in_columns(table, [k for k, heading in enumerate(headings) if heading in _RIGHT])
    if max(map(len, lines)) > console.width:
        lines = []
        for row in rows:
            first, *others = (c if h in _CLEAR else f"{h} {c}" for h, c in zip(headings, row) if c)
            # A name is folded at its dots, and what goes on of it is indented by more than the cells.
            name = _folded(first.replace(".", ". "), console.width, " " * 4)
            cells = _folded("  ".join(cell.replace(" ", _KEPT) for cell in others), console.width - 2)
            lines += [*(line.replace(". ", ".") for line in name), *(f"  {line}" for line in cells)]
    if number > len(rows):
        lines.append(f"and {number - len(rows):,} more (--all)")
    console.print(title, style="italic")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _group_rows(inventory: Any, limit: int | None) -> list[list[str]]:
    table = [["group", "parameters", "elements", "shards", "per shard", "padding", "on ranks"]]
    for group in inventory.groups[:limit]:
        ranks = inventory.written_by.tp * inventory.written_by.pp
        name = f"{group.index}" + (f" (model rank {group.model_rank})" if ranks > 1 else "")
        name += f", ep rank {group.ep_rank}" if group.ep_rank is not None else ""
        held = group.size - group.padding
        padded = [rank for rank, elements in enumerate(group.padding_of()) if elements]
        numbers = (len(group.names), held, group.num_shards, group.shard_size, group.padding)
        table.append([name, *(f"{number:,}" for number in numbers), _ranges(padded)])
    return table


def _ranges(ranks: list[int]) -> str:
    """[3, 5, 6, 7] → ``3, 5–7``, at most three ranges."""
    # Ranks of one range are all as far from their places in the list.
    place = itertools.count()
    runs = [list(run) for _, run in itertools.groupby(ranks, lambda rank: rank - next(place))]
    said = [f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(said if len(said) <= 3 else [*said[:2], f"… {said[-1]}"])


def _tensor_rows(inventory: Any, limit: int | None) -> list[list[str]]:
    """One row per parameter or buffer, its states together."""
    from ullage.core.display import size
    from ullage.report.checkpoint import by_name

    table = [["name", "shape", "dtype", "states", "bytes", "fragments"]]
    for name, tensors in list(by_name(inventory).items())[:limit]:
        first = tensors[0]
        shape = " × ".join(map(str, first.shape)) or "scalar"
        states = ", ".join(t.key for t in tensors)
        # The states of a parameter are cut alike as a rule; the most cut one is shown.
        fragments = str(max(t.num_fragments for t in tensors))
        table.append([name, shape, first.dtype, states, size(sum(t.num_bytes for t in tensors)), fragments])
    # Columns that are the same for all rows stand above the table, so that names have room.
    kept = [k for k in range(6) if k not in (2, 3) or len({row[k] for row in table[1:]}) > 1]
    return [[row[k] for k in kept] for row in table]
