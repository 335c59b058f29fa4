"""A whole dataset packed into bins, without ranks or steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.core.errors import require_int
from ullage.core.layout import Int64, Integers, as_lengths
from ullage.planning.bounds import bin_bound
from ullage.planning.placement import NO_LIMIT
from ullage.planning.request import refuse_oversize
from ullage.planning.solver.compiled import run
from ullage.planning.solver.items import Room, falling_order, rows
from ullage.planning.solver.packing import pack_items


class PackedBins(NamedTuple):
    """Bins in compressed rows: bin *k* holds the sequences ``ids[cu_ids[k]:cu_ids[k + 1]]``, in the dataset's order.

    Attributes:
        ids [n]: ids of the sequences, bin by bin, int64.
        cu_ids [num_bins + 1]: where each bin begins in ``ids``, int64.
    """

    ids: Int64
    cu_ids: Int64

    @property
    def num_bins(self) -> int:
        """Number of bins, each of which holds a sequence."""
        return len(self.cu_ids) - 1


def pack_lengths(lengths: Integers, capacity: int) -> PackedBins:
    """Pack sequences of ``lengths`` [n] tokens into as few bins of ``capacity`` tokens as can be found quickly.

    Every sequence is in exactly one bin and no bin is over ``capacity``. Deterministic; time and memory grow with n and
    the capacity, a million sequences take a fraction of a second. Raises ``InputError`` for lengths that are not
    integers >= 0, and for a sequence above ``capacity``.

    >>> ids, cu_ids = pack_lengths([5, 3, 4, 4], capacity=8)
    >>> ids.tolist(), cu_ids.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    """
    given, capacity = as_lengths(lengths), require_int(capacity, "capacity", least=1)
    refuse_oversize(given, capacity, 1)
    n = len(given)
    # Largest first, as packing wants them; each item is one sequence. The L2 bound tells when no better packing
    # exists.
    order = run(falling_order, given, work=3 * n)
    packed, ones = np.empty(n, np.int64), np.ones(n, np.int64)
    room, target = Room(capacity, NO_LIMIT), bin_bound(given, capacity)
    used = run(pack_items, given[order], ones, room, target, packed, work=50 * n)
    # From the order by size back to that of the dataset.
    bins = np.empty(n, np.int64)
    bins[order] = packed
    return PackedBins(*run(rows, bins, used, work=n))
