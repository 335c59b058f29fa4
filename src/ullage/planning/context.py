"""How many ranks a giant sequence gets, where context parallelism is free to choose.

A bin of degree ``d`` belongs to ``d`` consecutive ranks, the first of them a multiple of ``d``, and holds ``d`` times
as much; each of its ranks does one ``d``-th of the work of all its items, plus what it costs to send tokens around. A
giant gets the least power of two at which its memory fits and its share does not dominate: it stays at or below the
mean microbatch, times a tolerance. Giants open their bins, widest first, which keeps every block aligned; the bins,
and the whole microbatch where a giant dominates all the same, are filled with the dearest items that still fit under
the giant's share; what is left is balanced over the ranks that no giant took. The best of several tolerances is kept.

With one degree a bin an engine runs each microbatch with one process group a rank. :func:`list_schedule` is what list
scheduling reaches if every sequence could have a degree of its own inside one microbatch: the bound that this gives up.

Sources: the least degree that fits, Megatron-LM's dynamic context parallelism (which weighs without the linear term)
and FlexSP (arXiv:2412.01523).
"""

from __future__ import annotations

import numpy as np
from numba import boolean, int64, types

from ullage.planning.balancing import balance
from ullage.planning.compiled import kernel
from ullage.planning.improving import improve
from ullage.planning.ordering import ARRAY, falling_order
from ullage.planning.packing import pack
from ullage.planning.placing import NOWHERE, Items, Room, heaviest_first, no_bins

TABLE = int64[:, ::1]
#: Shares of a giant that are allowed, in hundredths of the mean microbatch; the last one is no limit.
_TOLERANCES = (100, 104, 110, 120, 135, 150, 200, 300, 1 << 30)
#: Times that one microbatch more is tried, and what the critical path must come down to for it.
_EXTRA, _WORTH = 3, 0.98
#: A critical path this close to the mean rank is good enough.
_LEVEL = 1.002


@kernel(ARRAY(TABLE, TABLE, int64, int64))
def _needed(slots, costs, capacity, share):
    """The exponent of the least degree at which each item fits and costs a rank at most ``share``; the least at which
    it fits and costs a rank the least if there is none, or −1 if it fits at none."""
    levels, n = slots.shape
    needed = np.full(n, -1, np.int64)
    for i in range(n):
        for e in range(levels):
            if slots[e, i] > capacity << e:
                continue
            if needed[i] < 0 or costs[e, i] >> e < costs[needed[i], i] >> needed[i]:
                needed[i] = e
            if costs[e, i] >> e <= share:
                needed[i] = e
                break
    return needed


@kernel(boolean(ARRAY, ARRAY, ARRAY, int64, int64, int64))
def _open(free, first, width, ranks, exponent, k):
    """Gives bin ``k`` the first aligned block of ``2**exponent`` ranks that a microbatch has left."""
    degree = 1 << exponent
    for microbatch in range(len(free)):
        rank = -(-free[microbatch] // degree) * degree
        if rank + degree <= ranks:
            first[k] = microbatch * ranks + rank
            width[k] = exponent
            free[microbatch] = rank + degree
            return True
    return False


@kernel(types.Tuple((ARRAY, ARRAY, int64))(TABLE, TABLE, ARRAY, int64, int64, int64, int64, ARRAY, int64))
def _place_giants(slots, costs, counts, capacity, sequences, ranks, microbatches, needed, share):
    """Opens bins for items that need more than one rank, and fills them.

    Returns the first rank's place of each item that was placed, ``NOWHERE`` for the others; the exponent of each bin
    by that place, −1 where no giant is; and how many giants found no block.
    """
    levels, n = slots.shape
    home = np.full(n, NOWHERE)
    exponents = np.full(microbatches * ranks, -1, np.int64)
    free = np.zeros(microbatches, np.int64)
    first, width = np.empty(n, np.int64), np.empty(n, np.int64)
    held, crowd, load = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    used, lost = 0, 0
    for e in range(levels - 1, 0, -1):
        for i in range(n):
            if needed[i] != e:
                continue
            at = -1
            for k in range(used):
                w = width[k]
                if (
                    held[k] + slots[w, i] <= capacity << w
                    and crowd[k] + counts[i] <= sequences
                    and (load[k] + costs[w, i]) >> w <= share
                    and w >= e
                    and (at < 0 or load[k] >> w > load[at] >> width[at])
                ):
                    at = k
            if at < 0 and _open(free, first, width, ranks, e, used):
                at = used
                used += 1
            if at < 0:
                lost += 1
                continue
            home[i] = first[at]
            held[at] += slots[width[at], i]
            crowd[at] += counts[i]
            load[at] += costs[width[at], i]
    goal = np.full(microbatches, share)
    for k in range(used):
        exponents[first[k]] = width[k]
        goal[first[k] // ranks] = max(goal[first[k] // ranks], load[k] >> width[k])
    # A microbatch that a giant dominates is filled as a whole; its other ranks become bins of degree 1.
    bins = used
    for microbatch in range(microbatches):
        if goal[microbatch] * 100 > share * 101 and bins + ranks <= n:
            while _open(free[microbatch : microbatch + 1], first[bins:], width[bins:], ranks, 0, 0):
                first[bins] += microbatch * ranks
                exponents[first[bins]] = 0
                bins += 1
    for k in range(bins):
        w = width[k]
        most = goal[first[k] // ranks]
        for i in range(n):
            if load[k] >> w >= most or crowd[k] >= sequences:
                break
            if (
                home[i] == NOWHERE
                and needed[i] <= w
                and held[k] + slots[w, i] <= capacity << w
                and crowd[k] + counts[i] <= sequences
                and (load[k] + costs[w, i]) >> w <= most
            ):
                home[i] = first[k]
                held[k] += slots[w, i]
                crowd[k] += counts[i]
                load[k] += costs[w, i]
    return home, exponents, lost


@kernel(ARRAY(ARRAY, ARRAY, TABLE, int64))
def _shares(home, exponents, costs, ranks):
    """What each bin costs each of its ranks, by its place."""
    load = np.zeros(len(exponents), np.int64)
    for i in range(len(home)):
        load[home[i]] += costs[max(0, exponents[home[i]]), i]
    for k in range(len(load)):
        load[k] >>= max(0, exponents[k])
    return load


@kernel(int64(ARRAY, int64))
def _path(load, ranks):
    path = 0
    for begin in range(0, len(load), ranks):
        path += load[begin : begin + ranks].max()
    return path


@kernel(boolean(TABLE, TABLE, ARRAY, int64, int64, int64, ARRAY, ARRAY, int64))
def _place_rest(slots, costs, counts, capacity, sequences, ranks, home, exponents, budget):
    """Balances the items that are nowhere over the places that no bin covers; false if they do not fit."""
    rest = np.flatnonzero(home == NOWHERE)
    covered = np.zeros(len(exponents), np.int64)
    for k in range(len(exponents)):
        if exponents[k] >= 0:
            covered[k : k + (1 << exponents[k])] = 1
    places = np.flatnonzero(covered == 0)
    if len(rest) == 0:
        return True
    if len(places) == 0:
        return False
    items = Items(slots[0][rest], costs[0][rest], counts[rest])
    room = Room(capacity, sequences)
    bins = no_bins(len(rest), len(places))
    if not heaviest_first(items, bins, room, 0, 64 * (len(rest) + len(places))):
        bins = no_bins(len(rest), len(places))
        order = falling_order(items.slots)
        at = np.empty(len(rest), np.int64)
        if pack(items.slots[order], items.counts[order], capacity, sequences, len(places), at) > len(places):
            return False
        bins.home[order] = at
    total = items.costs.sum()
    bound = max(total / len(places), float(items.costs[0]))
    improve(items, bins, room, len(places), bound, 40, budget)
    # The dearest bins go to the microbatches whose giants are dearest.
    load = np.zeros(len(exponents), np.int64)
    for i in range(len(home)):
        if home[i] != NOWHERE:
            load[home[i]] += costs[exponents[home[i]], i] >> exponents[home[i]]
    height = np.zeros(len(places), np.int64)
    for j in range(len(places)):
        begin = places[j] // ranks * ranks
        height[j] = load[begin : begin + ranks].max()
    target = places[falling_order(height)]
    order = falling_order(bins.load)
    place_of = np.empty(len(places), np.int64)
    for j in range(len(places)):
        place_of[order[j]] = target[j]
    for j in range(len(rest)):
        home[rest[j]] = place_of[bins.home[j]]
    return True


@kernel(types.Tuple((ARRAY, ARRAY, int64))(ARRAY, ARRAY, int64, int64, int64))
def _without_empty(homes, exponents, ranks, microbatches, multiple):
    """The same plan without microbatches that hold nothing, as far as their number stays a multiple."""
    held = np.zeros(microbatches, np.int64)
    for home in homes:
        held[home // ranks] = 1
    order = np.concatenate((np.flatnonzero(held == 1), np.flatnonzero(held == 0)))
    left = max(-(-held.sum() // multiple), 1) * multiple
    moved = np.empty(microbatches, np.int64)
    kept = np.empty(left * ranks, np.int64)
    for k in range(microbatches):
        moved[order[k]] = k
        if k < left:
            kept[k * ranks : (k + 1) * ranks] = exponents[order[k] * ranks : (order[k] + 1) * ranks]
    return moved[homes // ranks] * ranks + homes % ranks, kept, left


@kernel(types.Tuple((ARRAY, ARRAY, int64))(TABLE, TABLE, ARRAY, int64, int64, int64, int64, int64, int64))
def share_out(slots, costs, counts, capacity, sequences, ranks, microbatches, multiple, budget):
    """The place of each item, the exponent of the bin at each place (−1 behind the first rank of a block and 0 for one
    rank), and the number of microbatches. ``slots``, ``costs`` [exponents, items]: at degree 1, 2, 4, ..."""
    n = slots.shape[1]
    order = falling_order(costs[0])
    slots, costs, counts = slots[:, order].copy(), costs[:, order].copy(), counts[order]
    best, best_microbatches = np.int64(-1), microbatches
    best_home, best_exponents = np.empty(0, np.int64), np.empty(0, np.int64)
    if slots[0].max() <= capacity:
        best_home, best_microbatches = balance(
            slots[0], costs[0], counts, capacity, sequences, ranks, microbatches, multiple, budget
        )
        best_exponents = np.zeros(best_microbatches * ranks, np.int64)
        best = _path(_shares(best_home, best_exponents, costs, ranks), ranks)
    extra = 0
    ideal = costs[0].sum() / ranks
    while best < 0 or (extra <= _EXTRA and best > ideal * _LEVEL):
        mean = costs[0].sum() // (microbatches * ranks) + 1
        last = np.full(n, -2, np.int64)
        for tolerance in _TOLERANCES:
            share = mean * tolerance // 100 if tolerance < (1 << 20) else np.int64(1) << 60
            needed = _needed(slots, costs, capacity, share)
            if np.array_equal(needed, last) or needed.max() == 0:
                continue
            last = needed
            home, exponents, lost = _place_giants(
                slots, costs, counts, capacity, sequences, ranks, microbatches, needed, mean
            )
            if lost or not _place_rest(slots, costs, counts, capacity, sequences, ranks, home, exponents, budget):
                continue
            path = _path(_shares(home, exponents, costs, ranks), ranks)
            worth = 1.0 if microbatches == best_microbatches else _WORTH
            if best < 0 or path < best * worth:
                best, best_home, best_exponents, best_microbatches = path, home, exponents, microbatches
        microbatches += multiple
        extra += 1
    homes = np.empty(n, np.int64)
    homes[order] = best_home
    return _without_empty(homes, best_exponents, ranks, best_microbatches, multiple)


@kernel(int64(TABLE, TABLE, int64, int64, int64))
def list_schedule(slots, costs, capacity, ranks, microbatches):
    """The critical path, in cost, if each item has its own degree: the dearest first, each on the block of ranks, over
    all microbatches, that becomes least loaded. The best of the tolerances; −1 if none fits."""
    n = slots.shape[1]
    order = falling_order(costs[0])
    mean = costs[0].sum() // (microbatches * ranks) + 1
    best = np.int64(-1)
    for tolerance in _TOLERANCES:
        share = mean * tolerance // 100 if tolerance < (1 << 20) else np.int64(1) << 60
        needed = _needed(slots, costs, capacity, share)
        if n and needed.min() < 0:
            return -1
        load, held = np.zeros(microbatches * ranks, np.int64), np.zeros(microbatches * ranks, np.int64)
        fits = True
        for e in range(slots.shape[0] - 1, -1, -1):
            width = 1 << e
            for i in order:
                if needed[i] != e or not fits:
                    continue
                at, least = -1, 0
                each = -(-slots[e, i] // width)
                for microbatch in range(microbatches):
                    for begin in range(microbatch * ranks, (microbatch + 1) * ranks - width + 1, width):
                        high = load[begin : begin + width].max()
                        if (at < 0 or high < least) and held[begin : begin + width].max() + each <= capacity:
                            at, least = begin, high
                fits = at >= 0
                if fits:
                    for k in range(at, at + width):
                        load[k] = least + (costs[e, i] >> e)
                        held[k] += each
        if fits and (best < 0 or _path(load, ranks) < best):
            best = _path(load, ranks)
    return best
