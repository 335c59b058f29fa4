"""Arrival order beside a plan: the same sequences on the same ranks, as a loader without a planner places them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.errors import UllageError
from ullage.layout import Int64
from ullage.planning.placement import NO_LIMIT, free_degrees
from ullage.planning.planner import plan as make_plan
from ullage.planning.plans import Plan


@dataclass(frozen=True)
class _Known:
    """The cost model of a plan that is made already: its own costs."""

    costs: Int64
    per_microbatch: float
    communication: float

    def __call__(self, lengths: Int64) -> Int64:
        return self.costs


def arrival_order(plan: Plan) -> Plan | None:
    """The plan by ``next_fit`` of the same sequences, with the costs of ``plan``; None if there is none to compare.

    ``next_fit`` has one degree for all microbatches: the least degree of ``plan``, else the next one at which every
    sequence fits.
    """
    if plan.strategy == "next_fit" or not plan.num_microbatches:
        return None
    least = int(plan.degrees.min())
    dropped = bool(np.any(plan.bins < 0))
    truncated = bool(np.any(plan.lengths[plan.order] < plan.original_lengths[plan.order]))
    oversize = "drop" if dropped else "truncate" if truncated else "error"
    uniform = bool(np.all(plan.degrees == least))
    return at_least_degree(
        # What the plan truncated stays so where the degree differs: only then is the work the same.
        plan.original_lengths if uniform else plan.lengths,
        sorted({least, *free_degrees(plan.ranks, least)}),
        oversize=oversize if uniform else "error",
        ranks=plan.ranks,
        capacity=plan.capacity,
        cost=_Known(plan.costs, plan.per_microbatch, plan.communication),
        sync=plan.sync,
        microbatch_multiple=plan.microbatch_multiple,
        pad_to_multiple_of=plan.pad_to_multiple_of,
        max_sequences=None if plan.max_sequences == NO_LIMIT else plan.max_sequences,
    )


def at_least_degree(lengths: Int64, degrees: Iterable[int], *, ranks: int, **settings: Any) -> Plan | None:
    """The plan by ``next_fit`` at the first of ``degrees`` that divides the ranks and lets every sequence fit.

    ``settings``: of ``plan``, but for the strategy and ``context_parallel``.
    """
    for degree in degrees:
        if ranks % degree:
            continue
        try:
            return make_plan(lengths, ranks=ranks, strategy="next_fit", context_parallel=degree, **settings)
        except UllageError:  # a sequence needs a larger degree
            continue
    return None
