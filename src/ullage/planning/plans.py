"""Where each sequence goes, as data: which microbatch, which rank, how many ranks share it.

A plan is two arrays in compressed rows: ``order`` lists sequence ids, bin by bin, and ``offsets`` cuts it into
``num_microbatches × ranks`` bins, microbatch by microbatch. ``degrees`` says how many consecutive ranks share a bin
(context parallelism); the members stand at the first of them. Everything else is derived: no loop over sequences runs
here. A plan is compared, written as JSON and read back without the planner that made it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InputError
from ullage.layout import Int64, Layout, as_lengths
from ullage.planning.bounds import microbatch_bound, mixed_path, path_bound

_ARRAYS = ("order", "offsets", "degrees", "lengths", "original_lengths", "costs")
_NUMBERS = (
    "ranks",
    "capacity",
    "pad_to_multiple_of",
    "max_sequences",
    "microbatch_multiple",
    "per_microbatch",
    "communication",
)
_WORDS = ("sync", "strategy")
_FORMAT = "ullage plan 1"


@dataclass(frozen=True)
class Statistics:
    """What a plan achieves, with the lower bounds beside it. Token counts are exact integers.

    Conservation: ``tokens_in == num_tokens + truncated_tokens + dropped_tokens`` and ``capacity_tokens == num_tokens
    + padding_tokens``. ``num_padded_tokens`` counts slots: lengths rounded up to the alignment. ``critical_path`` is
    the sum over microbatches of the dearest rank, and ``rank_imbalance`` the dearest rank over the whole step, both
    divided by the mean over ranks: 1.0 is perfect. The bounds hold for every plan of these sequences: ``lower_bound``
    on microbatches, ``critical_path_bound`` and ``rank_imbalance_bound`` on the ratios.
    """

    num_sequences: int
    num_microbatches: int
    num_empty: int
    tokens_in: int
    num_tokens: int
    truncated_tokens: int
    dropped_tokens: int
    num_truncated: int
    num_dropped: int
    num_padded_tokens: int
    capacity_tokens: int
    padding_tokens: int
    sum_squared_lengths: int
    ullage: float
    rank_imbalance: float
    critical_path: float
    lower_bound: int
    rank_imbalance_bound: float
    critical_path_bound: float
    #: What a degree for each sequence inside a microbatch would reach, beside one degree for all of it.
    mixed_critical_path: float
    #: Sequences and their tokens that run on more than one rank.
    num_shared: int
    shared_tokens: int


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule of sequences over ``num_microbatches`` × ``ranks`` bins. Arrays are int64 and read-only.

    ``order`` [placed]: ids, bin by bin; ``offsets`` [num_microbatches·ranks + 1] cuts it; ``degrees``
    [num_microbatches, ranks]: ranks that share the bin there. ``lengths`` [n]: tokens kept of each sequence (0 if it
    was dropped); ``original_lengths`` [n]: tokens that came in; ``costs`` [n]. ``capacity``: slots a rank holds in one
    microbatch. ``max_sequences`` 0 is no limit.
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
    max_sequences: int = 0
    microbatch_multiple: int = 1
    per_microbatch: int = 0
    communication: int = 0
    sync: str = "microbatch"
    strategy: str = "balanced"

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

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
        """How many consecutive ranks share this bin: the context-parallel degree."""
        self._bin(microbatch, rank)
        return int(self.degrees[microbatch, rank])

    def slot_multiple(self, microbatch: int, rank: int) -> int:
        """The number that each slot of this bin is a multiple of.

        It is ``pad_to_multiple_of``, and twice the degree too where ranks share the bin: each takes one chunk from the
        front and one from the back.
        """
        return slot_multiple(self.pad_to_multiple_of, self.degree(microbatch, rank))

    def layout(self, microbatch: int, rank: int) -> Layout:
        """Where the members lie in this microbatch's flat buffer."""
        return Layout(self.lengths[self.members(microbatch, rank)], self.slot_multiple(microbatch, rank))

    def _bin(self, microbatch: int, rank: int) -> int:
        if not 0 <= microbatch < self.num_microbatches:
            raise InputError("no such microbatch", expected=f"0 to {self.num_microbatches - 1}", found=microbatch)
        if not 0 <= rank < self.ranks:
            raise InputError("no such rank", expected=f"0 to {self.ranks - 1}", found=rank)
        return microbatch * self.ranks + rank - rank % int(self.degrees[microbatch, rank])

    @cached_property
    def bins(self) -> Int64:
        """The bin of each sequence, int64 [n]: ``microbatch·ranks + rank`` of its first rank, −1 if dropped."""
        bins = np.full(self.num_sequences, -1, np.int64)
        bins[self.order] = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return bins

    @cached_property
    def inverse(self) -> Int64:
        """Where each sequence stands in ``order``, int64 [n], −1 if dropped: ``outputs[plan.inverse]`` puts outputs
        that were collected microbatch by microbatch, and in each rank by rank, back into the original order."""
        inverse = np.full(self.num_sequences, -1, np.int64)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    @cached_property
    def loads(self) -> npt.NDArray[np.float64]:
        """Cost of each bin to each rank that runs it, float64 [num_microbatches, ranks], in the cost's unit."""
        return _loads(self)

    def statistics(self) -> Statistics:
        """What this plan achieves beside what is possible. See :class:`Statistics`."""
        return _statistics(self)

    def problems(self) -> list[str]:
        """Every violation, as lines that name sequence ids, microbatch and rank; ``[]`` for a sound plan."""
        from ullage.planning.checking import violations

        return violations(self)

    @property
    def digest(self) -> str:
        """16 bytes in hexadecimal that equal plans share: ranks compare it instead of their plans."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([_FORMAT, *(getattr(self, name) for name in _NUMBERS + _WORDS)]).encode())
        for name in _ARRAYS:
            digest.update(np.int64(getattr(self, name).size).tobytes() + getattr(self, name).tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """The whole plan as one JSON object; :meth:`from_json` reads it back, equal."""
        record: dict[str, Any] = {"format": _FORMAT}
        record |= {name: getattr(self, name) for name in _NUMBERS + _WORDS}
        record |= {name: getattr(self, name).tolist() for name in _ARRAYS}
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that :meth:`to_json` wrote. Raises ``InputError`` if it is none or does not hold together."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise InputError("a plan must be JSON", found=str(error)) from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            found = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise InputError("this JSON is not a plan", expected=f"format {_FORMAT!r}", found=found)
        missing = [name for name in _ARRAYS + _NUMBERS + _WORDS if name not in record]
        if missing:
            raise InputError("a plan lacks a field", where=missing[0])
        return cls._from_record(record)

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> Plan:
        numbers = {name: record[name] for name in _NUMBERS}
        for name, value in numbers.items():
            least = 1 if name in ("ranks", "capacity", "pad_to_multiple_of", "microbatch_multiple") else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"a plan's {name} must be an integer", expected=f">= {least}", found=value)
        ranks, degrees = numbers["ranks"], record["degrees"]
        for row in degrees:
            if len(as_lengths(row, "degrees")) != ranks or min(row) < 1:
                raise InputError("a plan's degrees must be one a rank", expected=f"{ranks} numbers >= 1", found=row)
        arrays = {name: as_lengths(record[name], name) for name in _ARRAYS if name != "degrees"}
        arrays["degrees"] = np.asarray(degrees, np.int64).reshape(len(degrees), ranks)
        offsets, order, n = arrays["offsets"], arrays["order"], len(arrays["lengths"])
        if len(offsets) != len(degrees) * ranks + 1 or offsets[0] != 0 or offsets[-1] != len(order):
            raise InputError(
                "a plan's offsets do not cut its order", expected=f"{len(degrees) * ranks + 1} from 0 to {len(order)}"
            )
        if np.any(np.diff(offsets) < 0) or np.any(order >= n):
            raise InputError("a plan's offsets fall or its order names a sequence that is not there")
        if len(arrays["original_lengths"]) != n or len(arrays["costs"]) != n:
            raise InputError("a plan's lengths and costs disagree", expected=f"{n} each")
        words: dict[str, Any] = {name: str(record[name]) for name in _WORDS}
        return cls(**arrays, **numbers, **words)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _NUMBERS + _WORDS) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS
        )

    def __hash__(self) -> int:
        return hash(self.digest)


def slot_multiple(pad_to_multiple_of: int, degree: int) -> int:
    """What a slot is a multiple of where ``degree`` ranks share it."""
    return pad_to_multiple_of if degree == 1 else math.lcm(pad_to_multiple_of, 2 * degree)


def slots_of(lengths: Int64, pad_to_multiple_of: int, degree: int | Int64 = 1) -> Int64:
    """Lengths rounded up to :func:`slot_multiple`, int64."""
    if isinstance(degree, np.ndarray):
        multiple = np.where(degree == 1, pad_to_multiple_of, np.lcm(pad_to_multiple_of, 2 * degree))
    else:
        multiple = slot_multiple(pad_to_multiple_of, degree)
    return -(-lengths // multiple) * multiple


def _loads(plan: Plan) -> npt.NDArray[np.float64]:
    count = plan.num_microbatches * plan.ranks
    placed = np.repeat(np.arange(count), np.diff(plan.offsets))
    # Costs are integers and a bin's sum stays exact in int64; float64 comes after.
    work = np.zeros(count, np.int64)
    np.add.at(work, placed, plan.costs[plan.order])
    degrees = plan.degrees.reshape(-1)
    rows = np.arange(count) % plan.ranks
    first = np.arange(count) - rows % degrees
    loads = work[first] / degrees
    if plan.communication:
        tokens = np.zeros(count, np.int64)
        np.add.at(tokens, placed, plan.lengths[plan.order])
        loads = loads + plan.communication * tokens[first] * ((degrees - 1) / degrees)
    return (loads + plan.per_microbatch).reshape(plan.num_microbatches, plan.ranks)


def _statistics(plan: Plan) -> Statistics:
    placed = plan.lengths[plan.order]
    degree = plan.degrees.reshape(-1)[plan.bins[plan.order]]
    dropped = plan.bins < 0
    cut = ~dropped & (plan.lengths < plan.original_lengths)
    num_tokens, tokens_in = int(placed.sum()), int(plan.original_lengths.sum())
    dropped_tokens = int(plan.original_lengths[dropped].sum())
    capacity_tokens = plan.num_microbatches * plan.ranks * plan.capacity
    total = int(plan.costs[plan.order].sum())
    ideal = total / plan.ranks + plan.per_microbatch * plan.num_microbatches
    loads = plan.loads
    path, dearest = float(loads.max(axis=1, initial=0).sum()), float(loads.sum(axis=0).max(initial=0))
    reached = path / ideal if ideal else 1.0
    shared = degree > 1
    bounds = path_bound(plan)
    return Statistics(
        num_sequences=len(plan.order),
        num_microbatches=plan.num_microbatches,
        num_empty=int(np.count_nonzero(np.diff(plan.offsets)[_first_ranks(plan)] == 0)),
        tokens_in=tokens_in,
        num_tokens=num_tokens,
        truncated_tokens=tokens_in - num_tokens - dropped_tokens,
        dropped_tokens=dropped_tokens,
        num_truncated=int(np.count_nonzero(cut)),
        num_dropped=int(np.count_nonzero(dropped)),
        num_padded_tokens=int(slots_of(placed, plan.pad_to_multiple_of, degree).sum()),
        capacity_tokens=capacity_tokens,
        padding_tokens=capacity_tokens - num_tokens,
        sum_squared_lengths=sum_of_squares(placed),
        ullage=1 - num_tokens / capacity_tokens if capacity_tokens else 0.0,
        rank_imbalance=dearest / ideal if ideal else 1.0,
        critical_path=reached,
        lower_bound=microbatch_bound(plan),
        rank_imbalance_bound=bounds.rank_imbalance,
        critical_path_bound=bounds.critical_path,
        mixed_critical_path=min(reached, mixed_path(plan)),
        num_shared=int(np.count_nonzero(shared)),
        shared_tokens=int(placed[shared].sum()),
    )


def _first_ranks(plan: Plan) -> Int64:
    """The bins that can hold members: the first rank of each group of ranks."""
    rank = np.tile(np.arange(plan.ranks), plan.num_microbatches)
    return np.flatnonzero(rank % plan.degrees.reshape(-1) == 0)


def sum_of_squares(lengths: Int64) -> int:
    """Σlength², exact at any size."""
    if len(lengths) and float(np.square(lengths, dtype=np.float64).sum()) >= 2.0**62:
        return sum(length * length for length in lengths.tolist())
    return int(np.dot(lengths, lengths))
