"""Agreement of the files of a ZeRO folder, with one another and with the layout; all findings are problems or notes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ullage.checkpoint.files.metadata import comparable
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero.expert_parts import FlatBuffer
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.shards import ShardFile

#: Missing shards are named one by one up to this many.
_LISTED = 20


def require_ranks(folder: Folder, world: int, model_ranks: range, copies: int = 1) -> None:
    """Find missing shards, shards of ranks beyond the world size, and files that name another world size.

    ``copies`` is the number of groups of ``world`` ranks that held the same shards, of which one group saved them.
    """
    ranks: dict[int, list[int]] = {}
    for model_rank, dp_rank in folder.shards:
        ranks.setdefault(model_rank, []).append(dp_rank)
    example = next(iter(folder.shards.values())).name
    unreadable = {(p.file, p.rank) for p in folder.problems}
    # A shard that is there and cannot be read is a problem already, and is not missing as well.
    bad = {rank for file, rank in unreadable if file and "optim_states" in file}
    for model_rank in sorted({*ranks, *model_ranks}):
        prefix = example.partition("zero_pp")[0]
        missing = sorted(set(range(world)) - set(ranks.get(model_rank, ())) - bad)
        for rank in missing[:_LISTED]:
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            folder.problems.append(
                Problem(
                    "a shard is missing",
                    name,
                    rank,
                    expected=f"{world} shards",
                    found=f"{len(ranks.get(model_rank, ()))}",
                )
            )
        if len(missing) > _LISTED:
            found = f"{len(missing)} of {world}"
            folder.problems.append(Problem("more shards are missing", expected=f"{world} shards", found=found))
        extra = sorted(set(ranks.get(model_rank, ())) - set(range(world)))
        if extra:
            shard = folder.shards[model_rank, extra[0]]
            folder.add_problem(
                "the world size disagrees with the files",
                shard,
                expected=f"ranks 0 to {world - 1}",
                found=f"rank {extra[-1]}",
            )
    for model in folder.models.values():
        claimed = model.dp_world_size
        if claimed is not None and claimed != world * copies:
            folder.problems.append(
                Problem(
                    "the world size disagrees with the files",
                    model.name,
                    model.dp_rank,
                    expected=f"dp_world_size {world * copies}, as the shards say",
                    found=str(claimed),
                )
            )
    for model_rank in model_ranks:
        if (model_rank, 0) not in folder.models and not any("model_states" in (f or "") for f, _ in unreadable):
            folder.problems.append(Problem("model states are missing", f"mp_rank_{model_rank:02d}_model_states.pt", 0))


def require_agreement(folder: Folder) -> None:
    """Find files that differ from most others in stage, world size or step."""

    def odd_ones(facts: dict[Any, Any], what: str, names: dict[Any, Any]) -> None:
        facts = {key: comparable(fact) for key, fact in facts.items()}
        counts = Counter(facts.values())
        if len(counts) < 2:
            return
        # The majority is taken for right: one file of an older save is the usual case.
        common = counts.most_common(1)[0][0]
        for key, fact in facts.items():
            if fact != common:
                folder.problems.append(
                    Problem(what, names[key].name, names[key].dp_rank, expected=str(common), found=str(fact))
                )

    # The world size is compared on model rank 0 only; within one model rank all shards must be at the same step.
    held = folder.shards
    odd_ones({k: s.stage for k, s in held.items()}, "shards of two ZeRO stages", held)
    odd_ones({k: tuple(s.world) for k, s in held.items() if k[0] == 0}, "shards disagree on the world size", held)
    odd_ones({k: s.scaled for k, s in held.items()}, "shards of two different updates of the loss scale", held)
    steps = {k: tuple(x.get("step") for x in s.scalars) for k, s in held.items()}
    for model_rank in {k[0] for k in held}:
        mine = {k: v for k, v in steps.items() if k[0] == model_rank}
        odd_ones(mine, "shards of two different steps", held)
    odd_ones(
        {k: m.root.get("global_steps") for k, m in folder.models.items()},
        "model states of two different steps",
        folder.models,
    )
    odd_ones(
        {k: m.root.get("iteration") for k, m in folder.models.items()},
        "model states of two iterations",
        folder.models,
    )


def compare_mappings(folder: Folder, parts: list[FlatBuffer]) -> None:
    """Compare ``param_slice_mappings`` with the layout. A mapping is never followed, only compared.

    ``parts``: the flat buffers of one model rank.
    """
    wrong: list[tuple[ShardFile, int, str]] = []
    total = 0
    for part in parts:
        group, names = part.group, list(part.local)
        expected: dict[int, dict[str, tuple[int, int]]] = {}
        pieces = group.pieces
        for item, rank, length, start in zip(
            pieces.item.tolist(), pieces.shard.tolist(), pieces.length.tolist(), pieces.shard_start.tolist()
        ):
            expected.setdefault(rank, {})[names[item]] = (length, start)
        for rank, shard in part.mine.items():
            if group.index >= len(shard.mappings):
                continue
            # Entries of length 0 say nothing: the layout has no piece there.
            booked = {n: at for n, at in shard.mappings[group.index].items() if at[0] > 0}
            # A rank of padding only has no entry on either side.
            layout = expected.get(rank, {})
            total += len(layout)
            wrong += [(shard, group.index, n) for n in {*booked, *layout} if booked.get(n) != layout.get(n)]
    if not wrong:
        return
    # Under round robin the mappings are in another order than memory; otherwise the file contradicts itself.
    shard, group_index, name = wrong[0]
    if shard.round_robin is False:
        folder.add_problem(
            "param_slice_mappings and param_shapes disagree, and round_robin_gradients is off",
            shard,
            group=group_index,
            parameter=name,
        )
    else:
        folder.notes.append(
            f"round_robin: param_slice_mappings is in another order than memory for {len(wrong)} of {total} fragments; "
            "the layout of param_shapes is followed"
        )
