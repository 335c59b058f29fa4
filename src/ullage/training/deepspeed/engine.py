"""What a DeepSpeed engine holds on this rank: which elements of which parameter lie where in its memory.

At every stage a rank keeps its part of the master weights in flat tensors, and the state of the optimizer in tensors of
the same length, keyed by them:

===================  =================================================================================================
stages 1, 2, bf16    one per parameter group. All weights of the group lie in one flat buffer, of which every rank
                     masters an equal stretch. Where a weight lies in the buffer is read from its address there,
                     because DeepSpeed's own mapping is in another order under ``round_robin_gradients``.
stage 3              one per sub-group: the partitions of its parameters, end to end. A partition is ``ds_numel``
                     elements, as many on every rank; what it has beyond the end of the parameter is padding.
===================  =================================================================================================

The ranks that share a group of experts are those that hold the same ones. A checkpoint has each expert under its number
among all; DeepSpeed's own layers (``deepspeed.moe.layer.MoE``) name it by its number on the rank, and AutoEP stacks the
experts of a rank in one tensor, of which the checkpoint has that of all.

Source: ``_link_all_hp_params`` of ``stage_1_and_2.py`` and ``bf16_optimizer.py``, ``load_hp_checkpoint_state`` of
``stage3.py``, ``module_inject/auto_ep_layer.py`` (DeepSpeed 0.19).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ullage.checkpoint.zero.states import MOMENTUM
from ullage.core.errors import InputError

#: Optimizers of DeepSpeed's that keep their masters elsewhere, by the names of their classes.
_ELSEWHERE = ("MiCS_Optimizer", "SuperOffloadOptimizer_Stage3", "ZenFlowZeroOptimizer", "ZenFlowZeroOptimizerStage3")
#: Between the name of a layer of DeepSpeed's own and the number of an expert.
_LOCAL = "deepspeed_moe.experts.deepspeed_experts"


@dataclass(frozen=True)
class HeldRange:
    """Elements of a parameter that are held here.

    Attributes:
        start: the first one's number in the whole parameter.
        at: its place in the tensor that holds them.
        length: their number.
    """

    start: int
    at: int
    length: int


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A parameter or buffer as a checkpoint knows it, and what of it is held here.

    Attributes:
        names: in a checkpoint; a tied one has several.
        shape: of the whole.
        target: the tensor that holds the elements: its own, or the flat one of its group.
        ranges: the elements that are held, in order of memory.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    target: torch.Tensor
    ranges: tuple[HeldRange, ...]


@dataclass(frozen=True, eq=False)
class MasterWeights:
    """One flat tensor of master weights.

    Attributes:
        flat: the tensor.
        group: the parameter group that it is of.
        held: the parameters of the group; at stage 3 of the sub-group.
        keys: the state that the optimizer has of it by now; an optimizer makes it with its first step.
        whole: by key of a state that is not cut like the weights, the parameters as they lie in it.
    """

    flat: torch.Tensor
    group: int
    held: list[HeldTensor]
    keys: tuple[str, ...] = ()
    whole: dict[str, list[HeldTensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineTensors:
    """All tensors of an engine that a checkpoint has.

    Attributes:
        masters: the trained parameters.
        untrained: parameters that no optimizer group holds, and the buffers that a state dict holds.
        known: names that a checkpoint may have, with those of the experts of other ranks.
    """

    masters: list[MasterWeights]
    untrained: list[HeldTensor]
    known: set[str]


def require_engine(engine: Any) -> None:
    """Raise ``InputError`` for an engine whose tensors cannot be filled by ranges."""
    zero, found = engine.optimizer, None
    if not hasattr(zero, "param_names") or _groups(zero) is None:
        raise InputError("the engine has no ZeRO optimizer", expected="stage 1, 2 or 3", found=type(zero).__name__)
    classes = [each.__name__ for each in type(zero).__mro__]
    if engine.mp_world_size > 1:
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
            hint="load it with engine.load_checkpoint: one of the same layout, or, converted to universal, with "
            "checkpoint.load_universal in DeepSpeed's config",
        )


def is_stage3(zero: Any) -> bool:
    """Whether parameters are partitioned too."""
    return hasattr(zero, "fp16_partitioned_groups_flat")


def tensors_of(engine: Any) -> EngineTensors:
    """The tensors of ``engine``, which :func:`require_engine` takes."""
    zero, experts = engine.optimizer, _experts_of(engine)
    names: dict[int, list[str]] = {}
    for named in (engine.module.named_parameters, engine.module.named_buffers):
        for name, value in named(remove_duplicate=False):
            names.setdefault(id(value), []).append(experts.of(name))

    def describe(name: str, value: torch.Tensor, target: torch.Tensor, at: HeldRange) -> HeldTensor:
        own = experts.of(name)
        shape, stack = tuple(getattr(value, "ds_shape", value.shape)), experts.stacks.get(own)
        ranges = (at,) if at.length else ()
        if stack is not None:
            ranges = tuple(part for each in ranges for part in _rows_of(each, math.prod(shape[1:]), stack[1]))
            shape = (stack[0], *shape[1:])
        return HeldTensor((own, *names.get(id(value), ())), shape, target, ranges)

    made, trained = [], set()
    for number, (group, flat) in enumerate(zip(_groups(zero), _flats(zero), strict=True)):
        parts = list(_partitions(group) if is_stage3(zero) else _stretch(zero, number, group, flat.numel()))
        mine, momentum = (
            [describe(zero.param_names[p], p, flat, part) for p, part in zip(group, places)]
            for places in (parts, _end_to_end(group, parts))
        )
        trained.update(map(id, group))
        index = zero.sub_group_to_group_id[number] if is_stage3(zero) else number
        # Below stage 3 Muon keeps the momentum of all of each parameter that has elements here.
        cut = is_stage3(zero) or getattr(zero, "cpu_offload", False)
        whole = {MOMENTUM: momentum} if zero.optimizer.param_groups[index].get("use_muon") and not cut else {}
        state = {k: v for k, v in zero.optimizer.state.get(flat, {}).items() if torch.is_tensor(v) and k != "step"}
        keys = (key for key, value in state.items() if value.shape == flat.shape or key in whole)
        made.append(MasterWeights(flat, index, mine, tuple(keys), whole))
    untrained = [
        describe(name, value, value, _part_of(value) if hasattr(value, "ds_id") else HeldRange(0, 0, value.numel()))
        for name, value in _saved(engine.module)
        if id(value) not in trained
    ]
    return EngineTensors(made, untrained, {name for own in names.values() for name in own} | experts.elsewhere)


def _saved(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that a state dict holds."""
    yield from module.named_parameters()
    for prefix, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _groups(zero: Any) -> Any:
    """Trained parameters by flat tensor; the attribute is that of BF16_Optimizer, of stages 1 and 2, or of stage 3."""
    names = ("bf16_groups", "bit16_groups", "fp16_groups")
    return next((getattr(zero, name) for name in names if hasattr(zero, name)), None)


def _flats(zero: Any) -> list[torch.Tensor]:
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    return list(next(getattr(zero, name) for name in names if hasattr(zero, name)))


def _part_of(p: Any) -> HeldRange:
    """This rank's partition of ``p``, of stage 3, without padding; at its beginning."""
    # Of 10 elements on four ranks each has room for three: ranks hold 0-2, 3-5, 6-8, and 9 with padding behind it.
    share = p.ds_tensor.ds_numel
    start = share * dist.get_rank(group=getattr(p, "ds_process_group", None))
    return HeldRange(start, 0, max(0, min(share, p.ds_numel - start)))


def _end_to_end(group: list[Any], parts: list[HeldRange]) -> list[HeldRange]:
    """The whole of each parameter that has a part here, in the order of these parts."""
    found, at = [HeldRange(0, 0, 0)] * len(parts), 0
    for number in sorted(range(len(parts)), key=lambda number: parts[number].at):
        found[number] = HeldRange(0, at, group[number].numel() if parts[number].length else 0)
        at += found[number].length
    return found


def _partitions(group: list[Any]) -> Iterator[HeldRange]:
    at = 0
    for p in group:
        part = _part_of(p)
        yield HeldRange(part.start, at, part.length)
        at += p.ds_tensor.ds_numel


def _stretch(zero: Any, number: int, group: list[Any], size: int) -> Iterator[HeldRange]:
    """The parameters of a group within the equal stretch of ``size`` elements that this rank masters of its buffer."""
    buffer = (zero.bf16_groups_flat if hasattr(zero, "bf16_groups") else zero.bit16_groups_flat)[number]
    low = size * dist.get_rank(group=zero.real_dp_process_group[number])
    # Weights of 6 and 10 elements fill a buffer of 16. The second of two ranks masters 8 to 16 of it: nothing of the
    # first, and of the second its elements 2 to 10, which are the first of the stretch.
    for p in group:
        # Addresses are in bytes. A parameter of no elements has none.
        first = (p.data_ptr() - buffer.data_ptr()) // buffer.element_size() if p.numel() else 0
        begin, end = max(first, low), min(first + p.numel(), low + size)
        yield HeldRange(begin - first, begin - low, max(0, end - begin))


# Experts


@dataclass
class _Experts:
    """Names that parameters and buffers of experts have among all.

    Attributes:
        named: by the name on this rank, for DeepSpeed's own layers.
        elsewhere: names of the experts of all ranks.
        stacks: by name of a stack, the number of all experts, and those that this rank holds.
    """

    named: dict[str, str] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    stacks: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """The name in a checkpoint of what has ``name`` on this rank."""
        return self.named.get(name, name)


def _experts_of(engine: Any) -> _Experts:
    found = _Experts()
    if not getattr(engine, "has_moe_layers", False):
        return found
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    for prefix, module in engine.module.named_modules():
        dot = f"{prefix}." if prefix else ""
        kind = type(module)
        if isinstance(module, MoE):
            share = module.num_local_experts
            first = groups._get_expert_parallel_rank(module.expert_group_name) * share
            mine: Any = module.deepspeed_moe.experts.deepspeed_experts
            for local, expert in enumerate(mine):
                for name in expert.state_dict():
                    found.named[f"{dot}{_LOCAL}.{local}.{name}"] = f"{dot}{_LOCAL}.{first + local}.{name}"
                    found.elsewhere |= {f"{dot}{_LOCAL}.{number}.{name}" for number in range(module.num_experts)}
        # By name: a DeepSpeed of before AutoEP has no such module to import.
        elif (kind.__module__, kind.__name__) == ("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer"):
            placed = {entry["rank"]: entry["experts"] for entry in module.expert_placement_descriptor["ranks"]}
            own = (module.num_experts, list(placed[module.ep_rank]))
            found.stacks |= {f"{dot}experts.{name}": own for name, _ in module.experts.named_parameters()}
    return found


def _rows_of(held: HeldRange, row: int, experts: list[int]) -> Iterator[HeldRange]:
    """Elements of a rank's stack of ``experts``, of ``row`` elements each, by their numbers in the stack of all."""
    # With rows of 10 and experts [3, 0], elements 5 to 15 of the rank's stack are 35 to 40 and 0 to 5 of the whole.
    start, stop, at = held.start, held.start + held.length, held.at
    while start < stop:
        local, within = divmod(start, row)
        length = min(row - within, stop - start)
        yield HeldRange(experts[local] * row + within, at, length)
        start, at = start + length, at + length
