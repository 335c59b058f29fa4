"""The data of the kernels: items, bins, and what a bin may hold.

Every array is a C-contiguous int64 array. Inside the solver an item is its place in ``Items``, a bin its place in
``Bins``.

Sorts are stable and linear in time, by least-significant-digit radix and by counting: numpy's stable sort of int64
compares; these count, which is several times faster at a million items and always the same on every machine.

A set of small integers finds the next and the previous member in a few steps: bits of a flat uint64 array in four
levels, where a bit of a level says whether the word of 64 below it is not empty. A search climbs until it meets a word
that is not empty and then descends. 16 million values take four levels.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import compiled_from, kernel

Words = npt.NDArray[np.uint64]
#: The words of all levels, and where each level begins among them.
Bitset = tuple[Words, Int64]
LEVELS = 4

# Every operand is uint64: together with an int64 number numpy and numba would compute in float64.
_ONE = np.uint64(1)
_PAIRS, _FOURS, _EIGHTS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES = np.uint64(0x0101010101010101)


@kernel
def _count(word: np.uint64) -> int:
    # Population count: sums of 1-bit fields in 2 bits, of those in 4 and in 8; the multiplication adds up the 8 bytes
    # in the highest one. Of 0b1101 the pairs have 0b10 and 0b01 bits, and the four have 0b0011.
    word = word - ((word >> _ONE) & _PAIRS)
    word = (word & _FOURS) + ((word >> np.uint64(2)) & _FOURS)
    word = (word + (word >> np.uint64(4))) & _EIGHTS
    return np.int64((word * _BYTES) >> np.uint64(56))


@kernel
def _lowest(word: np.uint64) -> int:
    # ``w & -w`` is the lowest set bit alone; minus one, it has as many bits as there are zeros below it. Of 0b1100 that
    # is 0b0100, and 0b0011 has two bits.
    return _count((word & (~word + _ONE)) - _ONE)


@kernel
def empty_set(limit: int) -> Bitset:
    """An empty set of integers in ``0..limit``."""
    offsets = np.zeros(LEVELS + 1, np.int64)
    size = limit + 1
    for level in range(LEVELS):
        # Words of this level: one bit for each value, or for each word of the level below.
        size = (size + 63) >> 6
        offsets[level + 1] = offsets[level] + size
    return np.zeros(offsets[LEVELS], np.uint64), offsets


@kernel
def add(members: Bitset, value: int) -> None:
    words, offsets = members
    for level in range(LEVELS):
        k = offsets[level] + (value >> 6)
        before = words[k]
        words[k] = before | (_ONE << np.uint64(value & 63))
        # The word had a member already, so the levels above have its bit.
        if before:
            return
        value >>= 6


@kernel
def remove(members: Bitset, value: int) -> None:
    words, offsets = members
    for level in range(LEVELS):
        k = offsets[level] + (value >> 6)
        words[k] &= ~(_ONE << np.uint64(value & 63))
        # The word still has a member, so the levels above keep its bit.
        if words[k]:
            return
        value >>= 6


@kernel
def next_member(members: Bitset, value: int) -> int:
    """The least member >= ``value`` >= 0, or −1."""
    words, offsets = members
    for level in range(LEVELS):
        # Climb: is there a bit at or after ``value`` in the rest of its word? 200 is bit 8 of word 3.
        k = value >> 6
        if k >= offsets[level + 1] - offsets[level]:
            return -1
        word = words[offsets[level] + k] >> np.uint64(value & 63)
        if word:
            # Descend: ``value`` is the number of a word of the level below; its lowest bit leads on.
            value += _lowest(word)
            for below in range(level - 1, -1, -1):
                value = (value << 6) + _lowest(words[offsets[below] + value])
            return value
        # Nothing in this word: the level above is searched from the next word on.
        value = k + 1
    return -1


#: Bits per pass of the radix sort: 2048 counters of 8 bytes.
_DIGIT = 11


def _radix_order(keys: Int64) -> Int64:
    """:func:`falling_order`, digit by digit."""
    n = len(keys)
    highest = 0
    for i in range(n):
        highest = max(highest, keys[i])
    order = np.arange(n)
    spare = np.empty(n, np.int64)
    # Short lists take fewer bits per pass: clearing 2048 counters would cost more than sorting the items.
    digit = 8 if n < 1024 else _DIGIT
    mask = (1 << digit) - 1
    shift = 0
    # For [0x102, 0x201, 0x101] of 8 bits a pass: [0, 1, 2] by the low digit, then [1, 0, 2] by the high one.
    # One pass per digit, the least significant first. Each pass is stable, so it keeps the order of the passes before
    # among equal digits. It ends with the last digit of the highest key, or of int64: a shift by 64 bits or more is
    # one by the remainder on some machines.
    while shift < 63 and highest >> shift:
        # Count digits, then cumulate: ``starts[d]`` is where bucket d begins. ``mask - digit`` numbers the buckets
        # from the highest digit down, which sorts from high to low without losing stability.
        starts = np.zeros(mask + 2, np.int64)
        for i in range(n):
            starts[mask - ((keys[i] >> shift) & mask) + 1] += 1
        for d in range(mask + 1):
            starts[d + 1] += starts[d]
        for j in range(n):
            i = order[j]
            d = mask - ((keys[i] >> shift) & mask)
            spare[starts[d]] = i
            starts[d] += 1
        order, spare = spare, order
        shift += digit
    return order


@compiled_from(_radix_order)
def falling_order(keys: Int64) -> Int64:
    """Indices that sort non-negative ``keys`` from high to low; equal keys stay in their order."""
    return np.argsort(-keys, kind="stable")


@kernel
def rows(bins: Int64, count: int) -> tuple[Int64, Int64]:
    """Compressed rows of ``bins`` [n], each in ``0..count``: items bin by bin in their order, and where bins start."""
    # Counting sort: the number of items per bin, cumulated to where each bin begins. For bins [1, 0, 1] the offsets
    # are [0, 1, 3], and the order is [1, 0, 2].
    offsets = np.zeros(count + 1, np.int64)
    for i in range(len(bins)):
        offsets[bins[i] + 1] += 1
    for k in range(count):
        offsets[k + 1] += offsets[k]
    # ``following[k]``: the next free place of bin k. Items are met in order, so they stay in it within a bin.
    following = offsets[:-1].copy()
    order = np.empty(len(bins), np.int64)
    for i in range(len(bins)):
        k = bins[i]
        order[following[k]] = i
        following[k] += 1
    return order, offsets


#: An int64 array of two dimensions.
Table = Annotated[Int64, 2]
#: The bin of an item that has none yet.
NOWHERE = -1


class Items(NamedTuple):
    """Items to place, in any order or sorted by falling cost, as the kernel says.

    Attributes:
        slots [items]: slots that each item takes.
        costs [items]: cost of each item, in the unit of the cost model.
        counts [items]: sequences in each item; 1 unless sequences are kept together.
        amounts [resources, items]: what each item takes of every resource besides slots, patches of images for example;
            without rows where slots are the only one.
    """

    slots: Int64
    costs: Int64
    counts: Int64
    amounts: Table


class SharedItems(NamedTuple):
    """Items that several ranks may share.

    Attributes:
        slots, costs [levels, items]: slots and cost of each item at each degree, summed over all ranks that share it.
        counts [items]: sequences in each item.
        degrees [levels]: number of ranks that share an item, rising from 1.
    """

    slots: Table
    costs: Table
    counts: Int64
    degrees: Int64


class Bins(NamedTuple):
    """Bins and the items in them. A kernel that moves an item keeps all arrays up to date.

    Attributes:
        home [items]: the bin of each item, or ``NOWHERE``.
        load [bins]: cost of the items in each bin.
        held [bins]: slots of the items in each bin.
        num_sequences [bins]: sequences of the items in each bin.
        amounts [resources, bins]: what the items in each bin take of every further resource.
    """

    home: Int64
    load: Int64
    held: Int64
    num_sequences: Int64
    amounts: Table


class Room(NamedTuple):
    """Capacity of a bin: slots, sequences (``NO_LIMIT`` if any number of them), and every further resource."""

    capacity: int
    max_sequences: int
    limits: Int64


@kernel
def subset(items: Items, order: Int64) -> Items:
    """The items ``order``, in that order."""
    # Copied to be contiguous, as compiled kernels require.
    return Items(items.slots[order], items.costs[order], items.counts[order], items.amounts[:, order].copy())


@kernel
def within_limits(items: Items, bins: Bins, room: Room, i: int, k: int) -> bool:
    """Whether bin ``k`` has room for item ``i`` in every resource besides slots and sequences."""
    for r in range(len(room.limits)):  # noqa: SIM110  numba compiles no generators
        if bins.amounts[r, k] + items.amounts[r, i] > room.limits[r]:
            return False
    return True
