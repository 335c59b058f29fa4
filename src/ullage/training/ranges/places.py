"""Where the elements of each parameter lie on this rank of a DeepSpeed engine.

At every stage a rank keeps its part of the master weights in flat tensors, and the state of the optimizer in tensors of
the same length, keyed by them:

===================  =================================================================================================
stages 1, 2, bf16    one per parameter group. All weights of the group lie in one flat buffer, of which every rank
                     masters an equal stretch. Where a weight lies in the buffer is read from its address there,
                     because DeepSpeed's own mapping is in another order under ``round_robin_gradients``.
stage 3              one per sub-group: the partitions of its parameters, end to end. A partition is ``ds_numel``
                     elements, as many on every rank; what it has beyond the end of the parameter is padding.
===================  =================================================================================================

Source: ``_link_all_hp_params`` of ``stage_1_and_2.py`` and ``bf16_optimizer.py``, ``load_hp_checkpoint_state`` of
``stage3.py`` (DeepSpeed 0.19).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ullage.errors import InputError
from ullage.training.universal import groups_name, is_stage3

#: Optimizers of DeepSpeed's that keep their masters elsewhere, by the names of their classes.
_ELSEWHERE = ("MiCS_Optimizer", "SuperOffloadOptimizer_Stage3", "ZenFlowZeroOptimizer", "ZenFlowZeroOptimizerStage3")


@dataclass(frozen=True)
class HeldRange:
    """Elements of a parameter on this rank.

    Attributes:
        name: of the parameter.
        flat: number of the flat tensor that holds them.
        start: their first element in the parameter.
        at: their first element in the flat tensor.
        length: their number.
    """

    name: str
    flat: int
    start: int
    at: int
    length: int


def require_engine(engine: Any) -> None:
    """Raise ``InputError`` for an engine whose tensors cannot be filled by ranges."""
    zero, found = engine.optimizer, None
    if not hasattr(zero, "param_names") or not groups_name(zero):
        raise InputError("the engine has no ZeRO optimizer", expected="stage 1, 2 or 3", found=type(zero).__name__)
    classes = [each.__name__ for each in type(zero).__mro__]
    if getattr(engine, "has_moe_layers", False):
        found = "a model with experts"
    elif engine.mp_world_size > 1:
        found = f"{engine.mp_world_size} model-parallel ranks"
    elif getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
        found = "tensors that are offloaded to NVMe"
    elif other := next((name for name in classes if name.startswith(_ELSEWHERE)), None):
        found = other
    if found is not None:
        raise InputError(
            "a checkpoint cannot be loaded by ranges into this engine",
            expected="ZeRO 1, 2, 3 or BF16_Optimizer, data-parallel, in memory",
            found=found,
            hint="load one of the same layout with engine.load_checkpoint, or convert it and use load_universal",
        )


def masters(zero: Any) -> list[torch.Tensor]:
    """This rank's flat tensors of master weights."""
    if is_stage3(zero):
        return list(zero.fp32_partitioned_groups_flat)
    if hasattr(zero, "bf16_groups"):
        return list(zero.fp32_groups_flat_partition)
    return list(zero.single_partition_of_fp32_groups)


def group_of(zero: Any) -> list[int]:
    """The parameter group of each flat tensor."""
    count = len(getattr(zero, groups_name(zero)))
    return [zero.sub_group_to_group_id[i] for i in range(count)] if is_stage3(zero) else list(range(count))


def places(zero: Any) -> list[HeldRange]:
    """The elements of trained parameters that this rank masters, flat tensor by flat tensor, in order of memory."""
    found = []
    for flat, (group, master) in enumerate(zip(getattr(zero, groups_name(zero)), masters(zero), strict=True)):
        made = _partitions(zero, flat, group) if is_stage3(zero) else _stretch(zero, flat, group, master.numel())
        found += sorted((place for place in made if place.length), key=lambda place: place.at)
    return found


def part_of(p: torch.Tensor) -> tuple[int, int]:
    """First element and number of elements of this rank's partition of ``p``, of stage 3, without padding."""
    held: Any = p
    share = held.ds_tensor.ds_numel
    group = getattr(held, "ds_process_group", None)
    start = share * dist.get_rank(group=group)
    return start, max(0, min(share, held.ds_numel - start))


def _partitions(zero: Any, flat: int, group: list[Any]) -> list[HeldRange]:
    found, at = [], 0
    for p in group:
        start, length = part_of(p)
        found.append(HeldRange(zero.param_names[p], flat, start, at, length))
        at += p.ds_tensor.ds_numel
    return found


def _stretch(zero: Any, flat: int, group: list[Any], size: int) -> list[HeldRange]:
    """The parameters of a group within the equal stretch of ``size`` elements that this rank masters of its buffer."""
    is_bf16 = hasattr(zero, "bf16_groups")
    buffer = (zero.bf16_groups_flat if is_bf16 else zero.bit16_groups_flat)[flat]
    low = size * dist.get_rank(group=zero.real_dp_process_group[flat])
    found = []
    for p in group:
        # Addresses are in bytes. A parameter of no elements has none.
        first = (p.data_ptr() - buffer.data_ptr()) // buffer.element_size() if p.numel() else 0
        begin, end = max(first, low), min(first + p.numel(), low + size)
        found.append(HeldRange(zero.param_names[p], flat, begin - first, begin - low, max(0, end - begin)))
    return found


def shape_of(p: torch.Tensor) -> tuple[int, ...]:
    """The whole shape of a parameter, also of one of which this rank holds a partition."""
    return tuple(getattr(p, "ds_shape", p.shape))


def numel_of(p: torch.Tensor) -> int:
    """Elements of the whole parameter."""
    return math.prod(shape_of(p))
