"""Joining of slices into whole tensors, over tensor-parallel ranks and over pipeline stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ullage.checkpoint.inventory import Fragments, Slice, Tensor
from ullage.checkpoint.numbers import ITEM_BYTES
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero import shards
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.parallel import Patterns, join
from ullage.errors import CheckpointError

#: By tensor-parallel rank: the slice, its dtype, and its parameter group.
Parts = dict[int, tuple[Slice, str, int | None]]
#: By name and key, then by pipeline stage.
Stages = dict[tuple[str, str], dict[int, Parts]]

#: A folder that claims more than ``_LEAST`` ranks, of which fewer than one in ``_RATIO`` is there, is not looked into:
#: the number is damage, and everything that is allocated per rank would grow with it.
_LEAST, _RATIO = 1024, 64


def require_plausible(folder: Folder, what: str, claimed: int, there: int) -> None:
    """Raise ``CheckpointError`` for a number of ranks of which almost none is there, before memory depends on it."""
    if claimed > max(_LEAST, _RATIO * there):
        raise CheckpointError(
            f"the files say that {claimed} {what}, and almost none is there",
            where=str(folder.path),
            expected=claimed,
            found=there,
            hint="copy the folder again from where it was saved",
        )


def parallel_sizes(folder: Folder, model_ranks: int) -> tuple[int, int]:
    """(tensor-parallel, pipeline-parallel) sizes, as the files say or as their names show."""
    degrees = folder.models[min(folder.models)].degrees
    if degrees is not None:
        require_plausible(folder, "model ranks wrote it", degrees[0] * degrees[1], model_ranks)
        return degrees
    # A pipeline module's layer files have the tensor-parallel rank in their names; without any, there is one stage.
    layers = [m for m in (shards.LAYER.fullmatch(f.name) for f in folder.files) if m]
    tp = len({int(m[2]) for m in layers}) if layers else model_ranks
    return max(1, tp), max(1, model_ranks // max(1, tp))


def join_stages(
    folder: Folder, slices: Stages, patterns: Patterns, tp: int, kind: str = "parameter"
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Join slices over tensor-parallel ranks; also pair the tensors that several pipeline stages hold.

    Args:
        folder: gets the problems and notes.
        slices: by name and key, then by pipeline stage, then by tensor-parallel rank.
        patterns: how the slices of a name join.
        tp: number of tensor-parallel ranks.
        kind: of the tensors that are made.

    Of several stages the first one's tensor is taken; a conversion compares it with the others.
    """
    tensors: list[Tensor] = []
    twins: list[tuple[Tensor, Tensor]] = []
    for (name, key), stages in slices.items():
        # One tensor per stage. If any of them cannot be made, its problem is noted and the name is left out.
        made = [_joined(folder, name, key, stages[stage], patterns, tp, kind) for stage in sorted(stages)]
        if not all(made):
            continue
        for tensor, *copies in made:
            twins += [(tensor, copy) for copy in copies]
        first, *others = held = [tensor for tensor, *_ in made]
        tensors.append(first)
        for other in others:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                folder.problems.append(
                    Problem(
                        f"pipeline stages hold different tensors of one name ({key})",
                        parameter=name,
                        expected=f"{first.dtype} {list(first.shape)}",
                        found=f"{other.dtype} {list(other.shape)}",
                    )
                )
            else:
                twins.append((first, other))
        if others and key in ("fp32", "frozen"):
            folder.notes.append(f"{name} is in {len(held)} pipeline stages; they are compared, and the first is taken")
    return tensors, twins


def _joined(folder: Folder, name: str, key: str, parts: Parts, patterns: Patterns, tp: int, kind: Any) -> list[Tensor]:
    """The tensor that tensor-parallel ranks hold; none, and a problem, where it cannot be made.

    Further ones are the same tensor, taken from other ranks that must hold the same elements.

    Args:
        folder: gets the problem.
        name: of the parameter or buffer.
        key: which state of it.
        parts: by tensor-parallel rank.
        patterns: how the slices of a name join.
        tp: number of tensor-parallel ranks; each must have its part.
        kind: of the tensor that is made.
    """
    lead, dtype, group = parts[min(parts)]
    for rank in sorted(set(range(tp)) - set(parts)):
        # What a rank holds no element of is in no flat buffer; only the map tells that from a loss.
        shape = patterns.affine.empty_slice(name, rank)
        if shape is None:
            folder.problems.append(Problem(f"no slice of {key} on tensor-parallel rank {rank}", parameter=name))
            return []
        parts[rank] = Slice(lead.model_rank, shape, Fragments.of([]), lead.blocks), dtype, group
    if any(part[1] != dtype for part in parts.values()):
        found = ", ".join(sorted({part[1] for part in parts.values()}))
        folder.problems.append(Problem(f"slices of {key} are of several dtypes", parameter=name, found=found))
        return []
    slices = [parts[t][0] for t in range(tp)]
    if len({s.blocks is None for s in slices}) > 1:
        folder.problems.append(Problem(f"slices of {key} are 8-bit on some ranks only", parameter=name))
        return []
    try:
        whole = join(name, slices, patterns, ITEM_BYTES[dtype] if slices[0].blocks is None else 1)
    except CheckpointError as error:
        folder.problems.append(Problem.of_error(error, parameter=error.where or name))
        return []
    first = Tensor(name, key, whole.shape, dtype, kind, whole.slices, whole.merge, group, whole.extra)
    return [first, *(replace(first, slices=slices, merge=merge) for slices, merge in whole.others)]
