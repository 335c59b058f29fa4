"""Bins of equal work: several first placements, the best of them improved, the bins dealt to microbatches and ranks.

A placement is made in one pass: microbatches filled one after the other up to the cost of the giant they hold or a
little above the mean of the rest, what is left placed heaviest first; or all items packed as full as they go. Which of
them comes out best depends on how tight the capacity is and how heavy the giants are, and a pass is cheap, so all are
tried and compared with the lower bound.
"""

from __future__ import annotations

import numpy as np

from ullage.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.critical import deal_bins, least_path, path_of
from ullage.planning.solver.improving import GOOD, improve
from ullage.planning.solver.items import Bins, Items, Room
from ullage.planning.solver.ordering import falling_order
from ullage.planning.solver.packing import pack_items
from ullage.planning.solver.placing import fill_steps, heaviest_first, no_bins, put

#: Rounds of improvement.
_ROUNDS = 60
#: Above this many items packing is all that is tried, where there are so many microbatches that it suffices: over few
#: microbatches of many ranks the most expensive of them is far above the mean of packed bins.
_MANY = 32768
_MANY_MICROBATCHES = 16
#: Above this many it is done in one pass.
_VERY_MANY = 262144


@kernel
def _packed(items: Items, room: Room, count: int) -> Bins:
    """All items packed as full as they go, into as many bins as that takes, but at least ``count``."""
    n = len(items.slots)
    order = falling_order(items.slots)
    home = np.empty(n, np.int64)
    target = count if n <= _VERY_MANY else n  # a microbatch in a thousand is not worth a second try
    used = pack_items(items.slots[order], items.counts[order], room, target, home)
    bins = no_bins(n, max(used, count))
    for at in range(n):
        put(items, bins, order[at], home[at])
    return bins


@kernel
def _fill(items: Items, bins: Bins, room: Room, ranks: int, most: int, margin: int) -> bool:
    """Places all items, or returns false: at most ``most`` microbatches filled in turn, the rest heaviest first."""
    # Operations that are a small multiple of one pass, so that a tight capacity fails soon.
    patience = 16 * (len(items.slots) + len(bins.load))
    filled = fill_steps(items, bins, room, ranks, most, margin)
    if heaviest_first(items, bins, room, filled * ranks, patience):
        return True
    # Full microbatches may have holes that the last items need: try once more over all bins.
    return filled > 0 and heaviest_first(items, bins, room, 0, patience)


@kernel
def _fill_and_compare(
    items: Items, room: Room, ranks: int, microbatches: int, bound: float
) -> tuple[Bins, Bins, float]:
    """The two best of several first placements, and the critical path of the best; infinite if none was found."""
    n, count = len(items.slots), microbatches * ranks
    first, second = no_bins(n, count), no_bins(n, count)
    best, next_best = np.inf, np.inf
    last = microbatches - 1
    # How many microbatches are filled in turn, and the margin; packed at the end.
    for most, margin in (
        (last, -1),
        (last, 80),
        (last // 2, 0),
        (last // 2, 80),
        (last * 3 // 4, 0),
        (last, 40),
        (0, -1),
        (-1, 0),
    ):
        if most >= 0:
            bins = no_bins(n, count)
            if not _fill(items, bins, room, ranks, most, margin):
                continue
        # Packing leaves bins as unequal as they come; it is for capacities too tight for the passes above.
        elif best < bound * 1.005:
            continue
        else:
            bins = _packed(items, room, count)
            if len(bins.load) > count:
                continue
        # The two best with different paths: two equal paths are mostly one placement found twice, and improving it
        # twice gains nothing.
        path = path_of(bins.load, falling_order(bins.load), ranks)
        if path < best:
            first, second = bins, first
            best, next_best = path, best
        elif best < path < next_best:
            second, next_best = bins, path
        if best <= bound * GOOD:
            break
    return first, second, best


@kernel
def first_placements(
    items: Items, room: Room, ranks: int, microbatches: int, microbatch_multiple: int, bound: float
) -> tuple[Bins, Bins, int]:
    """Find two first placements for improvement to start from.

    Args:
        items: sorted by falling cost.
        room: what a bin can hold.
        ranks: bins of a microbatch.
        microbatches: number to try first.
        microbatch_multiple: microbatches added where no placement was found.
        bound: a lower bound of the critical path; a placement close to it ends the search.

    Returns the better placement, the other one (without items if there is none), and the number of microbatches.
    """
    n = len(items.slots)
    if n > _MANY and (microbatches >= _MANY_MICROBATCHES or n > _VERY_MANY):
        # Packing may need more bins than given: round up to whole microbatches, in their multiple.
        bins = _packed(items, room, microbatches * ranks)
        unit = ranks * microbatch_multiple
        count = -(-len(bins.load) // unit) * unit
        first = no_bins(n, count)
        for i in range(n):
            put(items, first, i, bins.home[i])
        return first, no_bins(n, 0), count // ranks
    first, second, path = _fill_and_compare(items, room, ranks, microbatches, bound)
    while path == np.inf:
        microbatches += microbatch_multiple
        first, second, path = _fill_and_compare(items, room, ranks, microbatches, bound)
    return first, second, microbatches


@kernel
def balance(
    items: Items, room: Room, ranks: int, microbatches: int, microbatch_multiple: int, budget: int
) -> tuple[Int64, int]:
    """Place items, given in any order, so that the critical path is short.

    Args:
        items: in any order.
        room: what a bin can hold.
        ranks: bins of a microbatch.
        microbatches: their number if that is feasible, else the next one in steps of ``microbatch_multiple`` that is.
        microbatch_multiple: see above.
        budget: operations to spend on improvement.

    Returns the bin of each item, ``microbatch·ranks + rank``, and the number of microbatches.
    """
    # Most expensive first: from here on an item is its place in this order. ``order`` leads back at the end.
    order = falling_order(items.costs)
    items = Items(items.slots[order], items.costs[order], items.counts[order])
    n = len(order)
    homes = np.empty(n, np.int64)
    if n == 0:
        return homes, microbatches
    bound = least_path(items.slots, items.costs, room.capacity, ranks)
    first, second, microbatches = first_placements(items, room, ranks, microbatches, microbatch_multiple, bound)
    path = path_of(first.load, falling_order(first.load), ranks)
    if path > bound * GOOD:
        # The better placement gets half the budget, the other one the rest of it.
        half = budget // 2
        budget = improve(items, first, room, ranks, bound, _ROUNDS, half) + half
        if second.home[0] >= 0:
            improve(items, second, room, ranks, bound, _ROUNDS, budget)
            path = path_of(first.load, falling_order(first.load), ranks)
            if path_of(second.load, falling_order(second.load), ranks) < path:
                first = second
    # From bins to ``microbatch·ranks + rank``, and from sorted items to the caller's.
    places = deal_bins(first.load, ranks)
    for i in range(n):
        homes[order[i]] = places[first.home[i]]
    return homes, microbatches
