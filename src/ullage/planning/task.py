"""The input and the result of a strategy, both as arrays.

:func:`ullage.plan` checks its arguments and makes a :class:`Task` of *items*: sequences, or groups of sequences that
stay together. A strategy is any function from a :class:`Task` to an :class:`Assignment`; it never sees lengths,
alignment or options that are not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.core.layout import Int64
from ullage.planning.bounds import bin_bound, microbatches_for


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
