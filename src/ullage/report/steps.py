"""Steps of a data set: each planned, in arrival order beside it, and all of them in sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.layout import Int64
from ullage.planning import Plan
from ullage.planning import plan as make_plan
from ullage.planning.placement import free_degrees
from ullage.planning.planner import at_least_degree
from ullage.report.figures import step_time
from ullage.report.padded import Padded, padded


@dataclass(frozen=True)
class PlannedStep:
    """One step: its plan, arrival order beside it (None where there is nothing to compare), and padded batches."""

    plan: Plan
    reference: Plan | None
    padded: Padded | None

    @property
    def work(self) -> int:
        """Cost of all sequences that are placed."""
        return int(self.plan.costs[self.plan.order].sum())

    @property
    def padded_time(self) -> float | None:
        """The time of the step on padded batches by the plan's own ``sync``, in ideal steps."""
        if self.padded is None:
            return None
        return self.padded.critical_path if self.plan.sync == "microbatch" else self.padded.rank_imbalance


@dataclass(frozen=True)
class StepTotals:
    """Several steps at one capacity, in sum. Times are in ideal steps and weighted by the work of each step.

    Attributes:
        num_microbatches, lower_bound: per rank, of all steps.
        ullage: the part of the capacity of all microbatches that holds no token.
        time: of all steps; ``worst_time``: of the step that is furthest from its ideal.
        next_fit_time, padded_time: the same for arrival order and padded batches, None where a step has none.
    """

    capacity: int
    num_steps: int
    num_microbatches: int
    lower_bound: int
    ullage: float
    time: float
    worst_time: float
    next_fit_time: float | None
    padded_time: float | None


def planned(lengths: Int64, strategy: str, settings: dict[str, Any]) -> PlannedStep:
    """One step of ``lengths``. ``settings``: of ``ullage.plan``, among them ``context_parallel`` and its least."""
    step = make_plan(lengths, strategy=strategy, **settings)
    if not step.num_microbatches:
        return PlannedStep(step, None, None)
    return PlannedStep(step, None if strategy == "next_fit" else _reference(step, lengths, settings), padded(step))


def cut(lengths: Int64, global_batch_size: int | None, steps: int | None) -> Iterator[Int64]:
    """The lengths of each step, in order; the last, short one is kept. Without a size, all of them are one step."""
    size = global_batch_size or max(1, len(lengths))
    for number, start in enumerate(range(0, max(1, len(lengths)), size)):
        if steps is not None and number >= steps:
            return
        yield lengths[start : start + size]


def summed(steps: Sequence[PlannedStep]) -> StepTotals:
    """Steps of one capacity in sum."""
    stats = [step.plan.statistics() for step in steps]
    work = [step.work for step in steps]
    times = [step_time(step.plan) for step in steps]
    references = [None if step.reference is None else step_time(step.reference) for step in steps]
    size = sum(one.capacity_tokens for one in stats)
    return StepTotals(
        capacity=steps[0].plan.capacity,
        num_steps=len(steps),
        num_microbatches=sum(one.num_microbatches for one in stats),
        lower_bound=sum(one.lower_bound for one in stats),
        ullage=1 - sum(one.num_tokens for one in stats) / size if size else 0.0,
        time=_mean(times, work) or 1.0,
        worst_time=max(times),
        next_fit_time=_mean(references, work),
        padded_time=_mean([step.padded_time for step in steps], work),
    )


def _mean(times: Sequence[float | None], work: Sequence[int]) -> float | None:
    """The mean by work; None where a step that has work has no time."""
    total, held = 0.0, 0
    for time, weight in zip(times, work, strict=True):
        if not weight:
            continue
        if time is None:
            return None
        total, held = total + time * weight, held + weight
    return total / held if held else None


def _reference(step: Plan, lengths: Int64, settings: dict[str, Any]) -> Plan | None:
    """Arrival order, with the least fixed degree that holds what the plan holds."""
    if settings["context_parallel"] != "auto":
        return make_plan(lengths, strategy="next_fit", **settings)
    # ``next_fit`` has one degree for all microbatches: with "auto", the smallest at which it can hold every sequence.
    degrees = free_degrees(step.ranks, settings["min_context_parallel"])
    # The lengths of the plan are truncated already, so anything oversize here means a larger degree is needed.
    others: dict[str, Any] = {name: value for name, value in settings.items() if name != "context_parallel"}
    others["oversize"] = "error"
    return at_least_degree(step.lengths, degrees, **others)
