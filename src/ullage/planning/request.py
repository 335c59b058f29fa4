"""The arguments of ``plan(...)``, checked before any work: each that cannot be met is one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ullage.core.errors import MOST_TOKENS, InputError, listed, require_int
from ullage.core.layout import Int64, as_lengths
from ullage.planning.cost import SQUARED
from ullage.planning.placement import TOKENS, free_degrees

#: The largest capacity and amount of a resource besides tokens: its square stays within 64 bits.
_MOST = (1 << 31) - 1


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


def read_capacities(capacity: Any, capacities: Any) -> dict[str, int]:
    """The capacity of a microbatch by resource, tokens first. Raises ``InputError`` without one of tokens."""
    if capacities is not None and not isinstance(capacities, Mapping):
        raise InputError(
            "capacities must be a mapping", expected='{"tokens": 8192, "patches": 16384}', found=repr(capacities)
        )
    given = dict(capacities or {})
    tokens = given.pop(TOKENS, capacity)
    if tokens is None:
        raise InputError("a plan needs the capacity of tokens", expected='capacity, or capacities={"tokens": ...}')
    if capacity is not None and capacity != tokens:
        raise InputError("two capacities of tokens are given", expected=f"capacity={capacity}", found=tokens)
    found = {TOKENS: require_int(tokens, "capacity", least=1, most=MOST_TOKENS)}
    return found | {
        name: require_int(limit, f"the capacity of {name}", least=1, most=_MOST) for name, limit in given.items()
    }


def read_amounts(amounts: Any, n: int) -> dict[str, Int64]:
    """What each sequence takes of every resource, int64 [n] by name.

    ``amounts``: by name one integer per sequence, or the sizes of its items as a list per sequence: their sum is the
    amount, and the sum of their squares is added under the name with ``_squared`` behind it.

    >>> {name: each.tolist() for name, each in read_amounts({"patches": [[4, 2], [], [3]]}, 3).items()}
    {'patches': [6, 0, 3], 'patches_squared': [20, 0, 9]}
    """
    if amounts is not None and not isinstance(amounts, Mapping):
        raise InputError("amounts must be a mapping", expected='{"patches": [n]}', found=type(amounts).__name__)
    found: dict[str, Int64] = {}
    for name, values in (amounts or {}).items():
        where = f"the amounts of {name}"
        if name == TOKENS:
            raise InputError("the amounts of tokens are the lengths", hint=f"leave {TOKENS!r} out of amounts")
        if len(values) != n:
            raise InputError(f"{where} must be one per sequence", expected=n, found=len(values))
        if isinstance(values, np.ndarray) or not any(isinstance(each, (Sequence, np.ndarray)) for each in values):
            found[name] = as_lengths(values, where)
        else:
            items = [as_lengths(each if np.ndim(each) else [each], where) for each in values]
            counts = [len(each) for each in items]
            sizes = np.concatenate([np.zeros(0, np.int64), *items])
            _refuse_large_amounts(sizes, where)
            for key, each in ((name, sizes), (name + SQUARED, sizes * sizes)):
                sums = np.concatenate(([0], np.cumsum(each)))[np.cumsum([0, *counts])]
                found.setdefault(key, np.diff(sums))
    for name, values in found.items():
        if name.endswith(SQUARED):
            continue
        _refuse_large_amounts(values, f"the amounts of {name}")
    return found


def _refuse_large_amounts(values: Int64, where: str) -> None:
    large = np.flatnonzero(values > _MOST)
    if len(large):
        raise InputError(f"{where} are too large", expected=f"at most {_MOST}", found=int(values[large[0]]))


def read_resources(capacity: Any, capacities: Any, amounts: Any, n: int) -> tuple[dict[str, int], dict[str, Int64]]:
    """:func:`read_capacities` and :func:`read_amounts`, each capacity with amounts. Raises ``InputError``."""
    limits, found = read_capacities(capacity, capacities), read_amounts(amounts, n)
    for name in limits:
        if name != TOKENS and name not in found:
            raise InputError(
                f"there is a capacity of {name}, and no amounts of it",
                expected=f"amounts={{{name!r}: one per sequence}}",
                found=f"amounts of {listed(list(found), 8)}" if found else "no amounts",
            )
    return limits, found


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
            hint="raise the capacity, or truncate or drop what is longer: by oversize, in the shell --oversize",
        )


def fit(
    given: Int64,
    most: int,
    pad_to_multiple_of: int,
    oversize: str,
    limits: Mapping[str, int],
    amounts: Mapping[str, Int64],
) -> tuple[Int64, Int64]:
    """Tokens kept of each sequence, at most ``most``, and the ids that are placed.

    ``limits``, ``amounts``: of every resource besides tokens. It cannot be cut, so a sequence that takes more than the
    limit is dropped or an error, and so is one over ``most`` tokens that takes any of it, which may be in its end.
    """
    if oversize == "error" or most == 0:
        refuse_oversize(given, most, pad_to_multiple_of)
    large = np.flatnonzero(given > most)
    ids = np.arange(len(given))
    if limits and oversize != "drop":
        _refuse_uncut(given, most, limits, amounts)
    elif limits:
        over = [np.flatnonzero(amounts[name] > limit) for name, limit in limits.items()]
        large = np.unique(np.concatenate([large, *over]))
    if not len(large):
        return given, ids
    kept = given.copy()
    kept[large] = most if oversize == "truncate" else 0
    return kept, ids if oversize == "truncate" else np.delete(ids, large)


def _refuse_uncut(given: Int64, most: int, limits: Mapping[str, int], amounts: Mapping[str, Int64]) -> None:
    """Raises ``InputError`` for a sequence that takes more than a limit, or would lose what it takes to a cut."""
    for name, limit in limits.items():
        over = np.flatnonzero(amounts[name] > limit)
        if len(over):
            raise InputError(
                f"a sequence has more {name} than a microbatch may hold",
                where=f"sequence {listed(over.tolist(), 1)}",
                expected=f"at most the capacity of {limit} {name}",
                found=int(amounts[name][over[0]]),
                hint=f"raise the capacity of {name}, or drop what is above it: {name} cannot be truncated",
            )
        cut = np.flatnonzero((given > most) & (amounts[name] > 0))
        if len(cut):
            raise InputError(
                f"a sequence with {name} cannot be truncated: the tokens that stand for them may be cut",
                where=f"sequence {listed(cut.tolist(), 1)}",
                expected=f"at most the capacity of {most} tokens",
                found=int(given[cut[0]]),
                hint="raise the capacity, or drop what is longer",
            )


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
    slots: Int64,
    counts: Int64,
    item: Int64,
    placed: Int64,
    capacity: int,
    max_sequences: int,
    others: Sequence[tuple[Int64, int, str]] = (),
) -> None:
    """Raises ``InputError`` for the first group that no microbatch can hold.

    Args:
        slots, counts [items]: slots and sequences of each group.
        item, placed [sequences]: the group and the id of each sequence.
        capacity, max_sequences: what a microbatch can hold.
        others: the amounts of each group, the limit and the name of every further resource.
    """
    for values, limit, unit in ((slots, capacity, "slots"), (counts, max_sequences, "sequences"), *others):
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
