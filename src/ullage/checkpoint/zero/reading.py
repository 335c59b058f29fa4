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

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ullage.checkpoint.core.inventory import Fragments, Group, Inventory, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.metadata import Shapes, comparable
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.expert_layers import Experts, FlatBuffer, dense_ranks, router_copies, untrained_experts
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.parallel import Joining, Patterns, Stages, parallel_sizes, require_plausible
from ullage.checkpoint.zero.partitions import fragments_of, rows_by_rank, stage3_group, stage12_group, undealt
from ullage.checkpoint.zero.shards import LOAD_AND_SAVE, ShardFile, offload_of, zero_config
from ullage.checkpoint.zero.states import (
    MOMENTUM,
    WEIGHTS_ONLY,
    WRAPPER,
    Details,
    Momentum,
    Uncut,
    compare_uncut,
    take_momentum,
)
from ullage.core.errors import CheckpointError

# Agreement of the files of a folder, with one another and with the layout; all findings are problems or notes.
#
# Kinds of run whose files lie otherwise than their names and shapes say are told by ``ds_config``, which every file
# has. ZenFlow and NVMe are refused by name before anything is read wrongly. ZenFlow keeps every matrix of its flat
# buffers transposed, in shapes that do not show it, and does not save the moments of the columns that it selects. State
# on NVMe is a copy of raw swap files beside the checkpoint. SuperOffload steps in a process of its own, whose moments
# nobody saves; its weights are those of any run at stage 3. MiCS cuts over fewer ranks than there are. Source:
# ``runtime/zenflow``, ``runtime/superoffload``, ``runtime/swap_tensor`` and ``save_checkpoint`` in
# ``runtime/engine.py`` of DeepSpeed 0.19.8.

#: Most ranks that share one sequence.
_MOST_SHARING = 64
#: Missing shards are named one by one up to this many.
_LISTED = 20


def require_ranks(folder: Folder, world: int, model_ranks: range, copies: int = 1) -> None:
    """Find missing shards, shards of ranks beyond the world size, and files that name another world size.

    ``copies`` is the number of groups of ``world`` ranks that held the same shards, of which one group saved them.
    """
    ranks: dict[int, set[int]] = {}
    for model_rank, dp_rank in folder.shards:
        ranks.setdefault(model_rank, set()).add(dp_rank)
    prefix = next(iter(folder.shards.values())).name.partition("zero_pp")[0]
    # A shard that is there and cannot be read is a problem already, and is not missing as well.
    bad = {p.rank for p in folder.problems if p.file and "optim_states" in p.file}
    has_bad_model = any(p.file and "model_states" in p.file for p in folder.problems)
    expected, disagrees = f"{world} shards", "the world size disagrees with the files"
    for model_rank in sorted({*ranks, *model_ranks}):
        there = ranks.get(model_rank, set())
        missing = sorted(set(range(world)) - there - bad)
        for rank in missing[:_LISTED]:
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            folder.add_problem("a shard is missing", file=name, rank=rank, expected=expected, found=f"{len(there)}")
        if len(missing) > _LISTED:
            folder.add_problem("more shards are missing", expected=expected, found=f"{len(missing)} of {world}")
        extra = sorted(there - set(range(world)))
        if extra:
            shard, found = folder.shards[model_rank, extra[0]], f"rank {extra[-1]}"
            folder.add_problem(disagrees, shard, expected=f"ranks 0 to {world - 1}", found=found)
    for model in folder.models.values():
        if model.dp_world_size not in (None, world * copies):
            expected = f"dp_world_size {world * copies}, as the shards say"
            folder.add_problem(disagrees, model, expected=expected, found=str(model.dp_world_size))
    for model_rank in model_ranks:
        if (model_rank, 0) not in folder.models and not has_bad_model:
            name = f"mp_rank_{model_rank:02d}_model_states.pt"
            folder.add_problem("model states are missing", file=name, rank=0)


def find_odd_files(folder: Folder) -> None:
    """Find files that differ from most others in stage, world size or step."""

    def odd_ones(facts: dict[Any, Any], what: str, files: dict[Any, Any]) -> None:
        facts = {key: comparable(fact) for key, fact in facts.items()}
        # The majority is taken for right: one file of an older save is the usual case.
        ((common, _),) = Counter(facts.values()).most_common(1) or [(None, 0)]
        for key, fact in facts.items():
            if fact != common:
                folder.add_problem(what, files[key], expected=str(common), found=str(fact))

    # The world size is compared on model rank 0 only; within one model rank all shards must be at the same step.
    held, models = folder.shards, folder.models
    odd_ones({k: s.stage for k, s in held.items()}, "shards of two ZeRO stages", held)
    odd_ones({k: tuple(s.world) for k, s in held.items() if k[0] == 0}, "shards disagree on the world size", held)
    odd_ones({k: s.scaled for k, s in held.items()}, "shards of two different updates of the loss scale", held)
    steps = {k: tuple(x.get("step") for x in s.scalars) for k, s in held.items()}
    for model_rank in {k[0] for k in held}:
        mine = {k: v for k, v in steps.items() if k[0] == model_rank}
        odd_ones(mine, "shards of two different steps", held)
    odd_ones({k: m.root.get("global_steps") for k, m in models.items()}, "model states of two different steps", models)
    odd_ones({k: m.root.get("iteration") for k, m in models.items()}, "model states of two iterations", models)


def compare_mappings(folder: Folder, parts: list[FlatBuffer]) -> None:
    """Compare ``param_slice_mappings`` with the layout. A mapping is never followed, only compared.

    ``parts``: the flat buffers of one model rank.
    """
    wrong: list[tuple[ShardFile, int, str]] = []
    total = 0
    for part in parts:
        group, names, rows = part.group, list(part.local), rows_by_rank(part.group)
        for rank, shard in part.mine.items():
            if group.index >= len(shard.mappings):
                continue
            # Entries of length 0 say nothing: the layout has no piece there.
            booked = {n: at for n, at in shard.mappings[group.index].items() if at[0] > 0}
            # A rank of padding only has no entry on either side.
            layout = {names[item]: (length, start) for item, length, start, _ in rows[rank]}
            total += len(layout)
            wrong += [(shard, group.index, n) for n in {*booked, *layout} if booked.get(n) != layout.get(n)]
    if not wrong:
        return
    # Under round robin the mappings are in another order than memory; otherwise the file contradicts itself.
    shard, group_index, name = wrong[0]
    if shard.round_robin is False:
        what = "param_slice_mappings and param_shapes disagree, and round_robin_gradients is off"
        folder.add_problem(what, shard, group=group_index, parameter=name)
    else:
        folder.notes.append(
            f"round_robin: param_slice_mappings is in another order than memory for {len(wrong)} of {total} fragments; "
            "the layout of param_shapes is followed"
        )


def _config(folder: Folder) -> dict[str, Any]:
    """``zero_optimization`` of the configuration that the run was started with; empty where no file has it."""
    found = (zero_config(held.root) for held in (*folder.models.values(), *folder.shards.values()))
    return next((zero for zero in found if zero is not None), {})


def unsaved_state(folder: Folder) -> list[Problem]:
    """The reason why the optimizer's state is not in the files, though the weights are."""
    if not offload_of(_config(folder)).get("super_offload"):
        return []
    what = "a SuperOffload run keeps the optimizer's state in a process of its own and does not save it"
    return [Problem(what, hint=WEIGHTS_ONLY)]


def require_known_kind(folder: Folder) -> None:
    """Raise ``RefusedFile`` for a kind of run whose state cannot be read from its files."""
    zero = _config(folder)
    device = str(offload_of(zero).get("device", "none"))
    if zero.get("zenflow"):
        raise RefusedFile(
            "a ZenFlow run is not supported: its weights are saved transposed, and part of its moments not at all",
            where=str(folder.path),
            hint="load it with DeepSpeed under the same configuration, and save the module's own weights",
        )
    if device == "nvme" or (folder.path / "offloaded_tensors").exists():
        raise RefusedFile(
            "the optimizer's state was offloaded to NVMe, so it is not in these files",
            where=str(folder.path),
            expected="state in *_optim_states.pt",
            found="swap files in offloaded_tensors",
            hint="load it with DeepSpeed under the same configuration, and save with offload_optimizer on the CPU",
        )


def shard_groups(folder: Folder, world: int) -> int:
    """How often the run holds its shards: MiCS cuts over ``mics_shard_size`` ranks, of which the first group saves.

    Args:
        folder: the files read.
        world: number of ranks over which the shards are cut.
    """
    size = _config(folder).get("mics_shard_size", -1)
    claimed = {model.dp_world_size for model in folder.models.values()} - {None}
    if size != world or len(claimed) != 1:
        return 1
    dp = claimed.pop() or 0
    return dp // world if dp % world == 0 else 1


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
    tensors, twins = joining.join(found.slices)
    # 3. Tensors that no optimizer holds.
    trained = dict.fromkeys(name for name, _ in found.slices) | {t.name: t for t in tensors if t.key == "fp32"}
    others = untrained_experts(folder, set(trained))
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
            "the folder holds no readable ZeRO shard", where=str(folder.path), expected="*_optim_states.pt", found=found
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
        if model.param_shapes is None:
            raise RefusedFile(
                "nothing says which parameters lie where in the optimizer's shards",
                where=f"{folder.path / model.name}",
                expected="param_shapes, which old versions leave out with a mixture of experts",
                hint=LOAD_AND_SAVE,
            )
        shapes = model.param_shapes
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
        momenta = [take_momentum(part.group, part.local, part.mine) for part in parts]
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
        dtype, fragments = fragments_of(folder, group, key, part.mine)
        for placed, pieces in zip(part.placed, fragments):
            there, rank = self.joining.stage_of(self.slices, placed.name, key, group.model_rank)
            whole = placed.moved(pieces, ITEM_BYTES[dtype])
            if placed.rows is not None and rank in there:
                known, other, _ = there[rank]
                if other != dtype:
                    folder.add_problem(f"state {key} is missing or of another dtype", lead, group=group.index)
                    continue
                whole = Fragments.join([known.fragments, whole])
            there[rank] = Slice(group.model_rank, placed.shape, whole), dtype, lead.group_of[group.index]

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
        group = stage3_group(index, model_rank, named, world)
        held = {shard.flats[index]["fp32"].numel for shard in mine.values()}
        # Cut over the ranks of a whole mesh, the files are named for the data-parallel ones alone, and overwritten.
        for ranks in range(2 * world, _MOST_SHARING * world + 1, world) if max(held) < group.shard_size else ():
            if held == {sum(-(-math.prod(shape) // ranks) for shape in named.values())}:
                raise RefusedFile(
                    f"the parameters were cut over {ranks} ranks, of which {world} have files",
                    where=f"{folder.path / lead.name}",
                    expected=f"{group.shard_size} elements",
                    found=f"{max(held)}, as ranks that share a sequence by mesh_param save them at stage 3",
                    hint="the rest was never saved: train with an mpu in place of mesh_param, or at stage 2",
                )
        return group
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
