"""Comparison of the tensors of two checkpoints, byte by byte, chunk by chunk, so that neither is held in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ullage.checkpoint.inventory import Inventory, Tensor
from ullage.checkpoint.numbers import cast
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.reading import CHUNK_BYTES, Sources, Tally, ranges_of, row_elements, stream
from ullage.errors import CheckpointError

#: Two tensors that must be equal (the second perhaps of another dtype), and the file to name where they are not.
Pair = tuple[Tensor, Tensor, str | None]

#: Bytes of one range of elements, the unit of comparison.
_UNIT_BYTES = 32 << 20


def compare_pairs(
    ours: Inventory,
    theirs: Inventory,
    pairs: list[Pair],
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """One problem per pair that differs.

    Args:
        ours: the inventory of the first tensor of each pair.
        theirs: the inventory of the second; where its dtype is another, the first is cast to it, as a conversion does.
        pairs: the tensors to compare, and the file to name where they differ.
        workers: threads.
        progress: called as ``progress(done, total)``, in bytes.
    """
    # The work is cut into ranges of elements of about 32 MiB; a thread takes several neighbouring ranges at once.
    jobs = []
    for number, (tensor, _, _) in enumerate(pairs):
        row = row_elements(tensor)
        step = max(1, _UNIT_BYTES // (row * tensor.item_bytes)) * row
        jobs += [(number, low, min(low + step, tensor.numel)) for low in range(0, tensor.numel, step)]
    total, done = sum(t.num_bytes for t, _, _ in pairs), 0
    differ: dict[int, tuple[int, int]] = {}
    errors: list[Problem] = []

    def one(share: list[Any]) -> list[tuple[int, int, int, int]]:
        nonlocal done
        mine, yours = Sources(ours), Sources(theirs)
        buffers = np.empty(CHUNK_BYTES, np.uint8), np.empty(2 * CHUNK_BYTES, np.uint8)
        found, fetched = [], 0
        try:
            for place, (number, low, high) in enumerate(share):
                tensor, other, _ = pairs[number]
                if place == fetched and (mine.remote or yours.remote):
                    fetched = _end_of_group(share, place, pairs)
                    mine.fetch(r for n, a, b in share[place:fetched] for r in ranges_of(pairs[n][0], a, b))
                    yours.fetch(r for n, a, b in share[place:fetched] for r in ranges_of(pairs[n][1], a, b))
                first, count = _compare(mine, yours, tensor, other, low, high, buffers)
                found.append((number, first, count, (high - low) * tensor.item_bytes))
                if progress is not None:
                    done += found[-1][3]
                    progress(done, total)
        except CheckpointError as error:
            errors.append(Problem.of_error(error, parameter=error.where))
        finally:
            mine.close()
            yours.close()
        return found

    # About four shares per thread, so that none is left alone with a long last one; each share opens its own files.
    size = max(1, min(64, len(jobs) // (4 * workers) + 1))
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(one, [jobs[i : i + size] for i in range(0, len(jobs), size)]):
            for number, first, count, _ in found:
                if count:
                    before = differ.get(number, (first, 0))
                    differ[number] = (min(before[0], first), before[1] + count)
    problems = list(errors)
    for number, (first, count) in sorted(differ.items()):
        tensor, _, file = pairs[number]
        what = f"differs in {count} of {tensor.numel} elements, first in {first}"
        if not tensor.name:
            problems.append(Problem(f"the file {what.replace('elements', 'bytes')}", file))
        else:
            problems.append(Problem(f"{tensor.key} {what}", file, parameter=tensor.name))
    return problems


def _end_of_group(share: list[Any], first: int, pairs: list[Pair]) -> int:
    """The number after the last range that is fetched together with ``first``: about as many bytes as one large one."""
    held = 0
    for place in range(first, len(share)):
        number, low, high = share[place]
        held += (high - low) * pairs[number][0].item_bytes
        if held > _UNIT_BYTES:
            return max(place, first + 1)
    return len(share)


def _compare(
    mine: Sources, yours: Sources, tensor: Tensor, other: Tensor, low: int, high: int, buffers: tuple[Any, Any]
) -> tuple[int, int]:
    """(first element that differs, ``high`` where none does; how many differ) in ``[low, high)``.

    Args:
        mine: open files of the first checkpoint.
        yours: open files of the second.
        tensor: the tensor of the first; its dtype is cast to that of ``other``.
        other: the tensor of the second.
        low: first element.
        high: the element after the last.
        buffers: memory for a chunk of each side.
    """
    first, count, at = high, 0, low
    item = other.item_bytes
    for chunk in stream(mine, tensor, low, high, buffers[0], Tally()):
        length = len(chunk) // tensor.item_bytes
        wanted = cast(chunk, tensor.dtype, other.dtype)
        # The other side may be wider after the cast (bfloat16 to float32), so its chunk may not fit the usual buffer.
        room = buffers[1] if len(wanted) <= len(buffers[1]) else np.empty(len(wanted), np.uint8)
        found = next(iter(stream(yours, other, at, at + length, room[: len(wanted)], Tally())), room[:0])
        if not np.array_equal(wanted, found):
            unequal = (wanted.reshape(-1, item) != found.reshape(-1, item)).any(axis=1)
            first = min(first, at + int(np.flatnonzero(unequal)[0]))
            count += int(unequal.sum())
        at += length
    return first, count
