"""Sequences in bins, as data: which microbatch, which rank, how many ranks share it.

Two arrays in compressed rows: ``order`` lists sequence ids, bin by bin, and ``offsets`` cuts it into
``num_microbatches × ranks`` bins, microbatch by microbatch. ``degrees`` says how many consecutive ranks share a bin
(context parallelism); the members stand at the first of them. Everything else is derived: no loop over sequences runs
here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout, ranges

#: ``max_sequences`` without a limit: a number that no microbatch reaches.
NO_LIMIT = (1 << 31) - 1
#: The resource that every plan has.
TOKENS = "tokens"
ARRAYS = ("order", "offsets", "degrees", "lengths", "original_lengths", "costs")


def slot_multiple(pad_to_multiple_of: int, degree: int) -> int:
    """The number that a slot is a multiple of where ``degree`` ranks share it.

    With more than one rank it is twice the degree too: each rank takes two chunks of every slot, and chunks are alike.
    """
    return pad_to_multiple_of if degree == 1 else math.lcm(pad_to_multiple_of, 2 * degree)


def free_degrees(ranks: int, least: int = 1) -> list[int]:
    """The degrees, rising, that ``context_parallel="auto"`` chooses from: powers of two, and all ranks together.

    A power of two is one of them if ``ranks`` hold two blocks of it. These are the groups that Megatron-Core makes.
    ``least``: the least degree, one of those that divide ``ranks``.

    >>> free_degrees(8), free_degrees(6), free_degrees(12, least=4)
    ([1, 2, 4, 8], [1, 2, 6], [4, 12])
    """
    powers = [1 << e for e in range(ranks.bit_length() - 1)]
    return [degree for degree in [*powers, ranks] if degree >= least]


def slots_of(lengths: Int64, pad_to_multiple_of: int, degree: int | Int64 = 1) -> Int64:
    """Lengths rounded up to :func:`slot_multiple`, int64."""
    if isinstance(degree, np.ndarray):
        multiple = np.where(degree == 1, pad_to_multiple_of, np.lcm(pad_to_multiple_of, 2 * degree))
    else:
        multiple = slot_multiple(pad_to_multiple_of, degree)
    return -(-lengths // multiple) * multiple


def _read_only(values: Int64) -> Int64:
    array = np.ascontiguousarray(values, dtype=np.int64)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Placement:
    """Assignment of sequences to bins, and everything that follows from its arrays alone. Arrays are int64, read-only.

    Attributes:
        order [placed]: ids of sequences, bin by bin.
        offsets [num_microbatches·ranks + 1]: where each bin begins in ``order``, microbatch by microbatch.
        degrees [num_microbatches, ranks]: number of ranks that share the bin there; its members stand at the first of
            them.
        lengths [n]: tokens kept of each sequence, 0 if it was dropped.
        original_lengths [n]: tokens that came in.
        costs [n]: cost of each sequence, in the unit of the cost model.
        ranks: number of ranks.
        capacity: slots that a rank holds in one microbatch.
        pad_to_multiple_of: each slot is a multiple of it.
        max_sequences: sequences that one microbatch may hold; ``NO_LIMIT`` for any number.
        microbatch_multiple: the number of microbatches is a multiple of it.
        per_microbatch, communication: these costs of the cost model, in the unit of ``costs``.
        sync: ``"microbatch"`` or ``"step"``: when ranks wait for one another.
        strategy: the name of the strategy that made it.
        capacities: what a rank holds in one microbatch, by resource: ``tokens`` (that is ``capacity``), and every other
            one with a capacity, such as patches of images.
        amounts: what each sequence takes of every other resource, int64 [n] by name, whether or not it has a capacity.
    """

    order: Int64
    offsets: Int64
    degrees: Int64
    lengths: Int64
    original_lengths: Int64 = field(repr=False)
    costs: Int64 = field(repr=False)
    ranks: int
    capacity: int
    pad_to_multiple_of: int = 1
    max_sequences: int = NO_LIMIT
    microbatch_multiple: int = 1
    per_microbatch: int = 0
    communication: int = 0
    sync: str = "microbatch"
    strategy: str = "balanced"
    capacities: Mapping[str, int] = field(default_factory=dict)
    amounts: Mapping[str, Int64] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacities", {TOKENS: self.capacity, **self.limits})
        object.__setattr__(self, "amounts", {name: _read_only(each) for name, each in self.amounts.items()})
        for name in ARRAYS:
            object.__setattr__(self, name, _read_only(getattr(self, name)))

    @property
    def limits(self) -> dict[str, int]:
        """The capacities besides that of tokens, by resource."""
        return {name: limit for name, limit in self.capacities.items() if name != TOKENS}

    def held(self, name: str) -> Int64:
        """How much of a resource each bin holds, int64 [num_microbatches, ranks]; a bin's stands at the first of its
        ranks."""
        held = np.zeros(self.num_microbatches * self.ranks, np.int64)
        np.add.at(held, np.repeat(np.arange(len(held)), np.diff(self.offsets)), self.amounts[name][self.order])
        return held.reshape(self.num_microbatches, self.ranks)

    @property
    def num_microbatches(self) -> int:
        """Microbatches that every rank runs, the empty ones included."""
        return len(self.degrees)

    @property
    def num_sequences(self) -> int:
        """Sequences that came in, dropped ones included."""
        return len(self.lengths)

    def members(self, microbatch: int, rank: int) -> Int64:
        """Ids of the sequences in this microbatch of this rank, int64, in packing order; all ranks that share a bin
        see the same members. Raises ``InputError`` for a microbatch or rank that the plan does not have."""
        first = self._bin(microbatch, rank)
        return self.order[self.offsets[first] : self.offsets[first + 1]]

    def degree(self, microbatch: int, rank: int) -> int:
        """Number of consecutive ranks that share this bin: the context-parallel degree."""
        self._bin(microbatch, rank)
        return int(self.degrees[microbatch, rank])

    def slot_multiple(self, microbatch: int, rank: int) -> int:
        """The number that each slot of this bin is a multiple of.

        It is ``pad_to_multiple_of``, and twice the degree too where ranks share the bin: each takes one chunk from the
        front and one from the back.
        """
        return slot_multiple(self.pad_to_multiple_of, self.degree(microbatch, rank))

    def layout(self, microbatch: int, rank: int) -> Layout:
        """Layout of the members in this microbatch's flat buffer."""
        return Layout(self.lengths[self.members(microbatch, rank)], self.slot_multiple(microbatch, rank))

    def all_members(self, rank: int) -> Int64:
        """Ids of all sequences that a rank runs, int64, microbatch by microbatch, each in packing order."""
        begins, counts = self._bins_of(rank)
        return self.order[ranges(begins, counts)]

    def layouts(self, rank: int) -> list[Layout]:
        """:meth:`layout` of every microbatch of a rank."""
        begins, counts = self._bins_of(rank)
        lengths = self.lengths[self.order[ranges(begins, counts)]]
        degrees = np.repeat(self.degrees[:, rank], counts) if len(counts) else counts
        return Layout.divide(lengths, slots_of(lengths, self.pad_to_multiple_of, degrees), counts)

    def _bins_of(self, rank: int) -> tuple[Int64, Int64]:
        """Where the members of each microbatch of a rank begin in ``order``, and how many there are."""
        if not self.num_microbatches:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._bin(0, rank)  # raises for a rank that is not there
        first = np.arange(self.num_microbatches) * self.ranks + rank - rank % self.degrees[:, rank]
        return self.offsets[first], self.offsets[first + 1] - self.offsets[first]

    def _bin(self, microbatch: int, rank: int) -> int:
        if not 0 <= microbatch < self.num_microbatches:
            raise InputError("no such microbatch", expected=f"0 to {self.num_microbatches - 1}", found=microbatch)
        if not 0 <= rank < self.ranks:
            raise InputError("no such rank", expected=f"0 to {self.ranks - 1}", found=rank)
        # The first rank of the group that shares the bin.
        return microbatch * self.ranks + rank - rank % int(self.degrees[microbatch, rank])

    @cached_property
    def bins(self) -> Int64:
        """The bin of each sequence, int64 [n]: ``microbatch·ranks + rank`` of its first rank, −1 if dropped."""
        bins = np.full(self.num_sequences, -1, np.int64)
        bins[self.order] = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return bins

    @cached_property
    def inverse(self) -> Int64:
        """Position of each sequence in ``order``, int64 [n], −1 if dropped: ``outputs[plan.inverse]`` puts outputs
        that were collected microbatch by microbatch, each of them rank by rank, back into the original order."""
        inverse = np.full(self.num_sequences, -1, np.int64)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    @cached_property
    def loads(self) -> npt.NDArray[np.float64]:
        """Cost of each bin to each rank that runs it, float64 [num_microbatches, ranks], in the cost's unit."""
        count = self.num_microbatches * self.ranks
        placed = np.repeat(np.arange(count), np.diff(self.offsets))
        # Costs are integers and a bin's sum stays exact in int64; float64 comes after.
        work = np.zeros(count, np.int64)
        np.add.at(work, placed, self.costs[self.order])
        # A bin's members stand at the first of its ranks, and groups begin at multiples of their degree, so every
        # rank finds the sum there and does its part of it.
        degrees = self.degrees.reshape(-1)
        rows = np.arange(count) % self.ranks
        first = np.arange(count) - rows % degrees
        loads = work[first] / degrees
        if self.communication:
            tokens = np.zeros(count, np.int64)
            np.add.at(tokens, placed, self.lengths[self.order])
            loads = loads + self.communication * tokens[first] * ((degrees - 1) / degrees)
        return (loads + self.per_microbatch).reshape(self.num_microbatches, self.ranks)

    @property
    def first_ranks(self) -> Int64:
        """The bins that can hold members: the first rank of each group of ranks that share one."""
        rank = np.tile(np.arange(self.ranks), self.num_microbatches)
        return np.flatnonzero(rank % self.degrees.reshape(-1) == 0)
