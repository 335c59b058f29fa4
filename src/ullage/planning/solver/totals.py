"""Rank totals of equal work, for ranks that meet once a step.

First each rank is one bin with the slots of all its microbatches; these are balanced, and then every rank's items are
packed into its microbatches. A rank that is too full for that is tried again with less room. Where giants take cost but
no slots, the other ranks may lack the slots for their share of the cost: then one or two microbatches more make the
ranks level. If nothing does, the bins of a first placement are dealt to the ranks, and the most expensive rank and the
cheapest divide the items of two of their bins again, so that half the difference moves over, again and again.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.layout import Int64
from ullage.planning.solver.balancing import first_placements
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.critical import deal_bins, least_path
from ullage.planning.solver.dividing import divide, link
from ullage.planning.solver.improving import improve
from ullage.planning.solver.items import Bins, Items, Room
from ullage.planning.solver.ordering import falling_order, rows
from ullage.planning.solver.packing import pack_items
from ullage.planning.solver.placing import heaviest_first, no_bins

#: Ranks are level when none is farther than this above the mean, in parts of the mean.
_LEVEL = 10_000
#: Pairs of bins tried for one pair of ranks, and cheapest ranks tried for the most expensive.
_PAIRS, _PARTNERS = 200, 6
#: Sizes of a rank that are tried, in thousandths of its microbatches' capacity, and rounds of balancing each.
_ROOMS = (1000, 997, 993, 988, 982, 976, 970, 960, 950, 930, 900)
_ROUNDS = 30
#: Microbatches tried beyond the least, in multiples.
_EXTRA = 2
#: Above this many items ranks are not tried one by one.
_MANY = 32768


@kernel
def _level(items: Items, bins: Bins, room: Room, ranks: int, at: Int64, budget: int) -> int:
    """Level the totals of ranks by pairs of their bins that divide their items again. Returns the budget left.

    ``at`` [bins]: the bin at each place ``microbatch·ranks + rank``. ``budget``: operations to spend.
    """
    n, count = len(items.costs), len(bins.load)
    head, following = np.empty(count, np.int64), np.empty(n, np.int64)
    ours, theirs = np.empty(n, np.int64), np.empty(n, np.int64)
    link(items, bins, head, following)
    total = np.zeros(ranks, np.int64)
    for place in range(count):
        total[place % ranks] += bins.load[at[place]]
    mean = total.sum() // ranks
    while budget > 0:
        # The most expensive rank against the cheapest ones, the cheapest first, until one of them has taken something.
        by_total = falling_order(total)
        high, moved = by_total[0], False
        if (total[high] - mean) * _LEVEL <= mean:
            break
        for j in range(ranks - 1, max(0, ranks - 1 - _PARTNERS), -1):
            low = by_total[j]
            tries = 0
            # The bins of a rank stand every ``ranks`` places. Half the gap should move over, from any bin of the one
            # to any of the other.
            for one in range(high, count, ranks):
                for other in range(low, count, ranks):
                    gap = total[high] - total[low]
                    if gap * _LEVEL <= mean or tries >= _PAIRS:
                        break
                    tries += 1
                    a, b = at[one], at[other]
                    before = bins.load[a]
                    target = before - gap // 2
                    if target < 0:
                        continue
                    # Negative if nothing changed. 16 more pay for the attempt itself.
                    spent = divide(items, bins, room, head, following, a, b, target, ours, theirs)
                    budget -= abs(spent) + 16
                    total[high] -= before - bins.load[a]
                    total[low] += before - bins.load[a]
                    moved = moved or spent > 0
            if moved:
                break
        if not moved:
            break
    return budget


@kernel
def _rank_by_rank(items: Items, room: Room, ranks: int, microbatches: int, homes: Int64, budget: int) -> bool:
    """Fills ``homes`` [n] with ``microbatch·ranks + rank`` of each item, or returns false."""
    # No rank's total can be below the mean, nor below the most expensive item, which is the first one.
    n = len(homes)
    total = 0.0
    for i in range(n):
        total += items.costs[i]
    bound = max(total / ranks, float(items.costs[0]))
    # Cut, so that a number that means no limit stays within 64 bits when it is multiplied.
    most = min(room.max_sequences, (1 << 60) // microbatches) * microbatches
    held = items.slots.sum()
    for thousandths in _ROOMS:
        # One bin per rank, as large as all its microbatches together. A little less leaves slack, so that its items
        # can then be packed into them; less than one microbatch is never needed.
        whole = Room(max(room.capacity, microbatches * room.capacity * thousandths // 1000), most)
        if whole.capacity * ranks < held:
            return False
        bins = no_bins(n, ranks)
        if not heaviest_first(items, bins, whole, 0, 1 << 40):
            continue
        improve(items, bins, whole, ranks, bound, _ROUNDS, budget)
        # Totals more than 0.1 % above the bound are not level: try another size.
        if (bins.load.max() - bound) * 1000 > bound:
            continue
        members, starts = rows(bins.home, ranks)
        fits = True
        for rank in range(ranks):
            # Pack the items of this rank, largest first, into its microbatches.
            mine = members[starts[rank] : starts[rank + 1]]
            mine = mine[falling_order(items.slots[mine])]
            at = np.empty(len(mine), np.int64)
            used = pack_items(items.slots[mine], items.counts[mine], room, microbatches, at)
            fits = fits and used <= microbatches
            if not fits:
                break
            load = np.zeros(microbatches, np.int64)
            for j in range(len(mine)):
                load[at[j]] += items.costs[mine[j]]
            place = np.empty(microbatches, np.int64)
            falling = falling_order(load)  # so that the most expensive microbatches of all ranks run together
            for m in range(microbatches):
                place[falling[m]] = m
            for j in range(len(mine)):
                homes[mine[j]] = place[at[j]] * ranks + rank
        if fits:
            return True
    return False


@kernel
def balance_totals(
    items: Items, room: Room, ranks: int, microbatches: int, microbatch_multiple: int, budget: int
) -> tuple[Int64, int]:
    """Place items, given in any order, so that the ranks' totals are level.

    Arguments and result as those of :func:`~ullage.planning.solver.balancing.balance`.
    """
    # Most expensive first, as every kernel below expects; ``order`` leads back at the end.
    order = falling_order(items.costs)
    items = Items(items.slots[order], items.costs[order], items.counts[order])
    n = len(order)
    homes = np.empty(n, np.int64)
    if n == 0:
        return homes, microbatches
    bound = least_path(items.slots, items.costs, room.capacity, ranks)
    # First choice: level totals, then microbatches, with one or two microbatches more if need be.
    for extra in range(_EXTRA + 1 if n <= _MANY else 0):
        if _rank_by_rank(items, room, ranks, microbatches + extra * microbatch_multiple, homes, budget):
            found = np.empty(n, np.int64)
            found[order] = homes
            return found, microbatches + extra * microbatch_multiple
    # Second choice: microbatches first, dealt to ranks, and the totals levelled afterwards.
    bins, _, microbatches = first_placements(items, room, ranks, microbatches, microbatch_multiple, bound)
    places = deal_bins(bins.load, ranks)
    at = np.empty(len(places), np.int64)
    for k in range(len(places)):
        at[places[k]] = k
    _level(items, bins, room, ranks, at, budget)
    for i in range(n):
        homes[order[i]] = places[bins.home[i]]
    return homes, microbatches
