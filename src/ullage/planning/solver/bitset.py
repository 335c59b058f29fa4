"""A set of small integers that finds the next and the previous member in a few steps.

Bits of a flat uint64 array in four levels: a bit of a level says whether the word of 64 below it is not empty, so a
search climbs until it meets a word that is not empty and then descends. 16 million values take four levels.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ullage.layout import Int64
from ullage.planning.solver.compiled import kernel

Words = npt.NDArray[np.uint64]
#: The words of all levels, and where each level begins among them.
Bitset = tuple[Words, Int64]
LEVELS = 4
LIMIT = 64**LEVELS

# Every operand is uint64: together with an int64 number numpy and numba would compute in float64.
_ONE = np.uint64(1)
_PAIRS, _FOURS, _EIGHTS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES = np.uint64(0x0101010101010101)


@kernel
def _count(word: np.uint64) -> int:
    # Population count: sums of 1-bit fields in 2 bits, of those in 4 and in 8; the multiplication adds up the 8 bytes
    # in the highest one.
    word = word - ((word >> _ONE) & _PAIRS)
    word = (word & _FOURS) + ((word >> np.uint64(2)) & _FOURS)
    word = (word + (word >> np.uint64(4))) & _EIGHTS
    return np.int64((word * _BYTES) >> np.uint64(56))


@kernel
def _lowest(word: np.uint64) -> int:
    # ``w & -w`` is the lowest set bit alone; minus one, it has as many bits as there are zeros below it.
    return _count((word & (~word + _ONE)) - _ONE)


@kernel
def _highest(word: np.uint64) -> int:
    # Set every bit below the highest one; their number is then its position plus one.
    for shift in (1, 2, 4, 8, 16, 32):
        word |= word >> np.uint64(shift)
    return _count(word) - 1


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
def contains(members: Bitset, value: int) -> bool:
    words, _ = members
    return (words[value >> 6] >> np.uint64(value & 63)) & _ONE != 0


@kernel
def next_member(members: Bitset, value: int) -> int:
    """The least member >= ``value`` >= 0, or −1."""
    words, offsets = members
    for level in range(LEVELS):
        # Climb: is there a bit at or after ``value`` in the rest of its word?
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


@kernel
def previous_member(members: Bitset, value: int) -> int:
    """The greatest member <= ``value``, or −1; ``value`` may be negative but not above the limit."""
    words, offsets = members
    for level in range(LEVELS):
        if value < 0:
            return -1
        k = value >> 6
        # Climb as in :func:`next_member`, with the bits above ``value`` shifted out of the word.
        word = words[offsets[level] + k] << np.uint64(63 - (value & 63))
        if word:
            # Descend by the highest bit of each word.
            value -= 63 - _highest(word)
            for below in range(level - 1, -1, -1):
                value = (value << 6) + _highest(words[offsets[below] + value])
            return value
        value = k - 1
    return -1
