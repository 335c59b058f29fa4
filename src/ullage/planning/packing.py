"""Sequences into bins, as full as they go."""

from __future__ import annotations

import numpy as np

from ullage.layout import Int64, Integers


def pack_dataset(lengths: Integers, capacity: int) -> tuple[Int64, Int64]:
    """Packs a whole dataset: ``(ids, cu_ids)``; bin *k* holds ``ids[cu_ids[k]:cu_ids[k + 1]]``."""
    from ullage.planning.planner import plan

    packed = plan(lengths, ranks=1, capacity=capacity)
    full = np.flatnonzero(np.diff(packed.offsets))
    return packed.order, np.append(packed.offsets[full], len(packed.order))
