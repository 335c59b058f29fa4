"""Bins of equal work: several first placements, the best of them improved, the bins dealt to microbatches and ranks.

A placement is made in one pass: microbatches filled one after the other up to the cost of the giant they hold or a
little above the mean of the rest, what is left placed heaviest first; or all items packed as full as they go. Which of
them comes out best depends on how tight the capacity is and how heavy the giants are, and a pass is cheap, so all are
tried and compared with the lower bound.

Rank totals of equal work, for ranks that meet once a step: first each rank is one bin with the slots of all its
microbatches; these are balanced, and then every rank's items are packed into its microbatches. A rank that is too full
for that is tried again with less room. Where giants take cost but no slots, the other ranks may lack the slots for
their share of the cost: then one or two microbatches more make the ranks level. If nothing does, the bins of a first
placement are dealt to the ranks, and the most expensive rank and the cheapest divide the items of two of their bins
again, so that half the difference moves over, again and again.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.critical import critical_path, deal_bins, least_path
from ullage.planning.solver.improving import GOOD, divide, improve, link
from ullage.planning.solver.items import Bins, Items, Room, falling_order, rows, subset
from ullage.planning.solver.packing import pack_items
from ullage.planning.solver.placing import fill_steps, heaviest_first, no_bins, put

#: Ranks are level when none is farther than this above the mean, in parts of the mean.
_LEVEL = 10_000
#: Pairs of bins tried for one pair of ranks, and cheapest ranks tried for the most expensive.
_PAIRS, _PARTNERS = 200, 6
#: Sizes of a rank that are tried, in thousandths of its microbatches' capacity, and rounds of balancing each.
_ROOMS = (1000, 997, 993, 988, 982, 976, 970, 960, 950, 930, 900)
_ROUNDS_OF_RANKS = 30
#: Microbatches tried beyond the least, in multiples.
_EXTRA = 2
#: Above this many items ranks are not tried one by one.
_MANY_FOR_RANKS = 32768


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
                    # Ranks of 100 and 80: a bin of 30 is to cost 20, which makes both 90. Negative if nothing
                    # changed. 16 more pay for the attempt itself.
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
        limits = np.maximum(room.limits, microbatches * room.limits * thousandths // 1000)
        whole = Room(max(room.capacity, microbatches * room.capacity * thousandths // 1000), most, limits)
        if whole.capacity * ranks < held:
            return False
        bins = no_bins(n, ranks, len(room.limits))
        if not heaviest_first(items, bins, whole, 0, 1 << 40):
            continue
        improve(items, bins, whole, ranks, bound, _ROUNDS_OF_RANKS, budget)
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
            used = pack_items(subset(items, mine), room, microbatches, at)
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
    items = subset(items, order)
    n = len(order)
    homes = np.empty(n, np.int64)
    if n == 0:
        return homes, microbatches
    bound = least_path(items.slots, items.costs, room.capacity, ranks)
    # First choice: level totals, then microbatches, with one or two microbatches more if need be.
    for extra in range(_EXTRA + 1 if n <= _MANY_FOR_RANKS else 0):
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
    used = pack_items(subset(items, order), room, target, home)
    bins = no_bins(n, max(used, count), len(room.limits))
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
    first, second = no_bins(n, count, len(room.limits)), no_bins(n, count, len(room.limits))
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
            bins = no_bins(n, count, len(room.limits))
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
        path = critical_path(bins.load, falling_order(bins.load), ranks)
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
        first = no_bins(n, count, len(room.limits))
        for i in range(n):
            put(items, first, i, bins.home[i])
        return first, no_bins(n, 0, len(room.limits)), count // ranks
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
    items = subset(items, order)
    n = len(order)
    homes = np.empty(n, np.int64)
    if n == 0:
        return homes, microbatches
    bound = least_path(items.slots, items.costs, room.capacity, ranks)
    first, second, microbatches = first_placements(items, room, ranks, microbatches, microbatch_multiple, bound)
    path = critical_path(first.load, falling_order(first.load), ranks)
    if path > bound * GOOD:
        # The better placement gets half the budget, the other one the rest of it.
        half = budget // 2
        budget = improve(items, first, room, ranks, bound, _ROUNDS, half) + half
        if second.home[0] >= 0:
            improve(items, second, room, ranks, bound, _ROUNDS, budget)
            path = critical_path(first.load, falling_order(first.load), ranks)
            if critical_path(second.load, falling_order(second.load), ranks) < path:
                first = second
    # From bins to ``microbatch·ranks + rank``, and from sorted items to the caller's.
    places = deal_bins(first.load, ranks)
    for i in range(n):
        homes[order[i]] = places[first.home[i]]
    return homes, microbatches
