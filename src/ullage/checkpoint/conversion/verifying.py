"""Verification of a converted checkpoint: every byte of every tensor, and every file that a loader reads.

Both sides are inventories, so the formats do not matter: the same elements are gathered from the fragments of each and
compared. Where the target keeps another dtype, the source is cast first, as the conversion did. All that the target
must hold beside tensors is laid out again from the source and compared (``loaded``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ullage.checkpoint.conversion import loaded
from ullage.checkpoint.conversion.comparing import Pair, compare_pairs
from ullage.checkpoint.conversion.converting import default_workers
from ullage.checkpoint.formats import trainer_folder
from ullage.checkpoint.formats.hub_names import hub_named
from ullage.checkpoint.formats.table import read
from ullage.checkpoint.inventory import Inventory, Tensor
from ullage.checkpoint.numbers import FLOATS
from ullage.checkpoint.problem import Problem


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
        target: the converted checkpoint, likewise. It may be without optimizer state altogether (weights only), unless
            it was converted with it.
        workers: threads; by default two for each processor that this process may use, at most 8.
        progress: called as ``progress(done, total)``, in bytes, from any thread.
        storage_options: those of fsspec, for URLs.

    Compares every byte of every tensor, and the content of every file that a loader of the target's format reads:
    steps, hyperparameters, model states, indexes. Memory: two chunks of 2 MiB per thread. Raises ``CheckpointError``
    for a folder that is not a checkpoint.
    """
    ours = source if isinstance(source, Inventory) else read(source, storage_options=storage_options)
    theirs = target if isinstance(target, Inventory) else read(target, storage_options=storage_options)
    ours = hub_named(ours, theirs.format)
    # Without a whole tiling on both sides there is nothing sound to compare.
    problems = ours.problems() + theirs.problems()
    if problems:
        return problems
    found = loaded.compare_files(ours, theirs)
    is_adapter = loaded.options_of(theirs.folder).get("format") == "trainer" and trainer_folder.is_adapter(
        theirs.folder
    )
    pairs, more = _pairs(trainer_folder.adapter_of(ours) if is_adapter else ours, theirs)
    problems = found.problems + more
    return problems + compare_pairs(ours, found.inventory, pairs + found.pairs, workers or default_workers(), progress)


def _pairs(ours: Inventory, theirs: Inventory) -> tuple[list[Pair], list[Problem]]:
    """The tensors to compare, and problems for those that are missing, of another shape, or of another dtype."""
    pairs: list[Pair] = []
    problems: list[Problem] = []
    weights_only = not loaded.has_optimizer(theirs)
    divided = any(tensor.group is not None for tensor in ours.tensors)
    for tensor in ours.tensors:
        if weights_only and tensor.kind == "parameter" and tensor.key != "fp32":
            continue
        other = _find(theirs, tensor, divided)
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
        elif other.dtype != tensor.dtype and not {other.dtype, tensor.dtype} <= set(FLOATS):
            problems.append(
                Problem(
                    f"{tensor.key} has another dtype", parameter=tensor.name, expected=tensor.dtype, found=other.dtype
                )
            )
        else:
            pairs.append((tensor, other, None))
    # What the target has beyond the source would be loaded too, so it is a difference.
    known = {tensor.name for tensor in ours.tensors} | set(ours.aliases)
    strange = sorted({tensor.name for tensor in theirs.tensors} - known)
    problems += [Problem("in the target, not in the source", parameter=name) for name in strange]
    return pairs, problems


def _find(theirs: Inventory, tensor: Tensor, divided: bool) -> Tensor | None:
    """The tensor of the target that holds this one.

    ``divided``: whether the source tells trained parameters from other weights. Where it does not, and of what has no
    elements, a target may call a weight what it must be there.
    """
    free = tensor.kind != "parameter" or (tensor.key == "fp32" and (not divided or not tensor.numel))
    for kind in (tensor.key, "frozen", "buffer", "fp32"):
        if (tensor.name, kind) in theirs and (kind == tensor.key or free):
            return theirs.tensor(tensor.name, kind)
    return None
