"""Microbatches in which sequences run on 1, 2, 4, ... or all ranks: the interface of Megatron-Core's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ullage.errors import InputError, require_int
from ullage.layout import as_lengths
from ullage.planning.placement import free_degrees, slots_of
from ullage.planning.planner import plan
from ullage.planning.plans import Plan


@dataclass
class _SharedBin:
    """Sequences that ``degree`` consecutive ranks run together."""

    degree: int
    ids: list[int]


class DynamicCPScheduler:
    """Scheduler of microbatches in which sequences run on 1, 2, 4, ... or all ranks, as verl calls Megatron-Core's.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that a rank holds in one microbatch.
        cp_size, dp_size: the scheduler divides work over ``dp_size · cp_size`` ranks.
        microbatch_group_size_per_vp_stage: the number of microbatches is a multiple of this.
        min_cp_size: least number of ranks per sequence.

    Raises ``InputError``, a ``ValueError``, for numbers that are not positive or do not divide.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        min_cp_size: int = 1,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = require_int(max_seqlen_per_dp_cp_rank, "max_seqlen_per_dp_cp_rank", least=1)
        self.ranks = require_int(cp_size, "cp_size", least=1) * require_int(dp_size, "dp_size", least=1)
        self.multiple = require_int(
            microbatch_group_size_per_vp_stage or 1, "microbatch_group_size_per_vp_stage", least=1
        )
        self.min_cp_size = require_int(min_cp_size, "min_cp_size", least=1)
        if self.ranks % self.min_cp_size:
            raise InputError("min_cp_size must divide the ranks", expected=f"a part of {self.ranks}", found=min_cp_size)

    def get_groups_and_subsamples(self, sample_id_seqlens: Iterable[tuple[Any, int]]) -> list[list[list[Any]]]:
        """Ids of the samples that each rank runs, by microbatch and rank.

        ``sample_id_seqlens``: pairs of an id and a length in tokens. Ranks that share samples are consecutive and begin
        at a multiple of their number; they list the same ids. No rank is without samples: where the plan leaves one
        idle, a bin is divided or shared by more ranks, at last by all of them. Raises ``InputError`` for an id that
        occurs twice, a sequence that all ranks together cannot hold, and too few sequences to keep every rank busy.
        """
        pairs = list(sample_id_seqlens)
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise InputError("an id occurs twice", found=next(name for name in names if names.count(name) > 1))
        lengths = as_lengths([length for _, length in pairs], "lengths")
        # Blocks of ``min_cp_size`` ranks are the ranks of the plan, which gives each bin 1, 2, 4, ... or all of them.
        num_blocks, capacity = self.ranks // self.min_cp_size, self.max_seqlen_per_dp_cp_rank * self.min_cp_size
        made = plan(
            lengths,
            ranks=num_blocks,
            capacity=capacity,
            context_parallel="auto",
            microbatch_multiple=self.multiple,
            pad_to_multiple_of=1 if self.min_cp_size == 1 else 2 * self.min_cp_size,
        )
        # Every microbatch must occupy every rank, and their number be a multiple.
        steps = [step for microbatch in range(made.num_microbatches) if (step := _occupied(made, microbatch))]
        steps += [[] for _ in range(-len(steps) % self.multiple)]
        _occupy_all(steps, made)
        # Largest degree first, so that each bin begins at a multiple of its degree.
        return [
            [
                [names[i] for i in part.ids]
                for part in sorted(step, key=lambda part: -part.degree)
                for _ in range(part.degree * self.min_cp_size)
            ]
            for step in steps
        ]


def _occupied(made: Plan, microbatch: int) -> list[_SharedBin]:
    found, rank = [], 0
    while rank < made.ranks:
        degree = made.degree(microbatch, rank)
        ids = made.members(microbatch, rank).tolist()
        if ids:
            found.append(_SharedBin(degree, ids))
        rank += degree
    return found


def _occupy_all(steps: list[list[_SharedBin]], made: Plan) -> None:
    """Occupy the idle ranks of every microbatch, most expensive bin first.

    A bin of several sequences is halved, and one half goes to the idle ranks; a bin of one sequence gets the next
    degree; where no bin fits the idle ranks, they get a sequence of another bin, of any microbatch, and where there is
    none, all ranks share the microbatch. Changes ``steps``.
    """
    costs, degrees = made.costs.tolist(), free_degrees(made.ranks)

    def cost_per_rank(part: _SharedBin) -> float:
        return sum(costs[i] for i in part.ids) / part.degree

    def wider(part: _SharedBin, idle: int) -> int | None:
        """The next degree of a bin of one sequence, if the idle ranks suffice for it."""
        following = next((degree for degree in degrees if degree > part.degree), None)
        if following is None or following - part.degree > idle or len(part.ids) > 1:
            return None
        return following if _fits(made, part.ids, following) else None

    for step in steps:
        while idle := made.ranks - sum(part.degree for part in step):
            fitting = [
                part for part in step if (len(part.ids) > 1 and part.degree <= idle) or wider(part, idle) is not None
            ]
            if fitting:
                expensive = max(fitting, key=cost_per_rank)
                following = wider(expensive, idle)
                if following is None:
                    step.append(_SharedBin(expensive.degree, _halve(expensive.ids, costs)))
                else:
                    expensive.degree = following
                continue
            spare = _taken(steps, idle, made, cost_per_rank)
            together = [i for part in step for i in part.ids]
            if spare is not None:
                step.append(spare)
            elif together and _fits(made, together, made.ranks):
                step[:] = [_SharedBin(made.ranks, together)]
            else:
                raise InputError(
                    "there are too few sequences to keep every rank busy",
                    expected="for each rank of each microbatch a sequence, or a share of one",
                    found=f"{made.num_sequences} sequences",
                )


def _fits(made: Plan, ids: list[int], degree: int) -> bool:
    return int(slots_of(made.lengths[ids], made.pad_to_multiple_of, degree).sum()) <= made.capacity * degree


def _halve(ids: list[int], costs: list[int]) -> list[int]:
    """Move sequences with about half of the work, at least one and not all, out of ``ids``; return them."""
    # Largest first, each to the lighter side; ``balance`` is the work kept less the work taken.
    kept, taken, balance = [], [], 0
    for i in sorted(ids, key=lambda i: -costs[i]):
        lighter = kept if balance < 0 or not kept else taken
        lighter.append(i)
        balance += costs[i] if lighter is kept else -costs[i]
    ids[:] = kept
    return taken


def _taken(
    steps: list[list[_SharedBin]], idle: int, made: Plan, cost_per_rank: Callable[[_SharedBin], float]
) -> _SharedBin | None:
    """Bin of one sequence that fits on at most ``idle`` ranks, from the most expensive bin that has several."""
    rich = [part for step in steps for part in step if len(part.ids) > 1]
    for part in sorted(rich, key=cost_per_rank, reverse=True):
        for i in sorted(part.ids, key=lambda i: -int(made.costs[i])):
            for degree in free_degrees(made.ranks):
                if degree <= idle and _fits(made, [i], degree):
                    part.ids.remove(i)
                    return _SharedBin(degree, [i])
    return None
