"""A ZeRO checkpoint as an inventory: the layout is derived, never read from a mapping.

Stages 1 and 2 and BF16_Optimizer lay the parameters of a group end to end in one flat buffer, in the order of
``param_shapes`` (the order of memory, also under ``round_robin_gradients``), each followed by its alignment padding,
and cut the buffer into equal partitions: F = ceil(sum / 2W)·2W elements for W ranks, F/W each. That is
``Layout.from_slots(numels, numels + paddings).pieces(cuts)``, and the tail, whether it fills part of one partition or
several hundred, is what no piece covers. ``group_paddings`` is recorded and never used; ``param_slice_mappings`` is
compared and, where it disagrees because of ``round_robin_gradients``, reported and not followed.

Stage 3 cuts each parameter by itself into W parts of ceil(numel / W) elements, and lays the parts of one rank end to
end, sub-group by sub-group. Again a :class:`~ullage.layout.Layout`, one a parameter.

Source: ``stage_1_and_2.py``, ``stage3.py`` and ``bf16_optimizer.py`` of DeepSpeed 0.19; files of before 0.16.4, which
book all padding on the last rank, read the same, because the booking is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.checkpoint import modules, shards
from ullage.checkpoint.agreement import check_agreement, check_ranks, compare_mappings
from ullage.checkpoint.folder import Folder, read_files
from ullage.checkpoint.inventory import Group, Inventory, Problem, Slice, Tensor, Topology
from ullage.checkpoint.parallel import Patterns, join
from ullage.checkpoint.partitions import fragments_of, group3, group12
from ullage.checkpoint.shards import Model, Shard
from ullage.checkpoint.torchfile import ITEM_BYTES
from ullage.errors import CheckpointError


@dataclass
class Details:
    """What the writers of other formats need beside the tensors: the files of rank 0, by model rank."""

    shards: dict[int, Shard]
    models: dict[int, Model]
    info: dict[str, Any]
    #: by parameter group: the step, and its dtype as it was saved (None for a Python number)
    steps: dict[int, tuple[Any, str | None]]
    param_groups: list[dict[str, Any]]


def read_zero(path: Path) -> Inventory:
    """The inventory of a ZeRO folder (the tag's). Raises ``CheckpointError`` when nothing can be made of it."""
    folder = Folder(path, shards.sort_files(path))
    read_files(folder)
    first = _first(folder)
    world = max(first.world, default=0)
    model_ranks = sorted({m for m, _ in folder.shards} | {m for m, _ in folder.models})
    tp, pp = _parallel_sizes(folder, len(model_ranks))
    check_ranks(folder, world, range(tp * pp))
    check_agreement(folder)
    info = folder.models[min(folder.models)].root.get("universal_checkpoint_info")
    info = info or first.root.get("optimizer_state_dict", {}).get("universal_checkpoint_info")
    patterns = Patterns(dict(info or {}))
    if tp > 1 and not info:
        folder.say("tensor parallel, and universal_checkpoint_info is missing: nothing says how slices join")
    slices: dict[tuple[str, str], _Parts] = {}
    for model_rank in model_ranks:
        _read_model_rank(folder, model_rank, world, tp, patterns, slices)
    tensors = _joined(folder, slices, patterns, tp)
    tensors += modules.frozen_and_buffers(folder, world, tp, patterns, {name for name, _ in slices})
    if patterns.info.get("affine_map"):
        folder.notes.append("affine_map is not read: slices join as the lists of patterns say, which are beside it")
    if unused := patterns.unused():
        folder.notes.append(f"patterns that match no parameter: {unused}")
    steps = _steps(folder)
    return Inventory(
        folder=path,
        format="zero",
        topology=Topology(first.stage, first.wrapper, world, tp, pp),
        files=tuple(folder.files),
        tensors=tuple(tensors),
        groups=tuple(folder.groups),
        steps={group: value for group, (value, _) in steps.items()},
        aliases=modules.aliases(folder),
        notes=tuple(dict.fromkeys(folder.notes)),
        problems=tuple(folder.problems),
        records=folder.records,
        details=Details(
            {m: s for (m, d), s in sorted(folder.shards.items()) if d == 0},
            {m: s for (m, d), s in sorted(folder.models.items()) if d == 0},
            dict(info or {}),
            steps,
            _param_groups(first),
        ),
    )


def _first(folder: Folder) -> Shard:
    """The first shard. Raises ``CheckpointError`` for a folder of which no shard or no model states can be read."""
    found = str(folder.problems[0]) if folder.problems else None
    if not folder.shards:
        raise CheckpointError(
            "the folder holds no readable ZeRO shard",
            where=str(folder.path),
            expected="*_optim_states.pt",
            found=found,
        )
    if not folder.models:
        raise CheckpointError(
            "no readable model states: nothing says which parameters there are",
            where=str(folder.path),
            expected="*_model_states.pt",
            found=found,
        )
    return folder.shards[min(folder.shards)]


def _parallel_sizes(folder: Folder, model_ranks: int) -> tuple[int, int]:
    dims = folder.models[min(folder.models)].root.get("checkpoint_parallel_dimensions")
    if isinstance(dims, dict) and dims.get("tp_degree") and dims.get("pp_degree"):
        return int(dims["tp_degree"]), int(dims["pp_degree"])
    layers = [m for m in (shards.LAYER.fullmatch(f.name) for f in folder.files) if m]
    tp = len({int(m[2]) for m in layers}) if layers else model_ranks
    return max(1, tp), max(1, model_ranks // max(1, tp))


_Parts = dict[int, tuple[Slice, str, int]]  # by tensor-parallel rank: slice, dtype, parameter group


def _read_model_rank(
    folder: Folder, model_rank: int, world: int, tp: int, patterns: Patterns, slices: dict[tuple[str, str], _Parts]
) -> None:
    """Adds the slices of one model rank, parameter by parameter and key by key."""
    model = folder.models.get((model_rank, 0))
    mine = {dp: s for (m, dp), s in folder.shards.items() if m == model_rank and dp < world}
    if model is None or not mine:
        return
    shapes = model.root.get("param_shapes")
    shapes = [shapes] if isinstance(shapes, dict) else list(shapes or [])
    lead = mine[min(mine)]
    for rank, shard in sorted(mine.items()):
        if len(shapes) != len(shard.flats):
            folder.say(
                "groups disagree with param_shapes", shard, expected=str(len(shapes)), found=str(len(shard.flats))
            )
            del mine[rank]
    if not mine:
        return
    for index, named in enumerate(shapes):
        named = {name: tuple(int(d) for d in shape) for name, shape in named.items()}
        group = _group(folder, index, model_rank, named, mine, world)
        folder.groups.append(group)
        for key in lead.flats[index]:
            dtype, fragments = fragments_of(folder, group, key, mine)
            if fragments is None:
                continue
            for name, found in zip(named, fragments):
                if model_rank // tp and patterns.match("pipeline_replicated_parameter", name):
                    continue
                parts = slices.setdefault((name, key), {})
                if model_rank % tp in parts:
                    if key == "fp32":
                        folder.notes.append(f"{name} is in two pipeline stages; the first is taken")
                    continue
                parts[model_rank % tp] = (Slice(model_rank, named[name], found), dtype, lead.group_of[index])
    if lead.stage < 3:
        compare_mappings(folder, model_rank, mine)


def _group(
    folder: Folder, index: int, model_rank: int, named: dict[str, tuple[int, ...]], mine: dict[int, Shard], world: int
) -> Group:
    lead = mine[min(mine)]
    if lead.stage == 3:
        return group3(index, model_rank, named, world)
    alignments = lead.alignments[index] if index < len(lead.alignments) else []
    booked = tuple(s.paddings[index] for _, s in sorted(mine.items()) if index < len(s.paddings))
    alignments = alignments if len(alignments) == len(named) else []
    seen = max((p.numel for p in mine[0].flats[index].values()), default=0) if 0 in mine else 0
    group = group12(index, model_rank, named, world, alignments, seen, booked)
    least = group12(index, model_rank, named, world, alignments).shard_size
    if group.shard_size > least:  # some version aligned to more than 2W; the mappings will be compared
        folder.notes.append(f"group {index}: partitions of {group.shard_size} elements, where {least} would do")
    return group


def _joined(folder: Folder, slices: dict[tuple[str, str], _Parts], patterns: Patterns, tp: int) -> list[Tensor]:
    tensors = []
    for (name, key), parts in slices.items():
        missing = sorted(set(range(tp)) - set(parts))
        if missing:
            folder.problems.append(Problem(f"no slice of {key} on tensor-parallel rank {missing[0]}", parameter=name))
            continue
        found = [parts[t][0] for t in range(tp)]
        dtype, group = parts[0][1], parts[0][2]
        try:
            whole = join(name, found, patterns, ITEM_BYTES[dtype])
        except CheckpointError as error:
            folder.problems.append(
                Problem(
                    error.what, parameter=error.where or name, expected=_text(error.expected), found=_text(error.found)
                )
            )
            continue
        tensors.append(
            Tensor(name, key, whole.shape, dtype, "parameter", whole.slices, whole.merge, group, whole.extra)
        )
    return tensors


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _param_groups(shard: Shard) -> list[dict[str, Any]]:
    """Hyperparameters by group; for an elastic file, which holds none, one entry a group."""
    saved = shard.root.get("optimizer_state_dict", {})
    base = saved.get("optimizer_state_dict" if shard.stage == 3 else "base_optimizer_state")
    groups = list(base.get("param_groups", [])) if isinstance(base, dict) else []
    step = saved.get("base_optimizer_state_step")
    return groups or [{"params": [i]} | ({} if step is None else {"step": step}) for i in range(len(shard.flats))]


def _steps(folder: Folder) -> dict[int, tuple[Any, str | None]]:
    """Step and its dtype by parameter group, from the first shard that has the group."""
    steps: dict[int, tuple[Any, str | None]] = {}
    for _, shard in sorted(folder.shards.items()):
        for scalar, dtype, group in zip(shard.scalars, shard.step_dtypes, shard.group_of):
            steps.setdefault(group, (scalar.get("step"), dtype))
    return steps
