"""Loops over time of the GRU and of Elman's network on the CPU, forwards and backwards.

Torch's own CPU kernels for both record an autograd node for every operation of every step, and take the gradient of
the recurrent weight by one product per step, which costs as much for one row as for sixty. Here each step is only as
wide as the sequences that still run; whatever does not depend on the step before (the input's part of the gates, the
gradients of both weights) is one product over all tokens. The loops are torch operators of their own, so that
``torch.compile`` takes them whole.

Values are in packed order: [size, ...], of which ``rows[t]`` belong to step *t*, and ``rows`` never grow. ``state``
[rows[0], H] is the state before the first step. H is the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gru_loop(gates: Tensor, weight: Tensor, bias: Tensor, state: Tensor, rows: Sequence[int]) -> Tensor:
    """Outputs [size, H] of a GRU, as ``torch.nn.GRU``.

    Args:
        gates: [size, 3H], the input's part of reset, update and new gate, input bias included
        weight: [3H, H], recurrent
        bias: [3H], recurrent
        state: [rows[0], H], before the first step
        rows: sequences at each step, on the host
    """
    return _gru(gates, weight, bias, state, list(rows), _needs_gradient(gates, weight, bias, state))[0]


def rnn_loop(gates: Tensor, weight: Tensor, state: Tensor, rows: Sequence[int], relu: bool) -> Tensor:
    """Outputs [size, H] of Elman's network, as ``torch.nn.RNN``.

    Args:
        gates: [size, H], the input's part, both biases included
        weight: [H, H], recurrent
        state: [rows[0], H], before the first step
        rows: sequences at each step, on the host
        relu: take ReLU for tanh
    """
    return _rnn(gates, weight, state, list(rows), relu)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@torch.library.custom_op("ullage::gru", mutates_args=())
def _gru(
    gates: Tensor, weight: Tensor, bias: Tensor, state: Tensor, rows: list[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [size, H]; for backward, if ``keep``, also the gates [size, 3H] and the new gate's recurrent part.

    Args:
        gates, weight, bias, state, rows: as for :func:`gru_loop`
        keep: whether a backward pass may follow; without it the two further tensors are empty
    """
    size, width = gates.shape[0], state.shape[1]
    output = gates.new_empty(size, width)
    reset_update_new = gates.new_empty(size if keep else rows[0], 3 * width)
    recurrent = gates.new_empty(size if keep else rows[0], width)
    weight = weight.t()
    start = 0
    for count, gate, out in zip(rows, gates.split(rows), output.split(rows), strict=True):
        # Sequences that have ended are the last ones of the state. Without ``keep`` each step writes over the last.
        state = state[:count]
        kept = slice(start, start + count) if keep else slice(count)
        three, from_state = reset_update_new[kept], recurrent[kept]
        # The recurrent part of all gates is one product; reset scales that of the new gate alone.
        product = torch.addmm(bias, state, weight)
        two = torch.add(gate[:, : 2 * width], product[:, : 2 * width], out=three[:, : 2 * width]).sigmoid_()
        from_state.copy_(product[:, 2 * width :])
        new = torch.addcmul(gate[:, 2 * width :], from_state, two[:, :width], out=three[:, 2 * width :]).tanh_()
        state = torch.lerp(new, state, two[:, width:], out=out)
        start += count
    if keep:
        return output, reset_update_new, recurrent
    return output, gates.new_empty(0), gates.new_empty(0)


@_gru.register_fake
def _(
    gates: Tensor, weight: Tensor, bias: Tensor, state: Tensor, rows: list[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    size, width = gates.shape[0], state.shape[1]
    if not keep:
        return gates.new_empty(size, width), gates.new_empty(0), gates.new_empty(0)
    return gates.new_empty(size, width), gates.new_empty(size, 3 * width), gates.new_empty(size, width)


@torch.library.custom_op("ullage::gru_backward", mutates_args=())
def _gru_backward(
    grad: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: list[int],
    output: Tensor,
    reset_update_new: Tensor,
    recurrent: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gates, weight, bias and state.

    Args:
        grad: [size, H], of the outputs
        weight: [3H, H], recurrent
        state: [rows[0], H], before the first step
        rows: sequences at each step
        output, reset_update_new, recurrent: what the forward pass returned with ``keep``
    """
    width = state.shape[1]
    reset, update, new = reset_update_new.split(width, 1)
    before = _states_before(output, state, rows)
    # For all tokens at once: the derivative of each output by each gate before its activation.
    # With h = (1 - z)·n + z·h₋ and n = tanh(x + r·a), where a is the recurrent part of the new gate: by z it is
    # (h₋ - n)·z(1 - z), by a (the third part here) (1 - z)(1 - n²)·r, and by r, which acts through n, that last one
    # times a(1 - r).
    slopes = torch.empty_like(reset_update_new)
    of_new = torch.addcmul(torch.ones_like(new), new, new, value=-1).mul_(1 - update)
    torch.mul(before - new, update * (1 - update), out=slopes[:, width : 2 * width])
    torch.mul(of_new, reset, out=slopes[:, 2 * width :])
    torch.mul(slopes[:, 2 * width :], recurrent * (1 - reset), out=slopes[:, :width])
    # Backwards in time: the gradient of each step's output, and what of it the state before carries on.
    hidden = torch.empty_like(output)
    parts = (hidden.split(rows), grad.split(rows), slopes.view(-1, 3, width).split(rows), update.split(rows))
    carried: Tensor | None = None
    for here, given, slope, gate in zip(*(reversed(part) for part in parts), strict=True):
        _add_carried(given, carried, here)
        # ``slopes`` turn into gradients in place. The state before gets a share directly (z) and one through all three
        # gates.
        slope.mul_(here.unsqueeze(1))
        carried = torch.addmm(here * gate, slope.view(len(here), 3 * width), weight)
    assert carried is not None
    # ``slopes`` are now the gradients of the recurrent parts: those of weight and bias are one product and one sum.
    of_weight, of_bias = slopes.t() @ before, slopes.sum(0)
    torch.mul(hidden, of_new, out=slopes[:, 2 * width :])  # the input's part of the new gate bypasses the reset
    return slopes, of_weight, of_bias, carried


@_gru_backward.register_fake
def _(
    grad: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: list[int],
    output: Tensor,
    reset_update_new: Tensor,
    recurrent: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias = weight.new_empty(weight.shape[0])
    return torch.empty_like(reset_update_new), torch.empty_like(weight), bias, torch.empty_like(state)


def _gru_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, state, ctx.rows, _ = inputs
    ctx.save_for_backward(weight, state, *output)
    ctx.set_materialize_grads(False)


def _gru_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    weight, state, *kept = ctx.saved_tensors
    return *_gru_backward(grad.contiguous(), weight, state, ctx.rows, *kept), None, None


_gru.register_autograd(_gru_gradients, setup_context=_gru_setup)


@torch.library.custom_op("ullage::rnn", mutates_args=())
def _rnn(gates: Tensor, weight: Tensor, state: Tensor, rows: list[int], relu: bool) -> Tensor:
    output = gates.new_empty(gates.shape[0], state.shape[1])
    weight = weight.t()
    for count, gate, out in zip(rows, gates.split(rows), output.split(rows), strict=True):
        state = torch.addmm(gate, state[:count], weight, out=out)
        state = state.relu_() if relu else state.tanh_()
    return output


@_rnn.register_fake
def _(gates: Tensor, weight: Tensor, state: Tensor, rows: list[int], relu: bool) -> Tensor:
    return torch.empty_like(gates)


@torch.library.custom_op("ullage::rnn_backward", mutates_args=())
def _rnn_backward(
    grad: Tensor, weight: Tensor, state: Tensor, rows: list[int], relu: bool, output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gates, weight and state.

    Args:
        grad: [size, H], of the outputs
        weight: [H, H], recurrent
        state: [rows[0], H], before the first step
        rows: sequences at each step
        relu: whether the activation is ReLU
        output: [size, H], of the forward pass
    """
    slopes = (output > 0).to(output.dtype) if relu else 1 - output * output
    carried: Tensor | None = None
    for given, slope in zip(reversed(grad.split(rows)), reversed(slopes.split(rows)), strict=True):
        slope.mul_(_add_carried(given, carried, torch.empty_like(slope)))
        carried = slope @ weight
    assert carried is not None
    return slopes, slopes.t() @ _states_before(output, state, rows), carried


@_rnn_backward.register_fake
def _(
    grad: Tensor, weight: Tensor, state: Tensor, rows: list[int], relu: bool, output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(output), torch.empty_like(weight), torch.empty_like(state)


def _rnn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, state, ctx.rows, ctx.relu = inputs
    ctx.save_for_backward(weight, state, output)


def _rnn_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, state, output = ctx.saved_tensors
    return *_rnn_backward(grad.contiguous(), weight, state, ctx.rows, ctx.relu, output), None, None


_rnn.register_autograd(_rnn_gradients, setup_context=_rnn_setup)


def _states_before(output: Tensor, state: Tensor, rows: list[int]) -> Tensor:
    """The state before each step [size, H]: the output of the step before, of the sequences that still run."""
    before = [out[:count] for out, count in zip(output.split(rows)[:-1], rows[1:], strict=True)]
    return torch.cat([state[: rows[0]], *before])


def _add_carried(given: Tensor, carried: Tensor | None, out: Tensor) -> Tensor:
    """``given`` [rows, H] plus, for the sequences that ran on, the gradient ``carried`` back from the later step."""
    if carried is None:
        return out.copy_(given)
    if len(carried) == len(given):
        return torch.add(given, carried, out=out)
    out.copy_(given)
    out[: len(carried)] += carried
    return out
