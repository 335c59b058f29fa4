"""Norm of all gradients, of parameters on several device meshes, and clipping by it.

With tensor parallelism some parameters live on dp·cp × tp and others on dp·cp alone; torch's own
``clip_grad_norm_`` takes parameters of one mesh. Here each rank adds up the squares it holds, in float32, and each sum
is added up over exactly the axes that its gradients are sharded over, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ullage.errors import InputError


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None = None) -> Tensor:
    """The norm of all gradients together, float32, 0-dim; scales them down to ``max_norm`` if that is given.

    Collective over every mesh that the gradients live on. Does not wait for the device. A parameter without a gradient
    counts nothing. Raises ``InputError`` for a ``max_norm`` that is not positive.
    """
    if max_norm is not None and not max_norm > 0:
        raise InputError("max_norm must be positive", found=max_norm)
    # Gradients by mesh and by the dims that cut them. Parameters come in the same order on every rank, and so do these
    # groups and the collectives below.
    kinds: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    local: list[Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        held = grad._local_tensor if isinstance(grad, DTensor) else grad
        kinds.setdefault(_sharding(grad), []).append(held)
        local.append(held)
    squares = []
    for (mesh, dims), held in kinds.items():
        norms = torch._foreach_norm(held, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        square = torch.stack(norms).square().sum()
        # Summed over the dims whose ranks hold different parts; over the others every rank has the same sum already.
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    if max_norm is not None and local:
        # The factor stays on the device and is always applied, so that nothing waits for it. 1e-6 as in torch's
        # clip_grad_norm_.
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for held in local:
            held.mul_(factor.to(held.device))
    return total


def _sharding(grad: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a gradient and the mesh dims whose ranks hold different parts of it."""
    if not isinstance(grad, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in grad.placements):
        raise AssertionError("a gradient that is still partial")
    return grad.device_mesh, tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
