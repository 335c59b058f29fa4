"""Figures of plans: a table beside a reference plan, padded batches, the lower bound and the ideal; steps in sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ullage.core.display import quantity
from ullage.core.layout import Int64
from ullage.planning import Plan, Statistics
from ullage.planning import plan as make_plan
from ullage.planning.padded import Padded, padded
from ullage.planning.planner import arrival_order


def _bound_unused(amount: int, plan: Plan, lower_bound: int, capacity: int) -> float:
    """What is unused of a capacity in as many microbatches as the lower bound."""
    size = lower_bound * plan.ranks * capacity
    return 1 - amount / size if size else 0.0


def figure_rows(plan: Plan, reference: Plan | None = None, padded: Padded | None = None) -> list[list[str]]:
    """The table as rows of text, the first with the headings; without columns of what is None.

    ``reference``: another plan of the same sequences, usually by ``next_fit``.
    """
    ours = plan.statistics()
    theirs = None if reference is None else reference.statistics()
    others = [*([] if reference is None else [reference_name(reference)]), *["padded"] * (padded is not None)]
    rows = [["", plan.strategy, *others, "lower bound", "ideal"]]

    def add(name: str, form: str, value: Any, bound: Any, ideal: str, of: Any = ours, beside: Any = theirs) -> None:
        compared = [] if beside is None else [form.format(value(beside))]
        if padded is not None:
            compared.append(form.format(value(padded)) if of is ours else "–")
        rows.append([name, form.format(value(of)), *compared, "" if bound is None else form.format(bound), ideal])

    unused = 100 * _bound_unused(ours.num_tokens, plan, ours.lower_bound, plan.capacity)
    add("microbatches per rank", "{:,d}", lambda stats: stats.num_microbatches, ours.lower_bound, "")
    add("slots unused (ullage)", "{:.2f} %", lambda stats: 100 * stats.ullage, unused, "0.00 %")
    add("rank imbalance, × mean", "{:.3f}", lambda stats: stats.rank_imbalance, ours.rank_imbalance_bound, "1.000")
    add("critical path, × ideal", "{:.3f}", lambda stats: stats.critical_path, ours.critical_path_bound, "1.000")
    for place, use in enumerate(ours.resources):  # besides tokens
        beside = None if theirs is None else theirs.resources[place]
        bins = plan.num_microbatches * plan.ranks
        mean = use.amount / bins if bins else 0.0
        least = max(math.ceil(mean), int(plan.amounts[use.name][plan.order].max(initial=0)))
        name = f"most {use.name} in a microbatch"
        add(name, "{:,}", lambda each: each.largest, least, f"{mean:,.0f}", use, beside)
        if use.capacity is not None:
            unused = 100 * _bound_unused(use.amount, plan, use.lower_bound, use.capacity)
            name = f"capacity of {use.name} unused"
            add(name, "{:.2f} %", lambda each: 100 * each.unused, unused, "0.00 %", use, beside)
    if ours.num_shared:  # and then there are no padded batches
        add("sequences on several ranks", "{:,}", lambda stats: stats.num_shared, None, "")
    return rows


def reference_name(reference: Plan) -> str:
    """Name of a reference plan: its strategy, and its degree where ranks share every microbatch."""
    degree = int(reference.degrees.max(initial=1))
    return reference.strategy if degree == 1 else f"{reference.strategy}, degree {degree}"


def lost_sequences(stats: Statistics) -> str:
    """The sequences that ``oversize`` truncated or dropped, in one sentence; empty if there are none."""
    parts = []
    if stats.num_truncated:
        parts.append(f"{quantity(stats.num_truncated, 'sequence')} truncated by {stats.truncated_tokens:,} tokens")
    if stats.num_dropped:
        parts.append(f"{quantity(stats.num_dropped, 'sequence')} of {stats.dropped_tokens:,} tokens dropped")
    return ", ".join(parts)


def length_figures(lengths: object) -> dict[str, float | int]:
    """Lengths in six numbers: sequences, tokens, shortest, median, mean, longest."""
    array = np.asarray(lengths)
    held = array if len(array) else np.zeros(1, np.int64)
    found = {"sequences": len(array), "tokens": int(array.sum()), "shortest": int(held.min())}
    return found | {"median": float(np.median(held)), "mean": float(held.mean()), "longest": int(held.max())}


@dataclass(frozen=True)
class PlannedStep:
    """One step: its plan, arrival order beside it (None where there is nothing to compare), and padded batches."""

    plan: Plan
    reference: Plan | None
    padded: Padded | None

    @property
    def times(self) -> tuple[float, float | None, float | None]:
        """The time of the step by the plan's own ``sync``, in ideal steps: of all three."""
        name = "critical_path" if self.plan.sync == "microbatch" else "rank_imbalance"
        beside = None if self.reference is None else getattr(self.reference.statistics(), name)
        return getattr(self.plan.statistics(), name), beside, self.padded and getattr(self.padded, name)


@dataclass(frozen=True)
class StepTotals:
    """Several steps at one capacity, in sum. Times are in ideal steps and weighted by the work of each step.

    Microbatches are per rank; ``worst_time`` is that of the step that is furthest from its ideal, and the times of
    arrival order and of padded batches are None where a step has none.
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
    """One step of ``lengths``. ``settings``: of ``ullage.plan``."""
    step = make_plan(lengths, strategy=strategy, **settings)
    return PlannedStep(step, arrival_order(step), padded(step) if step.num_microbatches else None)


def step_sentence(step: PlannedStep) -> str:
    """The time of the step beside arrival order's and that of padded batches, in one sentence; empty without any."""
    (time, beside, padded_time), parts = step.times, []
    if beside is not None:
        parts.append(f"{100 * time / beside:.1f} % of next_fit's time")
    if step.padded is not None and padded_time:
        padding = f"{100 * step.padded.padding_computed:.1f} % padding"
        parts.append(f"{100 * time / padded_time:.1f} % of padded batches' ({padding})")
    return f"The step takes {' and '.join(parts)}." if parts else ""


def step_record(step: PlannedStep) -> dict[str, Any]:
    """The figures of one step as plain data."""

    def numbers(one: Plan | None, time: float | None) -> dict[str, Any] | None:
        return one and {"strategy": one.strategy, "step_time": time, **asdict(one.statistics())}

    plan, stats = step.plan, step.plan.statistics()
    time, beside, padded_time = step.times
    names = ("num_microbatches", "ullage", "rank_imbalance", "critical_path")
    unused = _bound_unused(stats.num_tokens, plan, stats.lower_bound, plan.capacity)
    bound = (stats.lower_bound, unused, stats.rank_imbalance_bound, stats.critical_path_bound)
    return {
        **{name: getattr(plan, name) for name in ("ranks", "capacity", "capacities", "pad_to_multiple_of", "sync")},
        "plan": numbers(plan, time),
        "next_fit": numbers(step.reference, beside),
        "padded": step.padded and {"step_time": padded_time, **asdict(step.padded)},
        "lower_bound": dict(zip(names, bound, strict=True)),
        "ideal": dict(zip(names, (stats.num_tokens / (plan.ranks * plan.capacity), 0.0, 1.0, 1.0), strict=True)),
    }


def cut(lengths: Any, global_batch_size: int | None, steps: int | None) -> list[Any]:
    """The lengths of each step, in order; the last, short one is kept. Without a size, all of them are one step."""
    size = global_batch_size or max(1, len(lengths))
    return [lengths[start : start + size] for start in range(0, max(1, len(lengths)), size)[:steps]]


def summed(steps: Sequence[PlannedStep]) -> StepTotals:
    """Steps of one capacity in sum."""
    stats = [step.plan.statistics() for step in steps]
    work = [int(step.plan.costs[step.plan.order].sum()) for step in steps]
    times, references, unpacked = zip(*(step.times for step in steps), strict=True)
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
        padded_time=_mean(unpacked, work),
    )


def _mean(times: Sequence[float | None], work: Sequence[int]) -> float | None:
    """The mean by work; None where a step that has work has no time."""
    held = [(time, weight) for time, weight in zip(times, work, strict=True) if weight]
    if not held or any(time is None for time, _ in held):
        return None
    return sum((time or 0.0) * weight for time, weight in held) / sum(work)
