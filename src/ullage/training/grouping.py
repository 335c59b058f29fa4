"""Groups of a step's samples, one per rank and accumulated batch, of nearly equal cost and none above a capacity.

*Padded* groups cost their number of rows times their longest row, so neighbours in length belong together: the rows
are sorted and cut into runs. A run that may cost at most ``T`` takes as many rows as ``T`` buys at its longest, which
needs the fewest runs of all; the least ``T`` for which they are enough is found by bisection. A row that alone costs
``T`` is put aside, and the others are cut again.

Groups *without padding* cost the sum of their rows. The planner gives each rank its rows, and then divides those among
its batches; where that leaves a group above the capacity, it plans with the capacity, or packs as few groups as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ullage.errors import InputError
from ullage.layout import Int64
from ullage.planning import TransformerCost, pack_lengths, plan
from ullage.planning.cost import Cost

#: Of a step: for each rank, for each of its batches, positions in the step.
Groups = list[list[Int64]]


@dataclass(frozen=True)
class Measure:
    """Size and cost of a group of samples.

    Attributes:
        padded: whether the group is padded to its longest sample.
        cost: of a row by its length.
    """

    padded: bool
    cost: Cost

    @classmethod
    def of(cls, cost: str | Cost, quadratic: float) -> Measure:
        """``"padded"``, ``"tokens"``, or a cost of a sequence, without padding. ``quadratic``: per squared token."""
        if callable(cost):
            return cls(False, cost)
        if cost not in ("padded", "tokens"):
            raise InputError("no such cost", expected="'padded', 'tokens' or a cost of lengths", found=repr(cost))
        # length + quadratic·length², in integers.
        return cls(cost == "padded", TransformerCost(linear=round(1 / quadratic), quadratic=1))

    def costs(self, lengths: Int64) -> np.ndarray:
        return np.asarray(self.cost(lengths), np.float64)

    def size_of(self, lengths: Int64) -> int:
        """Tokens in memory, padding included."""
        return int(len(lengths) * lengths.max(initial=0) if self.padded else lengths.sum())

    def cost_of(self, lengths: Int64) -> float:
        """Cost of a group of these lengths; 0.0 for none."""
        if not len(lengths):
            return 0.0
        return float(
            len(lengths) * self.costs(lengths.max(keepdims=True))[0] if self.padded else self.costs(lengths).sum()
        )


def fewest_groups(lengths: Int64, capacity: int, *, padded: bool) -> int:
    """The number of groups that hold these lengths within the capacity. Padded it is the least possible."""
    if not padded:
        return pack_lengths(lengths, capacity).num_bins
    longest_first = np.sort(lengths)[::-1]
    return len(_runs(longest_first, capacity // longest_first))


def grouped(lengths: Int64, ranks: int, slots: int, measure: Measure, capacity: int | None = None) -> Groups:
    """The groups of a step: ``slots`` for each of ``ranks``, none empty, the most expensive of a rank first.

    Raises ``InputError`` where they cannot hold it within the capacity.
    """
    count = ranks * slots
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    if measure.padded:
        made = [_padded(lengths, ranks, slots, measure, capacity, aside=aside) for aside in (True, False)]
        return min(made, key=lambda groups: most_expensive(groups, lengths, measure))
    by_rank = _planned(lengths, ranks, slots, measure, capacity)
    if by_rank is not None:
        return by_rank
    assert capacity is not None
    bins = pack_lengths(lengths, capacity)
    _require_groups(bins.num_bins, count, capacity)
    groups = [bins.ids[start:stop] for start, stop in zip(bins.cu_ids[:-1], bins.cu_ids[1:])]
    return _dealt(_split(groups, count, lengths, measure), lengths, ranks, slots, measure)


def most_expensive(groups: Groups, lengths: Int64, measure: Measure) -> tuple[float, float]:
    """Cost of the most expensive rank of a step, and of all of them."""
    totals = [sum(measure.cost_of(lengths[group]) for group in mine) for mine in groups]
    return max(totals), sum(totals)


def _require_groups(needed: int, count: int, capacity: int | None) -> None:
    if needed > count:
        raise InputError(
            "a step does not fit into its groups",
            expected=f"at most {count} groups of {capacity} tokens",
            found=f"{needed} groups",
        )


def _padded(lengths: Int64, ranks: int, slots: int, measure: Measure, capacity: int | None, *, aside: bool) -> Groups:
    """Groups of rows sorted by length. ``aside``: a row that is a rank's whole share is put on a rank by itself."""
    order = np.argsort(-lengths, kind="stable")
    most = np.full(len(order), len(order)) if capacity is None else capacity // lengths[order]
    _require_groups(len(_runs(order, most)), ranks * slots, capacity)
    costs = measure.costs(lengths[order])
    given: Groups = []
    begin, end, left = 0, len(order), ranks
    while aside and left > 1:
        # Its other groups have one row each, the shortest there are.
        rest = slice(begin + 1, end - (slots - 1))
        others = (left - 1) * slots
        if (
            costs[begin] < costs[rest].sum() / (left - 1)
            or len(costs[rest]) < others
            or len(_runs(costs[rest], most[rest])) > others
        ):
            break
        given.append([order[i : i + 1] for i in (begin, *range(rest.stop, end))])
        begin, end, left = rest.start, rest.stop, left - 1
    groups = _padded_groups(order[begin:end], lengths, left * slots, measure, most[begin:end])
    return [*given, *_dealt(groups, lengths, left, slots, measure)]


def _padded_groups(order: Int64, lengths: Int64, count: int, measure: Measure, most: Int64) -> list[Int64]:
    """Runs of rows sorted by length, so that the most expensive run is as cheap as it can be, and so on.

    ``most``: rows that a run may have which begins at each.
    """
    costs = measure.costs(lengths[order]).astype(np.int64)  # of transformers' formula: integers, at least 1
    groups: list[Int64] = []
    begin, left = 0, count
    while begin < len(order):
        runs = _cheapest_runs(costs[begin:], most[begin:], left)
        # A single row that is the most expensive run sets the others' limit no longer.
        sizes = np.diff(np.append(runs, len(order) - begin))
        tops = sizes * costs[begin:][runs]
        alone = left > 1 and len(runs) > 1 and sizes[0] == 1 and tops[0] == tops.max()
        taken = runs[:1] if alone else runs
        ends = np.append(taken[1:], 1 if alone else len(order) - begin)
        groups += [order[begin + start : begin + stop] for start, stop in zip(taken, ends)]
        begin, left = begin + int(ends[-1]), left - len(taken)
    return _split(groups, count, lengths, measure)


def _cheapest_runs(costs: np.ndarray, most: np.ndarray, count: int) -> Int64:
    """Where at most ``count`` runs begin, for the least limit on the cost of a run. ``most``: rows of one at each."""

    def runs_at(limit: int) -> Int64:
        return _runs(costs, np.minimum(most, limit // costs))

    low, high = int(costs[0]), int(costs[0]) * len(costs)
    while low < high:
        middle = (low + high) // 2
        if len(runs_at(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return runs_at(low)


def _runs(costs: np.ndarray, rows: np.ndarray) -> Int64:
    """Where runs begin, if a run that begins at row ``i`` has ``rows[i]`` rows, at least one."""
    begins, at = [], 0
    while at < len(costs):
        begins.append(at)
        at += max(1, int(rows[at]))
    return np.array(begins, np.int64)


def _planned(lengths: Int64, ranks: int, slots: int, measure: Measure, capacity: int | None) -> Groups | None:
    """Groups of the planner's; None where one of them would be above the capacity."""
    room = int(lengths.sum())
    by_rank = plan(lengths, ranks=ranks, capacity=room, cost=measure.cost, sync="step")
    # Every rank needs a row for each of its groups.
    parts = _filled([by_rank.members(0, rank) for rank in range(ranks)], lengths, least=slots)
    groups: Groups = []
    for part in parts:
        made = plan(lengths[part], ranks=slots, capacity=capacity or room, cost=measure.cost)
        if made.num_microbatches > 1:
            break
        mine = _filled([part[made.members(0, slot)] for slot in range(slots)], lengths, least=1)
        groups.append(sorted(mine, key=lambda group: -measure.cost_of(lengths[group])))
    else:
        return groups
    # A rank's rows may be packed into its groups in no way: plan all ranks' groups within the capacity.
    made = plan(lengths, ranks=ranks, capacity=capacity or room, cost=measure.cost, microbatch_multiple=slots)
    if made.num_microbatches > slots:
        return None
    every = [made.members(slot, rank) for slot in range(slots) for rank in range(ranks)]
    return _dealt(_filled(every, lengths, least=1), lengths, ranks, slots, measure)


def _filled(groups: Sequence[Int64], lengths: Int64, *, least: int) -> list[Int64]:
    """The groups, after those of fewer than ``least`` rows took the shortest rows of the others."""
    kept = [list(group) for group in groups]
    for group in kept:
        while len(group) < least:
            row, donor = min(
                ((min(other, key=lambda i: lengths[i]), k) for k, other in enumerate(kept) if len(other) > least),
                key=lambda found: lengths[found[0]],
            )
            kept[donor].remove(row)
            group.append(row)
    return [np.array(group, np.int64) for group in kept]


def _split(groups: list[Int64], count: int, lengths: Int64, measure: Measure) -> list[Int64]:
    """``count`` groups: the most expensive one that has several rows is halved until there are as many."""
    groups = list(groups)
    while len(groups) < count:
        several = [i for i, group in enumerate(groups) if len(group) > 1]
        i = max(several, key=lambda k: measure.cost_of(lengths[groups[k]]))
        half = len(groups[i]) // 2
        groups[i : i + 1] = [groups[i][:half], groups[i][half:]]
    return groups


def _dealt(groups: list[Int64], lengths: Int64, ranks: int, slots: int, measure: Measure) -> Groups:
    """Groups by rank: the most expensive ones are the first of each rank, and the cheapest rank chooses first."""
    costs = [measure.cost_of(lengths[group]) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: -costs[i])
    dealt: Groups = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for slot in range(slots):
        cheapest_first = sorted(range(ranks), key=lambda rank: totals[rank])
        for rank, i in zip(cheapest_first, order[slot * ranks : (slot + 1) * ranks]):
            dealt[rank].append(groups[i])
            totals[rank] += costs[i]
    return dealt
