"""Flat buffers of ZeRO, and their cuts among the ranks; ``zero`` describes both layouts in prose."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.checkpoint.core.inventory import Fragments, Group
from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.shards import ShardFile
from ullage.core.layout import Int64, Layout, Pieces


def stage12_group(
    index: int,
    model_rank: int,
    named: Shapes,
    world: int,
    alignments: list[int] | None = None,
    shard_size: int = 0,
    booked: tuple[int, ...] = (),
) -> Group:
    """The flat buffer of a parameter group of stages 1 and 2, cut into equal partitions.

    Args:
        index: number of the group.
        model_rank: the rank among tensor- and pipeline-parallel ranks that holds it.
        named: the shape of each parameter, in the order of memory.
        world: number of data-parallel ranks.
        alignments: elements of padding after each parameter; None where there are none.
        shard_size: least number of elements of a partition.
        booked: the padding as the files book it, by rank; recorded only.
    """
    # Parameters end to end, each with its alignment padding; the end of the last partition is padding too.
    numels = np.array([int(np.prod(s, dtype=np.int64)) for s in named.values()], np.int64)
    paddings = np.array(alignments, np.int64) if alignments else np.zeros_like(numels)
    layout = Layout.from_slots(numels, numels + paddings)
    # DeepSpeed pads the buffer to a multiple of 2W (``nccl_start_alignment_factor``), so a partition has an even size.
    # Parameters of 5 and 4 elements on 2 ranks: 9 elements become 12. Rank 0 holds the first parameter and 1 element of
    # the second, rank 1 the other 3 and 3 of padding.
    size = max(shard_size, -(-layout.size // (2 * world)) * 2)
    return Group(index, model_rank, tuple(named), layout.pieces(np.arange(world + 1) * size), size, world, booked)


def stage3_group(index: int, model_rank: int, named: Shapes, world: int) -> Group:
    """A sub-group of stage 3: each parameter in ``world`` equal parts, the parts of one rank end to end."""
    # Every parameter is a layout of its own; ``at`` is where its part begins in the buffer of each rank. Parameters of
    # 5 and 4 elements on 2 ranks: rank 0 holds [0, 3) of the first at 0 and [0, 2) of the second at 3; rank 1 holds [3,
    # 5) of the first at 0, one element of padding, and [2, 4) of the second at 3.
    rows: list[Pieces] = []
    at = 0
    for item, shape in enumerate(named.values()):
        numel = int(np.prod(shape, dtype=np.int64))
        # The last ranks may have less of it, or nothing: cuts reach past the end of the layout, where no piece is.
        share = -(-numel // world)
        pieces = Layout([numel]).pieces(np.arange(world + 1) * share)
        rows.append(replace(pieces, item=pieces.item + item, shard_start=pieces.shard_start + at))
        at += share
    # Parameter by parameter, so ordered by item, as ``Pieces`` must be.
    joined = {
        field.name: np.concatenate([getattr(row, field.name) for row in rows] or [np.zeros(0, np.int64)])
        for field in fields(Pieces)
    }
    return Group(index, model_rank, tuple(named), Pieces(**joined), at, world)


def rows_by_rank(group: Group) -> list[list[tuple[int, int, int, int]]]:
    """By rank: (number of the parameter, elements, start in the partition, start in the parameter), in order."""
    # Parameters of 5 and 3 elements on 2 ranks of 4: [(0, 4, 0, 0)] and [(0, 1, 0, 4), (1, 3, 1, 0)].
    pieces = group.pieces
    order = np.lexsort((pieces.shard_start, pieces.shard))
    columns = (pieces.shard, pieces.item, pieces.length, pieces.shard_start, pieces.item_start)
    found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(group.num_shards)]
    for shard, item, length, begin, start in zip(*(column[order].tolist() for column in columns)):
        found[shard].append((item, length, begin, start))
    return found


def undealt(names: list[str], ranks: int) -> list[str]:
    """The parameters of a group in the order that the optimizer was given, from the order of memory under round robin.

    Round robin deals the parameters out to the ranks, one by one, and lays those of the first rank first.
    Source: ``_round_robin_reorder`` in ``deepspeed/runtime/zero/stage_1_and_2.py``.
    """
    # Five parameters a to e on 2 ranks lie in memory as a c e b d: of place 0 to 4 there, the numbers are 0 2 4 1 3.
    dealt = [place for rank in range(ranks) for place in range(rank, len(names), ranks)]
    return [name for _, name in sorted(zip(dealt, names))]


def fragments_of(folder: Folder, group: Group, key: str, mine: dict[int, ShardFile]) -> tuple[str, list[Fragments]]:
    """The dtype of one state of a group, and its fragments by parameter. The state is cut like the weights."""
    # 1. Where the flat tensor of each rank lies; numel is -1 for a rank that lacks it.
    lead = mine[min(mine)]
    first = lead.flats[group.index][key]
    dtype = first.dtype
    offset, numel = np.zeros(group.num_shards, np.int64), np.full(group.num_shards, -1, np.int64)
    file = np.zeros(group.num_shards, np.int64)
    for rank, shard in mine.items():
        flat = shard.flats[group.index].get(key) if group.index < len(shard.flats) else None
        if flat is None or flat.dtype != dtype:
            facts = {"expected": dtype, "found": flat and flat.dtype}
            folder.add_problem(f"state {key} is missing or of another dtype", shard, group=group.index, **facts)
            continue
        offset[rank], numel[rank], file[rank] = flat.offset, flat.numel, shard.file
    # 2. Pieces that end beyond their flat tensor are problems, and are left out.
    pieces = group.pieces
    short = (numel[pieces.shard] >= 0) & (pieces.shard_start + pieces.length > numel[pieces.shard])
    _compare_lengths(folder, group, key, mine, numel, short)
    # 3. The byte at which each piece begins in its file.
    where = offset[pieces.shard] + pieces.shard_start * first.item_bytes
    found = fragments_by_parameter(group, file[pieces.shard], where, (numel[pieces.shard] >= 0) & ~short)
    return dtype, found


def fragments_by_parameter(group: Group, file: Int64, offset: Int64, keep: Any = None) -> list[Fragments]:
    """The fragments of each parameter of a group; ``file`` and byte ``offset`` by piece, ``keep`` says which exist."""
    pieces = group.pieces
    found = []
    for low, high in itertools.pairwise(np.searchsorted(pieces.item, np.arange(len(group.names) + 1)).tolist()):
        # Pieces are ordered by item: those of one parameter are ``[low, high)``, in the order of its elements.
        mine: Any = slice(low, high) if keep is None else np.arange(low, high)[keep[low:high]]
        found.append(Fragments(file[mine], offset[mine], pieces.item_start[mine], pieces.length[mine]))
    return found


def _compare_lengths(
    folder: Folder, group: Group, key: str, mine: dict[int, ShardFile], numel: Int64, short: npt.NDArray[np.bool_]
) -> None:
    """Report shards that are shorter than the pieces they must hold, or longer than a partition.

    Args:
        folder: gets the problems.
        group: the flat buffer.
        key: which state of it.
        mine: the optimizer files by data-parallel rank.
        numel [num_shards]: elements of the flat tensor of each rank, -1 where it is missing.
        short [pieces]: whether a piece ends beyond its flat tensor.
    """
    pieces = group.pieces
    for rank in np.unique(pieces.shard[short]).tolist():
        first = int(np.flatnonzero(short & (pieces.shard == rank))[0])
        end = int((pieces.shard_start + pieces.length)[pieces.shard == rank].max())
        facts = {"expected": f"at least {end} elements", "found": str(int(numel[rank]))}
        name = group.names[int(pieces.item[first])]
        folder.add_problem(f"the shard is too short for {key}", mine[rank], group=group.index, parameter=name, **facts)
    for rank, shard in mine.items():
        # A longer shard would mean another layout than the one derived, so its elements may be of other parameters.
        if numel[rank] > group.shard_size:
            facts = {"expected": f"{group.shard_size} elements", "found": str(int(numel[rank]))}
            folder.add_problem(f"the shard is too long for {key}", shard, group=group.index, **facts)
