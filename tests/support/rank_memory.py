"""Bytes that a rank holds of a model and its optimizer, counted from the tensors themselves."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class LocalBytes:
    """Bytes of one rank.

    Attributes:
        parameters: of the model, trained and frozen.
        gradients: those that are there now.
        moments: state of the optimizer, without its counts of steps; zero before the first step.
    """

    parameters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.parameters + self.gradients + self.moments


def local_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> LocalBytes:
    """Bytes that this rank holds of ``model`` and ``optimizer``: of a sharded tensor (``DTensor``) its own part.

    Counted from the tensors themselves: resident memory says little on a CPU, where freed blocks stay with the process.
    A tied parameter counts once, on whatever device it lies. No rank waits for another, nor for the device. What is
    gathered for a forward is not counted.

    >>> layer = nn.Linear(3, 4)
    >>> local_bytes(layer, torch.optim.AdamW(layer.parameters()))
    LocalBytes(parameters=64, gradients=0, moments=0)
    """
    parameters = list(model.parameters())
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    states = [] if optimizer is None else list(optimizer.state.values())
    moments = (value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)
    return LocalBytes(_bytes(parameters), _bytes(gradients), _bytes(moments))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in map(_local, tensors))


def _local(tensor: Tensor) -> Tensor:
    """The part of this rank."""
    # Of a DTensor; its to_local() would record a graph, and wait for what is still being reduced.
    sharded = getattr(tensor, "_local_tensor", None)
    return sharded if isinstance(sharded, torch.Tensor) else tensor
