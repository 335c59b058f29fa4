"""The critical path that list scheduling reaches where every sequence has a degree of its own inside a microbatch.

An engine that can change its process group from sequence to sequence could run such a schedule. The plan gives one
degree to a block of ranks for a whole microbatch; the difference is what it gives up.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.context import TOLERANCES, allowed_share, longest_path, needed_levels
from ullage.planning.solver.items import SharedItems
from ullage.planning.solver.ordering import falling_order


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
