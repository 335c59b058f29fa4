"""Copying of tensors into the target files. Each byte is read once and written once, in chunks that fit the cache.

The work is cut into files, and a large file into units: a range of one large tensor, or small tensors that lie side by
side; small files are done some together. Units go to threads (reading, writing, summing and casting all release the
interpreter), in the order of the files, so that few files are begun and not done. A file whose units are done gets the
checksums of its tensors, is synced, and becomes a line in the journal.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ullage.checkpoint.conversion.journal import Journal, Line
from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.core.numbers import ITEM_BYTES, Bytes, cast, count_not_finite
from ullage.checkpoint.core.reading import CHUNK_BYTES, Sources, Tally, ranges_of, row_elements, stream
from ullage.checkpoint.core.sums import combine
from ullage.checkpoint.files.archive import Payload, Target
from ullage.core.errors import CheckpointError

#: Targets and tensors up to this size are composed in memory, many together, and written at once.
SMALL_BYTES = 1 << 20
#: Tensors, and small files, that are done together at most: their time is that of opening them, not of their bytes.
_TOGETHER, _FILES_TOGETHER = 2048, 256
#: A unit of a large file; small files together have a quarter of it.
UNIT_BYTES = 32 << 20


@dataclass(frozen=True)
class SideBySide:
    """Bytes ``[begin, end)`` of target number ``target``: payloads ``[first, last)`` and all texts between them."""

    target: int
    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True)
class Range:
    """Elements ``[start, stop)`` of payload number ``payload`` of target number ``target``."""

    target: int
    payload: int
    start: int
    stop: int


#: What one thread does at once: stretches, composed in memory, or a range of one tensor.
Unit = tuple[SideBySide, ...] | Range


@dataclass
class Files:
    """Targets that are done or not done: a large one, or some small ones.

    Attributes:
        number: place among all; its name in the journal.
        first: number of the first target.
        last: number after that of the last target.
        num_bytes: of all of them.
        units: the work, in order.
        is_large: whether it is one file, of which units are parts.
        line: gets what the journal is to keep.
        sums: by payload: (first byte, CRC-32, bytes) of the parts whose sum has no place yet.
        done: units that are done, and their bytes.
    """

    number: int
    first: int
    last: int
    num_bytes: int
    units: list[Unit]
    is_large: bool = False
    line: Line = field(default_factory=Line)
    sums: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    done: tuple[int, int] = (0, 0)


def split(targets: list[Target]) -> list[Files]:
    """The files of ``targets`` in the order of the work, that of the targets; the same for the same targets."""
    made: list[Files] = []
    together: list[SideBySide] = []
    held = 0  # bytes of those

    def close() -> None:
        nonlocal held
        if together:
            made.append(Files(len(made), together[0].target, together[-1].target + 1, held, [tuple(together)]))
            together.clear()
            held = 0

    for index, target in enumerate(targets):
        if target.num_bytes <= SMALL_BYTES:
            together.append(SideBySide(index, 0, len(target.payloads), 0, target.num_bytes))
            held += target.num_bytes
            if len(together) >= _FILES_TOGETHER or held >= UNIT_BYTES // 4:
                close()
            continue
        close()
        units = list(_units(index, target)) or [()]
        made.append(Files(len(made), index, index + 1, target.num_bytes, units, is_large=True))
    close()
    return made


def _units(index: int, target: Target) -> Iterator[Unit]:
    """The units of a large target, in the order of its bytes."""
    first, begin, end = 0, 0, 0  # of the stretch that is being made; the end of the last payload
    for number, payload in enumerate(target.payloads):
        item = ITEM_BYTES[payload.dtype]
        size = payload.tensor.numel * item
        is_large = size > SMALL_BYTES
        full = payload.offset - begin > UNIT_BYTES // 4 or number - first >= _TOGETHER
        if number > first and (is_large or full):
            yield (SideBySide(index, first, number, begin, end),)
            first, begin = number, end
        end = payload.offset + size
        if is_large:
            # At whole rows.
            row = row_elements(payload.tensor)
            step = max(1, UNIT_BYTES // (row * item)) * row
            for start in range(0, payload.tensor.numel, step):
                yield Range(index, number, start, min(start + step, payload.tensor.numel))
            first, begin = number + 1, end
    if len(target.payloads) > first:
        yield (SideBySide(index, first, len(target.payloads), begin, end),)


def _prepare(partial: Path, files: list[Files], targets: list[Target]) -> None:
    """Make the folders, and the large files at full size with their texts. May be repeated."""
    for folder in sorted({os.path.dirname(t.name) for t in targets}):
        os.makedirs(partial / folder, exist_ok=True)
    for each in files:
        if not each.is_large:
            continue
        target = targets[each.first]
        fd = os.open(partial / target.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # The full size at once, as a hole: units are written into it in any order.
            os.ftruncate(fd, target.num_bytes)
            for offset, text in target.texts:
                write_at(fd, memoryview(text), offset)
        finally:
            os.close(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however little the system takes at a time."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


class _Worker:
    """One thread's buffers and open files."""

    def __init__(self, inventory: Inventory, targets: list[Target], partial: Path) -> None:
        self.targets, self.partial = targets, os.fspath(partial)
        self.sources = Sources(inventory)
        self.buffer = np.empty(CHUNK_BYTES, np.uint8)

    def run(self, unit: Unit) -> tuple[Line, list[tuple[int, int, int, int]]]:
        """Do one unit.

        Returns what the journal is to keep of it, and (payload, first byte, CRC-32, bytes) of what was written of
        payloads whose sum has a place that the unit has not written.
        """
        if self.sources.remote:
            self.sources.fetch(self._reads(unit))
        line = Line()
        return line, self._copy(unit, line) if isinstance(unit, Range) else self._compose(unit, line)

    def _reads(self, unit: Unit) -> Iterator[tuple[int, int, int]]:
        """(file, offset, bytes) of the source that a unit reads."""
        if isinstance(unit, Range):
            yield from ranges_of(self.targets[unit.target].payloads[unit.payload].tensor, unit.start, unit.stop)
            return
        for part in unit:
            for payload in self.targets[part.target].payloads[part.first : part.last]:
                yield from ranges_of(payload.tensor, 0, payload.tensor.numel)

    def _compose(self, parts: tuple[SideBySide, ...], line: Line) -> list[tuple[int, int, int, int]]:
        """Compose stretches in memory and write each at once."""
        starts = [0, *itertools.accumulate(part.end - part.begin for part in parts)]
        whole = np.zeros(starts[-1], np.uint8)
        wanted: list[tuple[Payload, int]] = []
        for part, start in zip(parts, starts):
            target, shift = self.targets[part.target], start - part.begin
            low = bisect.bisect_left(target.texts, (part.begin,))
            for offset, text in target.texts[low : bisect.bisect_left(target.texts, (part.end,))]:
                whole[offset + shift : offset + shift + len(text)] = np.frombuffer(text, np.uint8)
            wanted += [(payload, payload.offset + shift) for payload in target.payloads[part.first : part.last]]
        tally = Tally(line.runs)
        counts = _read_small(self.sources, [(p.tensor, p.dtype, at) for p, at in wanted], whole, self.buffer, tally)
        view, later, done = whole.data, [], 0
        for part, start in zip(parts, starts):
            shift = start - part.begin
            for number in range(part.first, part.last):
                (payload, at), count = wanted[done], counts[done]
                done += 1
                line.add(part.target, number, count)
                if payload.crc_at:
                    size = payload.tensor.numel * ITEM_BYTES[payload.dtype]
                    crc = zlib.crc32(view[at : at + size])
                    if any(not part.begin <= place <= part.end - 4 for place in payload.crc_at):
                        later.append((number, 0, crc, size))
                    for place in payload.crc_at:
                        if part.begin <= place <= part.end - 4:
                            view[place + shift : place + shift + 4] = crc.to_bytes(4, "little")
            self._write(part, view[start : start + part.end - part.begin])
        return later

    def _write(self, part: SideBySide, data: memoryview) -> None:
        target = self.targets[part.target]
        flags = os.O_WRONLY | os.O_CLOEXEC
        if len(data) == target.num_bytes:
            flags |= os.O_CREAT | os.O_TRUNC
        fd = os.open(os.path.join(self.partial, target.name), flags, 0o666)
        try:
            write_at(fd, data, part.begin)
        finally:
            os.close(fd)

    def _copy(self, unit: Range, line: Line) -> list[tuple[int, int, int, int]]:
        """Copy a range of elements of one payload."""
        payload = self.targets[unit.target].payloads[unit.payload]
        tensor, tally = payload.tensor, Tally(line.runs)
        begin = at = unit.start * ITEM_BYTES[payload.dtype]
        crc = 0
        # A flat tensor that is not cast is written as it was read, so the sums of the runs are those of its bytes.
        as_read = payload.dtype == tensor.dtype and tensor.merge.kind == "flat"
        fd = os.open(os.path.join(self.partial, self.targets[unit.target].name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            for chunk in stream(self.sources, tensor, unit.start, unit.stop, self.buffer, tally):
                data = cast(chunk, tensor.dtype, payload.dtype)
                if payload.crc_at and not as_read:
                    crc = zlib.crc32(data.data, crc)
                write_at(fd, data.data, payload.offset + at)
                at += len(data)
        finally:
            os.close(fd)
        line.add(unit.target, unit.payload, tally.not_finite)
        if not payload.crc_at:
            return []
        if as_read:
            crc = _joined([(size, crc) for _, _, size, crc in line.runs])
        return [(unit.payload, begin, crc, at - begin)]


def _joined(parts: list[tuple[int, int]]) -> int:
    """The CRC-32 of parts (bytes, CRC-32) that lie end to end."""
    sizes, crcs = np.array(parts, np.int64).T
    return int(combine(crcs, sizes, np.zeros(len(sizes), np.int64))[0])


def _close(partial: Path, target: Target, sums: dict[int, list[tuple[int, int, int]]]) -> None:
    """Write the CRC-32 of payloads into their archive, from the sums of their parts, and sync it."""
    fd = os.open(partial / target.name, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for number, parts in sums.items():
            crc = _joined([(size, crc) for _, crc, size in sorted(parts)]) if len(parts) > 1 else parts[0][1]
            # Twice: in the header of the record, and in the entry of the directory.
            for place in target.payloads[number].crc_at:
                write_at(fd, memoryview(crc.to_bytes(4, "little")), place)
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_files(
    inventory: Inventory,
    targets: list[Target],
    partial: Path,
    files: list[Files],
    journal: Journal,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Write ``files`` on threads. Raises the error of the first unit that fails.

    Args:
        inventory: the source.
        targets: all files of the target.
        partial: the folder in which they are written.
        files: those to write; each gets its line.
        journal: gets a line per file.
        workers: threads; each holds one chunk of memory and its own open files.
        progress: called with the bytes of each finished unit, never by two threads at once.
    """
    local, lock, stop = threading.local(), threading.Lock(), threading.Event()
    made: list[_Worker] = []

    def one(each: Files, unit: Unit) -> None:
        if stop.is_set():
            return
        worker: _Worker | None = getattr(local, "worker", None)
        if worker is None:
            worker = local.worker = _Worker(inventory, targets, partial)
            with lock:
                made.append(worker)
        line, parts = worker.run(unit)
        with lock:
            each.line.join(line)
            for number, begin, crc, length in parts:
                each.sums.setdefault(number, []).append((begin, crc, length))
            size, (count, before) = _num_bytes(targets, unit), each.done
            each.done = count + 1, before + size
        if count + 1 == len(each.units):
            size = each.num_bytes - before  # with headers and directories
            if each.is_large:
                _close(partial, targets[each.first], each.sums)
            journal.add(each.number, each.line, synced=each.is_large)
        with lock:
            progress(size)

    _prepare(partial, files, targets)
    pool = ThreadPoolExecutor(workers)
    try:
        futures = []
        for each in sorted(files, key=lambda each: _source_order(targets[each.first])):
            futures += [pool.submit(one, each, unit) for unit in each.units]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
    finally:
        # Also after an error: units that have begun end first, since they hold files and write; the others are dropped.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        for worker in made:
            worker.sources.close()


def _source_order(target: Target) -> tuple[int, int]:
    """(file, byte) at which a target begins to read; files are written in this order, that of the disk."""
    for payload in target.payloads[:1]:
        for part in payload.tensor.slices[:1]:
            if len(part.fragments):
                return int(part.fragments.file[0]), int(part.fragments.offset[0])
    return -1, 0


def _num_bytes(targets: list[Target], unit: Unit) -> int:
    """Bytes that a unit writes."""
    if isinstance(unit, Range):
        return (unit.stop - unit.start) * ITEM_BYTES[targets[unit.target].payloads[unit.payload].dtype]
    return sum(part.end - part.begin for part in unit)


# Many small tensors at once: neighbours in a file are one read


def _read_small(
    sources: Sources, wanted: list[tuple[Tensor, str, int]], into: Bytes, buffer: Bytes, tally: Tally
) -> list[int]:
    """Read many small tensors whole; neighbours in a file are read at once.

    Args:
        sources: the open files.
        wanted: each tensor, the dtype in which it is wanted, and its first byte in ``into``.
        into: memory for all of them.
        buffer: memory for a chunk; no tensor is larger than half of it.
        tally: gets the runs that were read.

    Returns the number of elements that are not finite, of each tensor. Raises as :func:`stream` does.
    """
    counts = [0] * len(wanted)
    # A file that is copied has no name: it is read record by record, since a sum is that of one record.
    plain = [i for i, (t, dtype, _) in enumerate(wanted) if t.name and t.merge.kind == "flat" and t.dtype == dtype]
    for i in sorted(set(range(len(wanted))) - set(plain)) if len(plain) < len(wanted) else ():
        tensor, dtype, at = wanted[i]
        mine = Tally(tally.runs)
        for chunk in stream(sources, tensor, 0, tensor.numel, buffer, mine):
            data = cast(chunk, tensor.dtype, dtype)
            into[at : at + len(data)] = data
            at += len(data)
        counts[i] = mine.not_finite
    if plain and not _read_plain(sources, [(wanted[i][0], wanted[i][2]) for i in plain], into, buffer, tally):
        for i in plain:
            tensor, _, at = wanted[i]
            counts[i] = count_not_finite(into[at : at + tensor.num_bytes], tensor.dtype)
    return counts


def _read_plain(sources: Sources, wanted: list[tuple[Tensor, int]], into: Bytes, buffer: Bytes, tally: Tally) -> bool:
    """Read tensors that nothing cuts or casts; returns whether all their elements are known to be finite."""
    parts = [tensor.slices[0].fragments for tensor, _ in wanted]
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    item = np.array([tensor.item_bytes for tensor, _ in wanted], np.int64)[owners]
    file = np.concatenate([part.file for part in parts])
    offset = np.concatenate([part.offset for part in parts])
    size = np.concatenate([part.length for part in parts]) * item
    to = np.array([at for _, at in wanted], np.int64)[owners] + np.concatenate([p.start for p in parts]) * item
    if int(size.sum()) != sum(tensor.num_bytes for tensor, _ in wanted):  # cannot be in an inventory without problems
        raise CheckpointError("elements that no fragment holds", where=wanted[0][0].name)
    order = np.lexsort((offset, file))
    file, offset, size, to = file[order], offset[order], size[order], to[order]
    # A read ends where the next fragment lies elsewhere, and where the buffer might be full.
    ends = np.cumsum(size)
    full = (ends - 1) // (len(buffer) // 2)
    apart = (file[1:] != file[:-1]) | (offset[1:] != (offset + size)[:-1]) | (full[1:] != full[:-1])
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(file)]
    dtypes = {tensor.dtype for tensor, _ in wanted}
    dtype = dtypes.pop() if len(dtypes) == 1 else ""
    finite = bool(dtype)
    starts = (ends - size).tolist()
    sizes, places = size.tolist(), to.tolist()
    for first, last in itertools.pairwise(bounds):
        if first == last:
            continue
        low = starts[first]
        chunk = buffer[: starts[last - 1] + sizes[last - 1] - low]
        sources.read(int(file[first]), int(offset[first]), chunk.data)
        tally.runs.append((int(file[first]), int(offset[first]), len(chunk), zlib.crc32(chunk.data)))
        for i in range(first, last):
            begin = starts[i] - low
            into[places[i] : places[i] + sizes[i]] = chunk[begin : begin + sizes[i]]
        finite = finite and not count_not_finite(chunk, dtype)
    return finite
