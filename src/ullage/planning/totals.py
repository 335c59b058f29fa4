"""Rank totals of equal work, for ranks that meet once a step.

The bins of a good first placement are dealt to the ranks, as many to each, the heaviest to the rank that has the least
so far. Then the dearest rank and the cheapest divide the items of two of their bins anew, so that half the difference
moves over, again and again until all are level. The capacity holds at every moment, because bins are only divided
where both parts fit.
"""

from __future__ import annotations

import numpy as np
from numba import int64, types

from ullage.planning.balancing import best_starts
from ullage.planning.compiled import kernel
from ullage.planning.critical import deal, least_path
from ullage.planning.dividing import divide, link
from ullage.planning.ordering import ARRAY, falling_order
from ullage.planning.placing import BINS, ITEMS, ROOM, Items, Room

#: Ranks are level when none is farther than this above the mean, in parts of the mean.
_LEVEL = 10_000
#: Pairs of bins tried for one pair of ranks, and cheapest ranks tried for the dearest.
_PAIRS, _PARTNERS = 200, 6


@kernel(int64(ITEMS, BINS, ROOM, int64, ARRAY, int64))
def _level(items, bins, room, ranks, at, budget):
    """Levels the totals of ranks; ``at`` [bins]: the bin at each place ``microbatch·ranks + rank``. Returns the budget
    left."""
    n, count = len(items.costs), len(bins.load)
    head, following = np.empty(count, np.int64), np.empty(n, np.int64)
    ours, theirs = np.empty(n, np.int64), np.empty(n, np.int64)
    link(items, bins, head, following)
    total = np.zeros(ranks, np.int64)
    for place in range(count):
        total[place % ranks] += bins.load[at[place]]
    mean = total.sum() // ranks
    while budget > 0:
        by_total = falling_order(total)
        high, moved = by_total[0], False
        if (total[high] - mean) * _LEVEL <= mean:
            break
        for j in range(ranks - 1, max(0, ranks - 1 - _PARTNERS), -1):
            low = by_total[j]
            tries = 0
            for one in range(high, count, ranks):
                for other in range(low, count, ranks):
                    gap = total[high] - total[low]
                    if gap * _LEVEL <= mean or tries >= _PAIRS:
                        break
                    tries += 1
                    a, b = at[one], at[other]
                    before = bins.load[a]
                    wish = before - gap // 2
                    if wish < 0:
                        continue
                    spent = divide(items, bins, room, head, following, a, b, wish, ours, theirs)
                    budget -= abs(spent) + 16
                    total[high] -= before - bins.load[a]
                    total[low] += before - bins.load[a]
                    moved = moved or spent > 0
            if moved:
                break
        if not moved:
            break
    return budget


@kernel(types.Tuple((ARRAY, int64))(ARRAY, ARRAY, ARRAY, int64, int64, int64, int64, int64, int64))
def balance_totals(slots, costs, counts, capacity, sequences, ranks, microbatches, multiple, budget):
    """The bin of each item, in the order given, and the number of microbatches; ``microbatches`` if that is feasible,
    else the next multiple that is. ``budget``: operations to spend on levelling."""
    order = falling_order(costs)
    items = Items(slots[order], costs[order], counts[order])
    room = Room(capacity, sequences)
    n = len(order)
    homes = np.empty(n, np.int64)
    if n == 0:
        return homes, microbatches
    bound = least_path(items.slots, items.costs, capacity, ranks)
    bins, _, path = best_starts(items, room, ranks, microbatches, bound)
    while path == np.inf:
        microbatches += multiple
        bins, _, path = best_starts(items, room, ranks, microbatches, bound)
    places = deal(bins.load, ranks)
    at = np.empty(len(places), np.int64)
    for k in range(len(places)):
        at[places[k]] = k
    _level(items, bins, room, ranks, at, budget)
    for i in range(n):
        homes[order[i]] = places[bins.home[i]]
    return homes, microbatches
