"""A model's head in chunks with its loss: which heads can, and the stand-in that takes their place in a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ullage.errors import InputError
from ullage.training.loss.lazy_logits import HeadCall, LazyLogits, hooks_of


class _StandIn(nn.Module):
    """A stand-in for a head: gives the logits of its calls uncomputed; in all else it is the head."""

    def __init__(self, place: nn.Module, head: nn.Module, calls: list[HeadCall]) -> None:
        super().__init__()
        # Behind nn.Module's back, so that nobody finds the head's parameters twice.
        vars(self).update(_place=place, _head=head, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_place"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        if len(args) != 1 or kwargs or not isinstance(hidden, Tensor) or not torch.is_grad_enabled() or hidden.ndim < 2:
            return self._place(*args, **kwargs)
        device, head = hidden.device.type, self._head
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        call = HeadCall(head, hidden)
        self._calls.append(call)
        return LazyLogits(call, hidden, head.out_features, dtype)


@contextmanager
def head_in_chunks(model: nn.Module) -> Iterator[list[HeadCall]]:
    """For calls of ``model`` within this block, compute its head and its loss in chunks, where its forward allows it.

    Yields the calls of the head, as they come. ``model``: bare. Raises ``InputError`` where :func:`head_problem` tells
    of one.
    """
    problem = head_problem(model)
    if problem is not None:
        raise InputError("head and loss cannot run in chunks", where=type(model).__name__, found=problem)
    place = _output_embeddings(model)
    assert place is not None
    calls: list[HeadCall] = []
    stand_in = _StandIn(place, _within_adapters(place), calls)
    owners = [
        (parent, name)
        for parent in model.modules()
        for name, child in vars(parent)["_modules"].items()
        if child is place
    ]
    for parent, name in owners:
        vars(parent)["_modules"][name] = stand_in
    try:
        yield calls
    finally:
        for parent, name in owners:
            vars(parent)["_modules"][name] = place
        for call in calls:
            call.end()


def head_problem(model: nn.Module) -> str | None:
    """Why the head of a bare model cannot run in chunks; None where it can."""
    place = _output_embeddings(model)
    if place is None:
        return "the model names no head (get_output_embeddings)"
    head = _within_adapters(place)
    if not _is_linear(head):
        return f"its head is a {type(head).__name__}, not a linear layer"
    if any("forward" in vars(each) for each in (place, head)):
        return "somebody has given its head another forward"
    if any(not _is_engines(hook) for each in (place, *head.modules()) for hook in hooks_of(each)):
        return "somebody reads its head by hooks"
    if any(hooks_of(each) for each in head.modules() if each is not head):
        return "the parts of its head are gathered one by one"
    if next(head.parameters()).dtype == torch.float16:
        return "float16 needs its loss scaled before the gradients are made"
    return None


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        found = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _within_adapters(place: nn.Module) -> nn.Module:
    """The module that runs where PEFT trains a copy of the head (``modules_to_save``); else the head."""
    copies: Any = getattr(place, "modules_to_save", None)
    if type(place).__name__ != "ModulesToSaveWrapper" or not isinstance(copies, nn.ModuleDict):
        return place
    active: Any = place.active_adapters
    if place.disable_adapters or not active or active[0] not in copies:
        return place.original_module  # pyright: ignore[reportReturnType]
    return copies[active[0]]


def _is_linear(head: nn.Module) -> bool:
    """Whether a head is torch's linear layer, or one that PEFT's LoRA has put in its place."""
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return True
    base = getattr(head, "base_layer", None)
    is_lora = type(head).__module__.startswith("peft.tuners.lora") and type(head).__name__ == "Linear"
    return is_lora and isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward


def _is_engines(hook: Any) -> bool:
    """Whether DeepSpeed has registered a hook, to gather parameters and let them go."""
    return (getattr(hook, "__module__", "") or "").startswith("deepspeed.")
