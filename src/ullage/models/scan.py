"""The recurrence ``h[t] = decay[t] * h[t - 1] + inflow[t]`` over sequences that lie end to end, parallel in time.

The flat batch is cut into chunks of equal length, wherever sequences end: where one starts, nothing of the one before
it may flow on, so its first decay is taken to be zero, and what flows into it is the state it is given. All chunks
advance together, first with nothing before them, to learn what each makes of what enters it; then the chunks are
joined one after another, and run once more from the right state. That is twice the work of a loop over time in about
three times the square root of the number of tokens steps, it divides by nothing, and with decays of at most 1 it
amplifies no rounding.

Source of the chunked scan: Blelloch, "Prefix sums and their applications" (1990).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def linear_scan(decay: Tensor, inflow: Tensor, starts: Tensor, state: Tensor | None = None) -> Tensor:
    """Every ``h[t]`` [T, H] from ``decay`` and ``inflow`` [T, H] of sequences end to end.

    ``starts`` [n]: the position of each sequence's first token, rising from 0, none of them empty. ``state`` [n, H]:
    what comes before each sequence, zeros if ``None``. Does not wait for the device.
    """
    return _scan(decay, inflow, starts, state)[0]


@torch.library.custom_op("ullage::linear_scan", mutates_args=())
def _scan(decay: Tensor, inflow: Tensor, starts: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    kept = decay.index_fill(0, starts, 0.0)  # no sequence leaks into the next
    if state is not None:
        inflow = inflow.index_add(0, starts, decay.index_select(0, starts) * state)
    return _run(kept, inflow), kept


@_scan.register_fake
def _(decay: Tensor, inflow: Tensor, starts: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inflow), torch.empty_like(inflow)


@torch.library.custom_op("ullage::linear_scan_backward", mutates_args=())
def _scan_backward(grad: Tensor, kept: Tensor) -> Tensor:
    """The gradient of ``inflow``: the same recurrence backwards, each decay one token earlier."""
    return _run(kept, grad, backwards=True)


@_scan_backward.register_fake
def _(grad: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    decay, _, starts, state = inputs
    hidden, kept = output
    ctx.save_for_backward(decay, kept, hidden, starts, state)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    decay, kept, hidden, starts, state = ctx.saved_tensors
    inflow = _scan_backward(grad.contiguous(), kept)
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    first = torch.zeros_like(hidden[: len(starts)]) if state is None else state
    decayed = inflow * before.index_copy(0, starts, first)
    entering = None
    if state is not None:
        entering = decay.index_select(0, starts) * inflow.index_select(0, starts)
    return decayed, inflow, None, entering


_scan.register_autograd(_backward, setup_context=_setup)


def _run(decay: Tensor, inflow: Tensor, backwards: bool = False) -> Tensor:
    """The recurrence over the whole of [T, H], from zero, from either end."""
    decay, inflow = decay.contiguous(), inflow.contiguous()
    size, width = inflow.shape
    out = torch.empty_like(inflow)
    steps = max(1, min(size, round((size / 2) ** 0.5)))
    chunks = size // steps
    bulk = chunks * steps
    # Backwards, the short remainder at the end comes first.
    parts = [(0, bulk, chunks), (bulk, size, 1)] if bulk < size else [(0, size, chunks)]
    entering = inflow.new_zeros(width)
    if backwards:
        shifted = torch.empty_like(decay)
        shifted[:-1], shifted[-1] = decay[1:], 0
        decay = shifted
        parts.reverse()
    for start, stop, count in parts:
        a, b, h = (t[start:stop].view(count, -1, width).unbind(1) for t in (decay, inflow, out))
        if backwards:
            a, b, h = a[::-1], b[::-1], h[::-1]
        entering = _join(a, b, entering, backwards) if count > 1 else entering.expand(1, width)
        for decay_now, inflow_now, now in zip(a, b, h, strict=True):
            torch.addcmul(inflow_now, decay_now, entering, out=now)
            entering = now
        entering = entering[0 if backwards else -1]
    return out


def _join(decay: Any, inflow: Any, entering: Tensor, backwards: bool) -> Tensor:
    """What enters each chunk [chunks, H], from what enters the first of them."""
    product, ending = decay[0].clone(), inflow[0].clone()
    for decay_now, inflow_now in zip(decay[1:], inflow[1:], strict=True):
        product.mul_(decay_now)
        torch.addcmul(inflow_now, decay_now, ending, out=ending)
    entering_each = torch.empty_like(ending)
    order = range(len(ending) - 1, -1, -1) if backwards else range(len(ending))
    for chunk in order:
        entering_each[chunk] = entering
        entering = torch.addcmul(ending[chunk], product[chunk], entering)
    return entering_each
