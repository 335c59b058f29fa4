"""Mean of the weights of several checkpoints, written as safetensors.

Each element is the sum of its values times the checkpoints' shares, in float64, in the order in which they are given,
and is rounded once to the dtype of the file (to bfloat16 by way of float32). Weights that are no floating-point numbers
cannot be averaged: they are those of the last checkpoint. All are read in ranges of elements, side by side.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from ullage.checkpoint.conversion.converting import default_workers
from ullage.checkpoint.conversion.destination import disk_error, partial_of, require_paths, require_writable
from ullage.checkpoint.conversion.differing import WEIGHT, by_weight, numbers, read_range
from ullage.checkpoint.conversion.journal import FOLDER, sync_files
from ullage.checkpoint.conversion.report import Report
from ullage.checkpoint.dtypes import FLOATS
from ullage.checkpoint.files.archive import Payload, Target
from ullage.checkpoint.formats import table as formats
from ullage.checkpoint.formats.safetensors import safetensors_targets
from ullage.checkpoint.inventory import Inventory, Tensor
from ullage.checkpoint.numbers import Bytes, cast, count_not_finite, from_floats
from ullage.checkpoint.reading import CHUNK_BYTES, Sources, row_elements
from ullage.errors import CheckpointError, InputError

#: By how much shares may miss 1, as decimal numbers do.
_SLACK = 1e-6


def average(
    sources: Sequence[str | Path | Inventory],
    target: str | Path,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    dtype: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write the mean of the weights of ``sources`` as a folder of safetensors, whole or not at all.

    Args:
        sources: two or more checkpoints of one model, of any formats, oldest first.
        target: a folder that does not exist.
        weights: the share of each, which add up to 1; by default all are equal.
        ema: instead, an exponential moving average: it begins with the first, and each of the others counts
            ``1 - ema`` against what was there.
        dtype: of floating-point weights in the target; by default as in the first checkpoint.
        workers: threads; by default as for :func:`ullage.checkpoint.convert`.
        progress: called as ``progress(done, total)``, in bytes of the target.

    Returns the report of the files that were written; the config and tokenizer beside the first checkpoint are among
    them. Raises ``CheckpointError`` for a checkpoint that is not whole, and for checkpoints whose tensors have other
    names or shapes; ``InputError`` for shares that do not fit, and for a target that cannot be written.
    """
    target = Path(os.path.abspath(target))
    inventories = [each if isinstance(each, Inventory) else formats.read(each) for each in sources]
    shares = shares_of(len(inventories), weights, ema)
    for inventory in inventories:
        formats.require_none(inventory, inventory.problems())
    named = [_weights(inventory) for inventory in inventories]
    for inventory, tensors in zip(inventories[1:], named[1:], strict=True):
        _require_same(inventories[0], named[0], inventory, tensors)
    first = replace(inventories[0], tensors=tuple(named[0].values()))
    targets = safetensors_targets(first, dtype=dtype)
    require_paths(targets, target)
    partial = partial_of(target)
    report = Report(" ".join(str(each.folder) for each in inventories), str(target), "safetensors")
    report.num_tensors = sum(len(each.payloads) for each in targets)
    report.num_files, report.num_bytes = len(targets), sum(each.num_bytes for each in targets)
    report.workers = workers or default_workers()
    kept = sorted(name for name, tensor in named[0].items() if tensor.dtype not in FLOATS)
    if kept:
        more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
        report.notes.append(f"no floating-point numbers, taken from the last: {', '.join(kept[:3])}{more}")
    for inventory in inventories:
        require_writable(inventory, target, partial, report.num_bytes)
    try:
        # What an interrupted run left is begun anew: nothing says which sources it was made of.
        shutil.rmtree(partial, ignore_errors=True)
        (partial / FOLDER).mkdir(parents=True)  # the mark of a partial of ours
        _write(inventories, named, shares, targets, partial, report, progress)
        shutil.rmtree(partial / FOLDER)
        sync_files(partial)
        partial.rename(target)
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(partial)
        if isinstance(error, OSError):
            raise disk_error(error, partial, "nothing is left of it: run the same command again once {}") from error
        raise
    return report


def shares_of(count: int, weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """The share of each of ``count`` checkpoints. Raises ``InputError`` for numbers that do not fit."""
    if count < 2:
        raise InputError("there is nothing to average", expected="two or more checkpoints", found=count)
    if weights is not None and ema is not None:
        raise InputError("two kinds of shares", found="weights and ema", hint="give one of them")
    if ema is not None:
        if not 0 <= ema < 1:
            raise InputError("ema is the share of what was there before", expected="0 <= ema < 1", found=ema)
        return [ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - i) for i in range(1, count))]
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise InputError("one weight for each checkpoint", where="weights", expected=count, found=len(weights))
    if not all(map(math.isfinite, weights)) or abs(math.fsum(weights) - 1) > _SLACK:
        raise InputError("the weights must add up to 1", where="weights", expected=1, found=math.fsum(weights))
    return [float(weight) for weight in weights]


def _weights(inventory: Inventory) -> dict[str, Tensor]:
    return {name: tensor for (name, key), tensor in by_weight(inventory, weights_only=True).items() if key == WEIGHT}


def _require_same(first: Inventory, ours: dict[str, Tensor], other: Inventory, theirs: dict[str, Tensor]) -> None:
    """Raise ``CheckpointError`` that counts what differs in names and shapes, and names the first."""
    wrong = [f"{name} is missing" for name in ours if name not in theirs]
    wrong += [f"{name} is not in the first" for name in theirs if name not in ours]
    for name, tensor in ours.items():
        found = theirs.get(name, tensor)
        if found.shape != tensor.shape:
            wrong.append(f"{name} has shape {list(found.shape)} instead of {list(tensor.shape)}")
        elif (found.dtype in FLOATS) != (tensor.dtype in FLOATS):
            wrong.append(f"{name} is {found.dtype} instead of {tensor.dtype}")
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            "checkpoints of different models cannot be averaged",
            where=str(other.folder),
            expected=f"the names and shapes of {first.folder}",
            found=wrong[0] + more,
        )


def _write(
    inventories: list[Inventory],
    named: list[dict[str, Tensor]],
    shares: list[float],
    targets: list[Target],
    partial: Path,
    report: Report,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write all files below ``partial``; counts in ``report`` what is not finite."""
    done = _write_texts(targets, partial)
    jobs: list[tuple[Path, Payload, int, int]] = []
    for target in targets:
        for payload in target.payloads:
            held = [tensors[payload.tensor.name] for tensors in named]
            # Slices of several ranks may lie side by side: every source is read by whole rows.
            row = math.lcm(*(row_elements(tensor) for tensor in held))
            step = max(1, CHUNK_BYTES // (8 * row)) * row
            starts = range(0, held[0].numel, step)
            jobs += [(partial / target.name, payload, low, min(low + step, held[0].numel)) for low in starts]

    def work(share: list[tuple[Path, Payload, int, int]]) -> list[tuple[str, int, int]]:
        sources = [Sources(inventory) for inventory in inventories]
        counts = []
        try:
            for path, payload, low, high in share:
                held = [tensors[payload.tensor.name] for tensors in named]
                chunk = _averaged(sources, held, shares, low, high, payload.dtype)
                with closing(open(path, "r+b", buffering=0)) as file:
                    file.seek(payload.offset + low * (len(chunk) // (high - low)))
                    view = chunk.data
                    while len(view):
                        view = view[file.write(view) :]
                counts.append((payload.tensor.name, count_not_finite(chunk, payload.dtype), len(chunk)))
        finally:
            for each in sources:
                each.close()
        return counts

    not_finite: dict[str, int] = {}
    size = max(1, min(64, len(jobs) // (4 * report.workers) + 1))
    with ThreadPoolExecutor(report.workers) as pool:
        for found in pool.map(work, [jobs[i : i + size] for i in range(0, len(jobs), size)]):
            for name, count, num_bytes in found:
                done += num_bytes
                if count:
                    not_finite[name] = not_finite.get(name, 0) + count
            if progress is not None:
                progress(done, report.num_bytes)
    report.not_finite = [(name, WEIGHT, count) for name, count in sorted(not_finite.items())]


def _write_texts(targets: list[Target], partial: Path) -> int:
    """Make all files at full size, with their texts and holes for the tensors; returns the bytes of the texts."""
    done = 0
    for target in targets:
        path = partial / target.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for at, text in target.texts:
                file.seek(at)
                file.write(text)
                done += len(text)
            file.truncate(target.num_bytes)
    return done


def _averaged(
    sources: list[Sources], held: list[Tensor], shares: list[float], low: int, high: int, dtype: str
) -> Bytes:
    """The elements ``[low, high)`` of the mean, as ``dtype``."""
    if held[0].dtype not in FLOATS:
        return cast(read_range(sources[-1], held[-1], low, high), held[-1].dtype, dtype)
    total = np.zeros(high - low, np.float64)
    with np.errstate(all="ignore"):  # NaN and Inf are carried, and counted
        for source, tensor, share in zip(sources, held, shares, strict=True):
            total += share * numbers(read_range(source, tensor, low, high), tensor.dtype)
    return from_floats(total, dtype)
