"""Process groups of dynamic context parallelism: one for each aligned block of 2, 4, 8, ... neighbouring ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from ullage.ranks import Axis
from ullage.ranks.wire import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_made: dict[tuple[int, ...], tuple[object, dict[int, ProcessGroup]]] = {}


def degree_groups(axis: Axis) -> dict[int, ProcessGroup]:
    """Process groups of 2, 4, 8, ... neighbours along dp·cp that this rank belongs to, by size.

    Made once per world and axis, with the backend of the axis's group; the first call is collective over the world.
    Neighbours are aligned: the group of *d* ranks at coordinate *r* is that of *r // d*.
    """
    key, world = tuple(axis.ranks), dist.group.WORLD if dist.is_initialized() else None
    # A world that was destroyed and made again has other groups, so the world is compared too.
    held = _made.get(key)
    if held is not None and held[0] is world:
        return held[1]
    groups: dict[int, ProcessGroup] = {}
    if axis.size > 1:
        # The ranks of every such axis in the world (one per stage and tp coordinate): each rank helps to make all
        # groups.
        everyone: list[tuple[int, ...]] = gather_objects(key, Axis.world())
        backend = dist.get_backend(axis.group)
        # Every backend requires that all ranks make all groups in the same order.
        for ranks in sorted(set(everyone)):
            degree = 2
            while degree <= len(ranks):
                for first in range(0, len(ranks) - degree + 1, degree):
                    block = list(ranks[first : first + degree])
                    group = dist.new_group(block, backend=backend, group_desc=f"ullage cp {degree}")
                    if dist.get_rank() in block:
                        assert isinstance(group, dist.ProcessGroup)
                        groups[degree] = group
                degree *= 2
    _made[key] = (world, groups)
    return groups
