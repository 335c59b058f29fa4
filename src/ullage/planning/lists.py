"""Lists in, lists out: lengths to lists of ids, over the plan, as the balancing functions of other frameworks work.

``partitions`` divides values evenly, ``bins`` fills microbatches, ``schedule`` fills the microbatches of every rank.
Pure: no process group, no device, no data. ``ullage.engines.frameworks`` is a table of other frameworks' functions over
these three. ``pack_lengths`` packs a whole dataset, without ranks or steps.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ullage.core.errors import MOST_TOKENS, InputError, listed, require_int, require_one_of
from ullage.core.layout import Int64, Integers, as_lengths
from ullage.planning.bounds import bin_bound
from ullage.planning.cost import Cost, TransformerCost, integer_costs
from ullage.planning.placement import NO_LIMIT
from ullage.planning.planner import plan
from ullage.planning.plans import Plan
from ullage.planning.request import groups as item_numbers
from ullage.planning.request import refuse_large_groups, refuse_oversize
from ullage.planning.solver.compiled import run
from ullage.planning.solver.items import Items, Room, falling_order, rows
from ullage.planning.solver.packing import pack_items


class PackedBins(NamedTuple):
    """Bins in compressed rows: bin *k* holds the sequences ``ids[cu_ids[k]:cu_ids[k + 1]]``, in the dataset's order.

    Attributes:
        ids [n]: ids of the sequences, bin by bin, int64.
        cu_ids [num_bins + 1]: where each bin begins in ``ids``, int64.
    """

    ids: Int64
    cu_ids: Int64

    @property
    def num_bins(self) -> int:
        """Number of bins, each of which holds a sequence."""
        return len(self.cu_ids) - 1


def pack_lengths(lengths: Integers, capacity: int) -> PackedBins:
    """Pack sequences of ``lengths`` [n] tokens into as few bins of ``capacity`` tokens as can be found quickly.

    Every sequence is in exactly one bin and no bin is over ``capacity``. Deterministic; time and memory grow with n and
    the capacity, a million sequences take a fraction of a second. Raises ``InputError`` for lengths that are not
    integers >= 0, and for a sequence above ``capacity``.

    >>> ids, cu_ids = pack_lengths([5, 3, 4, 4], capacity=8)
    >>> ids.tolist(), cu_ids.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    """
    given, capacity = as_lengths(lengths), require_int(capacity, "capacity", least=1, most=MOST_TOKENS)
    refuse_oversize(given, capacity, 1)
    n = len(given)
    # Largest first, as packing wants them; each item is one sequence. The L2 bound tells when no better packing
    # exists.
    order = run(falling_order, given, work=3 * n)
    packed, ones, none = np.empty(n, np.int64), np.ones(n, np.int64), np.zeros((0, n), np.int64)
    room, target = Room(capacity, NO_LIMIT, np.zeros(0, np.int64)), bin_bound(given, capacity)
    used = run(pack_items, Items(given[order], ones, ones, none), room, target, packed, work=50 * n)
    # From the order by size back to that of the dataset.
    home = np.empty(n, np.int64)
    home[order] = packed
    return PackedBins(*run(rows, home, used, work=n))


_logger = logging.getLogger(__name__)
#: Bits of the work of all sequences together: as exact as float64, and far from where sums of it would overflow.
WORK_BITS = 52
#: Differencing is left out where the largest partition is within this factor of the bound on every division,
_LEVEL = 1.0002
#: unless there are at most this many items, for which it takes next to no time.
_FEW = 1024


def bins(
    lengths: Integers,
    cap: int,
    *,
    ranks: int = 1,
    least: int = 0,
    multiple: int = 1,
    work: Cost | Sequence[float] | None = None,
    groups: Integers | Sequence[Integers] | None = None,
    oversize: str = "error",
    order: str = "balanced",
    sync: str = "microbatch",
    max_sequences: int | None = None,
    fill: bool = True,
) -> list[list[int]]:
    """Ids of each bin, ascending: as few bins as can be found, none of them empty, none above ``cap``.

    Args:
        lengths [n]: tokens of each sequence.
        cap: tokens that a bin may hold.
        ranks: so many consecutive bins run at the same time and have equal work; bin ``k`` is for rank ``k % ranks``.
            With one rank, all bins have work as even as can be found.
        least: least number of bins.
        multiple: the number of bins per rank is a multiple of it.
        work: a cost model, or one number per sequence; ``None`` is ``TransformerCost()``.
        groups: what shares a bin, as ``keep_together`` of ``ullage.plan``.
        oversize: ``"error"``, or ``"alone"``: a sequence or group above ``cap`` gets a bin of its own, with a warning.
        order: ``"balanced"``; ``"fewest"``, which fills bins without regard to work; or ``"next_fit"``, arrival order.
        sync: as for ``ullage.plan``.
        max_sequences: sequences that a bin may hold, where there are no groups.
        fill: whether bins that would be empty take a sequence of another; otherwise they stay empty.

    Raises ``InputError`` for what does not fit, and for fewer sequences than bins.

    >>> bins([5, 3, 4, 4], 8)
    [[0, 1], [2, 3]]
    >>> bins([5, 3, 4, 4], 8, groups=[[0, 3], [1, 2]], oversize="alone")
    [[0, 3], [1, 2]]
    """
    least, multiple = require_int(least, "least", least=0), require_int(multiple, "multiple", least=1)
    filling = Filling.read(
        lengths, cap, ranks=ranks, work=work, groups=groups, oversize=oversize, order=order, sync=sync,
        max_sequences=max_sequences,
    )  # fmt: skip
    count = max(filling.needed, -(-least // filling.ranks))
    return filling.into(-(-count // multiple) * multiple, fill)


def schedule(
    lengths: Integers,
    ranks: int,
    cap: int,
    *,
    multiple: int = 1,
    work: Cost | Sequence[float] | None = None,
    groups: Integers | Sequence[Integers] | None = None,
    oversize: str = "error",
    sync: str = "microbatch",
    max_sequences: int | None = None,
) -> list[list[list[int]]]:
    """Ids of each microbatch of each rank, ``[rank][microbatch]``, none of them empty.

    Every rank has as many microbatches as the others, and those of one number have equal work. Arguments and errors are
    those of :func:`bins`.

    >>> schedule([5, 3, 4, 4], 2, 8)
    [[[2, 3]], [[0, 1]]]
    """
    found = bins(
        lengths, cap, ranks=ranks, multiple=multiple, work=work, groups=groups, oversize=oversize, sync=sync,
        max_sequences=max_sequences,
    )  # fmt: skip
    return [found[rank::ranks] for rank in range(ranks)]


def work_of(lengths: Int64, work: Any) -> Int64:
    """Work of each sequence, int64, by a cost model, by numbers, or by default. Raises ``InputError``."""
    model = TransformerCost() if work is None else work
    costs, _, _ = integer_costs(model if callable(model) else lambda _: np.asarray(model), lengths)
    return costs >> max(0, int(costs.sum()).bit_length() - WORK_BITS)


@dataclass(frozen=True)
class Grouping:
    """The item of each sequence: a group of sequences that stay together, or the sequence alone.

    Attributes:
        item [n]: number of the item of each sequence, int64.
        members: ids of the sequences of each item, ascending.
    """

    item: Int64
    members: list[list[int]]

    @classmethod
    def read(cls, groups: Any, n: int) -> Grouping:
        """``groups``: as ``keep_together`` of ``ullage.plan``; ``None`` leaves every sequence alone."""
        item = np.arange(n) if groups is None else item_numbers(groups, n, np.arange(n))
        members: list[list[int]] = [[] for _ in range(int(item.max(initial=-1)) + 1)]
        for i, number in enumerate(item.tolist()):
            members[number].append(i)
        return cls(item, members)

    def sums(self, values: Int64) -> Int64:
        """Sum over each item."""
        found = np.zeros(len(self.members), np.int64)
        np.add.at(found, self.item, values)
        return found

    def ids(self, items: Sequence[int]) -> list[int]:
        """Ids of the sequences of ``items``, ascending."""
        return sorted(i for number in items for i in self.members[number])


@dataclass(frozen=True)
class Filling:
    """A question for bins in two steps: how many are needed, and which ids each of a given number holds.

    Attributes:
        grouping: the items, each a sequence or a group.
        slots, costs [items]: room that each takes, and its work.
        capacity: room of a bin.
        ranks, order, sync, max_sequences: as for :func:`bins`.
    """

    grouping: Grouping
    slots: Int64
    costs: Int64
    capacity: int
    ranks: int
    order: str
    sync: str
    max_sequences: int | None

    @classmethod
    def read(
        cls,
        lengths: Integers,
        cap: int,
        *,
        ranks: int = 1,
        work: Any = None,
        groups: Any = None,
        oversize: str = "error",
        order: str = "balanced",
        sync: str = "microbatch",
        max_sequences: int | None = None,
    ) -> Filling:
        """The question, checked; arguments and errors are those of :func:`bins`."""
        require_one_of(order, ("balanced", "fewest", "next_fit"), "order")
        require_one_of(oversize, ("error", "alone"), "oversize")
        if groups is not None and max_sequences is not None:
            raise InputError("groups and a limit of sequences cannot both be met", hint="leave one of them out")
        ranks, cap = require_int(ranks, "ranks", least=1), require_int(cap, "the capacity", least=1, most=MOST_TOKENS)
        given = as_lengths(lengths)
        grouping = Grouping.read(groups, len(given))
        slots, capacity = _fit_items(given, grouping, cap, oversize)
        return cls(grouping, slots, grouping.sums(work_of(given, work)), capacity, ranks, order, sync, max_sequences)

    @cached_property
    def _fewest(self) -> list[list[int]]:
        """Items of as few bins as can be found, a multiple of the ranks; some may be empty."""
        if self.order == "fewest" and self.ranks == 1 and self.max_sequences is None:
            return _rows(*pack_lengths(self.slots, self.capacity))
        return bins_of(self._plan(self.ranks, strategy="next_fit" if self.order == "next_fit" else "balanced"))

    @property
    def needed(self) -> int:
        """Number of bins per rank, as few as can be found."""
        return len(self._fewest) // self.ranks

    def into(self, count: int, fill: bool = True) -> list[list[int]]:
        """Ids of ``count`` bins per rank, at least as many as are needed. ``fill``: as for :func:`bins`."""
        found = self._fewest
        if self.order == "balanced" and self.ranks == 1 and count > 1:
            # Bins that run one after another are balanced as if as many ranks ran them side by side.
            even = self._plan(count)
            found = bins_of(even) if even.num_microbatches == 1 else found
        elif self.order == "balanced" and count > self.needed > 0:
            found = bins_of(self._plan(self.ranks, microbatch_multiple=count))
        found = [*map(list, found), *([] for _ in range(count * self.ranks - len(found)))]
        if fill:
            found = fill_empty(found, self.costs.tolist(), self.grouping)
        made = [self.grouping.ids(items) for items in found]
        # On one rank their order says nothing: that of their first sequences, empty ones last.
        return made if self.ranks > 1 else sorted(made, key=lambda ids: ids or [len(self.grouping.item)])

    def _plan(self, ranks: int, **options: Any) -> Plan:
        return plan(
            self.slots, ranks=ranks, capacity=self.capacity, cost=lambda _: self.costs, sync=self.sync,
            max_sequences=self.max_sequences, **options,
        )  # fmt: skip


def _fit_items(lengths: Int64, grouping: Grouping, cap: int, oversize: str) -> tuple[Int64, int]:
    """Slots of each item, and the capacity, with which an item above ``cap`` fills a bin and has it alone."""
    slots, n = grouping.sums(lengths), len(grouping.members)
    large = np.flatnonzero(slots > cap)
    if not len(large):
        return slots, cap
    if oversize == "error":
        refuse_oversize(lengths, cap, 1)
        counts = grouping.sums(np.ones_like(lengths))
        refuse_large_groups(slots, counts, grouping.item, np.arange(len(lengths)), cap, len(lengths))
    shown = [_describe_item(grouping.members[k], int(slots[k])) for k in large.tolist()]
    _logger.warning("above the capacity of %d tokens, and therefore alone in a microbatch: %s", cap, listed(shown, 4))
    if not slots.all():
        # An item without tokens takes room too: one of n + 1 parts of a token, so that all of them are less than one.
        slots, cap = slots * (n + 1) + 1, cap * (n + 1) + n
    return np.minimum(slots, cap), cap


def _describe_item(ids: list[int], tokens: int) -> str:
    if len(ids) == 1:
        return f"sequence {ids[0]} ({tokens} tokens)"
    return f"the group of sequences {', '.join(map(str, ids[:8]))}{', ...' * (len(ids) > 8)} ({tokens} tokens)"


def bins_of(plan: Plan) -> list[list[int]]:
    """Ids of every bin of a plan, in the order of microbatches and then ranks: bin ``microbatch·ranks + rank``."""
    return _rows(plan.order, plan.offsets)


def _rows(ids: Int64, offsets: Int64) -> list[list[int]]:
    order, cuts = ids.tolist(), offsets.tolist()
    return [order[begin:end] for begin, end in pairwise(cuts)]


def fill_empty(bins: list[list[int]], costs: Sequence[float], grouping: Grouping | None = None) -> list[list[int]]:
    """``bins`` without empty ones: each takes the cheapest item of the most expensive bin that has several.

    ``costs``: cost of each item by number. ``grouping``: what the items are, for the error. Changes ``bins`` and
    returns it. An item fits wherever it is alone, so no capacity is exceeded. Raises ``InputError`` for fewer items
    than bins.
    """
    num_items = sum(map(len, bins))
    if num_items < len(bins):
        what = "groups" if grouping is not None and len(grouping.item) > num_items else "sequences"
        raise InputError(
            f"there are fewer {what} than bins, and none may be empty",
            expected=f"at least {len(bins)} {what}",
            found=num_items,
        )
    work = [sum(costs[i] for i in ids) for ids in bins]
    for k, ids in enumerate(bins):
        if ids:
            continue
        # One exists: there are at least as many items as bins, and this bin is empty.
        source = max((j for j in range(len(bins)) if len(bins[j]) > 1), key=lambda j: work[j])
        cheapest = min(bins[source], key=lambda i: costs[i])
        bins[source].remove(cheapest)
        ids.append(cheapest)
        work[source] -= costs[cheapest]
        work[k] = costs[cheapest]
    return bins


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
    [[1, 3, 4], [0, 2]]
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
    """``values`` as Python's numbers, which neither overflow nor round. Raises ``InputError`` for anything else."""
    to_list = getattr(values, "tolist", None)  # of arrays and tensors: of any device, and of types that numpy lacks
    array = np.asarray(to_list() if to_list is not None else values)
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
