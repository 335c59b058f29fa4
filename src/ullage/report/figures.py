"""Figures of plans: a table beside a reference plan, the lower bound and the ideal; steps in sum; padded batches.

Padded batches are what the step would take without packing. Sequences stay in the order in which they arrive. A batch
takes the next one for as long as all of it, padded to its longest, fits into the capacity; batches go to the ranks in
turn, and the ranks' batches of one turn are a microbatch. Every slot is computed, so a sequence costs what the longest
of its batch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ullage.core.display import quantity
from ullage.core.layout import Int64
from ullage.planning import Plan, ResourceUse, Statistics
from ullage.planning import plan as make_plan
from ullage.planning.placement import slots_of
from ullage.planning.planner import arrival_order


class Figure(NamedTuple):
    """One line of the table, as text; ``reference`` is "–" where the reference could not plan these sequences."""

    name: str
    plan: str
    reference: str
    bound: str
    ideal: str


def ideal_microbatches(plan: Plan, stats: Statistics) -> float:
    """Microbatches per rank if sequences could be cut anywhere: tokens ÷ (ranks · capacity)."""
    return stats.num_tokens / (plan.ranks * plan.capacity)


def bound_ullage(plan: Plan, stats: Statistics) -> float:
    """The ullage of a plan with as many microbatches as the lower bound."""
    # Slots of that many microbatches on all ranks.
    size = stats.lower_bound * plan.ranks * plan.capacity
    return 1 - stats.num_tokens / size if size else 0.0


def figures(plan: Plan, reference: Plan | None = None) -> list[Figure]:
    """The table. ``reference``: another plan of the same sequences, usually by ``next_fit``."""
    ours = plan.statistics()
    theirs = None if reference is None else reference.statistics()
    bound = bound_ullage(plan, ours)
    table = [
        Figure(name, _text(value(ours), form), _text(theirs and value(theirs), form), _text(least, form), ideal)
        for name, form, value, least, ideal in (
            (
                "microbatches per rank",
                "{:d}",
                lambda stats: stats.num_microbatches,
                ours.lower_bound,
                f"{ideal_microbatches(plan, ours):.2f}",
            ),
            ("ullage", "{:.2f} %", lambda stats: 100 * stats.ullage, 100 * bound, "0.00 %"),
            ("rank imbalance", "{:.3f}", lambda stats: stats.rank_imbalance, ours.rank_imbalance_bound, "1.000"),
            ("critical path", "{:.3f}", lambda stats: stats.critical_path, ours.critical_path_bound, "1.000"),
        )
    ]
    for place, use in enumerate(ours.resources):
        beside = None if theirs is None else theirs.resources[place]
        table += _figures_of(plan, use, beside)
    if ours.num_shared:
        shared = _text(theirs and theirs.num_shared, "{:,}")
        table.append(Figure("sequences on several ranks", f"{ours.num_shared:,}", shared, "", ""))
    return table


def _figures_of(plan: Plan, use: ResourceUse, beside: ResourceUse | None) -> Iterator[Figure]:
    """The lines of a resource besides tokens."""
    bins = plan.num_microbatches * plan.ranks
    mean = use.amount / bins if bins else 0.0
    least = max(math.ceil(mean), int(plan.amounts[use.name][plan.order].max(initial=0)))
    yield Figure(
        f"most {use.name} in a microbatch",
        f"{use.largest:,}",
        _text(beside and beside.largest, "{:,}"),
        f"{least:,}",
        f"{mean:,.0f}",
    )
    if use.capacity is not None:
        size = use.lower_bound * plan.ranks * use.capacity
        yield Figure(
            f"capacity of {use.name} unused",
            f"{100 * use.unused:.2f} %",
            _text(beside and 100 * beside.unused, "{:.2f} %"),
            f"{100 * (1 - use.amount / size if size else 0.0):.2f} %",
            "0.00 %",
        )


def _text(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def reference_name(reference: Plan) -> str:
    """Name of a reference plan: its strategy, and its degree where ranks share every microbatch."""
    degree = int(reference.degrees.max(initial=1))
    return reference.strategy if degree == 1 else f"{reference.strategy}, degree {degree}"


def step_time(plan: Plan) -> float:
    """The time of the step by the plan's own ``sync``, in ideal steps: the critical path, or the rank imbalance."""
    stats = plan.statistics()
    return stats.critical_path if plan.sync == "microbatch" else stats.rank_imbalance


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
    if not len(array):
        return {"sequences": 0, "tokens": 0, "shortest": 0, "median": 0.0, "mean": 0.0, "longest": 0}
    return {
        "sequences": len(array),
        "tokens": int(array.sum()),
        "shortest": int(array.min()),
        "median": float(np.median(array)),
        "mean": float(array.mean()),
        "longest": int(array.max()),
    }


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
    """One step of ``lengths``. ``settings``: of ``ullage.plan``."""
    step = make_plan(lengths, strategy=strategy, **settings)
    return PlannedStep(step, arrival_order(step), padded(step) if step.num_microbatches else None)


def step_sentence(step: PlannedStep) -> str:
    """The time of the step beside arrival order's and that of padded batches, in one sentence; empty without any."""
    time, parts = step_time(step.plan), []
    if step.reference is not None:
        parts.append(f"{100 * time / step_time(step.reference):.1f} % of next_fit's time")
    if step.padded is not None and step.padded_time:
        padding = f"{100 * step.padded.padding_computed:.1f} % padding"
        parts.append(f"{100 * time / step.padded_time:.1f} % of padded batches' ({padding})")
    return f"The step takes {' and '.join(parts)}." if parts else ""


def step_record(step: PlannedStep) -> dict[str, Any]:
    """The figures of one step as plain data."""

    def numbers(one: Plan) -> dict[str, Any]:
        return {"strategy": one.strategy, "step_time": step_time(one), **asdict(one.statistics())}

    plan, stats = step.plan, step.plan.statistics()
    names = ("num_microbatches", "ullage", "rank_imbalance", "critical_path")
    bound = (stats.lower_bound, bound_ullage(plan, stats), stats.rank_imbalance_bound, stats.critical_path_bound)
    return {
        **{name: getattr(plan, name) for name in ("ranks", "capacity", "capacities", "pad_to_multiple_of", "sync")},
        "plan": numbers(plan),
        "next_fit": None if step.reference is None else numbers(step.reference),
        "padded": None if step.padded is None else {"step_time": step.padded_time, **asdict(step.padded)},
        "lower_bound": dict(zip(names, bound, strict=True)),
        "ideal": dict(zip(names, (ideal_microbatches(plan, stats), 0.0, 1.0, 1.0), strict=True)),
    }


def cut(lengths: Any, global_batch_size: int | None, steps: int | None) -> Iterator[Any]:
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


@dataclass(frozen=True)
class Padded:
    """Figures of padded batches, in the terms of a plan's.

    Attributes:
        num_batches: batches on all ranks.
        num_microbatches: per rank.
        num_slots: tokens and padding that are computed.
        padding_computed: the part of ``num_slots`` that is padding.
        ullage: the part of the capacity that holds no token.
        rank_imbalance, critical_path: work of the most expensive rank, over the step or microbatch by microbatch, over
            the mean rank's work *on tokens*: padding counts, so both are larger than 1 also on one rank.
    """

    num_batches: int
    num_microbatches: int
    num_slots: int
    padding_computed: float
    ullage: float
    rank_imbalance: float
    critical_path: float

    @property
    def texts(self) -> dict[str, str]:
        """The figures by the names that :func:`figures` has for them."""
        return {
            "microbatches per rank": f"{self.num_microbatches:,}",
            "ullage": f"{100 * self.ullage:.2f} %",
            "rank imbalance": f"{self.rank_imbalance:.3f}",
            "critical path": f"{self.critical_path:.3f}",
        }


def padded(plan: Plan) -> Padded | None:
    """The padded batches of the sequences that ``plan`` places; None where ranks share sequences, or sequences take
    more than tokens, which nobody pads.

    >>> import ullage
    >>> step = ullage.plan([5, 3, 9, 1], ranks=2, capacity=12)
    >>> batches = padded(step)
    >>> batches.num_batches, batches.num_slots, round(batches.padding_computed, 2)
    (3, 20, 0.1)
    """
    if plan.amounts or int(plan.degrees.max(initial=1)) > 1:
        return None
    placed = np.sort(plan.order)
    lengths, costs = plan.lengths[placed], plan.costs[placed]
    sizes, widths, prices = _batches(
        slots_of(lengths, plan.pad_to_multiple_of), costs, plan.capacity, plan.max_sequences
    )
    turns = -(-len(sizes) // plan.ranks)
    turns = -(-turns // plan.microbatch_multiple) * plan.microbatch_multiple
    loads = np.zeros(turns * plan.ranks)
    loads[: len(sizes)] = sizes * prices
    loads = loads.reshape(turns, plan.ranks) + plan.per_microbatch
    ideal = int(costs.sum()) / plan.ranks + plan.per_microbatch * turns
    tokens, slots, size = int(lengths.sum()), int((sizes * widths).sum()), turns * plan.ranks * plan.capacity
    return Padded(
        num_batches=len(sizes),
        num_microbatches=turns,
        num_slots=slots,
        padding_computed=1 - tokens / slots if slots else 0.0,
        ullage=1 - tokens / size if size else 0.0,
        rank_imbalance=float(loads.sum(axis=0).max(initial=0)) / ideal if ideal else 1.0,
        critical_path=float(loads.max(axis=1, initial=0).sum()) / ideal if ideal else 1.0,
    )


def _batches(slots: Int64, costs: Int64, capacity: int, most: int) -> tuple[Int64, Int64, Int64]:
    """Sequences, width in slots and cost of the most expensive sequence of each batch, int64 [batches]."""
    found: list[tuple[int, int, int]] = []
    count = width = price = 0
    for slot, cost in zip(slots.tolist(), costs.tolist(), strict=True):
        wider = max(width, slot)
        if count and ((count + 1) * wider > capacity or count == most):
            found.append((count, width, price))
            count, wider, price = 0, slot, 0
        count, width, price = count + 1, wider, max(price, cost)
    if count:
        found.append((count, width, price))
    sizes, widths, prices = np.array(found, np.int64).reshape(-1, 3).T
    return sizes, widths, prices
