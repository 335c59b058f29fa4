"""Reading of a tensor's elements from its fragments, one buffer at a time.

While a chunk is in the cache it is summed once (CRC-32, for the record it came from and the one it goes to) and
searched once for NaN and Inf. Nothing is larger than the caller's buffer.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ullage.checkpoint.core.inventory import Inventory, Slice, Tensor
from ullage.checkpoint.core.numbers import Bytes, as_floats, cast, count_not_finite, from_floats
from ullage.checkpoint.core.paths import Held, is_remote, key_of, open_to_read, read_into, store_at
from ullage.core.errors import CheckpointError

#: Bytes handled at once: small enough to stay in the cache between reading, summing and writing.
CHUNK_BYTES = 2 << 20

#: Most bytes that one thread fetches from a store before it reads them.
_FETCHED_BYTES = 64 << 20


class Unreadable(CheckpointError):
    """A source file that the system does not let us read. Not a damaged one: it may be readable later."""


class Sources:
    """The files of a checkpoint, opened when needed; at most ``limit`` at once. Not for several threads.

    ``num_bytes``: bytes read so far. Of a checkpoint in a store nothing is opened: :meth:`fetch` asks for what is about
    to be read, all at once.
    """

    def __init__(self, inventory: Inventory, limit: int = 128) -> None:
        self._inventory, self._limit = inventory, limit
        self.num_bytes = 0
        self._open: OrderedDict[int, int] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], npt.NDArray[np.float32]] = OrderedDict()
        self.remote = is_remote(inventory.folder)
        self._held = Held()

    def fetch(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Fetch (file, offset, bytes) that are about to be read, in place of what was fetched before.

        By parallel requests for neighbouring ranges together, up to 64 MiB; what is beyond is asked for when it is
        read. Does nothing for files of this machine.
        """
        if not self.remote:
            return
        self._held = Held()
        wanted = [(self._key(file), offset, offset + size) for file, offset, size in ranges]
        try:
            self._held.add(store_at(self._inventory.folder), wanted, _FETCHED_BYTES)
        except OSError as error:
            raise self._unreadable(error, str(error.filename)) from error

    def fd(self, file: int) -> int:
        """The descriptor of file number ``file``; the one not used for longest is closed where too many are open."""
        found = self._open.get(file)
        if found is None:
            if len(self._open) >= self._limit:
                os.close(self._open.popitem(last=False)[1])
            try:
                found = self._open[file] = open_to_read(self._inventory.folder / self._inventory.files[file].name)
            except OSError as error:
                raise self._unreadable(error, self._where(file)) from error
        else:
            self._open.move_to_end(file)
        return found

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Fill ``into``. Raises ``CheckpointError`` when the file ends first."""
        if self.remote:
            self._read_remote(file, offset, into)
            return
        done, fd = 0, self.fd(file)
        while done < len(into):
            try:
                got = read_into(fd, into[done:], offset + done)
            except OSError as error:
                raise self._unreadable(error, self._where(file)) from error
            if got == 0:
                raise CheckpointError(
                    "the file ended while it was read",
                    where=self._where(file),
                    expected=f"{offset + len(into)} bytes",
                    found=f"{offset + done}",
                )
            done += got
            self.num_bytes += got

    def _read_remote(self, file: int, offset: int, into: memoryview) -> None:
        key = self._key(file)
        found = self._held.find(key, offset, offset + len(into))
        try:
            store = store_at(self._inventory.folder)
            into[:] = store.read(key, offset, offset + len(into)) if found is None else found
        except OSError as error:
            raise self._unreadable(error, str(error.filename)) from error
        self.num_bytes += len(into)

    def _key(self, file: int) -> str:
        return f"{key_of(self._inventory.folder)}/{self._inventory.files[file].name}"

    def _where(self, file: int) -> str:
        found = self._inventory.files[file]
        return f"{self._inventory.folder / found.name}, rank {found.dp_rank}"

    def _unreadable(self, error: OSError, where: str) -> Unreadable:
        return Unreadable(
            f"cannot read: {error.strerror or error}",
            where=where,
            hint="what is done is kept: run the same command again once the source can be read",
        )

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass
class Tally:
    """Record of a reading: each run read, as (file, offset, bytes, crc), and the number of elements not finite."""

    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    not_finite: int = 0

    def add(self, file: int, offset: int, content: memoryview) -> None:
        """Sum what was read of a file, from the byte ``offset`` on."""
        self.runs.append((file, offset, len(content), zlib.crc32(content)))


def ranges_of(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(file, offset, bytes) that :func:`stream` reads for these elements; of a strided tensor, all that it may read."""
    item, row = tensor.item_bytes, row_elements(tensor)
    for index, part in enumerate(tensor.slices):
        low, high = start, stop
        if tensor.merge.kind == "columns":
            # Rows of the slice, which are shorter than those of the whole.
            own = sum(b.width for b in tensor.merge.bands if b.slice == index) * tensor.merge.inner
            low, high = start // row * own, stop // row * own
        elif tensor.merge.kind == "strided":
            low, high = 0, part.shape[0]
        found = part.fragments.window(low, high, item)
        for file, offset, length in zip(found.file.tolist(), found.offset.tolist(), found.length.tolist()):
            yield file, offset, length * item


def row_elements(tensor: Tensor) -> int:
    """Number of elements that must be read together: a whole row where slices lie side by side, else 1."""
    return tensor.merge.size * tensor.merge.inner if tensor.merge.kind == "columns" else 1


def stream(sources: Sources, tensor: Tensor, start: int, stop: int, buffer: Bytes, tally: Tally) -> Iterator[Bytes]:
    """Yield the bytes of elements ``[start, stop)`` in order, in chunks that are valid until the next.

    Args:
        sources: the open files.
        tensor: the tensor to read.
        start: first element, a multiple of :func:`row_elements`.
        stop: the element after the last, a multiple too, or the end of the tensor.
        buffer: memory for a chunk; its size in bytes bounds what is read at once.
        tally: gets the runs that were read and the number of elements that are not finite.

    Raises ``CheckpointError`` when replicas differ, ``Unreadable`` when the system cannot read a file.
    """
    item = tensor.item_bytes
    row = row_elements(tensor)
    step = max(1, len(buffer) // (row * item)) * row
    for low in range(start, stop, step):
        high = min(low + step, stop)
        if tensor.merge.kind == "flat":
            chunk = buffer[: (high - low) * item]
            _gather(sources, tensor.slices[0], low, high, item, chunk, tally)
        elif tensor.merge.kind == "strided":
            chunk = _read_strided(sources, tensor, low, high, tally)
        elif tensor.merge.kind == "joined":
            chunk = _read_stretches(sources, tensor, low, high, buffer[: (high - low) * item], tally)
        else:
            chunk = _read_merged(sources, tensor, low, high, tally)
        tally.not_finite += count_not_finite(chunk, tensor.dtype)
        yield chunk


def _gather(sources: Sources, part: Slice, low: int, high: int, item: int, into: Bytes, tally: Tally) -> None:
    """Read elements ``[low, high)`` of a slice, in order, one read per fragment.

    Args:
        sources: the open files.
        part: the slice.
        low: first element of the slice.
        high: the element after the last.
        item: bytes per element.
        into: memory for exactly these elements.
        tally: gets a run per read.
    """
    # The fragments of a window tile it in order, so the buffer is filled from its beginning without a gap.
    found = part.fragments.window(low, high, item)
    view, at = into.data, 0
    for file, offset, length in zip(found.file.tolist(), found.offset.tolist(), found.length.tolist()):
        end = at + length * item
        sources.read(file, offset, view[at:end])
        tally.add(file, offset, view[at:end])
        at = end
    if at != len(into):  # cannot be in an inventory without problems
        raise CheckpointError("elements that no fragment holds", where=f"elements [{low}, {high})")


def _read_strided(sources: Sources, tensor: Tensor, low: int, high: int, tally: Tally) -> Bytes:
    """Elements ``[low, high)`` of a tensor that is not contiguous, from the blocks of its storage that hold them.

    Args:
        sources: the open files.
        tensor: the tensor, whose one slice is a stretch of its storage.
        low: first element of the tensor, in row-major order.
        high: the element after the last.
        tally: gets the runs that were read, whole blocks.
    """
    # The place of each element in the storage, from its index along each dim (row-major, so the last dim comes first).
    item, part = tensor.item_bytes, tensor.slices[0]
    rest = np.arange(low, high)
    places = np.zeros(high - low, np.int64)
    for dim, stride in zip(reversed(tensor.shape), reversed(tensor.merge.strides)):
        places += rest % dim * stride
        rest //= dim
    order = np.argsort(places, kind="stable")
    places = places[order]  # ascending, so that the elements of one block are neighbours
    chunk = np.empty((high - low, item), np.uint8)
    # Blocks lie on one grid for all chunks, so that what is read twice is summed alike, and counts once.
    size = CHUNK_BYTES // item
    for first in (np.unique(places // size) * size).tolist():
        last = min(first + size, part.shape[0])
        block = np.empty((last - first, item), np.uint8)
        _gather(sources, part, first, last, item, block.reshape(-1), tally)
        begin, end = np.searchsorted(places, [first, last])
        chunk[order[begin:end]] = block[places[begin:end] - first]
    return chunk.reshape(-1)


def _read_stretches(sources: Sources, tensor: Tensor, low: int, high: int, into: Bytes, tally: Tally) -> Bytes:
    """Elements ``[low, high)`` of a tensor that stretches of others make; of another dtype than the whole, cast.

    Args:
        sources: the open files.
        tensor: the tensor, whose stretches tile it.
        low: first element.
        high: the element after the last.
        into: memory for exactly these elements.
        tally: gets the runs that were read.
    """
    item, stretches = tensor.item_bytes, tensor.merge.stretches
    # The last stretch that begins at or before ``low``, and those that follow it.
    for part in stretches[max(0, bisect_right(stretches, low, key=lambda s: s.at) - 1) :]:
        if part.at >= high:
            break
        begin, end = max(low, part.at), min(high, part.at + part.length)
        if begin >= end:
            continue
        room = into[(begin - low) * item : (end - low) * item]
        if part.tensor is None:
            room[:] = 0
            continue
        first, last = (part.start + place - part.at for place in (begin, end))
        if part.tensor.merge.kind == "flat" and part.tensor.dtype == tensor.dtype:
            _gather(sources, part.tensor.slices[0], first, last, item, room, tally)
            continue
        # Slices side by side are read by whole rows, of which the ends may lie outside the stretch.
        row, own = row_elements(part.tensor), part.tensor.item_bytes
        at = first - first % row
        stop = min(-(-last // row) * row, part.tensor.numel)
        scratch = np.empty(min(CHUNK_BYTES, (stop - at) * own), np.uint8)
        # What is not finite is counted in the whole.
        for chunk in stream(sources, part.tensor, at, stop, scratch, Tally(tally.runs)):
            length = len(chunk) // own
            inside = chunk[max(first - at, 0) * own : (min(last, at + length) - at) * own]
            where = (max(first, at) - first) * item
            data = cast(inside, part.tensor.dtype, tensor.dtype)
            room[where : where + len(data)] = data
            at += length
    return into


def _read_merged(sources: Sources, tensor: Tensor, low: int, high: int, tally: Tally) -> Bytes:
    """Elements ``[low, high)`` of a tensor that several slices make; whole rows where they lie side by side.

    Args:
        sources: the open files.
        tensor: the tensor to read.
        low: first element, at the beginning of a row.
        high: the element after the last.
        tally: gets the runs that were read.

    Does not use the caller's buffer, but about a chunk of memory per slice. Raises ``CheckpointError`` where replicas
    differ.
    """
    item, merge = tensor.item_bytes, tensor.merge
    # Side by side: the rows of each slice are read, and each of its bands goes to its columns of the whole.
    if merge.kind == "columns":
        rows, width = (high - low) // row_elements(tensor), merge.inner * item
        whole = np.empty((rows, merge.size * width), np.uint8)
        for index, part in enumerate(tensor.slices):
            mine = [b for b in merge.bands if b.slice == index and b.width]
            # Of a slice not all columns need be taken: another may hold the same.
            own = int(np.prod(part.shape, dtype=np.int64)) // (merge.outer * merge.inner)
            local = np.empty((rows, own * width), np.uint8)
            # Where row ``low`` begins in this slice, whose own rows are shorter than those of the whole.
            first = low // row_elements(tensor) * own * merge.inner
            _gather(sources, part, first, first + rows * own * merge.inner, item, local.reshape(-1), tally)
            for band in mine:
                source = local[:, band.begin * width : (band.begin + band.width) * width]
                whole[:, band.at * width : (band.at + band.width) * width] = source
        return whole.reshape(-1)
    # Slices of the same elements: replicas must be equal, others are averaged.
    slices = []
    for part in tensor.slices:
        slices.append(np.empty((high - low) * item, np.uint8))
        _gather(sources, part, low, high, item, slices[-1], tally)
    if merge.kind == "replicated":
        for part, other in zip(tensor.slices[1:], slices[1:]):
            if not np.array_equal(slices[0], other):
                at = low + int(np.flatnonzero(slices[0] != other)[0]) // item
                who = f"model ranks {tensor.slices[0].model_rank} and {part.model_rank}"
                raise CheckpointError(
                    f"replicas of {tensor.key} differ",
                    where=f"parameter {tensor.name}, element {at}, {who}",
                    hint="tensor-parallel ranks have drifted apart; convert from a checkpoint where they agree",
                )
        return slices[0]
    # ``sum(slices) / len(slices)``, as in DeepSpeed's merge_tp_slices, in the order of ranks; bfloat16 as float32.
    numbers = [as_floats(s, tensor.dtype) for s in slices]
    total = numbers[0].copy()
    for other in numbers[1:]:
        total += other
    return from_floats(total / len(numbers), tensor.dtype)
