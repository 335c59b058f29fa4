"""The strategies by name, ours and others'.

``balanced`` is ours; ``next_fit`` keeps arrival order; ``preassigned`` takes the schedule that the caller gives.
Upstream's names are accepted: ``default`` and ``default_dynamic_cp`` mean ``balanced`` (the latter with
``context_parallel="auto"`` unless a degree is given), ``dp_balanced`` means ``next_fit``, which is what it does, and
``empty`` means ``preassigned``. Another distribution adds its own under the entry-point group ``ullage.strategies``:
the name is the strategy's, the object a function from :class:`~ullage.planning.problem.Problem` to
:class:`~ullage.planning.problem.Assignment`. :func:`register_strategy` does the same within a program.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import numpy as np

from ullage.errors import InputError
from ullage.layout import Int64
from ullage.planning.bounds import microbatches_for
from ullage.planning.problem import Assignment, Problem, Strategy

ENTRY_POINTS = "ullage.strategies"
PREASSIGNED = "preassigned"
#: Megatron-LM's names -> ours.
ALIASES = {
    "default": "balanced",
    "default_dynamic_cp": "balanced",
    "dp_balanced": "next_fit",
    "empty": PREASSIGNED,
}
#: Operations of improvement: for any plan, for each item, and for plans of more than so many items.
_BUDGET, _BUDGET_EACH, _BUDGET_MANY, _MANY = 60_000, 85, 400_000, 32768


def next_fit(problem: Problem) -> Assignment:
    """Arrival order: a bin is closed when the next item does not fit."""
    from ullage.planning import arrival

    bins = np.empty(problem.num_items, np.int64)
    used = arrival.next_fit(problem.slots, problem.counts, problem.capacity, problem.max_sequences, bins)
    return Assignment(bins, microbatches_for(used, problem.ranks, problem.microbatch_multiple))


def balanced(problem: Problem) -> Assignment:
    """Equal work in every microbatch, or over the step with ``sync="step"``, in the fewest microbatches."""
    from ullage.planning.balancing import balance
    from ullage.planning.totals import balance_totals

    least = problem.least_microbatches()
    if problem.shared_slots is not None and problem.shared_costs is not None and least:
        return _shared(problem, problem.shared_slots, problem.shared_costs, least)
    place = balance_totals if problem.sync == "step" else balance
    return Assignment(
        *place(
            problem.slots,
            problem.costs,
            problem.counts,
            problem.capacity,
            problem.max_sequences,
            problem.ranks,
            least,
            problem.microbatch_multiple,
            _budget(problem),
        )
    )


def _budget(problem: Problem) -> int:
    return _BUDGET_MANY if problem.num_items > _MANY else _BUDGET + _BUDGET_EACH * problem.num_items


def _shared(problem: Problem, slots: Int64, costs: Int64, least: int) -> Assignment:
    from ullage.planning.context import share_out

    places, exponents, microbatches = share_out(
        slots,
        costs,
        problem.counts,
        problem.capacity,
        problem.max_sequences,
        problem.ranks,
        least,
        problem.microbatch_multiple,
        _budget(problem),
    )
    first = np.flatnonzero(exponents >= 0)
    degrees = np.ones(len(exponents), np.int64)
    for k in first[exponents[first] > 0].tolist():
        degrees[k : k + (1 << exponents[k])] = 1 << exponents[k]
    return Assignment(places, microbatches, degrees.reshape(microbatches, problem.ranks))


_REGISTERED: dict[str, Strategy] = {"balanced": balanced, "next_fit": next_fit}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Makes ``strategy`` known to ``ullage.plan`` as ``name``. Raises ``InputError`` for a name that is taken."""
    if name in _REGISTERED or name in ALIASES or name == PREASSIGNED:
        raise InputError("this name of a strategy is taken", found=repr(name))
    _REGISTERED[name] = strategy


def strategy_names() -> list[str]:
    """Every name that ``ullage.plan(strategy=...)`` takes: ours, aliases, and those of installed distributions."""
    return sorted({*_REGISTERED, *ALIASES, PREASSIGNED, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def find_strategy(name: str) -> Strategy:
    """The strategy of this name, which is no alias. Raises ``InputError`` that lists the names."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    for entry in entry_points(group=ENTRY_POINTS, name=name) if isinstance(name, str) else ():
        return entry.load()
    raise InputError("no such strategy", expected=" or ".join(map(repr, strategy_names())), found=repr(name))
