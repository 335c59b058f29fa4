"""Sequences into bins, as full as they go.

Best-fit decreasing over residual capacities kept in a bitset: the next residual that holds an item is found in a few
steps, and items of one size are placed together, so a million items of a few thousand sizes take milliseconds. Where
the result is above the L2 bound, a bounded completion tries to do better: the largest item opens a bin, and a
depth-first search over the histogram of sizes, which knows at once whether one or two items fill the rest exactly,
looks for the fullest bin; a filling found once is repeated as often as the histogram allows.

Sources: best-fit decreasing, D. S. Johnson, "Near-optimal bin packing algorithms", MIT 1973; bin completion,
R. Korf, "A new algorithm for optimal bin packing", AAAI 2002.

Where a bin has more than one capacity, no residual says by itself what fits. Bins are then filled one after the other,
each with the item that comes closest to what it has left of every resource.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import compiled_from, kernel
from ullage.planning.solver.items import (
    Bitset,
    Items,
    Room,
    Table,
    add,
    contains,
    empty_set,
    falling_order,
    next_member,
    previous_member,
    remove,
)

#: Sizes above this are packed in coarser units, rounded up, so that memory does not grow with the capacity.
_FINEST = 1 << 22
#: Parts of a capacity in which needs are compared, where there are several capacities.
_PARTS = 1 << 16
#: Items among which the next one of a bin is chosen there.
_WAITING = 1024


@kernel
def fill_in_order(items: Items, room: Room, bins: Int64) -> int:
    """Next fit: arrival order, a bin closed when the next item does not fit.

    Fills ``bins`` [items] with the bin of each item and returns the number of bins. Kept for comparison and for data
    whose order matters. Source: Megatron-LM's ``DpBalancedScheduler``.
    """
    slots, counts, resources = items.slots, items.counts, len(room.limits)
    used, held, num_sequences = 0, 0, 0
    amounts = np.zeros(resources, np.int64)
    for i in range(len(slots)):
        fits = used > 0 and held + slots[i] <= room.capacity and num_sequences + counts[i] <= room.max_sequences
        for r in range(resources):
            fits = fits and amounts[r] + items.amounts[r, i] <= room.limits[r]
        if not fits:
            used, held, num_sequences = used + 1, 0, 0
            amounts[:] = 0
        bins[i] = used - 1
        held += slots[i]
        num_sequences += counts[i]
        for r in range(resources):
            amounts[r] += items.amounts[r, i]
    return used


@kernel
def _least_residual(
    residuals: Bitset, head: Int64, following: Int64, num_sequences: Int64, free: int, most: int
) -> int:
    """The least residual >= ``free`` with a bin of at most ``most`` sequences, that bin moved to the head, or −1."""
    # Residuals upwards from ``free``; of each, the list of its bins until one has room for the sequences.
    while free >= 0:
        before, k = -1, head[free]
        while k >= 0:
            if num_sequences[k] <= most:
                # To the head of its list, where the caller takes it from.
                if before >= 0:
                    following[before] = following[k]
                    following[k] = head[free]
                    head[free] = k
                return free
            before, k = k, following[k]
        free = next_member(residuals, free + 1) if free + 1 < len(head) else -1
    return -1


@kernel
def best_fit(slots: Int64, counts: Int64, room: Room, bins: Int64) -> int:
    """Best-fit decreasing of ``slots`` (falling).

    Fills ``bins`` [items] with the bin of each item and returns the number of bins.
    """
    n = len(slots)
    # Bins by what they have left: a set of the residuals that occur, and a linked list of the bins of each. Of bins
    # with 5, 2 and 5 slots left the set is {2, 5}, and the list of 5 has two bins.
    residuals = empty_set(room.capacity)
    head = np.full(room.capacity + 1, -1, np.int64)
    following = np.empty(n + 1, np.int64)
    num_sequences = np.zeros(n + 1, np.int64)
    used = 0
    for i in range(n):
        # Best fit: the least residual that holds the item. Only where the first bin of that residual has too many
        # sequences, its other bins and larger residuals are searched.
        slot = slots[i]
        free = next_member(residuals, slot)
        if free >= 0 and num_sequences[head[free]] + counts[i] > room.max_sequences:
            most = room.max_sequences - counts[i]
            free = _least_residual(residuals, head, following, num_sequences, free, most)
        if free < 0:
            # No bin has room: open one.
            k, free = used, room.capacity
            used += 1
        else:
            # Take the bin from the list of its residual, and the residual from the set if it was the last one.
            k = head[free]
            head[free] = following[k]
            if head[free] < 0:
                remove(residuals, free)
        bins[i] = k
        num_sequences[k] += counts[i]
        free -= slot
        # A bin that has its sequences is closed: it is in no list any more.
        if num_sequences[k] < room.max_sequences:
            following[k] = head[free]
            if head[free] < 0:
                add(residuals, free)
            head[free] = k
    return used


@kernel
def _take(sizes: Bitset, available: Int64, size: int) -> None:
    available[size] -= 1
    if available[size] == 0:
        remove(sizes, size)


@kernel
def _put(sizes: Bitset, available: Int64, size: int) -> None:
    if available[size] == 0:
        add(sizes, size)
    available[size] += 1


@kernel
def _pair(sizes: Bitset, available: Int64, free: int, most: int, least: int) -> int:
    """The larger of two available sizes that fill ``free`` exactly, none above ``most``, or −1."""
    # Of the sizes 7, 5 and 3 a free 10 is 7 + 3, and 7 is returned.
    # The other size is at least ``least`` and at most this one. Going down from the largest, the pairs end where this
    # size is the smaller one. 48 steps bound the search: it runs at every depth of every bin.
    size = previous_member(sizes, min(free - least, most)) if free <= 2 * most else -1
    for _ in range(48):
        if size < 0 or 2 * size < free:
            return -1
        other = free - size
        if contains(sizes, other) and (other != size or available[size] > 1):
            return size
        size = previous_member(sizes, size - 1)
    return -1


@kernel
def _fullest(
    sizes: Bitset,
    available: Int64,
    chosen: Int64,
    stack: Int64,
    tried: Int64,
    room: Room,
    width: int,
    budget: int,
) -> int:
    """The fullest bin that a depth-first search finds around the largest size left. Returns the number of its items.

    Args:
        sizes: the sizes of which there are items.
        available [capacity + 1]: items of each size; unchanged at the end.
        chosen: receives the sizes in the bin, falling.
        stack, tried: work arrays: the size at each depth, and how many sizes were tried there.
        room: what the bin can hold.
        width: sizes tried at each depth.
        budget: sizes tried beyond the first of each depth, altogether.
    """
    least = next_member(sizes, 1)
    largest = previous_member(sizes, room.capacity)
    # The largest size must go somewhere, so this bin begins with it; sizes fall with the depth, so that each set of
    # sizes is met once.
    stack[0] = largest
    _take(sizes, available, largest)
    depth, free = 1, room.capacity - largest
    best, count = room.capacity + 1, 0
    while True:
        # Forwards: the largest size that still fits, unless one or two items fill the bin exactly.
        last = stack[depth - 1]
        size = -1  # stays so where nothing can be added: the bin is complete
        if free >= least and depth < room.max_sequences:
            if free <= last and contains(sizes, free):
                stack[depth] = free
                best, count = 0, depth + 1
                chosen[:count] = stack[:count]
                break
            pair = _pair(sizes, available, free, last, least) if depth + 2 <= room.max_sequences else -1
            if pair >= 0:
                stack[depth], stack[depth + 1] = pair, free - pair
                best, count = 0, depth + 2
                chosen[:count] = stack[:count]
                break
            size = previous_member(sizes, min(free, last))
        if size >= 0:
            tried[depth] = 1
        else:
            # A complete bin: keep it if it is the fullest so far; nothing beats an exactly full one.
            if free < best:
                best, count = free, depth
                chosen[:count] = stack[:count]
            if free == 0:
                break
            # Backwards, to a depth that has another size to try. The first item stays. Only near the end of a bin,
            # where four more items of the last size would fill it, does another size change much.
            while depth > 1 and size < 0:
                depth -= 1
                last = stack[depth]
                _put(sizes, available, last)
                free += last
                if free <= 4 * stack[depth - 1] and tried[depth] < width and budget > 0:
                    size = previous_member(sizes, last - 1)
                    if size >= 0:
                        tried[depth] += 1
                        budget -= 1
            if size < 0:
                depth = 1
                break
        stack[depth] = size
        _take(sizes, available, size)
        free -= size
        depth += 1
    # Give back what the search took; what it chose is taken by the caller.
    while depth > 0:
        depth -= 1
        _put(sizes, available, stack[depth])
    return count


@kernel
def complete(slots: Int64, room: Room, width: int, budget: int, enough: int, bins: Int64) -> int:
    """Bin completion: open a bin with the largest item left and fill it as full as a bounded search can.

    Args:
        slots [items]: sizes > 0, falling; each item is one sequence.
        room: what a bin can hold.
        width, budget: bounds of the search in each bin, see :func:`_fullest`.
        enough: number of bins at which the search ends, without an improvement.
        bins [items]: receives the bin of each item.

    Returns the number of bins, or ``len(slots) + 1`` as soon as there are ``enough`` and items are left.
    """
    n = len(slots)
    # A histogram: the items of a size lie side by side in ``slots``, from ``first[size]`` on.
    sizes = empty_set(room.capacity)
    available = np.zeros(room.capacity + 1, np.int64)
    first = np.zeros(room.capacity + 1, np.int64)
    left = n
    for i in range(n - 1, -1, -1):
        if available[slots[i]] == 0:
            add(sizes, slots[i])
        available[slots[i]] += 1
        first[slots[i]] = i
    longest = min(n, room.max_sequences) + 2
    chosen, stack, tried = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    used = 0
    while left:
        count = _fullest(sizes, available, chosen, stack, tried, room, width, budget)
        # Repeat this filling as often as there are items of all its sizes: of four fives and five threes [5, 3, 3] is
        # two bins.
        # ``chosen`` falls, so the items of one size are a run ``chosen[start:end]``.
        times = left
        start = 0
        while start < count:
            end = start
            while end < count and chosen[end] == chosen[start]:
                end += 1
            times = min(times, available[chosen[start]] // (end - start))
            start = end
        for repeat in range(times):
            for j in range(count):
                size = chosen[j]
                bins[first[size]] = used + repeat
                first[size] += 1
                _take(sizes, available, size)
        left -= times * count
        used += times
        # No better than what is there: stop.
        if used >= enough and left:
            return n + 1
    return used


def _closest_each(needs: Table, parts: Table, weights: Int64, free: Int64, free_parts: Int64, waiting: Int64) -> int:
    """:func:`_closest`, one item after the other."""
    at, best = -1, np.int64(0)
    for p in range(len(waiting)):
        i = waiting[p]
        away, fits = np.int64(0), True
        for r in range(len(free)):
            if needs[r, i] > free[r]:
                fits = False
                break
            apart = free_parts[r] - parts[r, i]
            away += weights[r] * apart * apart
        if fits and (at < 0 or away < best):
            at, best = p, away
    return at


@compiled_from(_closest_each)
def _closest(needs: Table, parts: Table, weights: Int64, free: Int64, free_parts: Int64, waiting: Int64) -> int:
    """The place in ``waiting`` of the item that fits and whose needs are closest to what a bin has left, or −1.

    Args:
        needs, parts [resources, items]: of each item, in units and in parts of the capacity.
        weights [resources]: of each resource in the distance.
        free, free_parts [resources]: what the bin has left, likewise.
        waiting: the items to choose from.
    """
    fits = np.flatnonzero((needs[:, waiting] <= free[:, None]).all(axis=0))
    if not len(fits):
        return -1
    apart = free_parts[:, None] - parts[:, waiting[fits]]
    return fits[(weights[:, None] * apart * apart).sum(axis=0).argmin()]


@kernel
def _fill_with_closest(needs: Table, capacities: Int64, weights: Int64, bins: Int64) -> int:
    """Bin after bin, each filled with the items whose needs are closest to what it has left of every resource.

    Args:
        needs [resources, items]: of each item, at most ``capacities``.
        capacities [resources]: of a bin.
        weights [resources]: of each resource in the distance.
        bins [items]: receives the bin of each item.

    Returns the number of bins. Source: Panigrahy, Talwar, Uyeda, Wieder, "Heuristics for vector bin packing", Microsoft
    Research 2011: the bin-centric rule by the norm.
    """
    resources, n = needs.shape
    parts = np.empty((resources, n), np.int64)
    for r in range(resources):
        # In parts of the capacity, as integers, so that every machine finds the same distances.
        unit = capacities[r] / _PARTS
        for i in range(n):
            parts[r, i] = np.int64(needs[r, i] / unit)
    waiting, size, used = np.arange(n), n, 0
    while size:
        free, free_parts = capacities.copy(), np.full(resources, _PARTS)
        while size:
            # Of very many items the first ones, which are the largest, are enough to choose from.
            p = _closest(needs, parts, weights, free, free_parts, waiting[: min(size, _WAITING)])
            if p < 0:
                break
            i = waiting[p]
            bins[i] = used
            for r in range(resources):
                free[r] -= needs[r, i]
                free_parts[r] -= parts[r, i]
            size -= 1
            for q in range(p, size):
                waiting[q] = waiting[q + 1]
        used += 1
    return used


@kernel
def _pack_vectors(items: Items, room: Room, target: int, bins: Int64) -> int:
    """:func:`pack_items` where a bin has more than one capacity."""
    n, resources = len(items.slots), 2 + len(room.limits)
    if n == 0:
        return 0
    needs, capacities = np.empty((resources, n), np.int64), np.empty(resources, np.int64)
    needs[0] = items.slots
    needs[1] = items.counts
    needs[2:] = items.amounts
    capacities[0], capacities[1] = room.capacity, min(room.max_sequences, items.counts.sum())
    capacities[2:] = room.limits
    # The largest items first, by their largest part of any capacity: late ones are small, and fit into what is left.
    largest = np.zeros(n, np.int64)
    # ``filled``: how many bins each resource fills by itself. Where one of them decides, the others weigh less.
    filled, most = np.zeros(resources), 0.0
    for r in range(resources):
        for i in range(n):
            largest[i] = max(largest[i], np.int64(needs[r, i] * (_PARTS / capacities[r])))
            filled[r] += needs[r, i]
        filled[r] /= capacities[r]
        most = max(most, filled[r])
    order = falling_order(largest)
    sorted_needs = needs[:, order].copy()
    used, at = n + 1, np.empty(n, np.int64)
    for power in (1, 4, 0):
        weights = np.empty(resources, np.int64)
        for r in range(resources):
            weight = 256.0
            for _ in range(power):
                weight *= filled[r] / max(most, 1e-9)
            weights[r] = max(1, np.int64(weight))
        if room.max_sequences >= items.counts.sum():
            weights[1] = 0  # any number of sequences fits
        found = _fill_with_closest(sorted_needs, capacities, weights, at)
        if found < used:
            used = found
            bins[order] = at
        if used <= target:
            break
    return used


@kernel
def pack_items(items: Items, room: Room, target: int, bins: Int64) -> int:
    """Pack items into few bins: best-fit decreasing, then bin completion where that took more than ``target``.

    Args:
        items: by falling slots; their costs do not matter.
        room: what a bin can hold.
        target: number of bins that is good enough, for example a lower bound.
        bins [items]: receives the bin of each item.

    Returns the number of bins, which may be above ``target``.
    """
    if len(room.limits):
        return _pack_vectors(items, room, target, bins)
    slots, counts = items.slots, items.counts
    n = len(slots)
    if room.capacity > _FINEST:
        # Sizes round up and the capacity down, so what fits in units fits in slots too: of a capacity of 10 million, in
        # units of 3, an item of 10 slots takes 4.
        unit = -(-room.capacity // _FINEST)
        room = Room(room.capacity // unit, room.max_sequences, room.limits)
        slots = np.minimum(-(-slots // unit), room.capacity)
    used = best_fit(slots, counts, room, bins)
    # Completion works on a histogram of sizes > 0: it cannot tell an item of two sequences from one of the same size
    # with one, and size 0 is in no set.
    single = True
    for i in range(n):
        single = single and counts[i] == 1 and slots[i] > 0
    if used <= target or not single:
        return used
    other = np.empty(n, np.int64)
    # A narrow search first. The wide one only where it is needed, and not above 20,000 items, where it is slow.
    for width, budget in ((3, 32), (6, 400)):
        if used > target and (width == 3 or n <= 20000):
            fewer = complete(slots, room, width, budget, used, other)
            if fewer < used:
                used = fewer
                bins[:] = other
    return used
