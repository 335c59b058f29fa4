"""Table of a plan's figures, beside a reference plan, the lower bound and the ideal, for terminals and pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.display import counted
from ullage.planning import Plan, Statistics


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
    table = [
        Figure(
            "microbatches per rank",
            str(ours.num_microbatches),
            _text(theirs and theirs.num_microbatches, "d"),
            str(ours.lower_bound),
            f"{ideal_microbatches(plan, ours):.2f}",
        ),
        Figure(
            "ullage",
            f"{100 * ours.ullage:.2f} %",
            _text(theirs and 100 * theirs.ullage, ".2f", " %"),
            f"{100 * bound_ullage(plan, ours):.2f} %",
            "0.00 %",
        ),
        Figure(
            "rank imbalance",
            f"{ours.rank_imbalance:.3f}",
            _text(theirs and theirs.rank_imbalance, ".3f"),
            f"{ours.rank_imbalance_bound:.3f}",
            "1.000",
        ),
        Figure(
            "critical path",
            f"{ours.critical_path:.3f}",
            _text(theirs and theirs.critical_path, ".3f"),
            f"{ours.critical_path_bound:.3f}",
            "1.000",
        ),
    ]
    if ours.num_shared:
        shared = _text(theirs and theirs.num_shared, ",")
        table.append(Figure("sequences on several ranks", f"{ours.num_shared:,}", shared, "", ""))
    return table


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


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
        parts.append(f"{counted(stats.num_truncated, 'sequence')} truncated by {stats.truncated_tokens:,} tokens")
    if stats.num_dropped:
        parts.append(f"{counted(stats.num_dropped, 'sequence')} of {stats.dropped_tokens:,} tokens dropped")
    return ", ".join(parts)


def described(lengths: object) -> dict[str, float | int]:
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
