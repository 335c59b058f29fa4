"""Comparison of the tensors of two checkpoints, range by range, so that neither is held in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.core.numbers import Bytes, cast
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.core.reading import CHUNK_BYTES, Sources, Tally, ranges_of, row_elements, stream
from ullage.core.errors import CheckpointError

_T = TypeVar("_T")

#: Two tensors that must be equal (the second perhaps of another dtype), and the file to name where they are not.
Pair = tuple[Tensor, Tensor, str | None]

#: Elements that are compared at once, as bytes of the wider of both tensors.
_RANGE_BYTES = CHUNK_BYTES
#: Bytes that are fetched together from a store.
_FETCHED_BYTES = 32 << 20


def compare_ranges(
    ours: Inventory,
    theirs: Inventory,
    pairs: list[tuple[Tensor, Tensor]],
    compare: Callable[[int, int, Bytes, Bytes], _T],
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[tuple[int, _T]], list[CheckpointError]]:
    """What ``compare`` says of every range of elements, on threads.

    Args:
        ours: the inventory of the first tensor of each pair.
        theirs: the inventory of the second.
        pairs: the tensors, of one shape.
        compare: given the number of a pair, the first element, and the bytes of both, which it may not keep.
        workers: threads.
        progress: called as ``progress(done, total)``, in bytes of the first.

    Returns the answers, each with the number of its pair, in order; and the errors of what could not be read.
    """
    jobs = []
    for number, (a, b) in enumerate(pairs):
        # Ranges begin where a row of either begins: slices that lie side by side are read in whole rows.
        row = math.lcm(row_elements(a), row_elements(b))
        step = max(1, _RANGE_BYTES // (row * max(a.item_bytes, b.item_bytes))) * row
        jobs += [(number, low, min(low + step, a.numel)) for low in range(0, a.numel, step)]
    total, done = sum(a.num_bytes for a, _ in pairs), 0
    errors: list[CheckpointError] = []

    def work(share: list[tuple[int, int, int]]) -> list[tuple[int, _T]]:
        nonlocal done
        sides = Sources(ours), Sources(theirs)
        buffers = [np.empty(_RANGE_BYTES, np.uint8) for _ in sides]
        found, fetched = [], 0
        try:
            for place, (number, low, high) in enumerate(share):
                if place == fetched and any(each.remote for each in sides):
                    fetched = _end_of_group(share, place, pairs)
                    for side, each in enumerate(sides):
                        each.fetch(r for n, a, b in share[place:fetched] for r in ranges_of(pairs[n][side], a, b))
                one, other = map(_read, sides, pairs[number], [low] * 2, [high] * 2, buffers)
                found.append((number, compare(number, low, one, other)))
                if progress is not None:
                    done += (high - low) * pairs[number][0].item_bytes
                    progress(done, total)
        except CheckpointError as error:
            errors.append(error)
        finally:
            for each in sides:
                each.close()
        return found

    # About four shares per thread, so that none is left alone with a long last one; each share opens its own files.
    size = max(1, min(1024, len(jobs) // (4 * workers) + 1))
    with ThreadPoolExecutor(workers) as pool:
        shares = pool.map(work, [jobs[i : i + size] for i in range(0, len(jobs), size)])
        return [answer for share in shares for answer in share], errors


def _end_of_group(share: list[tuple[int, int, int]], first: int, pairs: list[tuple[Tensor, Tensor]]) -> int:
    """The number after the last range that is fetched together with ``first``."""
    held = 0
    for place in range(first, len(share)):
        number, low, high = share[place]
        held += (high - low) * pairs[number][0].item_bytes
        if held > _FETCHED_BYTES:
            return max(place, first + 1)
    return len(share)


def _read(sources: Sources, tensor: Tensor, low: int, high: int, buffer: Bytes) -> Bytes:
    """The bytes of elements ``[low, high)``, at row boundaries; in ``buffer`` where they fit and lie together."""
    num_bytes = (high - low) * tensor.item_bytes
    room = buffer[:num_bytes] if num_bytes <= len(buffer) else np.empty(num_bytes, np.uint8)
    return next(iter(stream(sources, tensor, low, high, room, Tally())))


def unequal_elements(one: Bytes, other: Bytes, item_bytes: int) -> Any:
    """Which elements differ in a byte, bool; None where none does."""
    if np.array_equal(one, other):
        return None
    return (one.reshape(-1, item_bytes) != other.reshape(-1, item_bytes)).any(axis=1)


def compare_pairs(
    ours: Inventory,
    theirs: Inventory,
    pairs: list[Pair],
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """One problem per pair that differs; the arguments are those of :func:`compare_ranges`.

    Where the second tensor of a pair has another dtype, the first is cast to it, as a conversion does.
    """

    def compare(number: int, low: int, one: Bytes, other: Bytes) -> tuple[int, int]:
        first, second, _ = pairs[number]
        unequal = unequal_elements(cast(one, first.dtype, second.dtype), other, second.item_bytes)
        return (0, 0) if unequal is None else (low + int(np.flatnonzero(unequal)[0]), int(unequal.sum()))

    answers, errors = compare_ranges(ours, theirs, [(a, b) for a, b, _ in pairs], compare, workers, progress)
    differ: dict[int, tuple[int, int]] = {}
    for number, (first, count) in answers:
        if count:
            before = differ.get(number, (first, 0))
            differ[number] = (before[0], before[1] + count)  # ranges come in order: the first stays
    problems = [Problem.of_error(error, parameter=error.where) for error in errors]
    for number, (first, count) in differ.items():
        tensor, _, file = pairs[number]
        what = f"differs in {count} of {tensor.numel} elements, first in {first}"
        if not tensor.name:
            problems.append(Problem(f"the file {what.replace('elements', 'bytes')}", file))
        else:
            problems.append(Problem(f"{tensor.key} {what}", file, parameter=tensor.name))
    return problems
