"""Muon's momentum below stage 3, which is not cut like the weights.

Muon makes a matrix orthogonal, so a rank needs the whole momentum of every parameter of which its partition has some
elements: ``momentum_buffer`` is those parameters end to end, in the order of the flat buffer, without padding. A
parameter that lies in two partitions is there twice, and both must be equal. With the optimizer offloaded to the CPU
the momentum is a partition like any other state; stage 3 saves it as one too.
Source: ``_muon_momentum_buffer`` and ``get_flat_partition`` in ``stage_1_and_2.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.inventory import Fragments, Group
from ullage.checkpoint.zero.flat import FlatTensor
from ullage.checkpoint.zero.shards import ShardFile

KEY = "momentum_buffer"


@dataclass
class Momentum:
    """The momentum of one group: its dtype, and by parameter one whole copy per rank that has one."""

    dtype: str
    copies: dict[str, list[Fragments]] = field(default_factory=dict)


def taken_momentum(group: Group, named: Shapes, mine: dict[int, ShardFile]) -> Momentum | None:
    """The momentum of a Muon group, taken out of the shards; None where the group has none of this layout.

    Args:
        group: the flat buffer.
        named: the shape of each parameter, in the order of memory.
        mine: the optimizer files by data-parallel rank; ``momentum_buffer`` is removed from what they hold.
    """
    if not all(_uses_muon(shard, group.index) and shard.stage < 3 for shard in mine.values()):
        return None
    numels = np.array([int(np.prod(shape, dtype=np.int64)) for shape in named.values()], np.int64)
    flats: dict[int, FlatTensor] = {}
    items: dict[int, list[int]] = {}
    for rank, shard in mine.items():
        items[rank] = np.unique(group.pieces.item[group.pieces.shard == rank]).tolist()
        flat = shard.flats[group.index].get(KEY)
        # A rank of padding only has no momentum.
        if (flat.numel if flat else 0) != int(numels[items[rank]].sum()):
            return None
        if flat is not None:
            flats[rank] = flat
    if len({flat.dtype for flat in flats.values()}) != 1:
        return None
    if all(flat.numel == group.shard_size for flat in flats.values()) and _is_offloaded(mine):
        return None
    names = list(named)
    found = Momentum(next(iter(flats.values())).dtype)
    for rank, flat in sorted(flats.items()):
        del mine[rank].flats[group.index][KEY]
        starts = np.concatenate([[0], np.cumsum(numels[items[rank]])]).tolist()
        for item, (low, high) in zip(items[rank], pairwise(starts)):
            whole = Fragments.one(mine[rank].file, flat.offset + low * flat.item_bytes, high - low)
            found.copies.setdefault(names[item], []).append(whole)
    return found


def _uses_muon(shard: ShardFile, index: int) -> bool:
    group = shard.group_of[index] if index < len(shard.group_of) else -1
    return 0 <= group < len(shard.settings) and bool(shard.settings[group].get("use_muon"))


def _is_offloaded(mine: dict[int, ShardFile]) -> bool:
    config = mine[min(mine)].root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    return isinstance(offload, dict) and str(offload.get("device", "none")) != "none"
