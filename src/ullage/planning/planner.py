"""``plan(...)``: checks what it was given, turns sequences into items, lets a strategy place them, and makes the plan.

Pure: no process group, no device, no randomness. Every rank that calls it with the same lengths gets the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ullage.errors import InputError
from ullage.layout import Int64, Integers, as_lengths
from ullage.planning.cost import Cost, TransformerCost, integer_costs
from ullage.planning.plan import Plan, slots_of
from ullage.planning.problem import Assignment, Problem
from ullage.planning.strategies import find_strategy

_OVERSIZE = ("error", "truncate", "drop")
_SYNC = ("microbatch", "step")
_NO_LIMIT = 2**62


def plan(
    lengths: Integers,
    *,
    ranks: int,
    capacity: int,
    cost: Cost | None = None,
    strategy: str = "balanced",
    sync: str = "microbatch",
    context_parallel: int | str = 1,
    microbatch_multiple: int = 1,
    align: int = 1,
    max_sequences: int | None = None,
    keep_together: Integers | None = None,
    assignment: Sequence[Any] | None = None,
    oversize: str = "error",
) -> Plan:
    """Gives each sequence a microbatch and a rank.

    ``lengths`` [n]: tokens of each sequence of the global batch. ``ranks``: how many ranks hold data. ``capacity``:
    slots (lengths rounded up to ``align``) a rank holds in one microbatch; never exceeded. ``cost``: ``None`` is
    ``TransformerCost()``, or any callable on an array of lengths. ``strategy``: a name of
    :func:`ullage.planning.strategies.names`. ``sync``: ``"microbatch"`` where ranks wait for one another in every
    microbatch (FSDP, ZeRO-3, expert parallel), ``"step"`` where they meet once (DDP). ``microbatch_multiple``: the
    number of microbatches is a multiple of it (virtual pipelines). ``max_sequences``: sequences of a microbatch.
    ``keep_together`` [n]: sequences of the same number >= 0 share a microbatch; a negative number binds nothing.
    ``oversize``: what becomes of a sequence that no microbatch can hold: ``"error"``, ``"truncate"`` or ``"drop"``.

    Raises ``InputError`` before any work for arguments that cannot be met.
    """
    given = as_lengths(lengths)
    ranks, capacity = _positive(ranks, "ranks"), _positive(capacity, "capacity")
    align, multiple = _positive(align, "align"), _positive(microbatch_multiple, "microbatch_multiple")
    limit = 0 if max_sequences is None else _positive(max_sequences, "max_sequences")
    _one_of(sync, "sync", _SYNC)
    _one_of(oversize, "oversize", _OVERSIZE)
    place = find_strategy(strategy)
    kept, placed = _fit(given, capacity, align, oversize)
    costs, per_microbatch, communication = integer_costs(TransformerCost() if cost is None else cost, kept)
    problem = Problem(
        slots=slots_of(kept[placed], align),
        costs=costs[placed],
        counts=np.ones(len(placed), np.int64),
        ranks=ranks,
        capacity=capacity,
        max_sequences=limit or _NO_LIMIT,
        microbatch_multiple=multiple,
        sync=sync,
    )
    answer = place(problem)
    order, offsets = _rows(answer, placed, ranks)
    degrees = answer.degrees
    if degrees is None:
        degrees = np.ones((answer.num_microbatches, ranks), np.int64)
    return Plan(
        order=order,
        offsets=offsets,
        degrees=degrees,
        lengths=kept,
        original_lengths=given,
        costs=costs,
        ranks=ranks,
        capacity=capacity,
        align=align,
        max_sequences=limit,
        microbatch_multiple=multiple,
        per_microbatch=per_microbatch,
        communication=communication,
        sync=sync,
        strategy=strategy,
    )


def _fit(given: Int64, capacity: int, align: int, oversize: str) -> tuple[Int64, Int64]:
    """Tokens kept of each sequence, and the ids that are placed."""
    most = capacity // align * align
    large = np.flatnonzero(given > most)
    if not len(large):
        return given, np.arange(len(given))
    if oversize == "error" or most == 0:
        i = int(large[0])
        raise InputError(
            "a sequence does not fit into a microbatch",
            where=f"sequence {i}" + (f" and {len(large) - 1} more" if len(large) > 1 else ""),
            expected=f"at most {most} tokens (capacity {capacity}, align {align})",
            found=int(given[i]),
            hint='raise capacity, or pass oversize="truncate" or "drop"',
        )
    kept = given.copy()
    kept[large] = most if oversize == "truncate" else 0
    ids = np.arange(len(given))
    return kept, ids if oversize == "truncate" else np.delete(ids, large)


def _rows(answer: Assignment, placed: Int64, ranks: int) -> tuple[Int64, Int64]:
    """Compressed rows: ids bin by bin, and where each bin starts."""
    count = answer.num_microbatches * ranks
    if answer.position is None:
        order = np.argsort(answer.bins, kind="stable")
    else:
        order = np.lexsort((answer.position, answer.bins))
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(answer.bins, minlength=count), out=offsets[1:])
    return placed[order], offsets


def _positive(value: Any, name: str) -> int:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < 1:
        raise InputError(f"{name} must be an integer", expected=">= 1", found=value)
    return int(value)


def _one_of(value: str, name: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"no such {name}", expected=" or ".join(map(repr, allowed)), found=repr(value))
