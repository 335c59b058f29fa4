"""Compares two checkpoints tensor by tensor, byte by byte, without holding either.

Both sides are inventories, so the formats do not matter: the same elements are gathered from the fragments of each and
compared. Where the target keeps another dtype, the source is cast first, as the conversion did.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.inventory import Inventory, Problem, Tensor, check
from ullage.checkpoint.reading import CHUNK_BYTES, Sources, Tally, cast, rows_of, stream
from ullage.errors import CheckpointError

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_UNIT_BYTES = 32 << 20


def verify(
    source: str | Path | Inventory,
    target: str | Path | Inventory,
    workers: int | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Every difference between ``source`` and ``target``; ``[]`` when every byte of every tensor agrees.

    The target may be without optimizer state altogether (weights only); otherwise each state of each parameter must be
    there. Memory: two chunks a thread. Raises ``CheckpointError`` for a folder that is no checkpoint.
    """
    from ullage.checkpoint import read
    from ullage.checkpoint.convert import default_workers

    ours = source if isinstance(source, Inventory) else read(source)
    theirs = target if isinstance(target, Inventory) else read(target)
    problems = check(ours) + check(theirs)
    if problems:
        return problems
    pairs = []
    weights_only = not any(t.kind == "parameter" and t.key != "fp32" for t in theirs.tensors)
    for tensor in ours.tensors:
        if weights_only and tensor.kind == "parameter" and tensor.key != "fp32":
            continue
        other = _find(theirs, tensor)
        if other is None:
            problems.append(Problem(f"{tensor.key} is missing in the target", parameter=tensor.name))
        elif other.shape != tensor.shape:
            problems.append(
                Problem(
                    f"{tensor.key} has another shape",
                    parameter=tensor.name,
                    expected=str(list(tensor.shape)),
                    found=str(list(other.shape)),
                )
            )
        elif other.dtype != tensor.dtype and not {other.dtype, tensor.dtype} <= set(_FLOATS):
            problems.append(
                Problem(
                    f"{tensor.key} has another dtype", parameter=tensor.name, expected=tensor.dtype, found=other.dtype
                )
            )
        else:
            pairs.append((tensor, other))
    problems += _steps(ours, theirs)
    return problems + _compare_all(ours, theirs, pairs, workers or default_workers(), progress)


def _find(theirs: Inventory, tensor: Tensor) -> Tensor | None:
    for kind in (tensor.key, "frozen", "buffer", "fp32"):
        if (tensor.name, kind) in theirs and (kind == tensor.key or tensor.kind != "parameter"):
            return theirs.tensor(tensor.name, kind)
    return None


def _steps(ours: Inventory, theirs: Inventory) -> list[Problem]:
    if theirs.format != "universal" or not isinstance(theirs.details, dict):
        return []
    group_of = {t.name: t.group for t in ours.tensors if t.kind == "parameter"}
    found = []
    for name, group in group_of.items():
        step = ours.steps.get(group) if group is not None else None
        if isinstance(step, (int, float)) and name in theirs.details and theirs.details[name] != step:
            found.append(
                Problem(
                    "another step", group=group, parameter=name, expected=str(step), found=str(theirs.details[name])
                )
            )
    return found


def _compare_all(
    ours: Inventory,
    theirs: Inventory,
    pairs: list[tuple[Tensor, Tensor]],
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> list[Problem]:
    jobs = []
    for number, (tensor, _) in enumerate(pairs):
        row = rows_of(tensor)
        step = max(1, _UNIT_BYTES // (row * tensor.item_bytes)) * row
        jobs += [(number, low, min(low + step, tensor.numel)) for low in range(0, tensor.numel, step)]
    total, done = sum(t.num_bytes for t, _ in pairs), 0
    differ: dict[int, tuple[int, int]] = {}
    errors: list[Problem] = []

    def one(share: list[Any]) -> list[tuple[int, int, int, int]]:
        nonlocal done
        mine, yours = Sources(ours), Sources(theirs)
        buffers = np.empty(CHUNK_BYTES, np.uint8), np.empty(2 * CHUNK_BYTES, np.uint8)
        found = []
        try:
            for number, low, high in share:
                tensor, other = pairs[number]
                first, count = _compare(mine, yours, tensor, other, low, high, buffers)
                found.append((number, first, count, (high - low) * tensor.item_bytes))
                if progress is not None:
                    done += found[-1][3]
                    progress(done, total)
        except CheckpointError as error:
            errors.append(Problem(error.what, parameter=error.where, found=str(error.found)))
        finally:
            mine.close()
            yours.close()
        return found

    size = max(1, min(64, len(jobs) // (4 * workers) + 1))
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(one, [jobs[i : i + size] for i in range(0, len(jobs), size)]):
            for number, first, count, _ in found:
                if count:
                    before = differ.get(number, (first, 0))
                    differ[number] = (min(before[0], first), before[1] + count)
    problems = list(errors)
    for number, (first, count) in sorted(differ.items()):
        tensor = pairs[number][0]
        problems.append(
            Problem(
                f"{tensor.key} differs in {count} of {tensor.numel} elements, first in {first}", parameter=tensor.name
            )
        )
    return problems


def _compare(
    mine: Sources, yours: Sources, tensor: Tensor, other: Tensor, low: int, high: int, buffers: tuple[Any, Any]
) -> tuple[int, int]:
    """(first element that differs, how many differ) in ``[low, high)``."""
    first, count, at = high, 0, low
    item = other.item_bytes
    for chunk in stream(mine, tensor, low, high, buffers[0], Tally()):
        length = len(chunk) // tensor.item_bytes
        wanted = cast(chunk, tensor.dtype, other.dtype)
        room = buffers[1] if len(wanted) <= len(buffers[1]) else np.empty(len(wanted), np.uint8)
        found = next(iter(stream(yours, other, at, at + length, room[: len(wanted)], Tally())), room[:0])
        if not np.array_equal(wanted, found):
            unequal = (wanted.reshape(-1, item) != found.reshape(-1, item)).any(axis=1)
            first = min(first, at + int(np.flatnonzero(unequal)[0]))
            count += int(unequal.sum())
        at += length
    return first, count
