"""The critical path (the sum over microbatches of the most expensive bin), its lower bound, and the deal to ranks.

Given the bins, the critical path is least when they are sorted by cost and cut into groups of ``ranks``: the optimum
for a sum of maxima over groups of equal size.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.items import falling_order


@kernel
def least_path(slots: Int64, costs: Int64, capacity: int, ranks: int) -> float:
    """A lower bound of the critical path, in cost, for items sorted by falling cost.

    Two items above half the capacity never share a bin, so a microbatch holds at most ``ranks`` of them. Of these
    items by falling cost, the first, the ``ranks + 1``-st, the ``2·ranks + 1``-st, ... are the *leaders*: the ``k``
    most expensive microbatches cost at least as much as the first ``k`` leaders together. The other ``k·(ranks − 1)``
    bins of these microbatches have two limits. Each costs no more than its leader, and all of them hold no more than
    the densest items (cost per slot) that fit into their slots, the last one in part. Work beyond that lies in other
    microbatches, which share it over ``ranks`` bins at best. The bound is the greatest over ``k``.

    Where more expensive items are denser, as for every cost that grows faster than length, the order by cost is the
    order by density, and the leaders are left out of the filling. Elsewhere they may be counted in it too, which makes
    the bound lower and keeps it valid.
    """
    n = len(slots)
    order, denser = np.arange(n), True
    density = np.empty(n, np.float64)
    work = 0.0
    for i in range(n):
        work += costs[i]
        density[i] = costs[i] / max(1, slots[i])
        denser = denser and (i == 0 or density[i] <= density[i - 1])
    if not denser:
        # Radix sort takes integers: densities scaled to 50 bits.
        order = falling_order((density * (2.0**50 / max(1e-300, density.max()))).astype(np.int64))
    # ``path``: cost of the ``leaders`` so far. ``apart``: items above half the capacity met so far. ``filled``,
    # ``held``: cost and slots of the items filled into the other bins, which are ``order[:at]`` without leaders.
    best = work / ranks
    leads = np.zeros(n, np.bool_)
    path, leaders, apart = 0.0, 0, 0
    filled, held, at = 0.0, 0, 0
    for i in range(n):
        big = 2 * slots[i] > capacity
        if i > 0 and not big:
            continue
        # The most expensive item leads a microbatch, which may hold `ranks` large items as well, whatever their cost.
        if i == 0 or (apart > 0 and apart % ranks == 0):
            path += costs[i]
            leaders += 1
            if denser:
                leads[i] = True
                # It was filled in for an earlier leader: take it out again.
                if i < at:
                    held -= slots[i]
                    filled -= costs[i]
            # Each leader adds slots, so the filling only goes on from where it stopped.
            room = leaders * (ranks - 1) * capacity
            while at < n and (leads[order[at]] or held + slots[order[at]] <= room):
                if not leads[order[at]]:
                    held += slots[order[at]]
                    filled += costs[order[at]]
                at += 1
            part = density[order[at]] * (room - held) if at < n else 0.0
            inside = path + min((ranks - 1) * path, filled + part)
            # ``(ranks − 1)·path``: what the other bins cost at most if each costs as much as its leader.
            best = max(best, path + (work - inside) / ranks)
        if big:
            apart += 1
    return best


@kernel
def critical_path(load: Int64, order: Int64, ranks: int) -> float:
    """The critical path of bins listed by falling cost."""
    path = 0.0
    # Loads 9, 7, 4, 2 on two ranks are the microbatches (9, 7) and (4, 2): a path of 9 + 4.
    for at in range(0, len(order), ranks):
        path += load[order[at]]
    return path


@kernel
def deal_bins(load: Int64, ranks: int) -> Int64:
    """The place of each bin, ``microbatch·ranks + rank``.

    Bins are sorted into microbatches, the heaviest of each goes to the rank that has the least so far, then bins are
    exchanged within microbatches while that lowers the most expensive rank.
    """
    order = falling_order(load)
    total = np.zeros(ranks, np.int64)
    places = np.empty(len(load), np.int64)
    at = np.empty(len(load), np.int64)
    for first in range(0, len(load), ranks):
        # The heaviest bin of this microbatch to the rank with the least so far, and so on: of loads 9, 7, 4, 2 on two
        # ranks one gets 9 and 2, the other 7 and 4.
        lightest = falling_order(total)[::-1]
        for j in range(ranks):
            k, rank = order[first + j], lightest[j]
            places[k] = first + rank
            at[first + rank] = k
            total[rank] += load[k]
    # Exchanges of two bins of one microbatch, which leave the critical path as it is. Stop at 1/10,000 above the
    # mean.
    mean = total.sum() // ranks
    for _ in range(4 * ranks):
        high = total.argmax()
        gain, one, other = 0, -1, -1
        if (total[high] - mean) * 10000 <= mean:
            break
        # Totals 10 and 6, bins of 5 and 4 in one microbatch: exchanged, the totals are 9 and 7, a shift of 1.
        # Of the exchanges with the four cheapest ranks, the one that lowers the higher of the two totals most: by
        # ``shift``, or by ``apart − shift`` where it makes the other rank the more expensive one.
        for rank in falling_order(total)[-4:]:
            apart = total[high] - total[rank]
            for first in range(0, len(load), ranks):
                shift = load[at[first + high]] - load[at[first + rank]]
                if 0 < shift < apart and min(shift, apart - shift) > gain:
                    gain, one, other = min(shift, apart - shift), first + high, first + rank
        if one < 0:
            break
        k, j = at[one], at[other]
        at[one], at[other] = j, k
        places[k], places[j] = other, one
        total[high] -= load[k] - load[j]
        total[other % ranks] += load[k] - load[j]
    return places
