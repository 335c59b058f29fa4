"""Lower bounds that hold for every plan, so that a plan can be compared with what is possible.

Bins: Martello and Toth's L2 ("Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
Mathematics 28, 1990). For each threshold ``a`` up to half the capacity, items above ``capacity − a`` need a bin each,
items above half the capacity need a bin each too, and what the latter leave free is all that items of size ``a`` and
more can share. The plain ``ceil(Σ/capacity)`` is the case without big items and misleads where there are many.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.placement import Placement, slots_of
from ullage.planning.solver.compiled import run
from ullage.planning.solver.critical import least_path
from ullage.planning.solver.items import falling_order


class PathBound(NamedTuple):
    """Least ratios to the mean rank that any plan of the same sequences can have."""

    critical_path: float
    rank_imbalance: float


def bin_bound(slots: Int64, capacity: int) -> int:
    """The least number of bins of ``capacity`` that can hold items of these sizes, in any order: the L2 bound."""
    # ``rising[:half]`` are the items up to half the capacity; no two of the others share a bin.
    rising = np.sort(slots)
    cumulated = np.concatenate(([0], np.cumsum(rising)))
    n = len(rising)
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    small = rising[:half]
    # Thresholds: the sizes > 0 up to half that occur. One between two of them gives no more than the next larger
    # size. ``first``: where each begins in ``rising``. All arrays below are per threshold.
    first = np.flatnonzero(np.concatenate((small[:1] > 0, small[1:] > small[:-1])))
    threshold = rising[first]
    # ``alone``: items too large to share a bin with one of the threshold. ``paired``: the other items above half,
    # each in a bin that has ``capacity − size`` left for small ones.
    alone = n - np.searchsorted(rising, capacity - threshold, side="right")
    paired = n - alone - half
    pair_total = cumulated[n - alone] - cumulated[half]
    # Slots [3, 3, 6, 8, 8] in bins of 10, for threshold 3: both 8 are alone, and 6 is paired and leaves 4. Of the small
    # ones, 6 together, 2 are left for one more bin: 4 bins, where the sum of 28 by itself gives 3.
    #
    # What the small items from the threshold up need beyond the room in those bins.
    shared = cumulated[half] - cumulated[first] - (paired * capacity - pair_total)
    bound = alone + paired + np.maximum(0, -(-shared // capacity))
    # The case without a threshold, and the plain sum, are bounds as well.
    return int(max(bound.max(initial=0), n - half, -(-int(cumulated[-1]) // capacity)))


def microbatches_for(bins: int, ranks: int, microbatch_multiple: int) -> int:
    """The least number of microbatches, a multiple of ``microbatch_multiple``, in which ``ranks`` have so many bins."""
    # 10 bins on 4 ranks, in multiples of 2: one round of 8 bins and another for the rest, which is 4 microbatches.
    return -(-bins // (ranks * microbatch_multiple)) * microbatch_multiple


def microbatch_bound(plan: Placement) -> int:
    """The least number of microbatches that can hold the placed sequences of this plan."""
    placed = plan.lengths[plan.order]
    slots = slots_of(placed, plan.pad_to_multiple_of)
    if np.any(plan.degrees > 1):  # a bin shared by d ranks holds d times as much: only the sum is left
        bins = -(-int(slots.sum()) // plan.capacity)
    else:
        bins = bin_bound(slots, plan.capacity)
    bins = max(bins, -(-len(placed) // plan.max_sequences))
    least = microbatches_for(bins, plan.ranks, plan.microbatch_multiple)
    return max([least, *(resource_bound(plan, name) for name in plan.limits)])


def resource_bound(plan: Placement, name: str) -> int:
    """The least number of microbatches whose capacity of this resource, one besides tokens, holds what is placed."""
    # Ranks that share a bin hold its items together, and have one capacity for them.
    blocks = plan.ranks // int(plan.degrees.min(initial=plan.ranks))
    bins = bin_bound(plan.amounts[name][plan.order], plan.capacities[name])
    return microbatches_for(bins, max(1, blocks), plan.microbatch_multiple)


def path_bound(plan: Placement) -> PathBound:
    """Least critical path and rank imbalance, as ratios to the mean rank, of any plan of these sequences in as many
    microbatches. Where ranks share microbatches as each needs, only perfect balance is a bound."""
    costs = plan.costs[plan.order]
    degree = int(plan.degrees.max(initial=1))
    # Where degrees differ or sharing costs communication, another plan may choose other degrees: only perfect balance
    # is a bound then.
    if not costs.any() or np.any(plan.degrees != degree) or (plan.communication and degree > 1):
        return PathBound(1.0, 1.0)
    # All ranks have one degree, so a block of ``degree`` ranks is one bin of ``degree`` times the capacity, and each
    # of its ranks does one ``degree``-th of the work.
    order = run(falling_order, costs, work=3 * len(costs))
    slots = slots_of(plan.lengths[plan.order][order], plan.pad_to_multiple_of, degree)
    num_blocks = plan.ranks // degree
    # What every rank pays per microbatch, whatever it holds: it is in the path, and in the mean rank.
    fixed = plan.per_microbatch * plan.num_microbatches
    ideal = int(costs.sum()) / plan.ranks + fixed
    capacity = min(plan.capacity * degree, 4 * int(slots.sum()) + 1)  # its multiples stay within 64 bits
    leaders = run(least_path, slots, costs[order], capacity, num_blocks, work=3 * len(costs))
    path = leaders / degree + fixed
    # The rank that runs the most expensive sequence runs at least that.
    most_expensive = int(costs.max()) / degree + fixed
    return PathBound(max(1.0, path / ideal), max(1.0, most_expensive / ideal))
