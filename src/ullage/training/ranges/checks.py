"""Comparison of what was read with the sums that the files and their manifest hold, without reading it again.

Every rank sums its ranges while it reads them. The ranges of all ranks, end to end, make most records of the archives
whole, and most blocks of the manifest; the few bytes between them (padding, headers of records) are read for the
comparison, as far as they are few. So a record or a block is compared where the ranks together read nearly all of it,
and is not where they needed a part of it only: the weights of a module that the masters replace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ullage.checkpoint.conversion.checksums import with_gaps
from ullage.checkpoint.files.crc import combine
from ullage.checkpoint.reading import Sources
from ullage.errors import CheckpointError
from ullage.layout import Int64
from ullage.training.ranges.content import Content

#: Of the bytes that a rank reads for itself, one in this many may be read for comparisons besides.
_SPARE = 32
_NONE: Int64 = np.zeros((0, 3), np.int64)


def joined(runs: list[tuple[int, int, int, int]], content: Content) -> Int64:
    """Runs (file, offset, bytes, crc) as [n, 4], those that follow one another within a record or block made one."""
    table = np.unique(np.array(runs, np.int64).reshape(-1, 4), axis=0)
    if len(table) < 2:
        return table
    # A run may not reach over the beginning of a record or a block, where another sum begins.
    begins = np.zeros(len(table), bool)
    for file in np.unique(table[:, 0]).tolist():
        edges = np.concatenate([units.get(file, _NONE)[:, 0] for units in _tables(content)])
        mine = table[:, 0] == file
        begins[mine] = np.isin(table[mine, 1], edges)
    follows = (table[1:, 0] == table[:-1, 0]) & (table[1:, 1] == table[:-1, 1] + table[:-1, 2])
    owner = np.concatenate([[0], np.cumsum(~follows | begins[1:])])
    first = np.searchsorted(owner, np.arange(owner[-1] + 1))
    crcs = combine(table[:, 3], table[:, 2], owner)
    return np.column_stack([table[first, :2], np.bincount(owner, table[:, 2]).astype(np.int64), crcs])


def compare(sources: Sources, content: Content, runs: list[Int64], rank: int) -> int:
    """Compare this rank's share of the records and blocks; returns how many were compared.

    Args:
        sources: the open files.
        content: the checkpoint.
        runs: what each rank read, as :func:`joined` gives it.
        rank: this one.

    Raises ``CheckpointError`` that names the file and what lies in the bytes that differ.
    """
    spare, count = sources.num_bytes // _SPARE, 0
    together = np.unique(np.concatenate(runs), axis=0) if runs else np.zeros((0, 4), np.int64)
    for number, (file, low, size, crc, inside) in enumerate(_units(content, together)):
        if number % len(runs) != rank:
            continue
        gaps = size - int(inside[:, 2].sum())
        if gaps > spare:
            continue
        spare -= max(gaps, 0)
        parts = with_gaps(sources, file, low, size, inside)
        if combine(parts[:, 1], parts[:, 0], np.zeros(len(parts), np.int64))[0] != crc:
            raise _damaged(content, file, low, size)
        count += 1
    return count


def _tables(content: Content) -> tuple[dict[int, Any], dict[int, Any]]:
    return content.inventory.records, content.blocks


def _units(content: Content, runs: Int64) -> Iterator[tuple[int, int, int, int, Int64]]:
    """(file, offset, bytes, crc, runs within) of each record and block that any rank read of, by file."""
    for file in np.unique(runs[:, 0]).tolist():
        mine = runs[runs[:, 0] == file]
        # Of a run that two ranks read in part, each byte counts once: the one that begins first, and the longer.
        mine = mine[np.lexsort((-mine[:, 2], mine[:, 1]))]
        for table in _tables(content):
            for low, size, crc in table.get(file, _NONE).tolist():
                first, last = np.searchsorted(mine[:, 1], [low, low + size])
                inside = mine[first:last]
                ends = inside[:, 1] + inside[:, 2]
                if len(inside) and (ends[:-1] <= inside[1:, 1]).all() and ends[-1] <= low + size:
                    yield file, low, size, crc, inside


def _damaged(content: Content, file: int, low: int, size: int) -> CheckpointError:
    inventory = content.inventory
    names = [
        f"{tensor.name} ({tensor.key})"
        for tensor in inventory.tensors
        for part in tensor.slices
        if (
            (part.fragments.file == file)
            & (part.fragments.offset < low + size)
            & (part.fragments.offset + part.fragments.length * tensor.item_bytes > low)
        ).any()
    ]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return CheckpointError(
        "corrupted: the data fails its checksum",
        where=f"{inventory.folder / inventory.files[file].name}, bytes {low:,} to {low + size:,}, {listed}",
        hint="the engine holds a part of it: load another checkpoint before training, or copy the file again",
    )
