"""Checksums of a conversion: those of the source, compared, and those of the target, filled in.

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

from ullage.checkpoint.conversion.copying import write_at
from ullage.checkpoint.conversion.journal import Unit
from ullage.checkpoint.files.archive import Payload, Target
from ullage.checkpoint.files.crc import combine
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import Inventory
from ullage.checkpoint.reading import CHUNK_BYTES, Sources
from ullage.errors import CheckpointError, listed
from ullage.layout import Int64


def fill_checksums(targets: list[Target], partial: Path, units: list[Unit], lines: dict[int, dict[str, Any]]) -> None:
    """Write the CRC-32 of each payload whose units could not into its archive, combined from the sums of the units."""
    places: list[tuple[str, Payload]] = []
    crcs, sizes, owners = [], [], []
    last: tuple[int, int] | None = None
    for unit in units:
        if unit.payload is None or unit.payload < 0:
            continue
        if unit.neighbours is not None:  # summed whole; only sums whose place lies in another unit are left
            for number, crc in lines[unit.number].get("crcs", ()):
                payload = targets[unit.first].payloads[number]
                places.append((targets[unit.first].name, payload))
                crcs.append(crc)
                sizes.append(payload.tensor.num_bytes)
                owners.append(len(places) - 1)
            continue
        payload = targets[unit.first].payloads[unit.payload]
        if not payload.crc_at:
            continue
        # Units of one payload are neighbours and in order (``units.split``), as ``combine`` requires.
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
            # Twice: in the header of the record, and in the entry of the directory.
            for place in payload.crc_at:
                write_at(fd, memoryview(crc.to_bytes(4, "little")), place)
        finally:
            os.close(fd)


def compare_sources(inventory: Inventory, lines: dict[int, dict[str, Any]]) -> int:
    """Compare the checksum of every source record that was read with the one its archive holds.

    The bytes between the runs (padding, and other tensors of a shared storage) are read for it. Returns how many
    records were compared. Raises ``CheckpointError`` that names the file, its rank and the parameters in the record.
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
            filled = with_gaps(sources, file, low, size, inside)
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
    # Both tables are ordered by offset, so the runs that begin in a record are one stretch.
    for file in np.unique(runs[:, 0]).tolist():
        low, high = np.searchsorted(runs[:, 0], [file, file + 1])
        mine = runs[low:high]
        for offset, size, crc in inventory.records.get(file, np.zeros((0, 3), np.int64)).tolist():
            first, last = np.searchsorted(mine[:, 1], [offset, offset + size])
            if first < last:
                yield file, offset, size, crc, mine[first:last]


def with_gaps(sources: Sources, file: int, low: int, size: int, runs: Int64) -> Int64:
    """[n, 2] bytes and crc of parts that make the whole record: the runs, and what lies between them, read for it.

    Args:
        sources: the open files.
        file: number of the file in the inventory.
        low: byte offset of the record in its file.
        size: bytes of the record.
        runs: [m, 4] file, offset, bytes and crc of what was read of the record, by offset.
    """
    starts, lengths = runs[:, 1], runs[:, 2]
    # Overlapping runs: each byte may count once only, so a run that begins inside an earlier one is left out.
    if len(runs) > 1 and (starts[1:] < (starts + lengths)[:-1]).any():  # two tensors of one storage
        kept, end = [], low
        for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
            if start >= end:
                kept.append(i)
                end = start + length
        runs = runs[kept]
        starts, lengths = runs[:, 1], runs[:, 2]
    # Before, between and after the runs lie gaps: padding, and tensors that were not read.
    ends = np.concatenate([[low], starts + lengths])
    gaps = np.concatenate([starts, [low + size]]) - ends
    rows = np.zeros((len(runs) * 2 + 1, 2), np.int64)  # a gap, a run, a gap, ..., a gap
    rows[1::2] = runs[:, 2:]
    for i in np.flatnonzero(gaps).tolist():
        rows[2 * i] = gaps[i], _sum(sources, file, int(ends[i]), int(gaps[i]))
    return rows[rows[:, 0] > 0]


def _sum(sources: Sources, file: int, offset: int, num_bytes: int) -> int:
    """The CRC-32 of a range of a source file."""
    crc, buffer = 0, bytearray(min(num_bytes, CHUNK_BYTES))
    for start in range(0, num_bytes, CHUNK_BYTES):
        view = memoryview(buffer)[: min(CHUNK_BYTES, num_bytes - start)]
        sources.read(file, offset + start, view)
        crc = zlib.crc32(view, crc)
    return crc


def _damaged(inventory: Inventory, file: int, low: int) -> CheckpointError:
    _, size, _ = next(r for r in inventory.records[file].tolist() if r[0] == low)
    # From the damaged record back to what lies in it: a person knows parameters, not records.
    names = []
    for tensor in inventory.tensors:
        for part in tensor.slices:
            inside = (
                (part.fragments.file == file) & (part.fragments.offset >= low) & (part.fragments.offset < low + size)
            )
            if inside.any():
                names.append(f"{tensor.name} ({tensor.key})")
    names = names or _module_names(inventory, file, low)
    who = inventory.files[file]
    what = f"parameter {listed(names)}" if names else f"the record of {size} bytes at {low}"
    return CheckpointError(
        "corrupted: the data fails its checksum",
        where=f"{inventory.folder / who.name}, rank {who.dp_rank}, {what}",
        hint="copy the file again from where it was saved",
    )


def _module_names(inventory: Inventory, file: int, low: int) -> list[str]:
    """Names of the tensors of the module that lie in one record of the model states."""
    for model in getattr(inventory.details, "models", {}).values():
        if model.file == file:
            keys = {key for key, record in model.source.records.items() if record.offset == low}
            held = (model.module or {}).items()
            return [f"{name} (module)" for name, ref in held if isinstance(ref, TensorRef) and ref.storage in keys]
    return []
