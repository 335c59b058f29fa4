"""Rank totals of equal work, for ranks that meet once a step: the items of a rank first, its microbatches second.

Each rank is one bin of ``microbatches × capacity`` slots. Those are balanced as microbatches of one group, and then
every rank's items are packed into its microbatches; a rank whose items do not fit spills into ranks that have a
microbatch to spare by trying again with less room. Source: balanced partition by differencing and exchange, as for
microbatches (:mod:`ullage.planning.balancing`).
"""

from __future__ import annotations

import numpy as np
from numba import int64, types

from ullage.planning.compiled import kernel
from ullage.planning.improving import improve
from ullage.planning.ordering import ARRAY, falling_order, rows
from ullage.planning.packing import pack
from ullage.planning.placing import Items, Room, heaviest_first, no_bins

#: Rooms tried for a rank, in thousandths of its microbatches' capacity.
_ROOMS = (1000, 998, 994, 986, 970)


@kernel(types.Tuple((ARRAY, int64))(ARRAY, ARRAY, ARRAY, int64, int64, int64, int64, int64))
def balance_totals(slots, costs, counts, capacity, sequences, ranks, microbatches, budget):
    """The bin of each item, in the order given, and ``microbatches``; 0 microbatches if no division of the items over
    the ranks was found that fits."""
    order = falling_order(costs)
    items = Items(slots[order], costs[order], counts[order])
    n = len(order)
    total = 0.0
    for i in range(n):
        total += costs[i]
    bound = max(total / ranks, float(items.costs[0]) if n else 0.0)
    homes = np.empty(n, np.int64)
    most = microbatches * sequences if sequences < (1 << 40) else sequences
    for thousandths in _ROOMS:
        room = Room(max(capacity, microbatches * capacity * thousandths // 1000), most)
        bins = no_bins(n, ranks)
        if not heaviest_first(items, bins, room, 0, 1 << 40):
            continue
        improve(items, bins, room, ranks, bound, 40, budget)
        members, starts = rows(bins.home, ranks)
        fits = True
        for rank in range(ranks):
            mine = members[starts[rank] : starts[rank + 1]]
            mine = mine[falling_order(items.slots[mine])]
            at = np.empty(len(mine), np.int64)
            used = pack(items.slots[mine], items.counts[mine], capacity, sequences, microbatches, at)
            fits = fits and used <= microbatches
            for j in range(len(mine)):
                homes[order[mine[j]]] = at[j] * ranks + rank
        if fits:
            return homes, microbatches
    return homes, 0
