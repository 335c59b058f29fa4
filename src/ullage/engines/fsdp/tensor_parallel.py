"""Tensor parallelism by the model's own plan, as transformers applies it, with two differences.

transformers shards a model before its weights are there and before they are tied; here both has happened, so a weight
with two names is sharded under one and tied again. And where a small weight is on every rank but each rank's gradient
covers its own heads only (``replicated_with_grad_allreduce``), transformers adds up ``param.grad`` after each
backward, which counts earlier microbatches again; here each backward's gradient is added up before it is accumulated.

Source: ``transformers.distributed.tensor_parallel`` and ``mixin`` of 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from ullage.core.errors import InputError

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_SPLITS_HEADS = "colwise"


def require_tensor_parallel(model: Any, size: int) -> None:
    """Raise ``InputError`` for a model that ``size`` ranks cannot share, with the reason."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if not _base_plan(model):
        reason = f"{name} has no tensor-parallel plan (base_model_tp_plan)"
        if getattr(config, "cell", None) is not None:
            reason = f"{name} is recurrent: every time step would wait for all ranks of tp"
        raise InputError(
            "this model cannot be split over tp", expected="a model with a plan", found=reason, hint="use dp instead"
        )
    heads = {
        "num_attention_heads": ("q_proj", "qkv_proj", "query_key_value"),
        "num_key_value_heads": ("k_proj", "v_proj"),
    }
    for attribute, projections in heads.items():
        number = getattr(config, attribute, None)
        if splits(model, *projections) and isinstance(number, int) and number % size:
            raise InputError(
                f"tp does not divide the model's {attribute}",
                where=name,
                expected=f"a multiple of tp = {size}",
                found=number,
            )


def splits(model: Any, *projections: str) -> bool:
    """Whether the model's plan leaves each rank with heads of its own after one of these projections."""
    plan = _base_plan(model)
    return any(name.rpartition(".")[2] in projections and style == _SPLITS_HEADS for name, style in plan.items())


def _base_plan(model: Any) -> dict[str, str]:
    return getattr(model.base_model, "tp_plan", None) or {}


def apply(model: Any, mesh: DeviceMesh) -> None:
    """Shard the model's parameters over ``mesh``, an axis of one dim, and hook its modules; weights stay tied."""
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    modules, owners = dict(model.named_modules()), dict(model.named_parameters())
    summed = [name for name, style in plan.items() if style == _PARTIAL_GRADIENT]
    # A tied weight is listed under both names, but is one parameter, sharded under the first.
    aliases = {name for name in plan if name not in modules and name not in owners}
    kept = {name: style for name, style in plan.items() if name not in summed and name not in aliases}
    apply_tensor_parallelism(model, mesh, kept)
    if aliases:
        model.tie_weights(recompute_mapping=False)
    for name in summed:
        if name in modules:
            _sum_gradients(modules[name], mesh.get_group())


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum each backward's gradients of this module's weights over the ranks, before they are accumulated."""

    def add_up(gradient: Tensor) -> Tensor:
        # A copy, because a hook must not change the gradient it is given.
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    hooked: dict[str, Tensor] = {}

    def before(module: nn.Module, arguments: Any) -> None:
        # FSDP2 puts other tensors in the parameters' place while the module runs: those have the gradients.
        if not torch.is_grad_enabled():
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and hooked.get(name) is not parameter:
                parameter.register_hook(add_up)
                hooked[name] = parameter

    module.register_forward_pre_hook(before)
