"""Process groups of dynamic context parallelism: one for each aligned block of neighbouring ranks along dp·cp.

Megatron-Core makes such groups itself where it was told to (``dynamic_context_parallel``, before that
``hybrid_context_parallel``, of ``initialize_model_parallel``), and then those are used. Other groups are made here by
the ranks of the block alone: no other rank has to be there. So a microbatch may need a group that the ranks of other
pipeline stages, or tensor-parallel peers that still wait for the microbatch, know nothing of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

from ullage.core.errors import InputError
from ullage.ranks import Axis
from ullage.ranks.groups import make_group
from ullage.ranks.wire import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: By the ranks of the axis: the world they belong to, and the groups by degree; ``None`` where the axis has no block.
_made: dict[tuple[int, ...], tuple[object, dict[int, ProcessGroup | None]]] = {}


def degree_groups(axis: Axis, degrees: Iterable[int]) -> dict[int, ProcessGroup]:
    """Process groups of these degrees along dp·cp that this rank belongs to, by degree.

    The group of *d* ranks at coordinate *r* is that of the block *r // d*; a rank behind the last whole block has none.
    Made once per world and axis, with the backend of the axis's group. Collective over all ranks of the world where the
    world is bound to devices, over the ranks of each block otherwise; each must ask for the same degrees in one order.
    """
    held = _groups_along(axis)
    new = [degree for degree in sorted(set(degrees)) if degree not in held]
    held.update({degree: _of_megatron(axis, degree) for degree in new})
    if new and _bound():
        _make_everywhere(axis, new, held)
    else:
        held.update({degree: _make(axis, degree) for degree in new if held[degree] is None})
    return {degree: group for degree, group in held.items() if group is not None}


def group_of(axis: Axis, degree: int) -> ProcessGroup:
    """The process group of this rank's block of ``degree`` ranks. Collective over those ranks at the first call.

    Raises ``InputError`` for a degree that has no block here.
    """
    if not _block(axis, degree):
        raise InputError(
            "there is no group of this local_cp_size",
            where=f"dp·cp rank {axis.rank} of {axis.size}",
            expected="1, or a number of ranks whose blocks, laid end to end, contain this one",
            found=degree,
        )
    group = _groups_along(axis).get(degree)
    if group is None and _bound():
        group = _of_megatron(axis, degree)
        if group is None:
            raise InputError(
                "there is no group of this local_cp_size yet",
                found=degree,
                hint="call initialize_model_parallel with dynamic_context_parallel=True, or take the microbatches from "
                "ullage's wrap_data_iterator",
            )
        return group
    return degree_groups(axis, [degree])[degree] if group is None else group


def _groups_along(axis: Axis) -> dict[int, ProcessGroup | None]:
    key, world = tuple(axis.ranks), dist.group.WORLD if dist.is_initialized() else None
    # A world that was destroyed and made again has other groups, so the world is compared too.
    if key not in _made or _made[key][0] is not world:
        _made[key] = (world, {})
    return _made[key][1]


def _block(axis: Axis, degree: int) -> list[int]:
    """The global ranks of this rank's block; none if it is the rest behind the last whole block."""
    if degree < 1 or not axis.ranks:
        return []
    first = axis.rank - axis.rank % degree
    return list(axis.ranks[first : first + degree]) if first + degree <= axis.size else []


def _bound() -> bool:
    """Whether groups are split off the world's, which takes all of its ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return getattr(world, "bound_device_id", None) is not None


def _of_megatron(axis: Axis, degree: int) -> ProcessGroup | None:
    """Megatron-Core's own group of this block, if it has one."""
    from megatron.core import parallel_state

    block = sorted(_block(axis, degree))
    if len(block) == axis.size > 1:
        return axis.group
    for name in ("get_dynamic_data_context_parallel_groups", "get_hybrid_data_context_parallel_groups"):
        find = getattr(parallel_state, name, None)
        if find is None or not block:
            continue
        try:
            group = find(group_size=degree)
        except (KeyError, AssertionError, ValueError, RuntimeError):
            continue  # not initialised, or without groups of this degree
        # Other groups may be in use than those of the parallel state.
        if group is not None and sorted(dist.get_process_group_ranks(group)) == block:
            return group
    return None


def _make(axis: Axis, degree: int) -> ProcessGroup | None:
    block = _block(axis, degree)
    if not block or not dist.is_initialized():
        return None
    backend = dist.get_backend(axis.group)  # the world's for ``None``
    # The ranks of the block wait for one another, and for nobody else.
    return make_group(block, name=f"context parallelism of {degree}", backend=backend)


def _make_everywhere(axis: Axis, degrees: list[int], held: dict[int, ProcessGroup | None]) -> None:
    """Make the groups that any rank lacks, of all such axes in the world (one per stage and tensor-parallel rank)."""
    # Ranks behind the last whole block lack nothing, and have to be there all the same.
    lacking = [degree for degree in degrees if held[degree] is None and _block(axis, degree)]
    everyone: list[tuple[tuple[int, ...], list[int]]] = gather_objects((tuple(axis.ranks), lacking), Axis.world())
    backend = dist.get_backend(axis.group)
    # Every backend requires that all ranks make all groups in the same order.
    for ranks in sorted({tuple(ranks) for ranks, _ in everyone}):
        for degree in sorted({degree for _, lacked in everyone for degree in lacked}):
            for first in range(0, len(ranks) - degree + 1, degree):
                block = list(ranks[first : first + degree])
                group = dist.new_group(block, backend=backend, group_desc=f"ullage cp {degree}")
                if dist.get_rank() in block:
                    assert isinstance(group, dist.ProcessGroup)
                    held[degree] = group
