"""The arguments of ``plan(...)``, checked before any work: each that cannot be met is one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ullage.core.errors import InputError, listed, require_int
from ullage.core.layout import Int64, as_lengths
from ullage.planning.placement import free_degrees


def degrees(context_parallel: Any, min_context_parallel: Any, ranks: int) -> tuple[int, ...]:
    """The numbers of ranks, rising, that a sequence may be given: one, or with ``"auto"`` any of several."""
    if isinstance(context_parallel, str) and context_parallel != "auto":
        raise InputError("no such context_parallel", expected="'auto' or a degree", found=repr(context_parallel))
    least = require_int(min_context_parallel, "min_context_parallel", least=1)
    if context_parallel == "auto":
        # Blocks of the least degree tile the ranks: only then can every rank be used at that degree.
        possible = [degree for degree in free_degrees(ranks) if ranks % degree == 0]
        if least not in possible:
            raise InputError(
                "min_context_parallel must be a power of two that divides the ranks, or all of them",
                expected=" or ".join(map(str, possible)),
                found=least,
            )
        return tuple(free_degrees(ranks, least))
    degree = require_int(context_parallel, "context_parallel", least=1)
    if ranks % degree:
        raise InputError("context_parallel must divide the ranks", expected=f"a divisor of {ranks}", found=degree)
    if degree < least:
        raise InputError(
            "context_parallel is below min_context_parallel",
            expected=f"at least {least}",
            found=degree,
            hint='min_context_parallel is for context_parallel="auto"',
        )
    return (degree,)


def refuse_oversize(given: Int64, most: int, pad_to_multiple_of: int) -> None:
    """Raises ``InputError`` for the first of ``given`` that is above ``most`` tokens."""
    large = np.flatnonzero(given > most)
    if len(large):
        i = int(large[0])
        raise InputError(
            "a sequence does not fit into a microbatch",
            where=f"sequence {listed(large.tolist(), 1)}",
            expected=f"at most the capacity of {most} tokens"
            + (f" at pad_to_multiple_of={pad_to_multiple_of}" if pad_to_multiple_of > 1 else ""),
            found=int(given[i]),
            hint="raise the capacity, or truncate or drop what is longer",
        )


def fit(given: Int64, most: int, pad_to_multiple_of: int, oversize: str) -> tuple[Int64, Int64]:
    """Tokens kept of each sequence, at most ``most``, and the ids that are placed."""
    if oversize == "error" or most == 0:
        refuse_oversize(given, most, pad_to_multiple_of)
    large = np.flatnonzero(given > most)
    ids = np.arange(len(given))
    if not len(large):
        return given, ids
    kept = given.copy()
    kept[large] = most if oversize == "truncate" else 0
    return kept, ids if oversize == "truncate" else np.delete(ids, large)


def groups(keep_together: Any, n: int, placed: Int64) -> Int64:
    """The item of each placed sequence, int64, items numbered by their first sequence.

    ``keep_together``: one number per sequence, equal numbers >= 0 staying together; or lists of ids that stay together.
    """
    numbers = _group_numbers(keep_together, n)[placed]
    alone = numbers < 0
    # Numbers below 0 mean alone: each gets a new number of its own.
    numbers[alone] = numbers.max(initial=-1) + 1 + np.arange(np.count_nonzero(alone))
    # Renumber by first appearance, so that items are in arrival order whatever numbers the caller chose.
    _, first, item = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[item.reshape(-1)]


def _group_numbers(keep_together: Any, n: int) -> Int64:
    if isinstance(keep_together, np.ndarray) or not any(
        isinstance(part, (Sequence, np.ndarray)) for part in keep_together
    ):
        numbers = np.asarray(keep_together)
        if numbers.shape != (n,) or (n and numbers.dtype.kind not in "iu"):
            raise InputError(
                "keep_together must be one integer per sequence, or lists of ids",
                expected=f"{n} integers",
                found=f"shape {list(numbers.shape)} of {numbers.dtype}",
            )
        return numbers.astype(np.int64)
    numbers = np.full(n, -1, np.int64)
    for number, part in enumerate(keep_together):
        ids = as_lengths(part, "keep_together")
        for i in ids.tolist():
            if i >= n or numbers[i] >= 0:
                what = "names a sequence that is not there" if i >= n else "names a sequence twice"
                raise InputError(f"keep_together {what}", where=f"group {number}", found=i)
            numbers[i] = number
    return numbers


def refuse_large_groups(
    slots: Int64, counts: Int64, item: Int64, placed: Int64, capacity: int, max_sequences: int
) -> None:
    """Raises ``InputError`` for the first group that no microbatch can hold.

    Args:
        slots, counts [items]: slots and sequences of each group.
        item, placed [sequences]: the group and the id of each sequence.
        capacity, max_sequences: what a microbatch can hold.
    """
    for values, limit, unit in ((slots, capacity, "slots"), (counts, max_sequences, "sequences")):
        large = np.flatnonzero(values > limit)
        if len(large):
            ids = placed[item == large[0]]
            shown = ", ".join(map(str, ids[:8].tolist())) + (", ..." if len(ids) > 8 else "")
            raise InputError(
                "a group to keep together does not fit into a microbatch",
                where=f"sequences {shown}",
                expected=f"at most {limit} {unit}",
                found=int(values[large[0]]),
            )


def preassigned(assignment: Any, ranks: int, multiple: int, n: int, placed: Int64) -> tuple[Int64, Int64, int]:
    """``order`` and ``offsets`` of the schedule that the caller gives, and its number of microbatches.

    Args:
        assignment: for each microbatch, for each rank, the ids in packing order; or the same bins in one flat list,
            microbatch by microbatch.
        ranks: bins of a microbatch.
        multiple: the number of microbatches must be a multiple of it.
        n: number of sequences.
        placed: ids of those that were not dropped.

    Raises ``InputError`` for an id that is missing, unknown, or there twice, and for a number
    of microbatches that is not a multiple of ``multiple``.
    """
    if assignment is None:
        raise InputError('strategy "preassigned" needs an assignment', expected="ids for each microbatch and rank")
    bins = _flat_bins(assignment, ranks)
    if len(bins) % ranks:
        raise InputError(
            "the assignment's bins are not a multiple of the ranks", expected=f"a multiple of {ranks}", found=len(bins)
        )
    microbatches = len(bins) // ranks
    if microbatches % multiple:
        raise InputError(
            "the assignment's microbatches are not a multiple of microbatch_multiple",
            expected=f"a multiple of {multiple}",
            found=microbatches,
        )
    # Dropped sequences may be named; they are left out below. All others must be named exactly once.
    order = np.concatenate([np.zeros(0, np.int64), *bins])
    unknown = np.flatnonzero(order >= n)
    if len(unknown):
        raise InputError(
            "the assignment names a sequence that is not there", expected=f"ids below {n}", found=int(order[unknown[0]])
        )
    times = np.bincount(order, minlength=n)
    wanted = np.zeros(n, np.int64)
    wanted[placed] = 1
    for what, bad in (("names sequences twice", times > 1), ("misses sequences", (times == 0) & (wanted == 1))):
        ids = np.flatnonzero(bad)
        if len(ids):
            raise InputError(f"the assignment {what}", found=listed(ids.tolist(), 8))
    # Offsets count what is left of each bin.
    sizes = np.array([np.count_nonzero(wanted[part]) for part in bins], np.int64)
    return order[wanted[order] == 1], np.concatenate(([0], np.cumsum(sizes))), microbatches


def _flat_bins(assignment: Any, ranks: int) -> list[Int64]:
    parts = list(assignment)
    # Microbatches of ranks of ids, or bins of ids: the former hold sequences of ids two levels down.
    nested = any(not np.isscalar(inner) for part in parts for inner in part)
    if not nested:
        return [as_lengths(part, "assignment") for part in parts]
    for microbatch, part in enumerate(parts):
        if len(part) != ranks:
            raise InputError(
                "the assignment must give every rank its ids",
                where=f"microbatch {microbatch}",
                expected=f"{ranks} lists",
                found=len(part),
            )
    return [as_lengths(inner, "assignment") for part in parts for inner in part]
