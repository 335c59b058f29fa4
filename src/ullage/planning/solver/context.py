"""The number of ranks that share a giant sequence, where context parallelism is free to choose.

A bin of degree ``d`` belongs to ``d`` consecutive ranks, the first of them a multiple of ``d``, and holds ``d`` times
as much; each of its ranks does one ``d``-th of the work of all its items, plus what it costs to send tokens around. The
degrees are given, rising: powers of two, and all ranks together. A giant gets the least of them at which its memory
fits and its share does not dominate: it stays at or below the mean microbatch, times a tolerance. Giants open their
bins, widest first, which keeps every block aligned. The bins, and the whole microbatch where a giant dominates all the
same, are filled with the most expensive items that still fit under the giant's share; what is left is balanced over the
ranks that no giant took. The best of several tolerances is kept. Its microbatches of few items, which no division over
blocks may balance, go to all ranks together where that is shorter.

Slots are the only resource here: a second capacity is refused before.

With one degree per bin an engine runs each microbatch with one process group per rank.

Sources: the least degree that fits, Megatron-LM's dynamic context parallelism (which weighs without the linear term)
and FlexSP (arXiv:2412.01523).
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.balancing import balance
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.items import NOWHERE, Items, Room, SharedItems, falling_order, subset
from ullage.planning.solver.packing import pack_items
from ullage.planning.solver.placing import heaviest_first, no_bins

#: Shares of a giant that are allowed, in hundredths of the mean microbatch; the last one allows any share.
_ANY = 1 << 30
_TOLERANCES = (100, 104, 110, 120, 135, 150, 200, 300, _ANY)
#: Times that one microbatch more is tried, and what the critical path must come down to for it.
_EXTRA, _WORTH = 3, 0.98
#: A microbatch of at most so many items per rank is given to all ranks if it then takes so much of its time.
_FEW, _SHORTER = 2, 0.95
#: A critical path this close to the mean rank is good enough.
_LEVEL = 1.002


class _Blocks(NamedTuple):
    """Bins that belong to one rank or to several consecutive ranks. All arrays are [bins].

    Attributes:
        first: place of the first rank, ``microbatch·ranks + rank``.
        level: which of the degrees it has.
        held, num_sequences, load: slots, sequences and cost of its items, at that degree.
    """

    first: Int64
    level: Int64
    held: Int64
    num_sequences: Int64
    load: Int64


@kernel
def _allowed_share(mean: int, tolerance: int) -> int:
    """The cost that a giant may put on each of its ranks."""
    return mean * tolerance // 100 if tolerance < _ANY else 1 << 60


@kernel
def _needed_levels(items: SharedItems, capacity: int, share: int) -> Int64:
    """The level of the least degree at which each item fits and costs each rank at most ``share``. If there is none,
    the one at which it fits and costs each rank the least; −1 if it fits at none."""
    slots, costs, degrees = items.slots, items.costs, items.degrees
    levels, n = slots.shape
    needed = np.full(n, -1, np.int64)
    for i in range(n):
        for e in range(levels):
            if slots[e, i] > capacity * degrees[e]:
                continue
            # Remember the degree that costs each rank the least, for items that no degree brings below ``share``.
            each = costs[e, i] // degrees[e]
            if needed[i] < 0 or each < costs[needed[i], i] // degrees[needed[i]]:
                needed[i] = e
            if each <= share:
                needed[i] = e
                break
    return needed


@kernel
def _open(taken: Int64, begin: int, end: int, ranks: int, level: int, degree: int, blocks: _Blocks, k: int) -> bool:
    """Gives bin ``k`` the first aligned block of ``degree`` ranks that microbatches ``begin..end`` have left.

    taken [microbatches]: ranks of each microbatch that have a bin, from rank 0 on; kept up to date.
    """
    for microbatch in range(begin, end):
        # Aligned: a block of ``degree`` ranks begins at a multiple of ``degree``, as a sound plan must. With three
        # ranks taken, a block of two begins at rank 4.
        rank = -(-taken[microbatch] // degree) * degree
        if rank + degree <= ranks:
            blocks.first[k] = microbatch * ranks + rank
            blocks.level[k] = level
            taken[microbatch] = rank + degree
            return True
    return False


@kernel
def _fits(items: SharedItems, blocks: _Blocks, room: Room, i: int, k: int, most: int) -> bool:
    """Whether bin ``k`` has room for item ``i`` and then costs each of its ranks at most ``most``."""
    e = blocks.level[k]
    degree = items.degrees[e]
    return (
        blocks.held[k] + items.slots[e, i] <= room.capacity * degree
        and blocks.num_sequences[k] + items.counts[i] <= room.max_sequences
        and (blocks.load[k] + items.costs[e, i]) // degree <= most
    )


@kernel
def _put(items: SharedItems, blocks: _Blocks, home: Int64, i: int, k: int) -> None:
    e = blocks.level[k]
    home[i] = blocks.first[k]
    blocks.held[k] += items.slots[e, i]
    blocks.num_sequences[k] += items.counts[i]
    blocks.load[k] += items.costs[e, i]


@kernel
def _place_giants(
    items: SharedItems, room: Room, ranks: int, microbatches: int, needed: Int64, share: int
) -> tuple[Int64, Int64, int]:
    """Open bins for items that need more than one rank, and fill them.

    Args:
        items: sorted by falling cost at degree 1.
        room: what one rank can hold.
        needed [items]: the level of the degree that each item needs.
        share: the cost of a mean microbatch of one rank.

    Returns the first rank's place of each item that was placed, ``NOWHERE`` for the others; the level of each bin by
    that place, −1 where no giant is; and the number of giants that found no block.
    """
    n, degrees = items.slots.shape[1], items.degrees
    home = np.full(n, NOWHERE)
    levels = np.full(microbatches * ranks, -1, np.int64)
    taken = np.zeros(microbatches, np.int64)
    work = np.zeros((5, n), np.int64)
    blocks = _Blocks(work[0], work[1], work[2], work[3], work[4])
    used, lost = 0, 0
    # Widest first: each block then begins at a multiple of its width without leaving ranks between blocks.
    for e in range(len(degrees) - 1, 0, -1):
        for i in range(n):
            if needed[i] != e:
                continue
            # The fullest open bin that takes the giant within the mean, so that few ranks are given to giants.
            at = -1
            for k in range(used):
                wide = blocks.level[k] >= e
                if wide and _fits(items, blocks, room, i, k, share):
                    height = blocks.load[k] // degrees[blocks.level[k]]
                    if at < 0 or height > blocks.load[at] // degrees[blocks.level[at]]:
                        at = k
            if at < 0 and _open(taken, 0, microbatches, ranks, e, degrees[e], blocks, used):
                at = used
                used += 1
            if at < 0:
                lost += 1
            else:
                _put(items, blocks, home, i, at)
    # A microbatch lasts as long as its most expensive giant, so its bins may cost that, and no less than the mean.
    goal = np.full(microbatches, share)
    for k in range(used):
        levels[blocks.first[k]] = blocks.level[k]
        microbatch = blocks.first[k] // ranks
        goal[microbatch] = max(goal[microbatch], blocks.load[k] // degrees[blocks.level[k]])
    # Where a giant lifts its microbatch by over 1 % above the mean, the other ranks would wait: they become bins of
    # degree 1 that are filled up to the giant's height. Elsewhere they are left to the balance of the rest.
    bins = used
    for microbatch in range(microbatches):
        if goal[microbatch] * 100 > share * 101 and bins + ranks <= n:
            while _open(taken, microbatch, microbatch + 1, ranks, 0, 1, blocks, bins):
                levels[blocks.first[bins]] = 0
                bins += 1
    # Most expensive first, so that the small items, which fit anywhere, are left for the balance of the rest.
    for k in range(bins):
        most = goal[blocks.first[k] // ranks]
        for i in range(n):
            each = blocks.load[k] // degrees[blocks.level[k]]
            if each >= most or blocks.num_sequences[k] >= room.max_sequences:
                break
            if home[i] == NOWHERE and needed[i] <= blocks.level[k] and _fits(items, blocks, room, i, k, most):
                _put(items, blocks, home, i, k)
    return home, levels, lost


@kernel
def _shares(home: Int64, levels: Int64, items: SharedItems) -> Int64:
    """The cost of each bin to each of its ranks, by its place."""
    load = np.zeros(len(levels), np.int64)
    for i in range(len(home)):
        load[home[i]] += items.costs[max(0, levels[home[i]]), i]
    for k in range(len(load)):
        load[k] //= items.degrees[max(0, levels[k])]
    return load


@kernel
def _longest_path(load: Int64, ranks: int) -> int:
    """The sum over microbatches of the most expensive rank; ``load`` is by place."""
    path = 0
    for begin in range(0, len(load), ranks):
        path += load[begin : begin + ranks].max()
    return path


@kernel
def _place_rest(shared: SharedItems, room: Room, ranks: int, home: Int64, levels: Int64) -> bool:
    """Balances the items that are nowhere over the places that no bin covers; false if they do not fit."""
    costs, degrees = shared.costs, shared.degrees
    rest = np.flatnonzero(home == NOWHERE)
    covered = np.zeros(len(levels), np.int64)
    for k in range(len(levels)):
        if levels[k] >= 0:
            covered[k : k + degrees[levels[k]]] = 1
    places = np.flatnonzero(covered == 0)
    if len(rest) == 0:
        return True
    if len(places) == 0:
        return False
    # Heaviest first, and where that does not fit, packed as full as they go.
    items = Items(shared.slots[0][rest], costs[0][rest], shared.counts[rest], np.zeros((0, len(rest)), np.int64))
    bins = no_bins(len(rest), len(places), 0)
    if not heaviest_first(items, bins, room, 0, 64 * (len(rest) + len(places))):
        bins = no_bins(len(rest), len(places), 0)
        order = falling_order(items.slots)
        at = np.empty(len(rest), np.int64)
        if pack_items(subset(items, order), room, len(places), at) > len(places):
            return False
        bins.home[order] = at
    # The most expensive bins go to the microbatches whose giants are most expensive: of bins of 6 and 4 beside giants
    # of 9 and 5 the path is 9 + 5 if the 6 stands beside the 9, and 9 + 6 if it does not.
    load = np.zeros(len(levels), np.int64)
    for i in range(len(home)):
        if home[i] != NOWHERE:
            level = levels[home[i]]
            load[home[i]] += costs[level, i] // degrees[level]
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


@kernel
def _share_few(items: SharedItems, room: Room, ranks: int, home: Int64, levels: Int64) -> None:
    """Gives a microbatch to all ranks together where it has too few items to be balanced, and fits. Changes ``home``
    and ``levels``."""
    last, microbatches = len(items.degrees) - 1, len(levels) // ranks
    number, counts = np.zeros(microbatches, np.int64), np.zeros(microbatches, np.int64)
    held, costs = np.zeros(microbatches, np.int64), np.zeros(microbatches, np.int64)
    for i in range(len(home)):
        microbatch = home[i] // ranks
        number[microbatch] += 1
        counts[microbatch] += items.counts[i]
        held[microbatch] += items.slots[last, i]
        costs[microbatch] += items.costs[last, i]
    load = _shares(home, levels, items)
    shared = np.zeros(microbatches, np.int64)
    for microbatch in range(microbatches):
        begin, end = microbatch * ranks, (microbatch + 1) * ranks
        fits = held[microbatch] <= room.capacity * items.degrees[last] and counts[microbatch] <= room.max_sequences
        shorter = costs[microbatch] // ranks < _SHORTER * load[begin:end].max()
        if number[microbatch] <= _FEW * ranks and fits and shorter:
            shared[microbatch] = 1
            levels[begin:end] = -1
            levels[begin] = last
    for i in range(len(home)):
        microbatch = home[i] // ranks
        if shared[microbatch]:
            home[i] = microbatch * ranks


@kernel
def _without_empty(
    homes: Int64, levels: Int64, ranks: int, microbatches: int, microbatch_multiple: int
) -> tuple[Int64, Int64, int]:
    """The same plan without microbatches that hold nothing, as far as their number stays a multiple."""
    held = np.zeros(microbatches, np.int64)
    for home in homes:
        held[home // ranks] = 1
    # Of microbatches that are full, empty and full, with a multiple of 2, the order is [0, 2, 1] and two are kept.
    # Microbatches that hold something first, in their order; empty ones fill up to the multiple.
    order = np.concatenate((np.flatnonzero(held == 1), np.flatnonzero(held == 0)))
    left = max(-(-held.sum() // microbatch_multiple), 1) * microbatch_multiple
    moved = np.empty(microbatches, np.int64)
    kept = np.empty(left * ranks, np.int64)
    for k in range(microbatches):
        moved[order[k]] = k
        if k < left:
            kept[k * ranks : (k + 1) * ranks] = levels[order[k] * ranks : (order[k] + 1) * ranks]
    return moved[homes // ranks] * ranks + homes % ranks, kept, left


@kernel
def share_out(
    items: SharedItems, room: Room, ranks: int, microbatches: int, microbatch_multiple: int
) -> tuple[Int64, Int64, int]:
    """Place items, given in any order, where several ranks may share a bin.

    Args:
        items: in any order, at each degree.
        room: what one rank can hold.
        ranks, microbatches, microbatch_multiple: as those of :func:`~ullage.planning.solver.balancing.balance`.

    Returns the place ``microbatch·ranks + rank`` of each item (the first of its ranks), the level of the bin at each
    place (−1 behind the first rank of a block and 0 for one rank), and the number of microbatches.
    """
    n = items.slots.shape[1]
    # Most expensive at degree 1 first; the copies are contiguous, as compiled kernels require.
    order = falling_order(items.costs[0])
    items = SharedItems(items.slots[:, order].copy(), items.costs[:, order].copy(), items.counts[order], items.degrees)
    slots, costs = items.slots, items.costs
    best, best_microbatches = np.int64(-1), microbatches
    best_home, best_levels = np.empty(0, np.int64), np.empty(0, np.int64)
    # Every item on one rank, where that is possible: the plan that sharing has to beat.
    if slots[0].max() <= room.capacity:
        alone = Items(slots[0], costs[0], items.counts, np.zeros((0, n), np.int64))
        best_home, best_microbatches = balance(alone, room, ranks, microbatches, microbatch_multiple)
        best_levels = np.zeros(best_microbatches * ranks, np.int64)
        best = _longest_path(_shares(best_home, best_levels, items), ranks)
    extra = 0
    ideal = costs[0].sum() / ranks
    # Every tolerance; then the same with more microbatches, as long as there is no plan or a level one is far.
    while best < 0 or (extra <= _EXTRA and best > ideal * _LEVEL):
        mean = costs[0].sum() // (microbatches * ranks) + 1
        last = np.full(n, -2, np.int64)
        for tolerance in _TOLERANCES:
            # A tolerance that changes no degree gives the same plan, and all degrees 1 is the plan from above.
            needed = _needed_levels(items, room.capacity, _allowed_share(mean, tolerance))
            if np.array_equal(needed, last) or needed.max() == 0:
                continue
            last = needed
            home, levels, lost = _place_giants(items, room, ranks, microbatches, needed, mean)
            if lost or not _place_rest(items, room, ranks, home, levels):
                continue
            # A plan of more microbatches than the best so far must be 2 % shorter to be taken.
            path = _longest_path(_shares(home, levels, items), ranks)
            worth = 1.0 if microbatches == best_microbatches else _WORTH
            if best < 0 or path < best * worth:
                best, best_home, best_levels, best_microbatches = path, home, levels, microbatches
        if best >= 0 and best > ideal * _LEVEL:
            _share_few(items, room, ranks, best_home, best_levels)
            best = _longest_path(_shares(best_home, best_levels, items), ranks)
        microbatches += microbatch_multiple
        extra += 1
    # Back to the order in which the caller gave the items.
    homes = np.empty(n, np.int64)
    homes[order] = best_home
    return _without_empty(homes, best_levels, ranks, best_microbatches, microbatch_multiple)
