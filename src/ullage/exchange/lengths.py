"""Lengths of all sequences of the global batch, gathered to every rank: the input of a plan.

Two small all-gathers over the data-parallel axis: first how many sequences each rank brings, then their lengths,
padded to the largest count. int64 throughout. A rank that has nothing brings 0; a rank whose lengths cannot be used
says so in its count, so that all ranks raise and none waits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Integers, as_lengths
from ullage.ranks import Topology, agree, tried
from ullage.ranks.wire import gather_int64

_FAILED = -1


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of the global batch, int64, the same on every rank.

    Attributes:
        lengths [n]: tokens of every sequence, rank by rank; the position here is the id that a plan uses.
        counts [dp]: number of sequences that each rank holds.
    """

    lengths: Int64
    counts: Int64 = field(repr=False)

    def __post_init__(self) -> None:
        lengths, counts = as_lengths(self.lengths), as_lengths(self.counts, "counts")
        if int(counts.sum()) != len(lengths):
            raise InputError("counts and lengths disagree", expected=f"{len(lengths)} in all", found=int(counts.sum()))
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "counts", counts)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Int64:
        """The id of each rank's first sequence, int64 [dp + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def digest(self) -> str:
        """16 bytes in hexadecimal that equal lengths and counts share."""
        return hashlib.blake2b(self.counts.tobytes() + self.lengths.tobytes(), digest_size=16).hexdigest()


def gather_lengths(local_lengths: Integers, topology: Topology) -> Lengths:
    """The lengths of all ranks along the data-parallel axis, in tokens, in the order of coordinates.

    ``local_lengths``: this rank's, integers >= 0, possibly none. Collective over dp, host values only. Raises
    ``InputError`` on the rank whose lengths cannot be used and ``DistributedError`` on the others.
    """
    mine, failure = tried(lambda: as_lengths(local_lengths))
    return gather_or_fail(mine, failure, topology)


def gather_or_fail(mine: Int64 | None, failure: Exception | None, topology: Topology) -> Lengths:
    """:func:`gather_lengths` for a rank that may have failed already: then every rank raises."""
    axis = topology.dp
    if mine is None and failure is None:
        mine = np.zeros(0, np.int64)
    # First how many each rank has, or that it failed: ranks without an error learn of it here and join the agreement
    # below, so all of them do.
    counts = gather_int64(np.array([_FAILED if mine is None else len(mine)]), axis)[:, 0]
    if (counts == _FAILED).any():
        agree(failure, axis, "reading its samples and their lengths")
    assert mine is not None
    # An all-gather takes blocks of one size, so lengths are padded to the largest count, and the padding is left out
    # by position and not by value: a length may be 0.
    widest = int(counts.max())
    padded = np.zeros(widest, np.int64)
    padded[: len(mine)] = mine
    rows = gather_int64(padded, axis) if widest else np.zeros((axis.size, 0), np.int64)
    return Lengths(rows[np.arange(widest) < counts[:, None]], counts)
