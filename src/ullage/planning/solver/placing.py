"""First placements: heaviest item first to the lightest bin, and steps filled up to the cost of the giant they hold.

Items are sorted by falling cost, and an item is its place in that order.
"""

from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.items import NOWHERE, Bins, Items, Room, within_limits


@kernel
def no_bins(n: int, count: int, resources: int) -> Bins:
    """Empty bins, and ``n`` items that are nowhere. ``resources``: besides slots and sequences."""
    zeros = np.zeros((3 + resources, count), np.int64)
    return Bins(np.full(n, NOWHERE), zeros[0], zeros[1], zeros[2], zeros[3:])


@kernel
def put(items: Items, bins: Bins, i: int, k: int) -> None:
    """Places item ``i``, which is nowhere, into bin ``k``."""
    bins.home[i] = k
    bins.load[k] += items.costs[i]
    bins.held[k] += items.slots[i]
    bins.num_sequences[k] += items.counts[i]
    for r in range(len(items.amounts)):
        bins.amounts[r, k] += items.amounts[r, i]


@kernel
def _sink(heap: Int64, load: Int64, size: int, at: int, last: int) -> None:
    """Moves ``last`` down from ``at`` in a heap of bins, the lightest first, ties by bin."""
    # Children that are lighter than ``last`` move up, until it finds its place: of 5 above 3 and 4 the 3 moves up.
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size:
            one, two = heap[child], heap[child + 1]
            if load[two] < load[one] or (load[two] == load[one] and two < one):
                child += 1
        k = heap[child]
        if load[last] < load[k] or (load[last] == load[k] and last < k):
            break
        heap[at] = k
        at = child
    heap[at] = last


@kernel
def heaviest_first(items: Items, bins: Bins, room: Room, begin: int, patience: int) -> bool:
    """Place each item that is nowhere into the lightest bin that has room for it.

    Args:
        items: sorted by falling cost.
        bins: receives the items.
        room: what a bin can hold.
        begin: the first bin to use.
        patience: number of bins to look at beyond the lightest, over all items.

    Returns false if an item found no bin, or if the patience is spent.
    """
    load, held, num_sequences = bins.load, bins.held, bins.num_sequences
    size, has_limits = len(load) - begin, len(room.limits) > 0
    # A heap with the lightest bin at its root, built from the last parent up.
    heap = np.arange(begin, len(load))
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, load, size, at, heap[at])
    least = items.slots.min() if len(items.slots) else 0
    for i in range(len(items.slots)):
        if bins.home[i] != NOWHERE:
            continue
        # A root that cannot take even the smallest item leaves the heap for good.
        while size and (held[heap[0]] + least > room.capacity or num_sequences[heap[0]] >= room.max_sequences):
            size -= 1
            if size:
                _sink(heap, load, size, 0, heap[size])
        # The root is the lightest bin. Where it is too full for this item, every bin of the heap is looked at, in
        # heap order, for the lightest one with room. That is linear, which is what ``patience`` is for.
        at, best = -1, NOWHERE
        slots_left, sequences_left = room.capacity - items.slots[i], room.max_sequences - items.counts[i]
        for q in range(size):
            k = heap[q]
            fits = held[k] <= slots_left and num_sequences[k] <= sequences_left
            fits = fits and (not has_limits or within_limits(items, bins, room, i, k))
            if fits and (best == NOWHERE or load[k] < load[best] or (load[k] == load[best] and k < best)):
                at, best = q, k
                if q == 0:
                    break
        if at > 0:
            patience -= size
        if best == NOWHERE or patience < 0:
            return False
        put(items, bins, i, best)
        # The bin has only become heavier, so it can only move down.
        _sink(heap, load, size, at, best)
    return True


@kernel
def _unplaced(following: Int64, at: int) -> int:
    """The first item at or after ``at`` that follows itself, with the path halved on the way."""
    while following[at] != at:
        following[at] = following[following[at]]
        at = following[at]
    return at


@kernel
def _first_within(falling: Int64, most: int) -> int:
    """First index at which falling numbers are at most ``most``."""
    low, high = 0, len(falling)
    while low < high:
        middle = (low + high) // 2
        if falling[middle] <= most:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def fill_steps(items: Items, bins: Bins, room: Room, ranks: int, most: int, margin: int) -> int:
    """Fill microbatches one after the other, all bins of one up to the same goal.

    The goal is the cost of the most expensive item left, if that is a giant: over 1 % above the mean cost of the bins
    that are left. Otherwise it is that mean and ``margin`` more. Each bin in turn takes the most expensive items left
    that fit both the goal and the capacity.

    Args:
        items: sorted by falling cost.
        bins: empty; receives the items.
        room: what a bin can hold.
        ranks: bins of a microbatch.
        most: number of microbatches to fill at most; one at least is left for the rest of the items.
        margin: thousandths of the mean that the goal is above it; negative: stop where no giant is left.

    Returns how many microbatches it filled.
    """
    slots, costs = items.slots, items.costs
    n, microbatches = len(slots), len(bins.load) // ranks
    rest = costs.sum()
    following, has_limits = np.arange(n + 1), len(room.limits) > 0
    filled = 0
    while filled < most and filled < microbatches - 1:
        # Items fall by cost, so the first one that has no bin is the most expensive one left.
        lead = _unplaced(following, 0)
        if lead == n:
            break
        mean = rest // ((microbatches - filled) * ranks)
        goal = costs[lead]
        # Of items [90, 30, 30, ...] with a mean bin of 60 the goal is 90, and the bins beside the giant take three 30s.
        # No giant (over 1 % above the mean bin) is left, so the goal is the mean of the rest, or filling ends.
        if goal <= mean + mean // 100:
            if margin < 0:
                break
            goal = max(goal, mean + mean * margin // 1000)
        for k in range(filled * ranks, (filled + 1) * ranks):
            at = 0
            while at < n:
                # Skip what costs more than the bin may still take, and what has more slots than it has left; then go
                # on to the next item without a bin. The skip by slots is exact where slots fall as costs do.
                at = max(at, _first_within(costs, goal - bins.load[k]))
                at = max(at, _first_within(slots, room.capacity - bins.held[k]))
                at = _unplaced(following, at)
                if at == n or bins.num_sequences[k] + items.counts[at] > room.max_sequences:
                    break
                # Slots need not fall as costs do, so that the item may be too large all the same.
                fits = bins.held[k] + slots[at] <= room.capacity
                if fits and (not has_limits or within_limits(items, bins, room, at, k)):
                    put(items, bins, at, k)
                    rest -= costs[at]
                    # Placed: searches that come here go on to the next item.
                    following[at] = at + 1
                at += 1
        filled += 1
    return filled
