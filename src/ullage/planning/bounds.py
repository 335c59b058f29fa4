"""Lower bounds that hold for every plan, so that a plan can say how far it is from the possible.

Bins: Martello and Toth's L2 ("Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
Mathematics 28, 1990). For each threshold ``a`` up to half the capacity, items above ``capacity − a`` need a bin each,
items above half the capacity need a bin each too, and what the latter leave free is all that items of size ``a`` and
more can share. The plain ``ceil(Σ/capacity)`` is the case without big items and misleads where there are many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ullage.layout import Int64

if TYPE_CHECKING:
    from ullage.planning.plan import Plan


class PathBound(NamedTuple):
    """Least ratios to the mean rank that any plan of the same sequences can have."""

    critical_path: float
    rank_imbalance: float


def bin_bound(slots: Int64, capacity: int) -> int:
    """Bins of ``capacity`` that items of these sizes need at the least: the L2 bound. ``slots``: any order."""
    rising = np.sort(slots)
    cumulated = np.concatenate(([0], np.cumsum(rising)))
    n = len(rising)
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    small = rising[:half]
    first = np.flatnonzero(np.concatenate((small[:1] > 0, small[1:] > small[:-1])))
    threshold = rising[first]
    alone = n - np.searchsorted(rising, capacity - threshold, side="right")
    paired = n - alone - half
    pair_total = cumulated[n - alone] - cumulated[half]
    shared = cumulated[half] - cumulated[first] - (paired * capacity - pair_total)
    bound = alone + paired + np.maximum(0, -(-shared // capacity))
    return int(max(bound.max(initial=0), n - half, -(-int(cumulated[-1]) // capacity)))


def microbatches_for(bins: int, ranks: int, multiple: int) -> int:
    """Microbatches a rank runs so that ``ranks`` of them offer this many bins, in multiples of ``multiple``."""
    return -(-bins // (ranks * multiple)) * multiple


def microbatch_bound(plan: Plan) -> int:
    """Microbatches a rank needs at the least for the placed sequences of this plan."""
    from ullage.planning.plan import slots_of

    placed = plan.lengths[plan.order]
    slots = slots_of(placed, plan.align)
    if np.any(plan.degrees > 1):  # a bin shared by d ranks holds d times as much: only the sum is left
        bins = -(-int(slots.sum()) // plan.capacity)
    else:
        bins = bin_bound(slots, plan.capacity)
    if plan.max_sequences:
        bins = max(bins, -(-len(placed) // plan.max_sequences))
    return microbatches_for(max(bins, min(1, len(placed))), plan.ranks, plan.microbatch_multiple)


def path_bound(plan: Plan) -> PathBound:
    """Least critical path and rank imbalance of any plan of these sequences, each on one rank unless shared here."""
    from ullage.planning.plan import slots_of

    costs = plan.costs[plan.order]
    total = int(costs.sum())
    if not total:
        return PathBound(1.0, 1.0)
    ideal = total / plan.ranks
    if np.any(plan.degrees > 1):
        return PathBound(1.0, 1.0)
    # Two items above half the capacity never share a bin, so every ranks-th of them starts a microbatch.
    big = 2 * slots_of(plan.lengths[plan.order], plan.align) > plan.capacity
    apart = np.sort(costs[big])[::-1][:: plan.ranks].sum()
    dearest = int(costs.max())
    return PathBound(max(1.0, dearest / ideal, int(apart) / ideal), max(1.0, dearest / ideal))
