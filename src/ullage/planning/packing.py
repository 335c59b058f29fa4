"""Sequences into bins, as full as they go.

Best-fit decreasing over residual capacities kept in a bitset: the next residual that holds an item is found in a few
steps, and items of one size are placed together, so a million items of a few thousand sizes take milliseconds. Where
the result is above the L2 bound, a bounded completion tries to do better: the largest item opens a bin, and a
depth-first search over the histogram of sizes, which knows at once whether one or two items fill the rest exactly,
looks for the fullest bin; a filling found once is repeated as often as the histogram allows.

Sources: best-fit decreasing, D. S. Johnson, "Near-optimal bin packing algorithms", MIT 1973; bin completion,
R. Korf, "A new algorithm for optimal bin packing", AAAI 2002.
"""

from __future__ import annotations

import numpy as np
from numba import int64, void

from ullage.planning.bitset import BITSET, add, contains, empty_set, next_member, previous_member, remove
from ullage.planning.compiled import kernel
from ullage.planning.ordering import ARRAY

#: Sizes above this are packed in coarser units, rounded up, so that memory does not grow with the capacity.
_FINEST = 1 << 22


@kernel(int64(BITSET, ARRAY, ARRAY, ARRAY, int64, int64))
def _roomier(residuals, head, following, crowd, room, most):
    """The least residual >= ``room`` with a bin of at most ``most`` sequences, that bin moved to the head, or −1."""
    while room >= 0:
        before, k = -1, head[room]
        while k >= 0:
            if crowd[k] <= most:
                if before >= 0:
                    following[before] = following[k]
                    following[k] = head[room]
                    head[room] = k
                return room
            before, k = k, following[k]
        room = next_member(residuals, room + 1) if room + 1 < len(head) else -1
    return -1


@kernel(int64(ARRAY, ARRAY, int64, int64, ARRAY))
def best_fit(slots, counts, capacity, limit, bins):
    """Best-fit decreasing of ``slots`` (falling) into bins of ``capacity`` and at most ``limit`` sequences.

    Fills ``bins`` [n] with the bin of each item and returns how many bins there are.
    """
    n = len(slots)
    residuals = empty_set(capacity)
    head = np.full(capacity + 1, -1, np.int64)
    following = np.empty(n + 1, np.int64)
    crowd = np.zeros(n + 1, np.int64)
    used = 0
    for i in range(n):
        slot = slots[i]
        room = next_member(residuals, slot)
        if room >= 0 and crowd[head[room]] + counts[i] > limit:
            room = _roomier(residuals, head, following, crowd, room, limit - counts[i])
        if room < 0:
            k, room = used, capacity
            used += 1
        else:
            k = head[room]
            head[room] = following[k]
            if head[room] < 0:
                remove(residuals, room)
        bins[i] = k
        crowd[k] += counts[i]
        room -= slot
        if crowd[k] < limit:
            following[k] = head[room]
            if head[room] < 0:
                add(residuals, room)
            head[room] = k
    return used


@kernel(void(BITSET, ARRAY, int64))
def _take(sizes, available, size):
    available[size] -= 1
    if available[size] == 0:
        remove(sizes, size)


@kernel(void(BITSET, ARRAY, int64))
def _put(sizes, available, size):
    if available[size] == 0:
        add(sizes, size)
    available[size] += 1


@kernel(int64(BITSET, ARRAY, int64, int64, int64))
def _pair(sizes, available, room, most, least):
    """The larger of two available sizes that fill ``room`` exactly, none above ``most``, or −1."""
    size = previous_member(sizes, min(room - least, most)) if room <= 2 * most else -1
    for _ in range(48):
        if size < 0 or 2 * size < room:
            return -1
        other = room - size
        if contains(sizes, other) and (other != size or available[size] > 1):
            return size
        size = previous_member(sizes, size - 1)
    return -1


@kernel(int64(BITSET, ARRAY, ARRAY, ARRAY, ARRAY, int64, int64, int64, int64))
def _fullest(sizes, available, chosen, stack, tried, capacity, limit, width, budget):
    """The fullest bin that the depth-first search finds around the largest size left.

    ``sizes``: the sizes of which ``available`` is positive. Writes the filling, sizes falling, to ``chosen`` and
    returns how many they are. ``width``: sizes tried at each depth; ``budget``: tries beyond the first at each.
    """
    least = next_member(sizes, 1)
    largest = previous_member(sizes, capacity)
    stack[0] = largest
    _take(sizes, available, largest)
    depth, room = 1, capacity - largest
    best, count = capacity + 1, 0
    while True:
        top = min(room, stack[depth - 1])
        size = -1
        if room < least or depth >= limit:
            pass
        elif room <= stack[depth - 1] and contains(sizes, room):
            stack[depth] = room
            best, count = 0, depth + 1
            chosen[:count] = stack[:count]
            break
        else:
            pair = _pair(sizes, available, room, stack[depth - 1], least) if depth + 2 <= limit else -1
            if pair >= 0:
                stack[depth], stack[depth + 1] = pair, room - pair
                best, count = 0, depth + 2
                chosen[:count] = stack[:count]
                break
            size = previous_member(sizes, top)
        if size < 0:
            if room < best:
                best, count = room, depth
                chosen[:count] = stack[:count]
            if room == 0:
                break
            size = -1
            while depth > 1:  # go back to a depth that has another size to try
                depth -= 1
                last = stack[depth]
                _put(sizes, available, last)
                room += last
                near = room <= 4 * stack[depth - 1]
                if near and tried[depth] < width and budget > 0:
                    size = previous_member(sizes, last - 1)
                    if size >= 0:
                        tried[depth] += 1
                        budget -= 1
                        break
            if size < 0:
                depth = 1
                break
        else:
            tried[depth] = 1
        stack[depth] = size
        _take(sizes, available, size)
        room -= size
        depth += 1
    while depth > 0:
        depth -= 1
        _put(sizes, available, stack[depth])
    return count


@kernel(int64(ARRAY, int64, int64, int64, int64, int64, ARRAY))
def complete(slots, capacity, limit, width, budget, enough, bins):
    """Bin completion of ``slots`` (falling): fills ``bins`` and returns how many there are, or ``len(slots) + 1`` as
    soon as they reach ``enough`` with items left."""
    n = len(slots)
    sizes = empty_set(capacity)
    available = np.zeros(capacity + 1, np.int64)
    first = np.zeros(capacity + 1, np.int64)
    left = n
    for i in range(n - 1, -1, -1):
        if available[slots[i]] == 0:
            add(sizes, slots[i])
        available[slots[i]] += 1
        first[slots[i]] = i
    longest = min(n, limit) + 2
    chosen, stack, tried = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    used = 0
    while left:
        count = _fullest(sizes, available, chosen, stack, tried, capacity, limit, width, budget)
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
        if used >= enough and left:
            return n + 1
    return used


@kernel(int64(ARRAY, ARRAY, int64, int64, int64, ARRAY))
def pack(slots, counts, capacity, limit, target, bins):
    """Packs ``slots`` (falling) and returns the number of bins; tries harder until ``target`` bins are enough."""
    n = len(slots)
    if capacity > _FINEST:
        unit = -(-capacity // _FINEST)
        capacity = capacity // unit
        slots = np.minimum(-(-slots // unit), capacity)
    used = best_fit(slots, counts, capacity, limit, bins)
    single = True
    for i in range(n):
        single = single and counts[i] == 1 and slots[i] > 0
    if used <= target or not single:
        return used
    other = np.empty(n, np.int64)
    for width, budget in ((3, 32), (6, 400)):
        if used > target and (width == 3 or n <= 20000):
            fewer = complete(slots, capacity, limit, width, budget, used, other)
            if fewer < used:
                used = fewer
                bins[:] = other
    return used
