"""Agreement of the files of a ZeRO folder, with one another and with the layout; all findings are problems or notes.

Kinds of run whose files lie otherwise than their names and shapes say are told by ``ds_config``, which every file has.
ZenFlow and NVMe are refused by name before anything is read wrongly. ZenFlow keeps every matrix of its flat buffers
transposed, in shapes that do not show it, and does not save the moments of the columns that it selects. State on NVMe
is a copy of raw swap files beside the checkpoint. SuperOffload steps in a process of its own, whose moments nobody
saves; its weights are those of any run at stage 3. MiCS cuts over fewer ranks than there are.
Source: ``runtime/zenflow``, ``runtime/superoffload``, ``runtime/swap_tensor`` and ``save_checkpoint`` in
``runtime/engine.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.metadata import comparable
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.zero.expert_layers import FlatBuffer
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.partitions import rows_by_rank
from ullage.checkpoint.zero.shards import ShardFile, offload_of, zero_config
from ullage.checkpoint.zero.states import WEIGHTS_ONLY

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
