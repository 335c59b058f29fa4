"""Is the source what its writer saved? And what are the checksums of what we wrote?

Every run that was read has been summed. The runs of one record of a source file, with the padding between them, are the
record, so their sums combine to the sum that the archive holds, or the file is damaged. The units of one tensor combine
to the sum of the new record in the same way.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.archive import Payload, Target
from ullage.checkpoint.copying import Unit, write_at
from ullage.checkpoint.crc import combine
from ullage.checkpoint.inventory import Inventory
from ullage.checkpoint.reading import Sources
from ullage.errors import CheckpointError
from ullage.layout import Int64


def fill_checksums(targets: list[Target], partial: Path, units: list[Unit], lines: dict[int, dict[str, Any]]) -> None:
    """Writes the CRC-32 of each large payload into its archive, combined from the sums of its units."""
    places: list[tuple[str, Payload]] = []
    crcs, sizes, owners = [], [], []
    last: tuple[int, int] | None = None
    for unit in units:
        if unit.payload is None or unit.payload < 0:
            continue
        payload = targets[unit.first].payloads[unit.payload]
        if not payload.crc_at:
            continue
        if last != (unit.first, unit.payload):
            places.append((targets[unit.first].name, payload))
            last = (unit.first, unit.payload)
        crcs.append(lines[unit.number]["crc"])
        sizes.append(unit.num_bytes)
        owners.append(len(places) - 1)
    if not places:
        return
    totals = combine(np.array(crcs, np.int64), np.array(sizes, np.int64), np.array(owners, np.int64))
    for (name, payload), crc in zip(places, totals.tolist()):
        fd = os.open(partial / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for place in payload.crc_at:
                write_at(fd, memoryview(crc.to_bytes(4, "little")), place)
        finally:
            os.close(fd)


def check_sources(inventory: Inventory, lines: dict[int, dict[str, Any]]) -> int:
    """Compares the checksum of every source record that was read with the one its archive holds.

    The bytes between the runs (padding) are read for it, unless they are most of the record. Returns how many records
    were compared. Raises ``CheckpointError`` naming the file, its rank and the parameters in the damaged record.
    """
    tables = [np.asarray(line["runs"], np.int64) for line in lines.values() if len(line.get("runs", ()))]
    if not tables:
        return 0
    runs = np.unique(np.concatenate(tables), axis=0)  # by file, then by offset; what was read twice counts once
    sources = Sources(inventory)
    parts: list[Int64] = []
    records: list[tuple[int, int, int]] = []
    try:
        for file, low, size, crc, inside in _by_record(inventory, runs):
            filled = _with_gaps(sources, file, low, size, inside)
            if filled is not None:
                parts.append(np.column_stack([filled, np.full(len(filled), len(records))]))
                records.append((file, low, crc))
    finally:
        sources.close()
    if not records:
        return 0
    table = np.concatenate(parts)
    totals = combine(table[:, 1], table[:, 0], table[:, 2])
    for (file, low, crc), total in zip(records, totals.tolist()):
        if total != crc:
            raise _damaged(inventory, file, low)
    return len(records)


def _by_record(inventory: Inventory, runs: Int64) -> Iterator[tuple[int, int, int, int, Int64]]:
    """(file, offset, bytes, crc, the runs in it) of each record that was read."""
    for file in np.unique(runs[:, 0]).tolist():
        low, high = np.searchsorted(runs[:, 0], [file, file + 1])
        mine = runs[low:high]
        for offset, size, crc in inventory.records.get(file, np.zeros((0, 3), np.int64)).tolist():
            first, last = np.searchsorted(mine[:, 1], [offset, offset + size])
            if first < last:
                yield file, offset, size, crc, mine[first:last]


def _with_gaps(sources: Sources, file: int, low: int, size: int, runs: Int64) -> Int64 | None:
    """[n, 2] bytes and crc of the runs and what lies between them; None if that is most of it or runs overlap."""
    starts, lengths = runs[:, 1], runs[:, 2]
    ends = np.concatenate([[low], starts + lengths])
    gaps = np.concatenate([starts, [low + size]]) - ends
    if (gaps < 0).any() or gaps.sum() > max(1 << 20, int(lengths.sum()) // 8):
        return None
    rows = np.zeros((len(runs) * 2 + 1, 2), np.int64)  # a gap, a run, a gap, ..., a gap
    rows[1::2] = runs[:, 2:]
    for i in np.flatnonzero(gaps).tolist():
        gap = bytearray(int(gaps[i]))
        sources.read(file, int(ends[i]), memoryview(gap))
        rows[2 * i] = len(gap), zlib.crc32(gap)
    return rows[rows[:, 0] > 0]


def _damaged(inventory: Inventory, file: int, low: int) -> CheckpointError:
    _, size, _ = next(r for r in inventory.records[file].tolist() if r[0] == low)
    names = []
    for tensor in inventory.tensors:
        for part in tensor.slices:
            inside = (
                (part.fragments.file == file) & (part.fragments.offset >= low) & (part.fragments.offset < low + size)
            )
            if inside.any():
                names.append(f"{tensor.name} ({tensor.key})")
    who = inventory.files[file]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return CheckpointError(
        "corrupted: the data fails its checksum",
        where=f"{inventory.folder / who.name}, rank {who.dp_rank}, parameter {listed}",
        hint="copy the file again from where it was saved",
    )
