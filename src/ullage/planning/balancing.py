"""Bins of equal work: pairs of bins exchange items until each microbatch is level.

The critical path is the sum over microbatches of the dearest bin, and given the bins it is least when they are sorted by
cost and cut into groups of ``ranks``. Each round sorts and cuts, gives every group a *goal* (what its bins should
cost), and pairs the bin that is farthest above its goal with the one farthest below, the second with the second, and so
on; a pair divides its items anew so that both end as close to their goals as the capacity allows. In the first rounds
all groups have one goal, the level at which the least critical path lies, except those that hold an item dearer than
that: their goal is the item's cost. Later rounds aim at each group's own mean. Small pairs try every division (in Gray
code, one item a step); larger ones look for the best exchange of one item for another, or for none, again and again.

Sources: sorting and cutting is the optimum for a sum of maxima over groups of equal size; pairwise re-division after
Karmarkar and Karp, "The differencing method of set partitioning", Berkeley 1982, and the C prototype's measurements.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit, types, void

from ullage.planning.dividing import divide
from ullage.planning.ordering import ARRAY, falling_order
from ullage.planning.packing import pack
from ullage.planning.placing import (
    BINS,
    ITEMS,
    ROOM,
    Items,
    Room,
    fill_giant_steps,
    heaviest_first,
    no_bins,
    put,
)

#: A critical path this close to its bound is good enough.
_GOOD = 1.0002


@njit(float64(ARRAY, ARRAY, int64, int64), cache=True, nogil=True)
def least_path(slots, costs, capacity, ranks):
    """A lower bound of the critical path, in cost, for items sorted by falling cost.

    The s-th dearest microbatch costs at least what the ``s·ranks``-th item above half the capacity costs, for no two of
    them share a bin. The first ``k`` microbatches hold no more work than ``ranks`` times their cost, and no more than
    the dearest items that fit into their slots; what they do not hold is work for the others.
    """
    n = len(slots)
    work = 0.0
    for i in range(n):
        work += costs[i]
    best = work / ranks
    path, apart = 0.0, 0
    filled, held, at = 0.0, 0, 0
    microbatch = 0
    for i in range(n):
        big = 2 * slots[i] > capacity
        if i == 0 or (big and apart % ranks == 0):
            path += costs[i]
            microbatch += 1
            room = microbatch * ranks * capacity
            while at < n and held + slots[at] <= room:
                held += slots[at]
                filled += costs[at]
                at += 1
            part = costs[at] * ((room - held) / slots[at]) if at < n else 0.0
            inside = min(ranks * path, filled + part)
            best = max(best, path + (work - inside) / ranks)
            if i == 0 and not big:
                break
        if big:
            apart += 1
    return best


@njit(float64(ARRAY, ARRAY, int64), cache=True, nogil=True)
def path_of(load, order, ranks):
    """The critical path of bins listed by falling cost."""
    path = 0.0
    for at in range(0, len(order), ranks):
        path += load[order[at]]
    return path


@njit(void(ITEMS, BINS, ARRAY, ARRAY), cache=True, nogil=True)
def _link(items, bins, head, following):
    """Lists the items of each bin by falling cost."""
    head[:] = -1
    for i in range(len(bins.home) - 1, -1, -1):
        k = bins.home[i]
        following[i] = head[k]
        head[k] = i


@njit(void(ITEMS, BINS, ARRAY, ARRAY, int64, float64, boolean, ARRAY), cache=True, nogil=True)
def _set_goals(items, bins, head, order, ranks, path, level, goals):
    """The cost that each bin should have, so that the critical path becomes ``path``.

    Groups that hold an item dearer than the others' level get its cost as their goal. The others get that level, or
    their own mean shifted so that the means add up to what ``path`` leaves for them.
    """
    microbatches = len(order) // ranks
    locked, left = 0, path
    dearest = np.zeros(microbatches, np.int64)
    for at in range(len(order)):
        if head[order[at]] >= 0:
            dearest[at // ranks] = max(dearest[at // ranks], items.costs[head[order[at]]])
    while locked < microbatches - 1 and dearest[locked] * (microbatches - locked) > left:
        left -= dearest[locked]
        locked += 1
    share = left / (microbatches - locked)
    total = 0.0
    for at in range(locked * ranks, len(order)):
        total += bins.load[order[at]]
    mean_all = total / (len(order) - locked * ranks)
    for microbatch in range(microbatches):
        goal = share
        if microbatch < locked:
            goal = float(dearest[microbatch])
        elif not level:
            mean = 0.0
            for at in range(microbatch * ranks, (microbatch + 1) * ranks):
                mean += bins.load[order[at]]
            goal = mean / ranks + share - mean_all
        for at in range(microbatch * ranks, (microbatch + 1) * ranks):
            goals[order[at]] = np.int64(goal)


@njit(void(ITEMS, BINS), cache=True, nogil=True)
def _weigh(items, bins):
    bins.load[:] = 0
    bins.held[:] = 0
    bins.crowd[:] = 0
    for i in range(len(bins.home)):
        k = bins.home[i]
        bins.load[k] += items.costs[i]
        bins.held[k] += items.slots[i]
        bins.crowd[k] += items.counts[i]


@njit(int64(ITEMS, BINS, ROOM, int64, float64, int64, int64), cache=True, nogil=True)
def improve(items, bins, room, ranks, bound, rounds, budget):
    """Rounds of pairwise division until the critical path is within ``_GOOD`` of ``bound``, nothing changes any more,
    or ``rounds`` or the ``budget`` of operations is spent. Leaves the best bins seen and returns the budget left."""
    n, count = len(items.costs), len(bins.load)
    head, following = np.empty(count, np.int64), np.empty(n, np.int64)
    ours, theirs = np.empty(n, np.int64), np.empty(n, np.int64)
    goals, deviation = np.empty(count, np.int64), np.empty(count, np.int64)
    _link(items, bins, head, following)
    best_home = bins.home.copy()
    best = np.inf
    idle = 0
    for turn in range(rounds):
        order = falling_order(bins.load)
        path = path_of(bins.load, order, ranks)
        if path < best:
            best = path
            best_home[:] = bins.home
        if best <= bound * _GOOD or budget < 0:
            break
        _set_goals(items, bins, head, order, ranks, bound, turn < 4, goals)
        least = 0
        for k in range(count):
            deviation[k] = bins.load[k] - goals[k]
            least = min(least, deviation[k])
        by_deviation = falling_order(deviation - least)
        changed = 0
        low = count - 1
        shift = max(0, turn - 4) % 7
        for at in range(count // 2):
            a = by_deviation[at]
            b = by_deviation[count - 1 - (at + shift) % (count - count // 2)]
            if deviation[a] - deviation[b] <= goals[a] * 0.0002:
                break
            wish = (bins.load[a] + bins.load[b] + goals[a] - goals[b]) // 2
            spent = divide(items, bins, room, head, following, a, b, wish, ours, theirs)
            budget -= abs(spent)
            changed += spent > 0
        budget -= 8 * count
        idle = 0 if changed else idle + 1
        if idle > 7:
            break
    bins.home[:] = best_home
    _weigh(items, bins)
    return budget


@njit(boolean(ITEMS, BINS, ROOM, int64, int64, int64), cache=True, nogil=True)
def _start(items, bins, room, ranks, kind, patience):
    """Places all items, or returns false. ``kind`` > 0: the giants' microbatches filled first, at most that many; 0:
    heaviest first; −1: packed as full as they go."""
    if kind >= 0:
        filled = fill_giant_steps(items, bins, room, ranks, kind)
        return filled >= kind and heaviest_first(items, bins, room, filled * ranks, patience)
    n, count = len(items.slots), len(bins.load)
    order = falling_order(items.slots)
    home = np.empty(n, np.int64)
    used = pack(items.slots[order], items.counts[order], room.capacity, room.sequences, count, home)
    if used > count:
        return False
    for at in range(n):
        put(items, bins, order[at], home[at])
    return True


@njit(ARRAY(ARRAY, int64), cache=True, nogil=True)
def _deal(load, ranks):
    """Where each bin goes, ``microbatch·ranks + rank``: sorted into microbatches, the heaviest bin of each to the rank
    that has the least so far, then exchanged within microbatches while that lowers the dearest rank."""
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


@njit(
    types.Tuple((ARRAY, int64))(ARRAY, ARRAY, ARRAY, int64, int64, int64, int64, int64, int64), cache=True, nogil=True
)
def balance(slots, costs, counts, capacity, sequences, ranks, microbatches, multiple, budget):
    """The bin of each item, in the order given, and the number of microbatches; ``microbatches`` if that is feasible,
    else the next multiple that is. ``budget``: operations to spend on improvement."""
    order = falling_order(costs)
    items = Items(slots[order], costs[order], counts[order])
    room = Room(capacity, sequences)
    n = len(order)
    bound = least_path(items.slots, items.costs, capacity, ranks)
    best, best_bins = np.inf, no_bins(n, 0)
    while True:
        count = microbatches * ranks
        patience = 64 * (n + count)
        giants = fill_giant_steps(items, no_bins(n, count), room, ranks, microbatches)
        tried = 0
        for kind in (giants, giants // 2, 1, 2, 0, -1):
            if kind > giants or (kind == -1 and best < bound * 1.01) or (kind > 0 and kind == tried):
                continue
            tried = kind
            bins = no_bins(n, count)
            if not _start(items, bins, room, ranks, kind, patience):
                continue
            budget = improve(items, bins, room, ranks, bound, 60, budget)
            path = path_of(bins.load, falling_order(bins.load), ranks)
            if path < best:
                best, best_bins = path, bins
            if best <= bound * _GOOD:
                break
        if best < np.inf:
            break
        microbatches += multiple
    places = _deal(best_bins.load, ranks)
    homes = np.empty(n, np.int64)
    for i in range(n):
        homes[order[i]] = places[best_bins.home[i]]
    return homes, microbatches
