"""A plan: sequences in bins, what that achieves, what is wrong with it, and its JSON.

A plan is compared, written as JSON and read back without the planner that made it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ullage.core.display import Paged, Shown, page_of, quantity, write_page
from ullage.core.errors import InputError, listed, require_int
from ullage.core.layout import Int64, as_lengths
from ullage.planning.bounds import microbatch_bound, path_bound, resource_bound
from ullage.planning.placement import ARRAYS, Placement, slots_of
from ullage.planning.request import read_resources

#: Ids that one line names before it only counts.
_NAMED = 8


def violations(plan: Placement) -> list[str]:
    """All violations of ``plan`` as lines; ``[]`` if it is sound."""
    return [*_membership(plan), *_degrees(plan), *_sizes(plan)]


def _ids(ids: Int64) -> str:
    return listed(ids.tolist(), _NAMED)


def _membership(plan: Placement) -> list[str]:
    problems = []
    n = plan.num_sequences
    # Ids first: the counts below are of ids that exist.
    unknown = np.unique(plan.order[(plan.order < 0) | (plan.order >= n)])
    if len(unknown):
        problems.append(f"unknown: sequences {_ids(unknown)} are placed, but there are only {n}")
    times = np.bincount(plan.order[(plan.order >= 0) & (plan.order < n)], minlength=n)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        problems.append(f"duplicate: sequences {_ids(twice)} are placed more than once")
    # A sequence kept at 0 tokens that had some was dropped on purpose; every other one must be placed, unless it takes
    # more of another resource than a microbatch has.
    dropped = (plan.lengths == 0) & (plan.original_lengths > 0)
    for name, limit in plan.limits.items():
        dropped |= (plan.lengths == 0) & (plan.amounts[name] > limit)
    missing = np.flatnonzero((times == 0) & ~dropped)
    if len(missing):
        problems.append(f"missing: sequences {_ids(missing)} are placed nowhere")
    ghosts = np.flatnonzero((times > 0) & dropped)
    if len(ghosts):
        problems.append(f"dropped: sequences {_ids(ghosts)} are dropped and placed all the same")
    longer = np.flatnonzero(plan.lengths > plan.original_lengths)
    if len(longer):
        problems.append(f"longer: sequences {_ids(longer)} are planned longer than they are")
    if plan.num_microbatches % plan.microbatch_multiple:
        problems.append(
            f"multiple: {plan.num_microbatches} microbatches are not a multiple of {plan.microbatch_multiple}"
        )
    return problems


def _degrees(plan: Placement) -> list[str]:
    problems = []
    for microbatch, row in enumerate(plan.degrees.tolist()):
        if max(row) == 1 == min(row):
            continue
        # From group to group. A group begins at a multiple of its degree, all its ranks name that degree, and its
        # sequences stand at its first rank. After a bad one the walk goes on with the next rank, so that one mistake
        # does not hide others.
        rank = 0
        while rank < plan.ranks:
            degree = row[rank]
            where = f"microbatch {microbatch}, rank {rank}"
            if degree < 1:
                problems.append(f"degree: {where} has degree {degree}")
                degree = 1
            elif rank % degree or rank + degree > plan.ranks:
                problems.append(f"misaligned: {where} starts a group of {degree} ranks, of {plan.ranks}")
                degree = 1
            elif row[rank : rank + degree] != [degree] * degree:
                problems.append(f"mixed: {where} starts a group of degrees {row[rank : rank + degree]}")
                degree = 1
            else:
                # Where the bins behind the first rank begin and end in ``order``: all of them must be empty.
                cuts = plan.offsets[microbatch * plan.ranks + rank + 1 : microbatch * plan.ranks + rank + degree + 1]
                if cuts[0] != cuts[-1]:
                    lost = plan.order[cuts[0] : cuts[-1]]
                    problems.append(f"mixed: sequences {_ids(lost)} stand behind the first rank of {where}")
            rank += degree
    return problems


def _sizes(plan: Placement) -> list[str]:
    problems = []
    count = plan.num_microbatches * plan.ranks
    known = (plan.order >= 0) & (plan.order < plan.num_sequences)
    bins = np.repeat(np.arange(count), np.diff(plan.offsets))[known]
    order = plan.order[known]
    degrees = np.maximum(plan.degrees.reshape(-1), 1)
    # Slots per bin, at the degree of the bin. Ids that do not exist were reported above and are left out.
    held = np.zeros(count, np.int64)
    np.add.at(held, bins, slots_of(plan.lengths[order], plan.pad_to_multiple_of, degrees[bins]))
    for k in np.flatnonzero(held > plan.capacity * degrees).tolist():
        microbatch, rank = divmod(k, plan.ranks)
        problems.append(
            f"over capacity: microbatch {microbatch}, rank {rank} holds {held[k]} slots of"
            f" {plan.capacity * degrees[k]}: sequences {_ids(order[bins == k])}"
        )
    # The other resources: every rank of a bin holds all of its items, so that sharing it adds no room.
    for name, limit in plan.limits.items():
        held = np.zeros(count, np.int64)
        np.add.at(held, bins, plan.amounts[name][order])
        for k in np.flatnonzero(held > limit).tolist():
            microbatch, rank = divmod(k, plan.ranks)
            problems.append(
                f"over capacity: microbatch {microbatch}, rank {rank} holds {held[k]} {name} of {limit}:"
                f" sequences {_ids(order[bins == k])}"
            )
    num_sequences = np.bincount(bins, minlength=count)
    for k in np.flatnonzero(num_sequences > plan.max_sequences).tolist():
        microbatch, rank = divmod(k, plan.ranks)
        problems.append(
            f"crowded: microbatch {microbatch}, rank {rank} holds {num_sequences[k]} sequences of at most"
            f" {plan.max_sequences}: {_ids(order[bins == k])}"
        )
    return problems


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
class ResourceUse:
    """What a plan places of a resource besides tokens, such as patches of images.

    Attributes:
        name: of the resource.
        amount: what all sequences that are placed take of it.
        capacity: what a rank holds in one microbatch; None where it has no capacity.
        largest: the most that a rank holds in one microbatch.
        unused: the part of all microbatches' capacity that is not taken; 0.0 without a capacity.
        rank_imbalance: what the rank with the most of it takes in the whole step, divided by the mean rank.
        lower_bound: least number of microbatches by this resource alone; 0 without a capacity.
    """

    name: str
    amount: int
    capacity: int | None
    largest: int
    unused: float
    rank_imbalance: float
    lower_bound: int


@dataclass(frozen=True, repr=False)
class Statistics(Shown):
    """Figures of a plan, with the lower bounds beside them. Token counts are exact integers.

    Conservation: ``tokens_in == num_tokens + truncated_tokens + dropped_tokens`` and ``capacity_tokens == num_tokens
    + padding_tokens``. The bounds hold for every plan of these sequences.

    Attributes:
        num_sequences: sequences that are placed.
        num_empty: bins without sequences.
        num_padded_tokens: slots in use: lengths rounded up to the alignment.
        capacity_tokens: slots that all microbatches of all ranks can hold.
        ullage: the part of ``capacity_tokens`` that holds no token.
        rank_imbalance: cost of the most expensive rank over the whole step, divided by the mean rank; 1.0 is perfect.
        critical_path: sum over microbatches of the most expensive rank, divided by the mean rank; 1.0 is perfect.
        lower_bound: least number of microbatches.
        rank_imbalance_bound, critical_path_bound: least values of these two ratios.
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
    #: Sequences and their tokens that run on more than one rank.
    num_shared: int
    shared_tokens: int
    #: Of every resource besides tokens.
    resources: tuple[ResourceUse, ...] = ()

    def _facts(self) -> Iterator[str]:
        yield quantity(self.num_sequences, "sequence")
        yield quantity(self.num_microbatches, "microbatch", "microbatches")
        yield f"ullage {100 * self.ullage:.1f} %"
        yield f"rank imbalance {self.rank_imbalance:.2f}"
        yield f"critical path {self.critical_path:.2f}"
        for each in self.resources:
            yield f"at most {each.largest:,} {each.name} a microbatch"


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Paged, Placement):
    """A schedule of sequences over ``num_microbatches`` × ``ranks`` bins, as :func:`ullage.plan` makes it."""

    def statistics(self) -> Statistics:
        """Figures of this plan beside their lower bounds. See :class:`Statistics`."""
        return _statistics(self)

    def to_html(self, path: str | os.PathLike[str], *, reference: Plan | None = None, source: str = "") -> Path:
        """Write the page of this plan, as ``ullage plan --html`` does, and return its path. Replaces a file.

        ``reference``: another plan of the same sequences to stand beside it; by default that by ``next_fit``, at the
        least degree of this plan that holds all. ``source``: what the lengths are, for the title. Raises ``InputError``
        for a file that cannot be written.
        """
        return write_page(path, page_of(self, reference=reference, source=source))

    def _facts(self) -> Iterator[str]:
        yield quantity(self.num_sequences, "sequence")
        yield quantity(self.ranks, "rank")
        yield quantity(self.num_microbatches, "microbatch", "microbatches")
        size = self.num_microbatches * self.ranks * self.capacity
        yield f"ullage {100 * (1 - int(self.lengths[self.order].sum()) / size if size else 0):.1f} %"
        yield f"critical path {_critical_path(self):.2f}"

    def problems(self) -> list[str]:
        """Every violation, as lines that name sequence ids, microbatch and rank; ``[]`` for a sound plan."""
        return violations(self)

    @property
    def digest(self) -> str:
        """16 bytes in hexadecimal that equal plans share: ranks compare it instead of their plans."""
        digest = hashlib.blake2b(digest_size=16)
        others = [self.limits, list(self.amounts)] if self.amounts else []
        digest.update(json.dumps([_FORMAT, *(getattr(self, name) for name in _NUMBERS + _WORDS), *others]).encode())
        for array in (*(getattr(self, name) for name in ARRAYS), *self.amounts.values()):
            # Each array behind its size: the same numbers, divided among the arrays in another way, are another plan.
            digest.update(np.int64(array.size).tobytes() + array.tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """The whole plan as one JSON object; :meth:`from_json` reads it back, equal."""
        record: dict[str, Any] = {"format": _FORMAT}
        record |= {name: getattr(self, name) for name in _NUMBERS + _WORDS}
        record |= {name: getattr(self, name).tolist() for name in ARRAYS}
        if self.amounts:
            record |= {"capacities": self.capacities}
            record |= {"amounts": {name: each.tolist() for name, each in self.amounts.items()}}
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read the plan that :meth:`to_json` wrote. Raises ``InputError`` for another text and for a contradiction."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise InputError("a plan must be JSON, not the name of a file", found=str(error)) from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            found = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise InputError("this JSON is not a plan", expected=f"format {_FORMAT!r}", found=found)
        missing = [name for name in ARRAYS + _NUMBERS + _WORDS if name not in record]
        if missing:
            raise InputError("a plan lacks a field", where=missing[0])
        return cls._from_record(record)

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> Plan:
        may_be_zero = ("per_microbatch", "communication")
        numbers = {
            name: require_int(record[name], f"a plan's {name}", least=0 if name in may_be_zero else 1)
            for name in _NUMBERS
        }
        # A plan from outside is checked as far as its methods index with it; :meth:`problems` tells the rest.
        ranks, degrees = numbers["ranks"], record["degrees"]
        for row in degrees:
            if len(as_lengths(row, "degrees")) != ranks or min(row) < 1:
                raise InputError("a plan's degrees must be one per rank", expected=f"{ranks} numbers >= 1", found=row)
        arrays = {name: as_lengths(record[name], name) for name in ARRAYS if name != "degrees"}
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
        capacities, amounts = read_resources(numbers["capacity"], record.get("capacities"), record.get("amounts"), n)
        return cls(**arrays, **numbers, **words, capacities=capacities, amounts=amounts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            all(getattr(self, name) == getattr(other, name) for name in _NUMBERS + _WORDS)
            and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS)
            and (self.capacities == other.capacities and self.amounts.keys() == other.amounts.keys())
            and all(np.array_equal(each, other.amounts[name]) for name, each in self.amounts.items())
        )

    def __hash__(self) -> int:
        return hash(self.digest)


def _mean_rank(plan: Placement) -> float:
    """An equal part of the work, and what every microbatch costs besides. Both ratios divide by it."""
    return int(plan.costs[plan.order].sum()) / plan.ranks + plan.per_microbatch * plan.num_microbatches


def _critical_path(plan: Placement) -> float:
    ideal = _mean_rank(plan)
    return float(plan.loads.max(axis=1, initial=0).sum()) / ideal if ideal else 1.0


def _statistics(plan: Placement) -> Statistics:
    # Per placed sequence: its tokens, and the number of ranks that run it.
    placed = plan.lengths[plan.order]
    degree = plan.degrees.reshape(-1)[plan.bins[plan.order]]
    dropped = plan.bins < 0
    cut = ~dropped & (plan.lengths < plan.original_lengths)
    num_tokens, tokens_in = int(placed.sum()), int(plan.original_lengths.sum())
    dropped_tokens = int(plan.original_lengths[dropped].sum())
    capacity_tokens = plan.num_microbatches * plan.ranks * plan.capacity
    ideal = _mean_rank(plan)
    highest = float(plan.loads.sum(axis=0).max(initial=0))
    shared = degree > 1
    bounds = path_bound(plan)
    return Statistics(
        num_sequences=len(plan.order),
        num_microbatches=plan.num_microbatches,
        num_empty=int(np.count_nonzero(np.diff(plan.offsets)[plan.first_ranks] == 0)),
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
        rank_imbalance=highest / ideal if ideal else 1.0,
        critical_path=_critical_path(plan),
        lower_bound=microbatch_bound(plan),
        rank_imbalance_bound=bounds.rank_imbalance,
        critical_path_bound=bounds.critical_path,
        num_shared=int(np.count_nonzero(shared)),
        shared_tokens=int(placed[shared].sum()),
        resources=tuple(_use(plan, name) for name in plan.amounts),
    )


def _use(plan: Placement, name: str) -> ResourceUse:
    held, limit = plan.held(name), plan.limits.get(name)
    amount, degree = int(held.sum()), int(plan.degrees.min(initial=plan.ranks))
    size = held.size // max(1, degree) * (limit or 0)
    return ResourceUse(
        name=name,
        amount=amount,
        capacity=limit,
        largest=int(held.max(initial=0)),
        unused=1 - amount / size if size else 0.0,
        rank_imbalance=int(held.sum(axis=0).max(initial=0)) * (plan.ranks // max(1, degree)) / amount
        if amount
        else 1.0,
        lower_bound=0 if limit is None else resource_bound(plan, name),
    )


def sum_of_squares(lengths: Int64) -> int:
    """Σlength², exact at any size."""
    # Near 64 bits numpy would wrap around, so Python adds up. float64 tells with a bit to spare.
    if len(lengths) and float(np.square(lengths, dtype=np.float64).sum()) >= 2.0**62:
        return sum(length * length for length in lengths.tolist())
    return int(np.dot(lengths, lengths))
