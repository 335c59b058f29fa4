"""Lower bounds that hold for every plan, so that a plan can be compared with what is possible.

Bins: Martello and Toth's L2 ("Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
Mathematics 28, 1990). For each threshold ``a`` up to half the capacity, items above ``capacity − a`` need a bin each,
items above half the capacity need a bin each too, and what the latter leave free is all that items of size ``a`` and
more can share. The plain ``ceil(Σ/capacity)`` is the case without big items and misleads where there are many.

An engine that can change its process group from sequence to sequence could run a schedule in which every sequence has a
degree of its own inside a microbatch; list scheduling tells its critical path. The plan gives one degree to a block of
ranks for a whole microbatch; the difference is what it gives up.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.placement import Placement, free_degrees, slots_of
from ullage.planning.solver.compiled import kernel, run
from ullage.planning.solver.context import TOLERANCES, allowed_share, longest_path, needed_levels
from ullage.planning.solver.critical import least_path
from ullage.planning.solver.items import SharedItems, falling_order


@kernel
def list_schedule(items: SharedItems, capacity: int, ranks: int, microbatches: int) -> int:
    """The critical path, in cost, if each item has its own degree: the most expensive first, each on the block of
    ranks, over all microbatches, that becomes least loaded. The best of the tolerances; −1 if none fits."""
    slots, costs, degrees = items.slots, items.costs, items.degrees
    n = slots.shape[1]
    order = falling_order(costs[0])
    mean = costs[0].sum() // (microbatches * ranks) + 1
    best = np.int64(-1)
    for tolerance in TOLERANCES:
        needed = needed_levels(items, capacity, allowed_share(mean, tolerance))
        if n and needed.min() < 0:
            return -1
        # Per rank of each microbatch. Widest items first, each on the aligned block that is free soonest and has the
        # memory.
        load, held = np.zeros(microbatches * ranks, np.int64), np.zeros(microbatches * ranks, np.int64)
        fits = True
        for e in range(slots.shape[0] - 1, -1, -1):
            width = degrees[e]
            for i in order:
                if needed[i] != e or not fits:
                    continue
                at, least = -1, 0
                each = -(-slots[e, i] // width)
                for microbatch in range(microbatches):
                    for begin in range(microbatch * ranks, (microbatch + 1) * ranks - width + 1, width):
                        # A shared item begins when the last rank of its block is ready.
                        high = load[begin : begin + width].max()
                        if (at < 0 or high < least) and held[begin : begin + width].max() + each <= capacity:
                            at, least = begin, high
                fits = at >= 0
                if fits:
                    for k in range(at, at + width):
                        # All ranks of the block wait for the slowest, so all end at the same height.
                        load[k] = least + costs[e, i] // width
                        held[k] += each
        if fits and (best < 0 or longest_path(load, ranks) < best):
            best = longest_path(load, ranks)
    return best


#: Sequences times bins above which the mixed path is not computed: it would take seconds.
_PATIENCE = 200_000_000


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
    # What the small items from the threshold up need beyond the room in those bins.
    shared = cumulated[half] - cumulated[first] - (paired * capacity - pair_total)
    bound = alone + paired + np.maximum(0, -(-shared // capacity))
    # The case without a threshold, and the plain sum, are bounds as well.
    return int(max(bound.max(initial=0), n - half, -(-int(cumulated[-1]) // capacity)))


def microbatches_for(bins: int, ranks: int, microbatch_multiple: int) -> int:
    """The least number of microbatches, a multiple of ``microbatch_multiple``, in which ``ranks`` have so many bins."""
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
    return microbatches_for(bins, plan.ranks, plan.microbatch_multiple)


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


def mixed_path(plan: Placement) -> float:
    """The critical path, as a ratio to the mean rank, that list scheduling reaches if each sequence may have a degree
    of its own inside one microbatch; infinite if degrees are all alike, or if finding out would take long."""
    n, bins = len(plan.order), plan.degrees.size
    if not np.any(plan.degrees != plan.degrees.max(initial=1)) or n * bins > _PATIENCE:
        return float("inf")
    lengths, costs = plan.lengths[plan.order], plan.costs[plan.order]
    # Slots and cost of each sequence at each degree from the plan's least one on, over all ranks that share it:
    # communication is paid by ``degree`` ranks, ``(degree − 1)/degree`` of it each.
    degrees = free_degrees(plan.ranks, min(plan.ranks, int(plan.degrees.min())))
    slots = np.array([slots_of(lengths, plan.pad_to_multiple_of, degree) for degree in degrees])
    work = np.array([costs + plan.communication * lengths * (degree - 1) for degree in degrees])
    items = SharedItems(slots, work, np.ones(n, np.int64), np.array(degrees))
    path = run(list_schedule, items, plan.capacity, plan.ranks, plan.num_microbatches, work=20 * n * bins)
    fixed = plan.per_microbatch * plan.num_microbatches
    return (path + fixed) / (int(costs.sum()) / plan.ranks + fixed) if path >= 0 and costs.any() else float("inf")
