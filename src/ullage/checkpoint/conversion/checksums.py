"""Checksums of the source of a conversion or a loading, compared.

Every run that was read has been summed. The runs of one record of a source file, with the padding between them, are the
record, so their sums combine to the sum that the archive holds, or the file is damaged.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.reading import CHUNK_BYTES, Sources
from ullage.checkpoint.core.sums import combine
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.core.errors import CheckpointError, listed
from ullage.core.layout import Int64


def compare_sources(inventory: Inventory, runs: list[Int64]) -> int:
    """Compare the checksum of every source record that was read with the one its archive holds; returns their number.

    ``runs``: [n, 4] file, offset, bytes and crc of what was read. Raises as :func:`compare_runs`.
    """
    if not sum(map(len, runs)):
        return 0
    with contextlib.closing(Sources(inventory)) as sources:
        return compare_runs(sources, inventory, np.concatenate(runs), [inventory.records])


def compare_runs(
    sources: Sources,
    inventory: Inventory,
    runs: Int64,
    tables: Sequence[Mapping[int, Int64]],
    *,
    part: int = 0,
    parts: int = 1,
    spare: int | None = None,
    hint: str = "copy the file again from where it was saved",
) -> int:
    """Compare the sums of records, or of whole files, with what was read of them; returns how many were compared.

    Args:
        sources: the open files, of which the bytes between the runs (padding, other tensors) are read.
        inventory: of the checkpoint.
        runs: [n, 4] file, offset, bytes and crc of all that was read.
        tables: by file, [m, 3] offset, bytes and crc of each record; of each file that a manifest lists.
        part: which share of them is compared here.
        parts: number of shares.
        spare: bytes that may be read besides, and whoever needs more is left out; None for all that are needed.
        hint: what to do with a damaged file.

    Raises ``CheckpointError`` that names the file, its rank and the parameters in the bytes that differ.
    """
    pieces: list[Int64] = []
    units: list[tuple[int, int, int, int]] = []
    for number, (file, low, size, crc, inside) in enumerate(_units(tables, np.unique(runs, axis=0))):
        gaps = size - int(inside[:, 2].sum())
        if number % parts != part or (spare is not None and gaps > spare):
            continue
        spare = None if spare is None else spare - gaps
        filled = _with_gaps(sources, file, low, size, inside)
        pieces.append(np.column_stack([filled, np.full(len(filled), len(units))]))
        units.append((file, low, size, crc))
    if not units:
        return 0
    table = np.concatenate(pieces)
    totals = combine(table[:, 1], table[:, 0], table[:, 2])
    for (file, low, size, crc), total in zip(units, totals.tolist()):
        if total != crc:
            raise _damage_error(inventory, file, low, size, hint)
    return len(units)


def _units(tables: Sequence[Mapping[int, Int64]], runs: Int64) -> Iterator[tuple[int, int, int, int, Int64]]:
    """(file, offset, bytes, crc, the runs in it) of each record or whole file that was read of, by file."""
    for file in np.unique(runs[:, 0]).tolist():
        mine = runs[runs[:, 0] == file]
        # By offset, so that the runs that begin in a record are one stretch; of those that begin at one byte, the
        # longest is first.
        mine = mine[np.lexsort((-mine[:, 2], mine[:, 1]))]
        for table in tables:
            for low, size, crc in table.get(file, np.zeros((0, 3), np.int64)).tolist():
                first, last = np.searchsorted(mine[:, 1], [low, low + size])
                inside = _disjoint(mine[first:last])
                if len(inside) and inside[-1, 1:3].sum() <= low + size:
                    yield file, low, size, crc, inside


def _disjoint(runs: Int64) -> Int64:
    """Runs of which each byte counts once: one that begins inside an earlier one is left out."""
    # Two tensors of one storage, or two ranks that read a part each: of [0, 8), [4, 12), [8, 16) the second goes.
    kept, end = [], -1
    if (runs[1:, 1] >= runs[:-1, 1:3].sum(1)).all():
        return runs
    for i, (start, length) in enumerate(runs[:, 1:3].tolist()):
        if start >= end:
            kept.append(i)
            end = start + length
    return runs[kept]


def _with_gaps(sources: Sources, file: int, low: int, size: int, runs: Int64) -> Int64:
    """[n, 2] bytes and crc of parts that make the whole record: the runs, and what lies between them, read for it.

    Args:
        sources: the open files.
        file: number of the file in the inventory.
        low: byte offset of the record in its file.
        size: bytes of the record.
        runs: [m, 4] file, offset, bytes and crc of what was read of the record, by offset, each byte once.
    """
    starts, lengths = runs[:, 1], runs[:, 2]
    # Before, between and after the runs lie gaps: padding, and tensors that were not read. In a record of bytes 100 to
    # 120 with runs of 8 at 100 and 4 at 112, the gaps are [0, 4, 4].
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


def _damage_error(inventory: Inventory, file: int, low: int, size: int, hint: str) -> CheckpointError:
    # From the damaged record back to what lies in it: a person knows parameters, not records.
    names = []
    for tensor in inventory.tensors:
        for part in tensor.slices:
            begins, lengths = part.fragments.offset, part.fragments.length * tensor.item_bytes
            if ((part.fragments.file == file) & (begins < low + size) & (begins + lengths > low)).any():
                names.append(f"{tensor.name} ({tensor.key})")
    names = names or _module_names(inventory, file, low)
    who = inventory.files[file]
    what = f"parameter {listed(names)}" if names else f"bytes {low:,} to {low + size:,}"
    where = f"{inventory.folder / who.name}, rank {who.dp_rank}, {what}"
    return CheckpointError("corrupted: the data fails its checksum", where=where, hint=hint)


def _module_names(inventory: Inventory, file: int, low: int) -> list[str]:
    """Names of the tensors of the module that lie in one record of the model states."""
    for model in getattr(inventory.details, "models", {}).values():
        if model.file == file:
            keys = {key for key, record in model.source.records.items() if record.offset == low}
            held = (model.module or {}).items()
            return [f"{name} (module)" for name, ref in held if isinstance(ref, TensorRef) and ref.storage in keys]
    return []
