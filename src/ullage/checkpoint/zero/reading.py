"""Reading of a ZeRO checkpoint into an inventory. The layout is derived, never read from a mapping.

Stages 1 and 2 and BF16_Optimizer lay the parameters of a group end to end in one flat buffer, in the order of
``param_shapes`` (the order of memory, also under ``round_robin_gradients``), each followed by its alignment padding,
and cut the buffer into equal partitions: F = ceil(sum / 2W)·2W elements for W ranks, F/W each. That is
``Layout.from_slots(numels, numels + paddings).pieces(cuts)``, and the tail, whether it fills part of one partition or
several hundred, is what no piece covers. ``group_paddings`` is recorded and never used; ``param_slice_mappings`` is
compared and, where it disagrees because of ``round_robin_gradients``, reported and not followed.

Stage 3 cuts each parameter by itself into W parts of ceil(numel / W) elements, and lays the parts of one rank end to
end, sub-group by sub-group. Again a :class:`~ullage.core.layout.Layout`, one per parameter.

Source: ``stage_1_and_2.py``, ``stage3.py`` and ``bf16_optimizer.py`` of DeepSpeed 0.19; files of before 0.16.4, which
book all padding on the last rank, read the same, because the booking is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ullage.checkpoint.core.inventory import Fragments, Group, Inventory, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.agreement import (
    compare_mappings,
    find_odd_files,
    require_known_kind,
    require_ranks,
    shard_groups,
    unsaved_state,
)
from ullage.checkpoint.zero.expert_layers import Experts, FlatBuffer, dense_ranks, router_copies, untrained_experts
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.parallel import Joining, Patterns, Stages, parallel_sizes, require_plausible
from ullage.checkpoint.zero.partitions import fragments_of, stage3_group, stage12_group, undealt
from ullage.checkpoint.zero.shards import ShardFile
from ullage.checkpoint.zero.states import MOMENTUM, WRAPPER, Details, Momentum, Uncut, compare_uncut, taken_momentum
from ullage.core.errors import CheckpointError


def read_shards(folder: Folder) -> Inventory:
    """The inventory of a folder of ZeRO shards. Raises ``CheckpointError`` where it holds none."""
    # 1. Whether all files are there and agree.
    path = folder.path
    require_known_kind(folder)
    first = _first(folder)
    lead = folder.models[min(folder.models)]
    world = dense_ranks(first, lead.dp_world_size)
    model_ranks = sorted({m for m, _ in folder.shards} | {m for m, _ in folder.models})
    tp, pp = parallel_sizes(folder, len(model_ranks))
    require_plausible(folder, "ranks hold a shard", world, len({d for _, d in folder.shards}))
    copies = shard_groups(folder, world)
    if copies > 1:
        folder.notes.append(f"MiCS: {copies} groups of {world} ranks hold the same shards; the first group's are saved")
    require_ranks(folder, world, range(tp * pp), copies)
    find_odd_files(folder)
    for model in folder.models.values():
        model.aliases |= router_copies(model)
    saved = first.root.get("optimizer_state_dict", {})
    info = lead.info or saved.get("universal_checkpoint_info")
    patterns = Patterns(metadata.mapping(info, "universal_checkpoint_info", str(path)), str(path))
    if tp > 1 and not info:
        folder.add_problem("tensor parallel, and universal_checkpoint_info is missing: nothing says how slices join")
    # 2. Slices of trained parameters, rank by rank, then joined over tensor- and pipeline-parallel ranks.
    joining = Joining(folder, patterns, tp)
    found = _Trained(joining, world)
    for model_rank in model_ranks:
        found.read(model_rank)
    tensors, twins = joining.joined(found.slices)
    # 3. Tensors that no optimizer holds.
    trained = {name for name, _ in found.slices}
    others = untrained_experts(folder, trained)
    untrained, more = modules.frozen_and_buffers(joining, world, trained, others)
    modules.note_left_out_parameters(folder)
    if unused := patterns.unused():
        folder.notes.append(f"patterns that match no parameter: {unused[:20]}")
    details = _details(folder, found)
    return Inventory(
        folder=path,
        format="zero",
        written_by=WrittenBy(first.stage, first.wrapper, world, tp, pp, tuple(sorted(found.ep)), tuple(found.experts)),
        files=tuple(folder.files),
        tensors=(*tensors, *untrained),
        groups=tuple(folder.groups),
        steps={group: value for group, (value, _) in details.steps.items()},
        aliases=folder.aliases,
        notes=tuple(dict.fromkeys(folder.notes)),
        read_problems=tuple(folder.problems),
        records=folder.records,
        twins=(*twins, *more, *found.twins),
        optimizer_problems=(*unsaved_state(folder), *(p for uncut in found.uncut.values() for p in uncut.problems)),
        details=details,
    )


def _details(folder: Folder, found: _Trained) -> Details:
    """What writers of other formats need beside the tensors."""
    first, lead = folder.shards[min(folder.shards)], folder.models[min(folder.models)]
    # Step and its dtype by parameter group, from the first shard that has the group.
    steps: dict[int, tuple[Any, str | None]] = {}
    for _, shard in sorted(folder.shards.items()):
        for scalar, dtype, group in zip(shard.scalars, shard.step_dtypes, shard.group_of):
            steps.setdefault(group, (scalar.get("step"), dtype))
    # An elastic file holds no hyperparameters, and gets one entry per group.
    saved = first.root.get("optimizer_state_dict", {})
    step = saved.get("base_optimizer_state_step")
    own = {} if step is None else {"step": step}
    names: dict[int, list[str]] = {}
    for each in folder.groups:
        # In the order that the optimizer was given, which round robin has changed; tensor-parallel ranks have the same.
        if each.model_rank % found.joining.tp == 0:
            names.setdefault(each.index, []).extend(undealt(list(each.names), each.num_shards))
    dealt = any(shard.round_robin and shard.stage < 3 for shard in folder.shards.values())
    taken = lead.root.get("global_steps")
    return Details(
        {m: s for (m, d), s in sorted(folder.shards.items()) if d == 0},
        {m: s for (m, d), s in sorted(folder.models.items()) if d == 0},
        steps,
        first.settings or [{"params": [i], **own} for i in range(len(first.flats))],
        found.uncut,
        names=[list(dict.fromkeys(names[index])) for index in sorted(names)] if dealt else None,
        wrapper={key: saved[key] for key in WRAPPER if key in saved},
        global_step=taken if type(taken) is int else None,
        shapes=found.shapes,
    )


def _first(folder: Folder) -> ShardFile:
    """The first shard. Raises ``CheckpointError`` for a folder of which no shard or no model states can be read."""
    found = str(folder.problems[0]) if folder.problems else None
    if not folder.shards:
        raise CheckpointError(
            "the folder holds no readable ZeRO shard",
            where=str(folder.path),
            expected="*_optim_states.pt",
            found=found,
        )
    if not any(dp_rank == 0 for _, dp_rank in folder.models):
        raise CheckpointError(
            "no readable model states: nothing says which parameters there are",
            where=str(folder.path),
            expected="*_model_states.pt",
            found=found,
        )
    return folder.shards[min(folder.shards)]


@dataclass
class _Trained:
    """What the optimizer files hold, read model rank by model rank.

    Attributes:
        joining: of slices; its folder gets groups, problems and notes.
        world: number of data-parallel ranks.
        slices: of trained parameters, by (name, state key), pipeline stage and tensor-parallel rank.
        twins: pairs of tensors, or of slices of one, that two ranks hold and that must be equal.
        uncut: by model rank, the state that is not cut like the weights.
        ep: sizes of expert parallelism.
        experts: number of experts of each layer that has some.
        shapes: by model rank with experts, the shapes of all parameters by group.
    """

    joining: Joining
    world: int
    slices: Stages = field(default_factory=dict)
    twins: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    uncut: dict[int, Uncut] = field(default_factory=dict)
    ep: set[int] = field(default_factory=set)
    experts: list[int] = field(default_factory=list)
    shapes: dict[int, list[Shapes]] = field(default_factory=dict)

    def read(self, model_rank: int) -> None:
        """Add the slices of one model rank, parameter by parameter and key by key."""
        folder, tp = self.joining.folder, self.joining.tp
        model = folder.models.get((model_rank, 0))
        # Shards of ranks beyond the world size are problems already (``require_ranks``), and have no partition here.
        mine = {dp: s for (m, dp), s in folder.shards.items() if m == model_rank and dp < self.world}
        if model is None or not mine:
            return
        shapes = model.param_shapes or []
        for rank, shard in sorted(mine.items()):
            if len(shapes) != len(shard.flats):
                sizes = {"expected": str(len(shapes)), "found": str(len(shard.flats))}
                folder.add_problem("groups disagree with param_shapes", shard, **sizes)
                del mine[rank]
        if not mine:
            return
        lead = mine[min(mine)]
        experts = Experts.of(folder, model, tp)
        if experts.layers and lead.stage == 3:
            raise RefusedFile("experts at ZeRO stage 3 are not supported", where=f"{folder.path / model.name}")
        parts: list[FlatBuffer] = []
        for index, named in enumerate(shapes):
            cut = partial(_group, folder, index, model_rank)
            parts += experts.flat_buffers(index, named, mine, self.world, cut)
        groups = [part.group for part in parts]
        folder.groups += groups
        self.ep |= experts.sizes
        self.experts += [layer.total for layer in experts.layers.values()] if model_rank % tp == 0 else []
        if experts.sizes:
            self.shapes[model_rank] = [
                {p.name: p.shape for part in parts if part.group.index == index for p in part.placed}
                for index in range(len(shapes))
            ]
        momenta = [taken_momentum(part.group, part.local, part.mine) for part in parts]
        uncut = self.uncut[model_rank] = compare_uncut(list(mine.values()), groups)
        folder.notes += uncut.notes
        for part in parts:
            for key in lead.flats[part.group.index]:
                # State that is no partition has no place in the layout, and is a problem of the optimizer's.
                if key not in uncut.keys:
                    self._add_slices(part, key)
        for part, momentum in zip(parts, momenta):
            if momentum is not None:
                self._add_momentum(momentum, part, lead.group_of[part.group.index])
        # Stage 3 writes no mappings.
        if lead.stage < 3:
            compare_mappings(folder, parts)

    def _add_slices(self, part: FlatBuffer, key: str) -> None:
        """Add one state of the parameters of a flat buffer; a stack of experts has a part in several."""
        folder, group, lead = self.joining.folder, part.group, part.mine[min(part.mine)]
        if key not in lead.flats[group.index]:
            folder.add_problem(f"state {key} is missing or of another dtype", lead, group=group.index)
            return
        dtype, fragments, blocks = fragments_of(folder, group, key, part.mine)
        if blocks is not None:
            folder.notes.append(f"group {group.index}: {key} is 8-bit in the files, and is decoded to float32")
            if any(placed.rows is not None for placed in part.placed):
                folder.add_problem("8-bit state of stacked experts is not supported", lead, group=group.index)
                return
        for placed, pieces in zip(part.placed, fragments):
            there, rank = self.joining.stage_of(self.slices, placed.name, key, group.model_rank)
            whole = placed.moved(pieces, ITEM_BYTES[dtype])
            if placed.rows is not None and rank in there:
                known, other, _ = there[rank]
                if other != dtype:
                    folder.add_problem(f"state {key} is missing or of another dtype", lead, group=group.index)
                    continue
                whole = Fragments.join([known.fragments, whole])
            there[rank] = Slice(group.model_rank, placed.shape, whole, blocks), dtype, lead.group_of[group.index]

    def _add_momentum(self, momentum: Momentum, part: FlatBuffer, group: int) -> None:
        """Add the whole momenta of a Muon group; of several copies the first is taken, the others must equal it."""
        model_rank = part.group.model_rank
        for name, copies in momentum.copies.items():
            held = [Slice(model_rank, part.local[name], whole) for whole in copies]
            parts, rank = self.joining.stage_of(self.slices, name, MOMENTUM, model_rank)
            parts[rank] = held[0], momentum.dtype, group
            first, *others = (Tensor(name, MOMENTUM, s.shape, momentum.dtype, "parameter", (s,)) for s in held)
            self.twins += [(first, other) for other in others]


def _group(
    folder: Folder,
    index: int,
    model_rank: int,
    named: dict[str, tuple[int, ...]],
    mine: dict[int, ShardFile],
    world: int,
) -> Group:
    lead = mine[min(mine)]
    if lead.stage == 3:
        return stage3_group(index, model_rank, named, world)
    alignments = lead.alignments[index] if index < len(lead.alignments) else []
    booked = tuple(s.paddings[index] for _, s in sorted(mine.items()) if index < len(s.paddings))
    alignments = alignments if len(alignments) == len(named) else []
    # The size that the rule gives, then the size that is seen: a writer that aligned further left longer partitions.
    least = stage12_group(index, model_rank, named, world, alignments).shard_size
    # A state of a full partition tells its size; the shortest does, since longer ones need not be partitions at all.
    seen = min((p.numel for p in mine[0].flats[index].values() if p.numel >= least), default=0) if 0 in mine else 0
    group = stage12_group(index, model_rank, named, world, alignments, seen, booked)
    if group.shard_size > least:  # some version aligned to more than 2W; the mappings will be compared
        folder.notes.append(f"group {index}: partitions of {group.shard_size} elements, where {least} would do")
    return group
