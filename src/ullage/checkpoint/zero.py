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

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint import modules, shards
from ullage.checkpoint.inventory import Fragments, Group, Inventory, Problem, Slice, Tensor, Topology
from ullage.checkpoint.parallel import Patterns, join
from ullage.checkpoint.shards import Model, Shard
from ullage.checkpoint.torchfile import ITEM_BYTES, TorchFile
from ullage.errors import CheckpointError
from ullage.layout import Int64, Layout, Pieces


@dataclass
class Details:
    """What the writers of other formats need beside the tensors: the files of rank 0, by model rank."""

    shards: dict[int, Shard]
    models: dict[int, Model]
    info: dict[str, Any]
    #: by parameter group: the step, and its dtype as it was saved (None for a Python number)
    steps: dict[int, tuple[Any, str | None]]
    param_groups: list[dict[str, Any]]


@dataclass
class _Reading:
    """State while a folder is read: what is known so far, and what went wrong."""

    folder: Path
    files: list[Any]
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    models: dict[tuple[int, int], Model] = field(default_factory=dict)
    records: dict[int, Int64] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    def say(self, what: str, shard: Shard | None = None, **more: Any) -> None:
        name, rank = (shard.name, shard.dp_rank) if shard else (None, None)
        self.problems.append(Problem(what, **{"file": name, "rank": rank, **more}))


def read_zero(folder: Path) -> Inventory:
    """The inventory of a ZeRO folder (the tag's). Raises ``CheckpointError`` when nothing can be made of it."""
    files = shards.sort_files(folder)
    reading = _Reading(folder, files)
    _read_files(reading)
    if not reading.shards:
        if reading.problems:
            raise CheckpointError(str(reading.problems[0]))
        raise CheckpointError("the folder holds no ZeRO shards", where=str(folder), expected="*_optim_states.pt")
    first = reading.shards[min(reading.shards)]
    if not reading.models:
        raise CheckpointError(
            "no readable model states: nothing says which parameters there are",
            where=str(folder),
            expected="*_model_states.pt",
            found=str(reading.problems[0]) if reading.problems else None,
        )
    world = max(first.world, default=0)
    model_ranks = sorted({m for m, _ in reading.shards} | {m for m, _ in reading.models})
    tp, pp = _parallel_sizes(reading, len(model_ranks))
    _check_ranks(reading, world, range(tp * pp))
    _check_agreement(reading)
    root = reading.models[min(reading.models)].root
    info = root.get("universal_checkpoint_info") or first.root.get("optimizer_state_dict", {}).get(
        "universal_checkpoint_info"
    )
    patterns = Patterns(dict(info or {}))
    if tp > 1 and not info:
        reading.say("tensor parallel, and universal_checkpoint_info is missing: nothing says how slices join")
    slices: dict[tuple[str, str], _Parts] = {}
    for model_rank in model_ranks:
        _read_model_rank(reading, model_rank, world, tp, patterns, slices)
    tensors = _joined(reading, slices, patterns, tp)
    tensors += modules.frozen_and_buffers(reading, world, tp, patterns, {name for name, _ in slices})
    if unused := patterns.unused():
        reading.notes.append(f"patterns that match no parameter: {unused}")
    steps = _steps(reading)
    return Inventory(
        folder=folder,
        format="zero",
        topology=Topology(first.stage, first.wrapper, world, tp, pp),
        files=tuple(files),
        tensors=tuple(tensors),
        groups=tuple(reading.groups),
        steps={g: value for g, (value, _) in steps.items()},
        aliases=modules.aliases(reading),
        notes=tuple(reading.notes),
        problems=tuple(reading.problems),
        records=reading.records,
        details=Details(
            {m: s for (m, d), s in sorted(reading.shards.items()) if d == 0},
            {m: s for (m, d), s in sorted(reading.models.items()) if d == 0},
            dict(info or {}),
            steps,
            _param_groups(first),
        ),
    )


def _read_files(reading: _Reading) -> None:
    def one(index: int) -> Any:
        file = reading.files[index]
        try:
            if file.kind == "optimizer":
                return shards.read_shard(reading.folder, index, file)
            return shards.read_model(reading.folder, index, file) if file.kind == "model" else None
        except CheckpointError as error:
            if "refused" in error.what or "mixture of experts" in error.what:
                raise
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, range(len(reading.files))))
    for index, result in enumerate(results):
        file = reading.files[index]
        if result is None:
            continue
        if isinstance(result, CheckpointError):
            found = str(result.found) if result.found is not None else None
            reading.problems.append(Problem(result.what, file.name, file.dp_rank, found=found, hint=result.hint))
            continue
        parsed, source = result
        table = reading.shards if isinstance(parsed, Shard) else reading.models
        key = (parsed.model_rank, parsed.dp_rank)
        if key in table:
            both = f"{table[key].name} and {parsed.name}"
            reading.problems.append(Problem("two files claim one rank", both, parsed.dp_rank))
            continue
        table[key] = parsed
        reading.records[index] = record_table(source)


def record_table(source: TorchFile) -> Int64:
    """Offset, bytes and CRC-32 of each record of a file, by offset; empty for a file saved without checksums."""
    rows = [(r.offset, r.num_bytes, r.crc) for r in source.records.values() if r.num_bytes] if source.has_crcs else []
    return np.array(sorted(rows), np.int64).reshape(-1, 3)


def _parallel_sizes(reading: _Reading, model_ranks: int) -> tuple[int, int]:
    dims = reading.models[min(reading.models)].root.get("checkpoint_parallel_dimensions")
    if isinstance(dims, dict) and dims.get("tp_degree") and dims.get("pp_degree"):
        return int(dims["tp_degree"]), int(dims["pp_degree"])
    layers = [m for m in (shards.LAYER.fullmatch(f.name) for f in reading.files) if m]
    tp = len({int(m[2]) for m in layers}) if layers else model_ranks
    return max(1, tp), max(1, model_ranks // max(1, tp))


def _check_ranks(reading: _Reading, world: int, model_ranks: range) -> None:
    """Every rank has its file, no other file is there, and the files agree on how many ranks there are."""
    ranks: dict[int, list[int]] = {}
    for model_rank, dp_rank in reading.shards:
        ranks.setdefault(model_rank, []).append(dp_rank)
    example = next(iter(reading.shards.values())).name
    unreadable = {(p.file, p.rank) for p in reading.problems}
    bad = {rank for file, rank in unreadable if file and "optim_states" in file}
    for model_rank in sorted({*ranks, *model_ranks}):
        prefix = example.partition("zero_pp")[0]
        missing = sorted(set(range(world)) - set(ranks.get(model_rank, ())) - bad)
        for rank in missing:
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            reading.problems.append(
                Problem(
                    "a shard is missing",
                    name,
                    rank,
                    expected=f"{world} shards",
                    found=f"{len(ranks.get(model_rank, ()))}",
                )
            )
        extra = sorted(set(ranks.get(model_rank, ())) - set(range(world)))
        if extra:
            shard = reading.shards[model_rank, extra[0]]
            reading.say(
                "the world size disagrees with the files",
                shard,
                expected=f"ranks 0 to {world - 1}",
                found=f"rank {extra[-1]}",
            )
    for model in reading.models.values():
        claimed = model.root.get("dp_world_size")
        if isinstance(claimed, int) and claimed != world:
            reading.problems.append(
                Problem(
                    "the world size disagrees with the files",
                    model.name,
                    model.dp_rank,
                    expected=f"dp_world_size {world}, as the shards say",
                    found=str(claimed),
                )
            )
    for model_rank in model_ranks:
        if (model_rank, 0) not in reading.models and not any("model_states" in (f or "") for f, _ in unreadable):
            reading.problems.append(Problem("model states are missing", f"mp_rank_{model_rank:02d}_model_states.pt", 0))


def _check_agreement(reading: _Reading) -> None:
    """Shards of one checkpoint agree on stage, world size, groups, and step; so do the model states on the step."""

    def odd_ones(facts: dict[Any, Any], what: str, names: dict[Any, Any]) -> None:
        counts = Counter(facts.values())
        if len(counts) < 2:
            return
        common = counts.most_common(1)[0][0]
        for key, fact in facts.items():
            if fact != common:
                reading.problems.append(
                    Problem(what, names[key].name, names[key].dp_rank, expected=str(common), found=str(fact))
                )

    held = reading.shards
    odd_ones({k: s.stage for k, s in held.items()}, "shards of two ZeRO stages", held)
    odd_ones({k: tuple(s.world) for k, s in held.items() if k[0] == 0}, "shards disagree on the world size", held)
    steps = {k: tuple(x.get("step") for x in s.scalars) for k, s in held.items()}
    for model_rank in {k[0] for k in held}:
        mine = {k: v for k, v in steps.items() if k[0] == model_rank}
        odd_ones(mine, "shards of two different steps", held)
    odd_ones(
        {k: m.root.get("global_steps") for k, m in reading.models.items()},
        "model states of two different steps",
        reading.models,
    )
    odd_ones(
        {k: m.root.get("iteration") for k, m in reading.models.items()},
        "model states of two iterations",
        reading.models,
    )


_Parts = dict[int, tuple[Slice, str, int]]  # by tensor-parallel rank: slice, dtype, parameter group


def _read_model_rank(
    reading: _Reading, model_rank: int, world: int, tp: int, patterns: Patterns, slices: dict[tuple[str, str], _Parts]
) -> None:
    """Adds the slices of one model rank, parameter by parameter and key by key."""
    model = reading.models.get((model_rank, 0))
    mine = {dp: s for (m, dp), s in reading.shards.items() if m == model_rank and dp < world}
    if model is None or not mine:
        return
    shapes = model.root.get("param_shapes")
    shapes = [shapes] if isinstance(shapes, dict) else list(shapes or [])
    lead = mine[min(mine)]
    if len(shapes) != len(lead.flats):
        reading.say("groups disagree with param_shapes", lead, expected=str(len(shapes)), found=str(len(lead.flats)))
        return
    for index, named in enumerate(shapes):
        named = {name: tuple(int(d) for d in shape) for name, shape in named.items()}
        group = (
            _group3(index, model_rank, named, world)
            if lead.stage == 3
            else _group12(reading, index, model_rank, named, mine, world)
        )
        reading.groups.append(group)
        for key in lead.flats[index]:
            dtype, fragments = _fragments(reading, group, key, mine)
            if fragments is None:
                continue
            for name, found in zip(named, fragments):
                if model_rank // tp and patterns.match("pipeline_replicated_parameter", name):
                    continue
                parts = slices.setdefault((name, key), {})
                if model_rank % tp in parts:
                    if key == "fp32":
                        reading.notes.append(f"{name} is in two pipeline stages; the first is taken")
                    continue
                parts[model_rank % tp] = (Slice(model_rank, named[name], found), dtype, lead.group_of[index])
    if lead.stage < 3:
        _compare_mappings(reading, model_rank, mine)


def _group12(
    reading: _Reading,
    index: int,
    model_rank: int,
    named: dict[str, tuple[int, ...]],
    mine: dict[int, Shard],
    world: int,
) -> Group:
    """The flat buffer of a group of stages 1 and 2, cut into equal partitions."""
    lead = mine[min(mine)]
    numels = np.array([int(np.prod(s, dtype=np.int64)) for s in named.values()], np.int64)
    paddings = np.zeros_like(numels)
    if index < len(lead.alignments) and len(lead.alignments[index]) == len(numels):
        paddings = np.array(lead.alignments[index], np.int64)
    layout = Layout.from_slots(numels, numels + paddings)
    size = -(-layout.size // (2 * world)) * 2
    seen = max((p.numel for s in mine.values() for p in s.flats[index].values()), default=size)
    if seen != size and 0 in mine and any(p.numel == seen for p in mine[0].flats[index].values()):
        if seen > size:  # aligned to more than 2W; the mappings will be compared
            reading.notes.append(f"group {index}: partitions of {seen} elements, where {size} would do")
            size = seen
    return Group(
        index,
        model_rank,
        tuple(named),
        layout.pieces(np.arange(world + 1) * size),
        size,
        world,
        tuple(s.paddings[index] for _, s in sorted(mine.items()) if index < len(s.paddings)),
    )


def _group3(index: int, model_rank: int, named: dict[str, tuple[int, ...]], world: int) -> Group:
    """A sub-group of stage 3: each parameter in ``world`` parts, the parts of one rank end to end."""
    rows: list[Pieces] = []
    at = 0
    for item, shape in enumerate(named.values()):
        numel = int(np.prod(shape, dtype=np.int64))
        share = -(-numel // world)
        pieces = Layout([numel]).pieces(np.arange(world + 1) * share)
        rows.append(Pieces(pieces.item + item, pieces.shard, pieces.item_start, pieces.shard_start + at, pieces.length))
        at += share
    fields = ("item", "shard", "item_start", "shard_start", "length")
    joined = [np.concatenate([getattr(r, f) for r in rows]) if rows else np.zeros(0, np.int64) for f in fields]
    return Group(index, model_rank, tuple(named), Pieces(*joined), at, world)


def _fragments(reading: _Reading, group: Group, key: str, mine: dict[int, Shard]) -> tuple[str, list[Fragments] | None]:
    """The dtype of one state of a group and its fragments by parameter; None for a state that cannot be cut."""
    lead = mine[min(mine)]
    dtype = lead.flats[group.index][key].dtype
    offset, numel = np.zeros(group.num_shards, np.int64), np.full(group.num_shards, -1, np.int64)
    file = np.zeros(group.num_shards, np.int64)
    for rank, shard in mine.items():
        flat = shard.flats[group.index].get(key) if group.index < len(shard.flats) else None
        if flat is None or flat.dtype != dtype:
            reading.say(
                f"state {key} is missing or of another dtype",
                shard,
                group=group.index,
                expected=dtype,
                found=flat and flat.dtype,
            )
            continue
        offset[rank], numel[rank], file[rank] = flat.offset, flat.numel, shard.file
    if key != "fp32" and lead.flats[group.index][key].numel not in (
        group.shard_size,
        lead.flats[group.index]["fp32"].numel,
    ):
        reading.notes.append(f"group {group.index}: state {key} is not cut like the weights; rank 0's is carried")
        return dtype, None
    pieces = group.pieces
    held = numel[pieces.shard] >= 0
    short = held & (pieces.shard_start + pieces.length > numel[pieces.shard])
    for rank in np.unique(pieces.shard[short]):
        piece = int(np.flatnonzero(short & (pieces.shard == rank))[0])
        end = int((pieces.shard_start + pieces.length)[pieces.shard == rank].max())
        reading.say(
            f"the shard is too short for {key}",
            mine[int(rank)],
            group=group.index,
            parameter=group.names[int(pieces.item[piece])],
            expected=f"at least {end} elements",
            found=str(int(numel[rank])),
        )
    for rank, shard in mine.items():
        if numel[rank] > group.shard_size:
            reading.say(
                f"the shard is too long for {key}",
                shard,
                group=group.index,
                expected=f"{group.shard_size} elements",
                found=str(int(numel[rank])),
            )
    item_bytes = ITEM_BYTES[dtype]
    where = offset[pieces.shard] + pieces.shard_start * item_bytes
    keep = held & ~short
    bounds = np.searchsorted(pieces.item, np.arange(len(group.names) + 1))
    found = []
    for low, high in zip(bounds[:-1], bounds[1:]):
        chosen = np.arange(low, high)[keep[low:high]]
        found.append(
            Fragments(file[pieces.shard[chosen]], where[chosen], pieces.item_start[chosen], pieces.length[chosen])
        )
    return dtype, found


def _compare_mappings(reading: _Reading, model_rank: int, mine: dict[int, Shard]) -> None:
    """``param_slice_mappings`` against the layout: a cross-check that is never followed."""
    wrong: list[tuple[Shard, int, str]] = []
    total = 0
    for group in (g for g in reading.groups if g.model_rank == model_rank):
        expected: dict[int, dict[str, tuple[int, int]]] = {}
        pieces = group.pieces
        for item, rank, length, start in zip(
            pieces.item.tolist(), pieces.shard.tolist(), pieces.length.tolist(), pieces.shard_start.tolist()
        ):
            expected.setdefault(rank, {})[group.names[item]] = (length, start)
        for rank, shard in mine.items():
            if group.index >= len(shard.mappings):
                continue
            booked = {n: at for n, at in shard.mappings[group.index].items() if at[0] > 0}
            layout = expected.get(rank, {})
            total += len(layout)
            wrong += [(shard, group.index, n) for n in {*booked, *layout} if booked.get(n) != layout.get(n)]
    if not wrong:
        return
    shard, group_index, name = wrong[0]
    if shard.round_robin is False:
        reading.say(
            "param_slice_mappings and param_shapes disagree, and round_robin_gradients is off",
            shard,
            group=group_index,
            parameter=name,
        )
    else:
        reading.notes.append(
            f"round_robin: param_slice_mappings is in another order than memory for {len(wrong)} of {total} fragments; "
            "the layout of param_shapes is followed"
        )


def _joined(reading: _Reading, slices: dict[tuple[str, str], _Parts], patterns: Patterns, tp: int) -> list[Tensor]:
    tensors = []
    for (name, key), parts in slices.items():
        missing = sorted(set(range(tp)) - set(parts))
        if missing:
            reading.problems.append(Problem(f"no slice of {key} on tensor-parallel rank {missing[0]}", parameter=name))
            continue
        found = [parts[t][0] for t in range(tp)]
        dtype, group = parts[0][1], parts[0][2]
        try:
            whole = join(name, found, patterns, ITEM_BYTES[dtype])
        except CheckpointError as error:
            reading.problems.append(
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


def _steps(reading: _Reading) -> dict[int, tuple[Any, str | None]]:
    """Step and its dtype by parameter group, from the first shard that has the group."""
    steps: dict[int, tuple[Any, str | None]] = {}
    for _, shard in sorted(reading.shards.items()):
        for scalar, dtype, group in zip(shard.scalars, shard.step_dtypes, shard.group_of):
            steps.setdefault(group, (scalar.get("step"), dtype))
    return steps
