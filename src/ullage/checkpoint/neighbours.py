"""Reading of many small tensors at once: neighbours in a file are one read."""

from __future__ import annotations

import itertools
import zlib

import numpy as np

from ullage.checkpoint.inventory import Tensor
from ullage.checkpoint.numbers import Bytes, cast, count_not_finite
from ullage.checkpoint.reading import Sources, Tally, stream
from ullage.errors import CheckpointError


def read_small(
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
    plain = [
        i for i, (t, dtype, _) in enumerate(wanted) if t.merge.kind == "flat" and not t.is_coded and t.dtype == dtype
    ]
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
