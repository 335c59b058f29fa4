"""A whole dataset packed into bins, without ranks or steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.layout import Int64, Integers, as_lengths
from ullage.planning.bounds import bin_bound
from ullage.planning.request import as_positive, refuse_oversize


class PackedBins(NamedTuple):
    """Bin *k* holds the sequences ``ids[cu_ids[k]:cu_ids[k + 1]]``, in the dataset's order. Both int64."""

    ids: Int64
    cu_ids: Int64

    @property
    def num_bins(self) -> int:
        """How many bins there are; none is empty."""
        return len(self.cu_ids) - 1


def pack_lengths(lengths: Integers, capacity: int) -> PackedBins:
    """Packs sequences of ``lengths`` [n] tokens into as few bins of ``capacity`` tokens as can be found quickly.

    Every sequence is in exactly one bin and no bin is over ``capacity``. Deterministic; time and memory grow with n and
    the capacity, a million sequences take a fraction of a second. Raises ``InputError`` for lengths that are not
    integers >= 0, and for a sequence above ``capacity``.

    >>> ids, cu_ids = pack_lengths([5, 3, 4, 4], capacity=8)
    >>> ids.tolist(), cu_ids.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    """
    from ullage.planning.ordering import falling_order, rows
    from ullage.planning.packing import pack

    given, capacity = as_lengths(lengths), as_positive(capacity, "capacity")
    refuse_oversize(given, capacity, 1)
    order = falling_order(given)
    packed = np.empty(len(given), np.int64)
    ones = np.ones(len(given), np.int64)
    used = pack(given[order], ones, capacity, len(given) + 1, bin_bound(given, capacity), packed)
    bins = np.empty(len(given), np.int64)
    bins[order] = packed
    return PackedBins(*rows(bins, used))
