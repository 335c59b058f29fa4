"""Dividing the items of two bins anew, so that the first ends as close to a wished cost as its room allows.

Few items: every division, in Gray code, so that each step moves one item. More: the best exchange of one item for
another, or for none, found in one pass over both sorted bins, again and again.
"""

from __future__ import annotations

from numba import boolean, int64, void

from ullage.planning.compiled import kernel
from ullage.planning.ordering import ARRAY
from ullage.planning.placing import BINS, ITEMS, ROOM

#: Pairs of up to this many items try every division.
EXHAUSTIVE = 9
#: Exchanges tried on one pair.
_EXCHANGES = 6


@kernel(void(ITEMS, BINS, ARRAY, ARRAY))
def link(items, bins, head, following):
    """Lists the items of each bin by falling cost."""
    head[:] = -1
    for i in range(len(bins.home) - 1, -1, -1):
        k = bins.home[i]
        following[i] = head[k]
        head[k] = i


@kernel(int64(ARRAY, ARRAY, int64, ARRAY))
def _gather(head, following, k, pool):
    """Writes the items of bin ``k`` to ``pool`` and returns how many they are."""
    size, i = 0, head[k]
    while i >= 0:
        pool[size] = i
        size += 1
        i = following[i]
    return size


@kernel(int64(ITEMS, ARRAY, int64, ROOM, int64, int64))
def _every_division(items, pool, size, room, wish, closer):
    """The items of the part that costs closest to ``wish``, as a bit mask of ``pool[:size]``, both parts within
    ``room``.

    −1 if none is closer than ``closer``.
    """
    held_all, crowd_all = 0, 0
    for j in range(size):
        held_all += items.slots[pool[j]]
        crowd_all += items.counts[pool[j]]
    found = -1
    cost, held, crowd, mask = 0, 0, 0, 0
    for step in range(1, 1 << size):
        j = 0
        while not (step >> j) & 1:
            j += 1
        i = pool[j]
        mask ^= 1 << j
        sign = 1 if (mask >> j) & 1 else -1
        cost += sign * items.costs[i]
        held += sign * items.slots[i]
        crowd += sign * items.counts[i]
        if (
            abs(cost - wish) < closer
            and held <= room.capacity
            and held_all - held <= room.capacity
            and crowd <= room.sequences
            and crowd_all - crowd <= room.sequences
        ):
            closer = abs(cost - wish)
            found = mask
    return found


@kernel(boolean(ITEMS, BINS, ROOM, int64, int64, int64, int64))
def _allowed(items, bins, room, a, b, i, j):
    """Whether bins ``a`` and ``b`` can hold one another's items ``i`` of ``a`` and ``j`` of ``b`` (−1: none)."""
    slots, count = items.slots[i], items.counts[i]
    if j >= 0:
        slots -= items.slots[j]
        count -= items.counts[j]
    return (
        bins.held[b] + slots <= room.capacity
        and bins.held[a] - slots <= room.capacity
        and bins.crowd[b] + count <= room.sequences
        and bins.crowd[a] - count <= room.sequences
    )


@kernel(int64(ITEMS, BINS, ROOM, int64, int64, ARRAY, int64, ARRAY, int64, int64, int64))
def _best_exchange(items, bins, room, a, b, ours, size_a, theirs, size_b, surplus, closer):
    """The exchange that moves a cost closest to ``surplus`` > 0 from ``a`` to ``b``.

    ``ours[:size_a]`` and ``theirs[:size_b]`` are their items by falling cost. Returns ``place in ours · (size_b + 1) +
    place in theirs``, the latter ``size_b`` for none, or −1 if no exchange comes closer than ``closer``.
    """
    found, at = -1, 0
    for p in range(size_a):
        cost = items.costs[ours[p]]
        if abs(cost - surplus) < closer and _allowed(items, bins, room, a, b, ours[p], -1):
            closer = abs(cost - surplus)
            found = p * (size_b + 1) + size_b
        # Both costs fall, so the partner that comes closest only moves on.
        while at < size_b and cost - items.costs[theirs[at]] < surplus:
            at += 1
        for q in range(max(0, at - 2), min(size_b, at + 2)):
            away = abs(cost - items.costs[theirs[q]] - surplus)
            if away < closer and _allowed(items, bins, room, a, b, ours[p], theirs[q]):
                closer = away
                found = p * (size_b + 1) + q
        if closer == 0:
            break
    return found


@kernel(int64(ARRAY, int64, int64, int64))
def _replace(pool, size, out, into):
    """Takes place ``out`` (−1: none) from ``pool[:size]`` and puts item ``into`` (−1: none) at its place in order."""
    if out >= 0:
        for j in range(out, size - 1):
            pool[j] = pool[j + 1]
        size -= 1
    if into >= 0:
        j = size
        while j > 0 and pool[j - 1] > into:
            pool[j] = pool[j - 1]
            j -= 1
        pool[j] = into
        size += 1
    return size


@kernel(int64(ITEMS, BINS, ARRAY, ARRAY, int64, ARRAY, int64))
def _settle(items, bins, head, following, k, pool, size):
    """Makes ``pool[:size]`` the items of bin ``k``."""
    load, held, crowd = 0, 0, 0
    head[k] = pool[0] if size else -1
    for j in range(size):
        i = pool[j]
        bins.home[i] = k
        load += items.costs[i]
        held += items.slots[i]
        crowd += items.counts[i]
        following[i] = pool[j + 1] if j + 1 < size else -1
    bins.load[k], bins.held[k], bins.crowd[k] = load, held, crowd
    return load


@kernel(int64(ITEMS, BINS, ROOM, ARRAY, ARRAY, int64, int64, int64, ARRAY, ARRAY))
def divide(items, bins, room, head, following, a, b, wish, ours, theirs):
    """Divides the items of bins ``a`` and ``b`` anew so that ``a`` costs as close to ``wish`` as it can.

    ``head`` [bins] and ``following`` [n] list the items of each bin by falling cost; ``ours`` and ``theirs`` are room
    to work in. Returns the operations spent, negative if nothing changed.
    """
    size_a, size_b = _gather(head, following, a, ours), _gather(head, following, b, theirs)
    away = abs(bins.load[a] - wish)
    size = size_a + size_b
    if size <= EXHAUSTIVE:
        for j in range(size_b):
            _replace(ours, size_a + j, -1, theirs[j])
        mask = _every_division(items, ours, size, room, wish, away)
        if mask < 0:
            return -(1 << size)
        size_a, size_b = 0, 0
        for j in range(size):
            i = ours[j]
            if (mask >> j) & 1:
                ours[size_a] = i
                size_a += 1
            else:
                theirs[size_b] = i
                size_b += 1
        _settle(items, bins, head, following, a, ours, size_a)
        _settle(items, bins, head, following, b, theirs, size_b)
        return 1 << size
    spent = 0
    for tries in range(_EXCHANGES):
        surplus = bins.load[a] - wish
        spent += 10 * size
        if surplus > 0:
            found = _best_exchange(items, bins, room, a, b, ours, size_a, theirs, size_b, surplus, surplus)
            p, q = found // (size_b + 1), found % (size_b + 1)
        else:
            found = _best_exchange(items, bins, room, b, a, theirs, size_b, ours, size_a, -surplus, -surplus)
            q, p = found // (size_a + 1), found % (size_a + 1)
        if found < 0 or surplus == 0:
            return spent if tries else -spent
        i, j = ours[p] if p < size_a else -1, theirs[q] if q < size_b else -1
        size_a = _replace(ours, size_a, p if i >= 0 else -1, j)
        size_b = _replace(theirs, size_b, q if j >= 0 else -1, i)
        _settle(items, bins, head, following, a, ours, size_a)
        _settle(items, bins, head, following, b, theirs, size_b)
        if abs(bins.load[a] - wish) * 2000 < wish:
            break
    return spent
