"""Even division of values into a number of parts: by the plan, and by Karmarkar and Karp's differencing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ullage.engines.lists.filling import WORK_BITS, bins_of, fill_empty
from ullage.engines.lists.grouping import Grouping
from ullage.errors import InputError, require_int
from ullage.layout import Int64
from ullage.planning.planner import plan

#: Differencing is left out where the largest partition is within this factor of the bound on every division,
_LEVEL = 1.0002
#: unless there are at most this many items, for which it takes next to no time.
_FEW = 1024


def partitions(
    values: Sequence[float], parts: int, *, equal_size: bool = False, groups: Any = None, name: str = "values"
) -> list[list[int]]:
    """Ids of ``parts`` parts whose sums are as equal as can be found; each part ascending, none empty.

    Args:
        values [n]: numbers >= 0, lengths or work: integers of any size, or floats.
        parts: number of parts.
        equal_size: whether all parts have as many items.
        groups: ids that stay together, as ``keep_together`` of ``ullage.plan``; a group is one item.
        name: the caller's word for ``values``, for errors.

    The largest sum is at most that of Karmarkar-Karp's differencing, or within 0.02 % of what no division can beat.
    Raises ``InputError`` for fewer items than parts, and for items that ``equal_size`` cannot divide.

    >>> partitions([8, 7, 6, 5, 4], 2)
    [[2, 3, 4], [0, 1]]
    >>> partitions([8, 7, 6, 5, 4], 2, groups=[[0, 1, 2]])
    [[3, 4], [0, 1, 2]]
    """
    given, k = _numbers(values, name), require_int(parts, "parts", least=1)
    grouping = Grouping.read(groups, len(given))
    sums = [sum(given[i] for i in ids) for ids in grouping.members]
    if len(sums) < k:
        raise InputError("there are fewer items than partitions", expected=f"at least {k}", found=len(sums))
    if equal_size and len(sums) % k:
        raise InputError("equal_size must divide the items", expected=f"a multiple of {k}", found=len(sums))
    # The plan: every item takes one slot, so that a capacity of n/k slots gives parts of equal size.
    made = plan(
        np.ones(len(sums), np.int64),
        ranks=k,
        capacity=len(sums) // k if equal_size else len(sums),
        cost=lambda _: _costs(sums),
    )
    found = fill_empty(bins_of(made), sums)
    # Differencing, where the plan is not at the bound; the more even division is taken.
    largest, least = _largest(sums, found), max(_share(sum(sums), k), max(sums))
    if largest > least and (len(sums) <= _FEW or largest > least * _LEVEL):
        others = fill_empty(_differencing(sums, k, equal_size), sums)
        found = min(found, others, key=lambda each: _largest(sums, each))
    return [grouping.ids(part) for part in found]


def _numbers(values: Any, name: str) -> list[float]:
    """``values`` as Python's numbers, which neither overflow nor round. Raises ``InputError`` for what is none."""
    array = np.asarray(values.tolist() if isinstance(values, Tensor) else values)
    found = array.tolist()
    if array.ndim != 1:
        raise InputError(f"{name} must have one dimension", expected="[n]", found=f"shape {list(array.shape)}")
    if array.dtype.kind not in "iufO" or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in found):
        raise InputError(f"{name} must be numbers", found=f"dtype {array.dtype}")
    for i, value in enumerate(found):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} must be finite and not negative", where=f"item {i}", found=value)
    return found


def _costs(values: Sequence[float]) -> Int64:
    """``values`` as int64 costs of a plan: themselves, where they are integers and their sum is small enough."""
    total = sum(values)
    whole = [value for value in values if isinstance(value, int)]
    if len(whole) == len(values):
        shift = max(0, sum(whole).bit_length() - WORK_BITS)
        return np.array([value >> shift for value in whole], np.int64)
    return np.array([value / total * 2.0**WORK_BITS if total else 0 for value in values]).astype(np.int64)


def _share(total: float, k: int) -> float:
    """What the largest of ``k`` parts of ``total`` is at least: rounded up where the values are integers."""
    return -(-total // k) if isinstance(total, int) else total / k


def _largest(values: Sequence[float], parts: Sequence[Sequence[int]]) -> float:
    return max(sum(values[i] for i in part) for part in parts)


def _differencing(values: Sequence[float], k: int, equal_size: bool) -> list[list[int]]:
    """Karmarkar and Karp's differencing for ``k`` parts.

    Of the two partial divisions with the widest spread, the large parts of one are joined with the small parts of the
    other, until one division is left. A part is (sum, number of items, items as (index, value)); ties are broken by
    these, so that the result is deterministic.
    """
    # With equal_size the first divisions have one item in each part, and joining them keeps the counts equal.
    order = sorted((value, i) for i, value in enumerate(values))
    size = k if equal_size else 1
    empty = (0, 0, [])
    heap: list[Any] = []

    def push(parts: list[tuple[float, int, list[tuple[int, float]]]]) -> None:
        parts.sort(reverse=True)
        total, count, items = parts[0]
        tie = [(-i, -value) for i, value in items]
        # Smallest less largest sum: the heap gives the widest spread first.
        heapq.heappush(heap, (parts[-1][0] - total, -total, -count, tie, parts))

    for begin in range(0, len(order), size):
        parts = [(value, 1, [(i, value)]) for value, i in order[begin : begin + size]]
        push(parts + [empty] * (k - len(parts)))
    while len(heap) > 1:
        wide, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        push([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(wide, reversed(other))])
    return [[i for i, _ in items] for _, _, items in heap[0][-1]]
