"""What a way puts into a model, and how it is taken out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ullage.attention.support import (
    is_attention_put_in,
    mixing_problem,
    put_in_attention,
    remember_packable,
    take_out_attention,
)
from ullage.mixers.forwards import CheckpointedRow, CurrentRow, Forward, ModelForward, PartForward
from ullage.mixers.relative import BiasedForward
from ullage.mixers.ways import Way, is_biased_attention


def put_in(model: nn.Module, way: Way, *, is_proved: bool = False) -> None:
    """Make a bare model that is not packed keep sequences apart in a way.

    ``is_proved``: whether the model has shown, or is about to show, that it does so: what cannot be told by looking at
    it is then not asked.
    """
    if way.kind == "native":
        if mixing_problem(model) is not None:
            put_in_attention(model)
        if is_proved:
            remember_packable(model)
    if not way.needs_forward:
        return
    current = CurrentRow()
    for path in way.paths:
        part = model.get_submodule(path)
        if is_biased_attention(part):
            BiasedForward(part, current).put_in()
        elif path:
            PartForward(part, current, is_causal=way.kind == "mixers").put_in()
    ModelForward(model, current, way=way).put_in()
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if way.kind in ("native", "mixers") and not is_encoder_decoder:
        # Its attention reads the lengths; what it cannot check is done by lengths, or by the model's forward.
        put_in_attention(model)
        remember_packable(model)


def way_of(model: nn.Module) -> Way:
    """The way of a bare model that is packed; native where nothing took its forward's place."""
    forward = forward_of(model)
    return Way("native") if forward is None else forward.way


def take_out(model: nn.Module) -> None:
    """Make a bare model what it was before :func:`put_in`. More than once does nothing more."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Forward):
            forward.take_out()
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, CheckpointedRow):
            vars(module)["_gradient_checkpointing_func"] = function.function
    for hidden in _hidden_forwards(model):
        hidden.is_off = True
    take_out_attention(model)


def forward_of(model: nn.Module) -> ModelForward | None:
    """The forward that :func:`put_in` has given a bare model, also where autocast was put around it since."""
    forward = vars(model).get("forward")
    if isinstance(forward, ModelForward):
        return forward
    return next((each for each in _hidden_forwards(model) if not each.is_off), None)


def is_put_in(model: nn.Module) -> bool:
    """Whether :func:`put_in` has given a bare model another forward or attention."""
    return forward_of(model) is not None or is_attention_put_in(model)


def _hidden_forwards(model: nn.Module) -> Iterator[ModelForward]:
    """Forwards of ours that accelerate has wrapped in autocast: it keeps what it found as an attribute."""
    hidden: Any = vars(model).get("_original_forward")
    if isinstance(hidden, ModelForward):
        yield hidden
