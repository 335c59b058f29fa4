"""Verification of a converted checkpoint.

What a conversion of ours made (``ullage.json`` says so) is compared byte by byte with what the same conversion would
write today: sizes, descriptions, and every tensor of the source, cast as the conversion did. What others made, such as
DeepSpeed's own converter, is compared tensor by tensor, as by :func:`ullage.checkpoint.diff`, and by the steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.conversion.comparing import Pair, compare_pairs
from ullage.checkpoint.conversion.converting import default_workers, where_is
from ullage.checkpoint.conversion.differing import pair_tensors, steps_that_differ
from ullage.checkpoint.conversion.journal import plan_of
from ullage.checkpoint.core.inventory import File, Fragments, Inventory, Slice, Tensor
from ullage.checkpoint.core.numbers import FLOATS
from ullage.checkpoint.core.paths import hold_descriptions, let_go, opened, read_start
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.formats.hub_names import hub_named
from ullage.checkpoint.formats.locate import COMPLETE
from ullage.checkpoint.formats.table import FORMATS, read, targets
from ullage.core.errors import CheckpointError, InputError

#: Names that loaders look for end so.
_LOADED = (".pt", ".safetensors", ".distcp")
#: Bytes of ``ullage.json`` at most.
_MOST = 64 << 20


def verify(
    source: str | Path | Inventory,
    target: str | Path | Inventory,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[Problem]:
    """List every difference between two checkpoints; ``[]`` when a loader of ``target`` gets what ``source`` holds.

    Args:
        source: the checkpoint that was converted: its folder or URL, as for :func:`ullage.checkpoint.read`, or an
            inventory.
        target: the converted checkpoint, likewise. One that another tool made may be without optimizer state.
        workers: threads; by default two for each processor that this process may use, at most 8.
        progress: called as ``progress(done, total)``, in bytes, from any thread.
        storage_options: those of fsspec, for URLs.

    Every file of a conversion of ours is compared byte by byte with the plan of that conversion; of another tool's
    every tensor and the steps. Memory: two chunks of 2 MiB per thread. Raises ``CheckpointError`` for a folder that is
    not a checkpoint.
    """
    ours = source if isinstance(source, Inventory) else read(source, storage_options=storage_options)
    theirs = target if isinstance(target, Inventory) else read(target, storage_options=storage_options)
    # Without a whole tiling on both sides there is nothing sound to compare.
    problems = ours.problems() + theirs.problems()
    if problems:
        return problems
    try:
        plan = _plan(ours, theirs)
    except (CheckpointError, InputError) as error:  # the source cannot be converted to this
        return getattr(error, "problems", None) or [Problem.of_error(error, error.where)]
    if plan is None:
        problems, pairs = _by_tensor(hub_named(ours, theirs.format), theirs)
    else:
        theirs = replace(theirs, files=tuple(File(t.name, t.num_bytes, "weights") for t in plan))
        try:
            with as_checkpoint_error(str(theirs.folder)):
                problems, pairs = _by_byte(theirs.folder, plan)
        finally:
            let_go(theirs.folder)
    return problems + compare_pairs(ours, theirs, pairs, workers or default_workers(), progress)


def _plan(ours: Inventory, theirs: Inventory) -> list[Target] | None:
    """The files that made ``theirs`` of ``ours``; None where no conversion of ours did."""
    try:
        said = json.loads(read_start(theirs.folder / COMPLETE, _MOST))
        format, dtype, optimizer = said["format"], said["dtype"], said["optimizer"]
        found, source, ranks = said["plan"], said["source"], said.get("ranks")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = isinstance(format, str) and isinstance(dtype, str | None) and isinstance(ranks, int | None)
    if not known or format not in FORMATS:  # changed, or of another version
        return None
    # Made of another folder: it may be a copy of this one, or another form of it, which has other files.
    is_source = source == where_is(ours.folder)
    try:
        plan = targets(ours, format, dtype=dtype, optimizer=optimizer, ranks=ranks)
    except (CheckpointError, InputError):
        if is_source:
            raise
        return None
    return plan if is_source or plan_of(plan) == found else None


def _by_byte(folder: Path, plan: list[Target]) -> tuple[list[Problem], list[Pair]]:
    """Problems of all bytes but those of tensors, and the tensors that are still to be compared."""
    problems: list[Problem] = []
    pairs: list[Pair] = []
    hold_descriptions((folder / planned.name, 0, planned.num_bytes) for planned in plan)
    for number, planned in enumerate(plan):
        path = folder / planned.name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            problems.append(Problem("a file is missing in the target", planned.name))
            continue
        if size != planned.num_bytes:
            expected = f"{planned.num_bytes} bytes"
            problems.append(Problem("a file has another size", planned.name, expected=expected, found=f"{size}"))
            continue
        problems += _compare_texts(path, planned)
        for payload in planned.payloads:
            tensor = payload.tensor
            part = Slice(0, tensor.shape, Fragments.one(number, payload.offset, tensor.numel))
            there = Tensor(tensor.name, tensor.key, tensor.shape, payload.dtype, tensor.kind, (part,))
            pairs.append((tensor, there, planned.name))
    known = {planned.name for planned in plan}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in _LOADED)
    return problems + [Problem("in the target, not in the source", name) for name in names if name not in known], pairs


def _compare_texts(path: Path, planned: Target) -> Iterator[Problem]:
    """A problem where headers, descriptions or directories are others, but for the sums of tensors."""
    sums = np.array([place for payload in planned.payloads for place in payload.crc_at], np.int64)
    sums = np.unique((sums[:, None] + np.arange(4)).reshape(-1))
    with opened(path) as file:
        for offset, text in planned.texts:
            found = np.frombuffer(file.pread(len(text), offset), np.uint8)
            differs = found != np.frombuffer(text, np.uint8)
            inside = sums[slice(*np.searchsorted(sums, [offset, offset + len(text)]))]
            differs[inside - offset] = False
            if differs.any():
                count, first = int(differs.sum()), offset + int(np.flatnonzero(differs)[0])
                what = f"the file says something else beside its tensors, in {count} bytes, first in byte {first}"
                yield Problem(what, planned.name)
                return


def _by_tensor(ours: Inventory, theirs: Inventory) -> tuple[list[Problem], list[Pair]]:
    """Problems of tensors that one side has alone or in another form, and of steps; and the pairs to compare."""
    weights_only = all(tensor.kind != "parameter" or tensor.key == "fp32" for tensor in theirs.tensors)
    problems: list[Problem] = []
    pairs: list[Pair] = []
    for (name, key), one, other in pair_tensors(ours, theirs, weights_only):
        if one is None or other is None:
            what = "in the target, not in the source" if one is None else f"{key} is missing in the target"
            problems.append(Problem(what, parameter=name))
        elif one.shape != other.shape:
            shapes: dict[str, Any] = {"expected": str(list(one.shape)), "found": str(list(other.shape))}
            problems.append(Problem(f"{key} has another shape", parameter=name, **shapes))
        elif one.dtype != other.dtype and not {one.dtype, other.dtype} <= set(FLOATS):
            what = f"{key} has another dtype"
            problems.append(Problem(what, parameter=name, expected=one.dtype, found=other.dtype))
        else:
            pairs.append((one, other, None))
    steps = None if weights_only else steps_that_differ(ours, theirs)
    if steps is not None:
        problems.append(Problem("the optimizer is at another step", expected=steps[0], found=steps[1]))
    return problems, pairs
