"""Improvement: pairs of bins divide their items again until each microbatch is level.

Each round sorts the bins by cost and cuts them into microbatches, gives every microbatch a *goal* (what its bins should
cost), and pairs the bin that is farthest above its goal with the one farthest below, the second with the second, and so
on; a pair divides its items so that both end as close to their goals as the capacity allows. In the first rounds all
microbatches have one goal: the critical path to reach, divided by the number of microbatches. Microbatches that hold
an item more expensive than that are the exception: their goal is the item's cost, and the others share what is left of
the path. Later rounds aim at each microbatch's own mean, and shift the pairing.

Source: pairwise differencing, Karmarkar and Karp, "The differencing method of set partitioning", Berkeley 1982, with
the capacity as a constraint.

Two bins divide their items again so that the first ends as close to a target cost as its room allows. Few items: every
division, in Gray code, so that each step moves one item. More: the best exchange of one item for another, or for none,
found in one pass over both sorted bins, again and again.
"""

# numpy's type stubs do not know that an int64 number is an int to numba.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.solver.compiled import compiled_from, kernel
from ullage.planning.solver.critical import critical_path
from ullage.planning.solver.items import Bins, Items, Room, falling_order

#: Pairs of up to this many items try every division.
EXHAUSTIVE = 9
#: Exchanges tried on one pair.
_EXCHANGES = 6


@kernel
def link(items: Items, bins: Bins, head: Int64, following: Int64) -> None:
    """Lists the items of each bin by falling cost."""
    head[:] = -1
    # Items are numbered by falling cost, so pushing them from the last to the first leaves every list in that order.
    for i in range(len(bins.home) - 1, -1, -1):
        k = bins.home[i]
        following[i] = head[k]
        head[k] = i


@kernel
def _gather(head: Int64, following: Int64, k: int, pool: Int64) -> int:
    """Writes the items of bin ``k`` to ``pool`` and returns how many they are."""
    size, i = 0, head[k]
    while i >= 0:
        pool[size] = i
        size += 1
        i = following[i]
    return size


def _each_division(items: Items, pool: Int64, size: int, room: Room, target: int, closer: int) -> int:
    """:func:`_every_division`, one division after the other."""
    # The second part is the whole without the first, so the sums over all items bound it.
    held_all, sequences_all = 0, 0
    for j in range(size):
        held_all += items.slots[pool[j]]
        sequences_all += items.counts[pool[j]]
    resources = len(room.limits)
    amounts, amounts_all = np.zeros(resources, np.int64), np.zeros(resources, np.int64)
    for r in range(resources):
        for j in range(size):
            amounts_all[r] += items.amounts[r, pool[j]]
    found = -1
    cost, held, num_sequences, mask = 0, 0, 0, 0
    for step in range(1, 1 << size):
        # Steps 1, 2, 3, 4 are the masks 0b001, 0b011, 0b010, 0b110.
        # Gray code: the lowest set bit of ``step`` is the one item that changes sides, and the sums of the first part
        # change by that item alone.
        j = 0
        while not (step >> j) & 1:
            j += 1
        i = pool[j]
        mask ^= 1 << j
        sign = 1 if (mask >> j) & 1 else -1
        cost += sign * items.costs[i]
        held += sign * items.slots[i]
        num_sequences += sign * items.counts[i]
        fits = True
        for r in range(resources):
            amounts[r] += sign * items.amounts[r, i]
            fits = fits and amounts[r] <= room.limits[r] and amounts_all[r] - amounts[r] <= room.limits[r]
        if (
            fits
            and abs(cost - target) < closer
            and held <= room.capacity
            and held_all - held <= room.capacity
            and num_sequences <= room.max_sequences
            and sequences_all - num_sequences <= room.max_sequences
        ):
            closer = abs(cost - target)
            found = mask
    return found


#: The masks of :func:`_each_division` in its order, without the empty one, and their bits [masks, items].
_MASKS = np.arange(1, 1 << EXHAUSTIVE) ^ (np.arange(1, 1 << EXHAUSTIVE) >> 1)
_BITS = (_MASKS[:, None] >> np.arange(EXHAUSTIVE)) & 1


@compiled_from(_each_division)
def _every_division(items: Items, pool: Int64, size: int, room: Room, target: int, closer: int) -> int:
    """The items of the part that costs closest to ``target``, as a bit mask of ``pool[:size]``, both parts within
    ``room``.

    −1 if none is closer than ``closer``.
    """
    # The Gray code of fewer items is the beginning of that of more items.
    mine = pool[:size]
    values = np.stack((items.costs[mine], items.slots[mine], items.counts[mine]), axis=1)
    cost, held, num_sequences = (_BITS[: (1 << size) - 1, :size] @ values).T
    held_all, sequences_all = values[:, 1].sum(), values[:, 2].sum()
    fits = (held <= room.capacity) & (held_all - held <= room.capacity)
    fits &= (num_sequences <= room.max_sequences) & (sequences_all - num_sequences <= room.max_sequences)
    for limit, amounts in zip(room.limits, items.amounts[:, mine]):
        part = _BITS[: (1 << size) - 1, :size] @ amounts
        fits &= (part <= limit) & (amounts.sum() - part <= limit)
    # The first of those that are equally close counts, as it does one after the other.
    away = np.where(fits, np.abs(cost - target), closer)
    if not len(away) or away.min() >= closer:
        return -1
    return _MASKS[away.argmin()]


@kernel
def _allowed(items: Items, bins: Bins, room: Room, a: int, b: int, i: int, j: int) -> bool:
    """Whether bins ``a`` and ``b`` can hold one another's items ``i`` of ``a`` and ``j`` of ``b`` (−1: none)."""
    slots, count = items.slots[i], items.counts[i]
    if j >= 0:
        slots -= items.slots[j]
        count -= items.counts[j]
    for r in range(len(room.limits)):
        amount = items.amounts[r, i] - (items.amounts[r, j] if j >= 0 else 0)
        if bins.amounts[r, b] + amount > room.limits[r] or bins.amounts[r, a] - amount > room.limits[r]:
            return False
    return (
        bins.held[b] + slots <= room.capacity
        and bins.held[a] - slots <= room.capacity
        and bins.num_sequences[b] + count <= room.max_sequences
        and bins.num_sequences[a] - count <= room.max_sequences
    )


@kernel
def _best_exchange(
    items: Items,
    bins: Bins,
    room: Room,
    a: int,
    b: int,
    ours: Int64,
    size_a: int,
    theirs: Int64,
    size_b: int,
    surplus: int,
    closer: int,
) -> int:
    """The exchange that moves a cost closest to ``surplus`` > 0 from bin ``a`` to bin ``b``.

    ``ours[:size_a]``, ``theirs[:size_b]``: the items of ``a`` and of ``b``, by falling cost. ``closer``: the distance
    from ``surplus`` that an exchange must be below.

    Returns ``place in ours · (size_b + 1) + place in theirs``, the latter ``size_b`` for no item, or −1 without such an
    exchange.
    """
    found, at = -1, 0
    for p in range(size_a):
        # Without a partner the exchange moves all of the item's cost.
        cost = items.costs[ours[p]]
        if abs(cost - surplus) < closer and _allowed(items, bins, room, a, b, ours[p], -1):
            closer = abs(cost - surplus)
            found = p * (size_b + 1) + size_b
        # Both costs fall, so the partner that comes closest only moves on. To move 3, an 8 is exchanged for about a 5.
        while at < size_b and cost - items.costs[theirs[at]] < surplus:
            at += 1
        # The two partners on either side of the best cost, in case the closest one is not allowed by the room.
        for q in range(max(0, at - 2), min(size_b, at + 2)):
            away = abs(cost - items.costs[theirs[q]] - surplus)
            if away < closer and _allowed(items, bins, room, a, b, ours[p], theirs[q]):
                closer = away
                found = p * (size_b + 1) + q
        if closer == 0:
            break
    return found


@kernel
def _replace(pool: Int64, size: int, out: int, into: int) -> int:
    """Takes place ``out`` (−1: none) from ``pool[:size]`` and puts item ``into`` (−1: none) at its place in order."""
    # The number of an item is its place by falling cost, so sorting by number is sorting by cost.
    if out >= 0:
        for j in range(out, size - 1):
            pool[j] = pool[j + 1]
        size -= 1
    if into >= 0:
        j = size
        while j > 0 and pool[j - 1] > into:
            pool[j] = pool[j - 1]
            j -= 1
        pool[j] = into
        size += 1
    return size


@kernel
def _settle(items: Items, bins: Bins, head: Int64, following: Int64, k: int, pool: Int64, size: int) -> int:
    """Makes ``pool[:size]`` the items of bin ``k``."""
    load, held, num_sequences = 0, 0, 0
    head[k] = pool[0] if size else -1
    for j in range(size):
        i = pool[j]
        bins.home[i] = k
        load += items.costs[i]
        held += items.slots[i]
        num_sequences += items.counts[i]
        following[i] = pool[j + 1] if j + 1 < size else -1
    bins.load[k], bins.held[k], bins.num_sequences[k] = load, held, num_sequences
    for r in range(len(items.amounts)):
        bins.amounts[r, k] = 0
        for j in range(size):
            bins.amounts[r, k] += items.amounts[r, pool[j]]
    return load


@kernel
def divide(
    items: Items,
    bins: Bins,
    room: Room,
    head: Int64,
    following: Int64,
    a: int,
    b: int,
    target: int,
    ours: Int64,
    theirs: Int64,
) -> int:
    """Divide the items of bins ``a`` and ``b`` again, so that ``a`` costs as close to ``target`` as it can.

    Args:
        items: sorted by falling cost.
        bins: receives the new homes and sums of both bins.
        room: what a bin can hold.
        head [bins], following [items]: the items of each bin as a linked list, by falling cost; kept up to date.
        a, b: the two bins.
        target: the cost that ``a`` should have.
        ours, theirs [items]: work arrays.

    Returns the operations spent, negative if nothing changed.
    """
    size_a, size_b = _gather(head, following, a, ours), _gather(head, following, b, theirs)
    away = abs(bins.load[a] - target)
    size = size_a + size_b
    # Few items: all 2^size divisions are tried. Both lists become one, still by falling cost, so that a division is a
    # bit mask and both parts come out sorted.
    if size <= EXHAUSTIVE:
        for j in range(size_b):
            _replace(ours, size_a + j, -1, theirs[j])
        mask = _every_division(items, ours, size, room, target, away)
        if mask < 0:
            return -(1 << size)
        # ``ours`` is read and written in one pass: what is written never overtakes what is read.
        size_a, size_b = 0, 0
        for j in range(size):
            i = ours[j]
            if (mask >> j) & 1:
                ours[size_a] = i
                size_a += 1
            else:
                theirs[size_b] = i
                size_b += 1
        _settle(items, bins, head, following, a, ours, size_a)
        _settle(items, bins, head, following, b, theirs, size_b)
        return 1 << size
    # Many items: the best single exchange, again and again. Each one leaves a smaller surplus for the next.
    spent = 0
    for tries in range(_EXCHANGES):
        surplus = bins.load[a] - target
        spent += 10 * size
        # The bin that costs too much gives, and an exchange must leave less than the surplus there is.
        if surplus > 0:
            found = _best_exchange(items, bins, room, a, b, ours, size_a, theirs, size_b, surplus, surplus)
            p, q = found // (size_b + 1), found % (size_b + 1)
        else:
            found = _best_exchange(items, bins, room, b, a, theirs, size_b, ours, size_a, -surplus, -surplus)
            q, p = found // (size_a + 1), found % (size_a + 1)
        if found < 0 or surplus == 0:
            return spent if tries else -spent
        # Exchange the two items, or move one where it has no partner, and keep both lists sorted.
        i, j = ours[p] if p < size_a else -1, theirs[q] if q < size_b else -1
        size_a = _replace(ours, size_a, p if i >= 0 else -1, j)
        size_b = _replace(theirs, size_b, q if j >= 0 else -1, i)
        _settle(items, bins, head, following, a, ours, size_a)
        _settle(items, bins, head, following, b, theirs, size_b)
        # Closer than this is no gain: pairs are only divided that are farther than 0.0002 of a goal apart.
        if abs(bins.load[a] - target) * 2000 < target:
            break
    return spent


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
    # A path of 30 over three microbatches is 10 each; an item of 16 locks the first, and 7 are left for each other.
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
    bins.amounts[:] = 0
    for i in range(len(bins.home)):
        k = bins.home[i]
        for r in range(len(items.amounts)):
            bins.amounts[r, k] += items.amounts[r, i]
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
        path = critical_path(bins.load, order, ranks)
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
            # Loads 12 and 6 with goals 10 and 6 end at 11 and 7, each 1 above.
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
