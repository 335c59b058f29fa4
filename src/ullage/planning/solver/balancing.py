"""Bins of equal work: several placements, the best of them taken, the bins dealt to microbatches and ranks.

A placement is made in one pass: microbatches filled one after the other up to the cost of the giant they hold or a
little above the mean of the rest, what is left placed heaviest first; or all items packed as full as they go. Which of
them comes out best depends on how tight the capacity is and how heavy the giants are, and a pass is cheap, so all are
tried and compared with the lower bound.

Rank totals of equal work, for ranks that meet once a step: first each rank is one bin with the slots of all its
microbatches; these are balanced, and then every rank's items are packed into its microbatches. A rank that is too full
for that is tried again with less room. Where giants take cost but no slots, the other ranks may lack the slots for
their share of the cost: then one or two microbatches more make the ranks level. If nothing does, the bins of a
placement by microbatches are dealt to the ranks.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.critical import critical_path, deal_bins, least_path
from ullage.planning.solver.items import Bins, Items, Room, falling_order, rows, subset
from ullage.planning.solver.packing import pack_items
from ullage.planning.solver.placing import fill_steps, heaviest_first, no_bins, put

#: Sizes of a rank that are tried, in thousandths of its microbatches' capacity.
_ROOMS = (1000, 997, 993, 988, 982, 976, 970, 960, 950, 930, 900)
#: Microbatches tried beyond the least, in multiples.
_EXTRA = 2
#: Above this many items ranks are not tried one by one.
_MANY_FOR_RANKS = 32768


@kernel
def _rank_by_rank(items: Items, room: Room, ranks: int, microbatches: int, homes: Int64) -> bool:
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
        # Totals more than 0.2 % above the bound are not level: try another size.
        if (bins.load.max() - bound) * 500 > bound:
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
    items: Items, room: Room, ranks: int, microbatches: int, microbatch_multiple: int
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
        if _rank_by_rank(items, room, ranks, microbatches + extra * microbatch_multiple, homes):
            found = np.empty(n, np.int64)
            found[order] = homes
            return found, microbatches + extra * microbatch_multiple
    # Second choice: microbatches first, dealt to ranks.
    bins, microbatches = place_items(items, room, ranks, microbatches, microbatch_multiple, bound)
    places = deal_bins(bins.load, ranks)
    for i in range(n):
        homes[order[i]] = places[bins.home[i]]
    return homes, microbatches


#: A critical path this close to its bound is good enough.
_GOOD = 1.0002
#: Above this many items packing is all that is tried, where there are so many microbatches that it suffices: over few
#: microbatches of many ranks the most expensive of them is far above the mean of packed bins.
_MANY = 32768
_MANY_MICROBATCHES = 16
#: Above this many it is all that is tried in any case.
_VERY_MANY = 262144


@kernel
def _packed(items: Items, room: Room, count: int) -> Bins:
    """All items packed as full as they go, into as many bins as that takes, but at least ``count``."""
    n = len(items.slots)
    order = falling_order(items.slots)
    home = np.empty(n, np.int64)
    used = pack_items(subset(items, order), room, count, home)
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
def _fill_and_compare(items: Items, room: Room, ranks: int, microbatches: int, bound: float) -> tuple[Bins, float]:
    """The best of several placements, and its critical path; infinite if none was found."""
    n, count = len(items.slots), microbatches * ranks
    found, best = no_bins(n, count, len(room.limits)), np.inf
    last = microbatches - 1
    # How many microbatches are filled in turn, and the margin; packed at the end. Of 14 such placements these three are
    # enough, giants alone, all microbatches evenly, and as full as they go: their best is within 0.1 % of that of all.
    for most, margin in ((last, -1), (last, 80), (-1, 0)):
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
        path = critical_path(bins.load, falling_order(bins.load), ranks)
        if path < best:
            found, best = bins, path
        if best <= bound * _GOOD:
            break
    return found, best


@kernel
def place_items(
    items: Items, room: Room, ranks: int, microbatches: int, microbatch_multiple: int, bound: float
) -> tuple[Bins, int]:
    """Place items in the fewest microbatches for which a placement is found, with a short critical path.

    Args:
        items: sorted by falling cost.
        room: what a bin can hold.
        ranks: bins of a microbatch.
        microbatches: number to try first.
        microbatch_multiple: microbatches added where no placement was found.
        bound: a lower bound of the critical path; a placement close to it ends the search.

    Returns the placement and its number of microbatches.
    """
    n = len(items.slots)
    if n > _MANY and (microbatches >= _MANY_MICROBATCHES or n > _VERY_MANY):
        # Packing may need more bins than given: round up to whole microbatches, in their multiple.
        bins = _packed(items, room, microbatches * ranks)
        unit = ranks * microbatch_multiple
        count = -(-len(bins.load) // unit) * unit
        found = no_bins(n, count, len(room.limits))
        for i in range(n):
            put(items, found, i, bins.home[i])
        return found, count // ranks
    found, path = _fill_and_compare(items, room, ranks, microbatches, bound)
    while path == np.inf:
        microbatches += microbatch_multiple
        found, path = _fill_and_compare(items, room, ranks, microbatches, bound)
    return found, microbatches


@kernel
def balance(items: Items, room: Room, ranks: int, microbatches: int, microbatch_multiple: int) -> tuple[Int64, int]:
    """Place items, given in any order, so that the critical path is short.

    Args:
        items: in any order.
        room: what a bin can hold.
        ranks: bins of a microbatch.
        microbatches: their number if that is feasible, else the next one in steps of ``microbatch_multiple`` that is.
        microbatch_multiple: see above.

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
    bins, microbatches = place_items(items, room, ranks, microbatches, microbatch_multiple, bound)
    # From bins to ``microbatch·ranks + rank``, and from sorted items to the caller's.
    places = deal_bins(bins.load, ranks)
    for i in range(n):
        homes[order[i]] = places[bins.home[i]]
    return homes, microbatches
