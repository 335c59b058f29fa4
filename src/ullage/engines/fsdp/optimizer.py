"""Facts about an optimizer that the user made: whose parameters it holds, and its state.

An optimizer made before ``parallelize`` holds tensors that the model no longer has, and would train nothing without an
error. With tp, parameters live on two meshes, and the kernels that take many tensors at once take those of one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ullage.errors import InputError

#: Optimizers that were looked at, with the number of parameters they had.
_CHECKED: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()


def names_of(model: Any, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each group. Raises ``InputError`` if one is not the model's."""
    # Parameters are compared as objects: while weights are gathered, the model has other tensors than the optimizer.
    reshard(model)
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in by_id for parameter in group["params"]):
            raise InputError(
                "the optimizer holds parameters that the model does not",
                hint="make the optimizer after parallelize: the model's parameters are other tensors then",
            )
        groups.append([by_id[id(parameter)] for parameter in group["params"]])
    return groups


def reshard(model: Any) -> None:
    """Free the weights that a forward without a backward left gathered, and put the sharded ones in their place."""
    if isinstance(model, FSDPModule):
        model.reshard()


def require_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer once, and keep it from batching tensors of two meshes. Raises as :func:`names_of`."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == count:
        return
    names_of(model, optimizer)
    for group in optimizer.param_groups:
        # Under tp a group may hold parameters on dp·cp × tp and on dp·cp alone, and one call over many tensors takes
        # one mesh.
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        if len(meshes) > 1 and (group.get("foreach") or group.get("fused")):
            group["foreach"] = group["fused"] = False
    _CHECKED[optimizer] = count


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have a new optimizer make its state: a step with zero gradients at a rate of zero, which changes no weight."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            # A product keeps the type, as the rate may be a tensor. The step count becomes 1; whoever calls this loads
            # over it.
            group["lr"] = group["lr"] * 0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        if "lr" in group:
            group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
