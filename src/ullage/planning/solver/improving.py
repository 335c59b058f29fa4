"""Improvement: pairs of bins divide their items again until each microbatch is level.

Each round sorts the bins by cost and cuts them into microbatches, gives every microbatch a *goal* (what its bins should
cost), and pairs the bin that is farthest above its goal with the one farthest below, the second with the second, and so
on; a pair divides its items so that both end as close to their goals as the capacity allows. In the first rounds all
microbatches have one goal: the critical path to reach, divided by the number of microbatches. Microbatches that hold
an item more expensive than that are the exception: their goal is the item's cost, and the others share what is left of
the path. Later rounds aim at each microbatch's own mean, and shift the pairing.

Source: pairwise differencing, Karmarkar and Karp, "The differencing method of set partitioning", Berkeley 1982, with
the capacity as a constraint.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
from __future__ import annotations

import numpy as np

from ullage.layout import Int64
from ullage.planning.solver.compiled import kernel
from ullage.planning.solver.critical import path_of
from ullage.planning.solver.dividing import divide, link
from ullage.planning.solver.items import Bins, Items, Room
from ullage.planning.solver.ordering import falling_order

#: A critical path this close to its bound is good enough.
GOOD = 1.0002
#: Rounds without any improvement before it stops.
_IDLE = 8


@kernel
def _set_goals(
    items: Items, bins: Bins, head: Int64, order: Int64, ranks: int, path: float, level: bool, goals: Int64
) -> None:
    """Compute the cost that each bin should have, so that the critical path becomes ``path``.

    Microbatches that hold an item more expensive than the others' level get its cost as their goal. The others get that
    level, or their own mean shifted so that the means add up to what ``path`` leaves for them.

    Args:
        items, bins: sorted by falling cost; where the items are.
        head [bins]: the most expensive item of each bin, −1 in an empty one.
        order [bins]: bins by falling cost; each run of ``ranks`` is a microbatch.
        ranks: bins of a microbatch.
        path: the critical path to reach, in cost.
        level: whether the other microbatches get one goal, and not their own means.
        goals [bins]: receives the goals.
    """
    microbatches = len(order) // ranks
    # ``highest``: the most expensive item of each microbatch, below which its path cannot come.
    locked, left = 0, path
    highest = np.zeros(microbatches, np.int64)
    for at in range(len(order)):
        if head[order[at]] >= 0:
            highest[at // ranks] = max(highest[at // ranks], items.costs[head[order[at]]])
    # A microbatch is locked if its most expensive item is above an equal share of the path that is left. Locking it
    # lowers the share of the others, so the next one is compared with what is left then.
    while locked < microbatches - 1 and highest[locked] * (microbatches - locked) > left:
        left -= highest[locked]
        locked += 1
    share = left / (microbatches - locked)
    # The mean bin of the microbatches that are not locked.
    total = 0.0
    for at in range(locked * ranks, len(order)):
        total += bins.load[order[at]]
    mean_all = total / (len(order) - locked * ranks)
    for microbatch in range(microbatches):
        goal = share
        if microbatch < locked:
            goal = float(highest[microbatch])
        # Keep the differences between microbatches, and shift them all so that their mean is ``share``.
        elif not level:
            mean = 0.0
            for at in range(microbatch * ranks, (microbatch + 1) * ranks):
                mean += bins.load[order[at]]
            goal = mean / ranks + share - mean_all
        for at in range(microbatch * ranks, (microbatch + 1) * ranks):
            goals[order[at]] = np.int64(goal)


@kernel
def _weigh(items: Items, bins: Bins) -> None:
    bins.load[:] = 0
    bins.held[:] = 0
    bins.num_sequences[:] = 0
    for i in range(len(bins.home)):
        k = bins.home[i]
        bins.load[k] += items.costs[i]
        bins.held[k] += items.slots[i]
        bins.num_sequences[k] += items.counts[i]


@kernel
def improve(items: Items, bins: Bins, room: Room, ranks: int, bound: float, rounds: int, budget: int) -> int:
    """Let pairs of bins divide their items again, in rounds, until the critical path is good or the budget is spent.

    Args:
        items: sorted by falling cost.
        bins: with every item in a bin; receives the best placement seen.
        room: what a bin can hold.
        ranks: bins of a microbatch.
        bound: a lower bound of the critical path; within ``GOOD`` of it nothing is improved any more.
        rounds: most rounds; it also ends after ``_IDLE`` rounds that gained nothing.
        budget: operations to spend; the last round may overdraw it.

    Returns the budget left.
    """
    n, count = len(items.costs), len(bins.load)
    head, following = np.empty(count, np.int64), np.empty(n, np.int64)
    ours, theirs = np.empty(n, np.int64), np.empty(n, np.int64)
    goals, deviation = np.empty(count, np.int64), np.empty(count, np.int64)
    link(items, bins, head, following)
    best_home = bins.home.copy()
    best = np.inf
    idle = 0
    for turn in range(rounds):
        # Bins have changed, so the microbatches are cut again. A round may make the path longer; the best one is kept.
        order = falling_order(bins.load)
        path = path_of(bins.load, order, ranks)
        if path < best * (1 - 1e-5):
            idle = 0
        if path < best:
            best = path
            best_home[:] = bins.home
        if best <= bound * GOOD or budget < 0:
            break
        # Four rounds with one goal for all microbatches, later ones with each microbatch's own mean.
        _set_goals(items, bins, head, order, ranks, bound, turn < 4, goals)
        least = 0
        for k in range(count):
            # Bins from the farthest above their goal to the farthest below; the sort takes no negative keys.
            deviation[k] = bins.load[k] - goals[k]
            least = min(least, deviation[k])
        by_deviation = falling_order(deviation - least)
        # The upper half is paired with the lower one from its end. Later rounds shift the pairing, because a pair
        # that could not divide better once cannot do so again.
        shift = max(0, turn - 4) % 7
        for at in range(count // 2):
            a = by_deviation[at]
            b = by_deviation[count - 1 - (at + shift) % (count - count // 2)]
            # Deviations shrink along the pairing, so the pairs after a level one are about as level.
            if deviation[a] - deviation[b] <= goals[a] * 0.0002:
                break
            # Both end equally far from their goals: ``a − goals[a] = b − goals[b]`` with the same sum.
            target = (bins.load[a] + bins.load[b] + goals[a] - goals[b]) // 2
            spent = divide(items, bins, room, head, following, a, b, target, ours, theirs)
            budget -= abs(spent)
        budget -= 8 * count
        idle += 1
        if idle > _IDLE:
            break
    # Back to the best placement; loads follow from it.
    bins.home[:] = best_home
    _weigh(items, bins)
    return budget
