"""The strategies by name, ours and others'.

``balanced`` is ours; ``next_fit`` keeps arrival order; ``preassigned`` takes the schedule that the caller gives.
Upstream's names are accepted: ``default`` and ``default_dynamic_cp`` mean ``balanced`` (the latter with
``context_parallel="auto"`` unless a degree is given), ``dp_balanced`` means ``next_fit``, which is what it does, and
``empty`` means ``preassigned``. :func:`register_strategy` adds one of your own.

A strategy is any function from a :class:`Task` to an :class:`Assignment`. :func:`ullage.plan` checks its arguments and
makes a task of *items*: sequences, or groups of sequences that stay together. A strategy never sees lengths, alignment
or options that are not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ullage.core.errors import InputError, require_one_of
from ullage.core.layout import Int64
from ullage.planning.bounds import bin_bound, microbatches_for
from ullage.planning.solver.balancing import balance, balance_totals
from ullage.planning.solver.compiled import run
from ullage.planning.solver.context import share_out
from ullage.planning.solver.items import Items, Room, SharedItems
from ullage.planning.solver.packing import fill_in_order


@dataclass(frozen=True, eq=False)
class Task:
    """Items to place into bins: one bin for each microbatch of each rank.

    Attributes:
        slots, costs, counts [items]: int64 slots, cost and number of sequences of each item, in arrival order.
        ranks: bins of one microbatch.
        capacity: slots that a bin holds.
        max_sequences: sequences that a bin holds, :data:`~ullage.planning.placement.NO_LIMIT` for any number.
        microbatch_multiple: the number of microbatches must be a multiple of it.
        sync: what to minimise: ``"microbatch"`` the sum over microbatches of the most expensive rank, ``"step"`` the
            most expensive rank of the step.
        shared_slots, shared_costs [levels, items]: where ranks may share a bin, slots and cost on all its ranks
            together at each degree.
        shared_degrees [levels]: those degrees, rising from 1. A bin of degree d begins at a multiple of d.
        amounts [resources, items]: what each item takes of every resource that has a capacity besides slots, patches of
            images for example; without rows where there is none. Never beside ``shared_slots``.
        limits [resources]: how much of it a bin holds.
    """

    slots: Int64
    costs: Int64
    counts: Int64
    ranks: int
    capacity: int
    max_sequences: int
    microbatch_multiple: int
    sync: str
    shared_slots: Int64 | None = None
    shared_costs: Int64 | None = None
    shared_degrees: Int64 | None = None
    amounts: Int64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    limits: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.slots)

    def least_microbatches(self) -> int:
        """The least number of microbatches that can hold the items; 0 without items."""
        if not self.num_items:
            return 0
        if self.shared_slots is None:
            bins = bin_bound(self.slots, self.capacity)
        else:  # a shared bin holds as much as its ranks together: only the sum is left
            bins = -(-int(self.slots.sum()) // self.capacity)
        for each, limit in zip(self.amounts, self.limits.tolist(), strict=True):
            bins = max(bins, bin_bound(each, limit))
        bins = max(1, bins, -(-int(self.counts.sum()) // self.max_sequences))
        return microbatches_for(bins, self.ranks, self.microbatch_multiple)


@dataclass(frozen=True, eq=False)
class Assignment:
    """The answer of a strategy.

    Attributes:
        bins [items]: ``microbatch·ranks + rank`` of each item; the first of its ranks where several share a bin.
        num_microbatches: their number, a multiple of the task's ``microbatch_multiple``.
        degrees [num_microbatches, ranks]: number of ranks that share each bin; ``None`` if none is shared.
    """

    bins: Int64
    num_microbatches: int
    degrees: Int64 | None = None


Strategy = Callable[[Task], Assignment]


PREASSIGNED = "preassigned"
#: Megatron-LM's names -> ours.
ALIASES = {"default": "balanced", "default_dynamic_cp": "balanced", "dp_balanced": "next_fit", "empty": PREASSIGNED}
#: Microseconds per item as plain Python: on one rank each, on as many as it needs, and in arrival order.
_EACH, _EACH_SHARED, _EACH_IN_ORDER = 50, 150, 1


def next_fit(task: Task) -> Assignment:
    """Arrival order: a bin is closed when the next item does not fit."""
    bins = np.empty(task.num_items, np.int64)
    used = run(fill_in_order, _items(task), _room(task), bins, work=_EACH_IN_ORDER * task.num_items)
    return Assignment(bins, microbatches_for(used, task.ranks, task.microbatch_multiple))


def balanced(task: Task) -> Assignment:
    """Equal work in every microbatch, or over the step with ``sync="step"``, in the fewest microbatches."""
    # Where the plan by slots alone keeps within the other capacities, it is the plan.
    if len(task.limits):
        by_slots = replace(task, amounts=np.zeros((0, task.num_items), np.int64), limits=task.limits[:0])
        if by_slots.least_microbatches() == task.least_microbatches():
            found = balanced(by_slots)
            if _holds(task, found):
                return found
    least = task.least_microbatches()
    rest = _room(task), task.ranks, least, task.microbatch_multiple
    if task.shared_slots is None or task.shared_costs is None or task.shared_degrees is None or not least:
        place = balance_totals if task.sync == "step" else balance
        return Assignment(*run(place, _items(task), *rest, work=_EACH * task.num_items))
    shared = SharedItems(task.shared_slots, task.shared_costs, task.counts, task.shared_degrees)
    places, levels, microbatches = run(share_out, shared, *rest, work=_EACH_SHARED * task.num_items)
    # The solver names the level at the first rank of a block; a plan names the degree at all of them.
    degrees = np.ones(len(levels), np.int64)
    for k in np.flatnonzero(levels > 0).tolist():
        degree = int(task.shared_degrees[levels[k]])
        degrees[k : k + degree] = degree
    return Assignment(places, microbatches, degrees.reshape(microbatches, task.ranks))


def _holds(task: Task, found: Assignment) -> bool:
    """Whether every bin keeps within the capacities besides slots."""
    for each, limit in zip(task.amounts, task.limits.tolist(), strict=True):
        held = np.zeros(found.num_microbatches * task.ranks, np.int64)
        np.add.at(held, found.bins, each)
        if held.max(initial=0) > limit:
            return False
    return True


def _room(task: Task) -> Room:
    # A capacity that is never reached is cut, so that its multiples stay within 64 bits.
    limits = np.minimum(task.limits, 4 * task.amounts.sum(axis=1) + 1)
    return Room(min(task.capacity, 4 * int(task.slots.sum()) + 1), task.max_sequences, limits)


def _items(task: Task) -> Items:
    return Items(task.slots, task.costs, task.counts, task.amounts.reshape(len(task.limits), task.num_items))


_REGISTERED: dict[str, Strategy] = {"balanced": balanced, "next_fit": next_fit}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Makes ``strategy`` known to ``ullage.plan`` as ``name``. Raises ``InputError`` for a name that is taken."""
    if name in _REGISTERED or name in ALIASES or name == PREASSIGNED:
        raise InputError("this name of a strategy is taken", found=repr(name))
    _REGISTERED[name] = strategy


def strategy_names() -> list[str]:
    """Every name that ``ullage.plan(strategy=...)`` takes: ours, those that were registered, and aliases."""
    return sorted({*_REGISTERED, *ALIASES, PREASSIGNED})


def find_strategy(name: str) -> Strategy:
    """The strategy of this name, which is not an alias. Raises ``InputError`` that lists the names."""
    require_one_of(name, strategy_names(), "strategy")
    return _REGISTERED[name]
