"""Deferred attention masks: described when a model asks for one, built only by a layer that needs it.

transformers asks for a mask before it knows whether the row is packed, and under sdpa would build one of T² elements.
A packed row needs none: its lengths say everything. So the model carries a description to its layers instead. A
layer with ``cu_seq_lens`` reads from it whether a mask was asked for; a layer without builds the same mask that sdpa
would get, once for all layers of a forward. With a filled cache there is no packed row, and sdpa's mask is built at
once. The mask is requested once per forward, so its description also keeps the arguments of the model's call.
Source: ``transformers.masking_utils`` (``AttentionMaskInterface``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from ullage.attention.calls import given
from ullage.errors import InputError


class _NoHook(InputError, AttributeError):
    """Error for a use of a mask that is only described; an ``AttributeError`` too, so that ``hasattr`` gives False."""


def _no_hook(use: str) -> _NoHook:
    return _NoHook(
        "this model changes the attention mask itself, which attn_implementation='ullage' cannot take part in",
        expected="a model that hands its mask to the attention as it is",
        found=use,
        hint="load it with attn_implementation='sdpa' or 'eager', without packing",
    )


class DeferredMask:
    """Description of the mask that transformers asked for: queries and keys of equal number, no cache.

    Attributes:
        arguments: those of ``sdpa_mask``.
        padded: whether a mask of real tokens was given.
        both_ways: whether a token sees later ones too.
        window: how many tokens a query sees, if the mask is local: itself and those before it, in both ways itself and
            those on each side.
        altered: whether the pattern is neither of these.
        given: positions and lengths that the model was called with, whether or not they reach its layers; None under
            ``torch.compile``.
        checked: whether a layer of this forward has looked for lost lengths.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.padded = arguments.get("attention_mask") is not None
        self.window: int | None = arguments.get("local_size")
        pattern: Callable[..., Any] = arguments["mask_function"]
        self.both_ways = bidirectional_mask_function in _united(pattern)
        if self.both_ways and self.window is not None:
            # transformers counts the tokens on one side here, and the query itself where the mask is causal.
            self.window += 1
        # A pattern that a user or a model joined to the causal one is called through vmap, or is a union.
        self.altered = bool(arguments.get("use_vmap")) or pattern.__qualname__.startswith("or_masks")
        # Read while the model's own call is on the stack. A layer that is recomputed in the backward pass has no model
        # around it, but still has this mask.
        self.given = given()
        self.checked = False
        # In a tuple, because None is a mask too.
        self._built: tuple[Tensor | None] | None = None

    def build(self) -> Tensor | None:
        """The mask for sdpa: bool [batch, 1, T, T], or None where sdpa's own ``is_causal`` is enough."""
        if self._built is None:
            self._built = (sdpa_mask(**self.arguments),)
        return self._built[0]

    def restarts(self, position_ids: Tensor) -> Tensor | None:
        """Whether positions [rows, T] or [axes, rows, T] go back between two neighbouring tokens that are not padding.

        One bool on their device, so this does not wait for it; None for positions of another shape than this row's.
        """
        least = 1
        if position_ids.ndim == 3:  # image models: tokens of one image share a position of the first axis
            position_ids, least = position_ids[0], 0
        if position_ids.ndim != 2 or position_ids.shape[1] != self.arguments["q_length"]:
            return None
        back = position_ids.diff() < least
        # Between padding and a token, or within padding, positions mean nothing.
        real = self.arguments.get("attention_mask")
        if real is not None:
            if real.ndim != 2 or real.shape[1] != position_ids.shape[1]:
                return None
            back = back & real[:, 1:].bool() & real[:, :-1].bool()
        return back.any()

    def contiguous(self) -> Tensor | None:
        """The built mask, contiguous: ``generate`` asks for it before the forward where a static cache has windows."""
        mask = self.build()
        return None if mask is None else mask.contiguous()

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and torch probe for such names, and expect a plain AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise _no_hook(f"a use of its {name}")

    def __getitem__(self, index: Any) -> Any:
        raise _no_hook("a slice of it")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _no_hook(f"{getattr(function, '__name__', function)} of it")


def _united(pattern: Callable[..., Any]) -> list[Any]:
    """A pattern of transformers, and those that ``and_masks`` made it of."""
    cells = [cell.cell_contents for cell in getattr(pattern, "__closure__", None) or ()]
    return [pattern, *(part for parts in cells if isinstance(parts, tuple) for part in parts)]


def packed_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **arguments: Any
) -> DeferredMask | Tensor | None:
    """The mask function of attn_implementation="ullage"; arguments and waiting for the device as in ``sdpa_mask``."""
    arguments.update(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset
    )
    # A cache lies in front of the queries. An offset that is a tensor counts as not zero, since its value lies on the
    # device.
    if any(isinstance(offset, torch.Tensor) or offset for offset in (q_offset, kv_offset)) or q_length != kv_length:
        return sdpa_mask(**arguments)
    return DeferredMask(arguments)
