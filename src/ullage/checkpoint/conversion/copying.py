"""Copying of tensors into the target files. Each byte is read once and written once, in chunks that fit the cache.

The work is cut into units: a range of one large tensor, small tensors that lie side by side, or some small files
together. Units go to threads (reading, writing, summing and casting all release the interpreter), in any order, since
each knows its place in the target. A unit that is done is a line in the journal. Checksums of what several units make
come last, from the sums of the parts.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.conversion.journal import Journal, SideBySide, Unit, is_small, neighbours_in
from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.core.numbers import ITEM_BYTES, Bytes, cast, count_not_finite
from ullage.checkpoint.core.reading import CHUNK_BYTES, Sources, Tally, ranges_of, stream
from ullage.checkpoint.files.archive import Payload, Target, combine
from ullage.core.errors import CheckpointError


def _source_order(targets: list[Target], unit: Unit) -> tuple[int, int]:
    """(file, byte) at which a unit begins to read; units are done in this order, that of the disk."""
    target = targets[unit.first]
    if target.copy_of is not None:
        return target.copy_of, unit.start
    if not target.payloads or not target.payloads[unit.payload or 0].tensor.slices:
        return -1, 0
    fragments = target.payloads[unit.payload or 0].tensor.slices[0].fragments
    if not len(fragments):
        return -1, 0
    # The last fragment that begins at or before the unit.
    i = max(0, int(np.searchsorted(fragments.start, unit.start, side="right")) - 1) if unit.start else 0
    return int(fragments.file[i]), int(fragments.offset[i])


def _read_by(targets: list[Target], unit: Unit) -> Iterator[tuple[int, int, int]]:
    """(file, offset, bytes) of the source that a unit reads."""
    copied = targets[unit.first].copy_of
    if unit.payload is None:
        for payload in itertools.chain.from_iterable(t.payloads for t in targets[unit.first : unit.last]):
            yield from ranges_of(payload.tensor, 0, payload.tensor.numel)
    elif unit.neighbours is not None:
        for payload in targets[unit.first].payloads[unit.neighbours.first : unit.neighbours.last]:
            yield from ranges_of(payload.tensor, 0, payload.tensor.numel)
    elif copied is not None:
        yield copied, unit.start, unit.num_bytes
    else:
        yield from ranges_of(targets[unit.first].payloads[unit.payload].tensor, unit.start, unit.stop)


def prepare(partial: Path, targets: list[Target]) -> None:
    """Make the folders, and the large files at full size with the texts that no unit writes. May be repeated."""
    for folder in sorted({os.path.dirname(t.name) for t in targets}):
        os.makedirs(partial / folder, exist_ok=True)
    for index, target in enumerate(targets):
        if is_small(target):
            continue
        together = neighbours_in(index, target)
        begins = [part.begin for part in together]
        fd = os.open(partial / target.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(fd).st_size != target.num_bytes:
                # The full size at once, as a hole: units are written into it in any order.
                os.ftruncate(fd, target.num_bytes)
            for offset, text in target.texts:
                before = bisect.bisect_right(begins, offset) - 1
                if before < 0 or offset >= together[before].end:
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
        self.inventory, self.targets, self.partial = inventory, targets, os.fspath(partial)
        self.sources = Sources(inventory)
        self.buffer = np.empty(CHUNK_BYTES, np.uint8)

    def run(self, unit: Unit) -> dict[str, Any]:
        """Do one unit; returns its line in the journal."""
        tally = Tally()
        if self.sources.remote:
            self.sources.fetch(_read_by(self.targets, unit))
        line: dict[str, Any] = {"unit": unit.number}
        not_finite: list[tuple[int, int, int]] = []
        if unit.payload is None:
            whole = [
                SideBySide(i, 0, len(self.targets[i].payloads), 0, self.targets[i].num_bytes)
                for i in range(unit.first, unit.last)
            ]
            self._compose(whole, tally, not_finite)
        elif unit.neighbours is not None:
            later = self._compose([unit.neighbours], tally, not_finite)
            if later:
                line["crcs"] = later
        elif unit.payload < 0:
            self._copy(unit, tally)
        else:
            line["crc"] = self._range(unit, tally)
            if tally.not_finite:
                not_finite.append((unit.first, unit.payload, tally.not_finite))
        if not_finite:
            line["not_finite"] = not_finite
        if tally.runs:
            line["runs"] = tally.runs
        return line

    def _compose(
        self, parts: list[SideBySide], tally: Tally, not_finite: list[tuple[int, int, int]]
    ) -> list[tuple[int, int]]:
        """Compose stretches in memory and write each at once.

        Args:
            parts: the stretches; of a target that is written whole, one that is all of it.
            tally: gets the runs that were read.
            not_finite: gets (target, payload, elements not finite) of each payload that has any.

        Returns (payload, CRC-32) of those whose sum belongs to a place outside their stretch.
        """
        starts = [0, *itertools.accumulate(part.end - part.begin for part in parts)]
        whole = np.zeros(starts[-1], np.uint8)
        wanted: list[tuple[Payload, int]] = []
        for part, start in zip(parts, starts):
            target, shift = self.targets[part.target], start - part.begin
            low = bisect.bisect_left(target.texts, (part.begin,))
            for offset, text in target.texts[low : bisect.bisect_left(target.texts, (part.end,))]:
                whole[offset + shift : offset + shift + len(text)] = np.frombuffer(text, np.uint8)
            wanted += [(payload, payload.offset + shift) for payload in target.payloads[part.first : part.last]]
        counts = _read_small(self.sources, [(p.tensor, p.dtype, at) for p, at in wanted], whole, self.buffer, tally)
        view, later, done = whole.data, [], 0
        for part, start in zip(parts, starts):
            shift = start - part.begin
            for number in range(part.first, part.last):
                payload, at = wanted[done]
                if counts[done]:
                    not_finite.append((part.target, number, counts[done]))
                done += 1
                if not payload.crc_at:
                    continue
                crc = zlib.crc32(view[at : at + payload.tensor.numel * ITEM_BYTES[payload.dtype]])
                for place in payload.crc_at:
                    if part.begin <= place and place + 4 <= part.end:
                        view[place + shift : place + shift + 4] = crc.to_bytes(4, "little")
                    else:
                        later.append((number, crc))
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

    def _range(self, unit: Unit, tally: Tally) -> int:
        """Copy a range of elements of one payload; returns the CRC-32 of the bytes written."""
        payload = self.targets[unit.first].payloads[unit.payload or 0]
        at, crc = payload.offset + unit.start * ITEM_BYTES[payload.dtype], 0
        before = len(tally.runs)
        # A flat tensor that is not cast is written as it was read, so the sums of the runs are those of its bytes.
        tensor = payload.tensor
        as_read = payload.dtype == tensor.dtype and tensor.merge.kind == "flat"
        fd = os.open(os.path.join(self.partial, self.targets[unit.first].name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            for chunk in stream(self.sources, payload.tensor, unit.start, unit.stop, self.buffer, tally):
                data = cast(chunk, payload.tensor.dtype, payload.dtype)
                if not as_read:
                    crc = zlib.crc32(data.data, crc)
                write_at(fd, data.data, at)
                at += len(data)
        finally:
            os.close(fd)
        if as_read:
            # Runs are (file, offset, bytes, crc), in the order of the elements.
            _, _, sizes, crcs = np.array(tally.runs[before:], np.int64).T
            crc = int(combine(crcs, sizes, np.zeros(len(sizes), np.int64))[0])
        return crc

    def _copy(self, unit: Unit, tally: Tally) -> None:
        """Copy a range of a source file; the parts that lie in its records are summed, record by record."""
        target = self.targets[unit.first]
        assert target.copy_of is not None
        file = target.copy_of
        records = self.inventory.records.get(file, np.zeros((0, 3), np.int64))
        begins, ends = records[:, 0], records[:, 0] + records[:, 1]
        fd = os.open(os.path.join(self.partial, target.name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            for start in range(unit.start, unit.stop, CHUNK_BYTES):
                view = self.buffer[: min(CHUNK_BYTES, unit.stop - start)].data
                self.sources.read(file, start, view)
                write_at(fd, view, start)
                stop = start + len(view)
                # Records that end after ``start`` and begin before ``stop``; of each, what this chunk holds is summed.
                first, last = np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop)
                for begin, end in zip(begins[first:last].tolist(), ends[first:last].tolist()):
                    low, high = max(begin, start), min(end, stop)
                    tally.runs.append((file, low, high - low, zlib.crc32(view[low - start : high - start])))
        finally:
            os.close(fd)


def run_units(
    inventory: Inventory,
    targets: list[Target],
    partial: Path,
    units: list[Unit],
    journal: Journal,
    workers: int,
    progress: Callable[[int], None],
) -> dict[int, dict[str, Any]]:
    """Do ``units`` on threads; returns their lines in the journal by number. Raises the error of the first that fails.

    Args:
        inventory: the source.
        targets: all files of the target.
        partial: the folder in which they are written.
        units: the units to do.
        journal: gets a line per finished unit.
        workers: threads; each holds one chunk of memory and its own open files.
        progress: called with the bytes of each finished unit, never by two threads at once.
    """
    local = threading.local()
    made: list[_Worker] = []
    lock = threading.Lock()
    stop = threading.Event()

    def one(unit: Unit) -> dict[str, Any] | None:
        if stop.is_set():
            return None
        worker: _Worker | None = getattr(local, "worker", None)
        if worker is None:
            worker = local.worker = _Worker(inventory, targets, partial)
            with lock:
                made.append(worker)
        line = worker.run(unit)
        journal.add(line, unit.num_bytes)
        if "runs" in line:  # 32 bytes a run, not 300
            line["runs"] = np.array(line["runs"], np.int64)
        with lock:
            progress(unit.num_bytes)
        return line

    # In the order of the source, so that a disk reads ahead; where the bytes go is known for each unit alone.
    ordered = sorted(units, key=lambda u: _source_order(targets, u))
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(one, unit) for unit in ordered]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
        return {line["unit"]: line for line in (f.result() for f in futures) if line}
    finally:
        # Also after an error: units that have begun end first, since they hold files and write; the others are dropped.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        for worker in made:
            worker.sources.close()


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
    plain = [i for i, (t, dtype, _) in enumerate(wanted) if t.merge.kind == "flat" and t.dtype == dtype]
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
