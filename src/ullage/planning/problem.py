"""The question put to a strategy, and its answer, both as arrays.

:func:`ullage.plan` checks what it was given and makes a :class:`Problem` of *items*: sequences, or groups of sequences
that stay together. A strategy is any function from a :class:`Problem` to an :class:`Assignment`; it never sees lengths,
alignment or options that are not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.layout import Int64
from ullage.planning.bounds import bin_bound, microbatches_for


@dataclass(frozen=True, eq=False)
class Problem:
    """Items to place into bins: one bin for each microbatch of each rank.

    ``slots``, ``costs``, ``counts`` [items]: int64 room, work and sequences of each item, in arrival order.
    ``capacity``: slots of a bin. ``max_sequences``: sequences of a bin, a number no bin reaches if there is no limit.
    ``sync``: ``"microbatch"`` to minimise the sum over microbatches of the dearest rank, ``"step"`` the dearest rank.
    ``shared_slots``, ``shared_costs`` [exponents, items]: where ranks may share a bin, slots and work of all its ranks
    together at degree 1, 2, 4, ...
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

    @property
    def num_items(self) -> int:
        return len(self.slots)

    def least_microbatches(self) -> int:
        """Microbatches a rank needs at the least; 0 without items."""
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
    """``bins`` [items]: ``microbatch·ranks + rank`` of each item; ``degrees`` [num_microbatches, ranks] if ranks share
    bins, which then hold their items at the first of those ranks."""

    bins: Int64
    num_microbatches: int
    degrees: Int64 | None = None


Strategy = Callable[[Problem], Assignment]
