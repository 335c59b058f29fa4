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
    """

    slots: Int64
    costs: Int64
    counts: Int64
    ranks: int
    capacity: int
    max_sequences: int
    microbatch_multiple: int
    sync: str

    @property
    def num_items(self) -> int:
        return len(self.slots)

    def least_microbatches(self) -> int:
        """Microbatches a rank needs at the least; 0 without items."""
        if not self.num_items:
            return 0
        bins = max(1, bin_bound(self.slots, self.capacity), -(-int(self.counts.sum()) // self.max_sequences))
        return microbatches_for(bins, self.ranks, self.microbatch_multiple)


@dataclass(frozen=True, eq=False)
class Assignment:
    """``bins`` [items]: ``microbatch·ranks + rank`` of each item; ``degrees`` [num_microbatches, ranks] if ranks share
    bins, which then hold their items at the first of those ranks; ``position`` [items] orders the items of a bin, by
    arrival if it is ``None``."""

    bins: Int64
    num_microbatches: int
    degrees: Int64 | None = None
    position: Int64 | None = None


Strategy = Callable[[Problem], Assignment]
