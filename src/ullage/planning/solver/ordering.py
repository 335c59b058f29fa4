"""Stable sorts and compressed rows in linear time: least-significant-digit radix and counting sort.

numpy's stable sort of int64 compares; these count, which is several times faster at a million items and always the
same on every machine.
"""

from __future__ import annotations

import numpy as np

from ullage.layout import Int64
from ullage.planning.solver.compiled import kernel

#: Bits per pass of the radix sort: 2048 counters of 8 bytes.
_DIGIT = 11


@kernel
def falling_order(keys: Int64) -> Int64:
    """Indices that sort non-negative ``keys`` from high to low; equal keys stay in their order."""
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


@kernel
def rows(bins: Int64, count: int) -> tuple[Int64, Int64]:
    """Compressed rows of ``bins`` [n], each in ``0..count``: items bin by bin in their order, and where bins start."""
    # Counting sort: the number of items per bin, cumulated to where each bin begins.
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
