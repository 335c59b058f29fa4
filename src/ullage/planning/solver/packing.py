"""Sequences into bins, as full as they go.

Best-fit decreasing over residual capacities kept in a bitset: the next residual that holds an item is found in a few
steps, and items of one size are placed together, so a million items of a few thousand sizes take milliseconds.

Source: best-fit decreasing, D. S. Johnson, "Near-optimal bin packing algorithms", MIT 1973.

Where a bin has more than one capacity, no residual says by itself what fits. Bins are then filled one after the other,
each with the item that comes closest to what it has left of every resource.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import compiled_from, kernel
from ullage.planning.solver.items import Bitset, Items, Room, Table, add, empty_set, falling_order, next_member, remove

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
    """Pack items into few bins by best-fit decreasing.

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
    if room.capacity > _FINEST:
        # Sizes round up and the capacity down, so what fits in units fits in slots too: of a capacity of 10 million, in
        # units of 3, an item of 10 slots takes 4.
        unit = -(-room.capacity // _FINEST)
        room = Room(room.capacity // unit, room.max_sequences, room.limits)
        slots = np.minimum(-(-slots // unit), room.capacity)
    return best_fit(slots, counts, room, bins)
