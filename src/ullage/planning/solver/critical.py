"""The critical path (the sum over microbatches of the most expensive bin), its lower bound, and the deal to ranks.

Given the bins, the critical path is least when they are sorted by cost and cut into groups of ``ranks``: the optimum
for a sum of maxima over groups of equal size.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.ordering import falling_order


@kernel
def least_path(slots: Int64, costs: Int64, capacity: int, ranks: int) -> float:
    """A lower bound of the critical path, in cost, for items sorted by falling cost.

    No two items above half the capacity share a bin, so the ``k`` microbatches that hold the first, the ``ranks +
    1``-st, ... of them cost at least as much as these *leaders*. The other ``k·(ranks − 1)`` bins hold no more work
    than that cost each, and no more than the most expensive of the other items that fit into their slots; what is left
    over is work for other microbatches. More expensive items must be denser, as for every cost that grows faster than
    length: where they are not, the leaders may lie in those bins too, and the densest items come first.
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
        order = falling_order((density * (2.0**50 / max(1e-300, density.max()))).astype(np.int64))
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
                if i < at:
                    held -= slots[i]
                    filled -= costs[i]
            room = leaders * (ranks - 1) * capacity
            while at < n and (leads[order[at]] or held + slots[order[at]] <= room):
                if not leads[order[at]]:
                    held += slots[order[at]]
                    filled += costs[order[at]]
                at += 1
            part = density[order[at]] * (room - held) if at < n else 0.0
            inside = path + min((ranks - 1) * path, filled + part)
            best = max(best, path + (work - inside) / ranks)
        if big:
            apart += 1
    return best


@kernel
def path_of(load: Int64, order: Int64, ranks: int) -> float:
    """The critical path of bins listed by falling cost."""
    path = 0.0
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
        lightest = falling_order(total)[::-1]
        for j in range(ranks):
            k, rank = order[first + j], lightest[j]
            places[k] = first + rank
            at[first + rank] = k
            total[rank] += load[k]
    mean = total.sum() // ranks
    for _ in range(4 * ranks):
        high = total.argmax()
        gain, one, other = 0, -1, -1
        if (total[high] - mean) * 10000 <= mean:
            break
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
