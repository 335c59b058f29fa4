"""minGRU and minLSTM: cells whose gates see the input alone, so that a layer is parallel in time.

Both are ``h[t] = d[t] * h[t - 1] + (1 - d[t]) * c[t]``. The decay ``d`` and the candidate ``c`` are one product over
all tokens; the recurrence is a scan over the flat batch. The paper works with logarithms, because its scan divides by
products of ``d``; this scan does not divide, so it needs none, and takes any initial state. ``1 - d`` is a sigmoid of
its own, so that neither gate loses digits near 0 or 1.

The scan cuts the flat batch of T tokens into chunks of equal length, wherever sequences end. Sequences stay apart
because the decay at each sequence's first token is set to zero, and its initial state is added to its inflow. All
chunks advance together in three passes: from zero, to learn how each maps the state that enters it to the state that
leaves it; a join of these maps, one chunk after another; and once more from the right state. That is twice the work of
a loop over time, in about 3·√T steps instead of T. With decays of at most 1 it amplifies no rounding.

Sources: Blelloch, "Prefix sums and their applications" (1990);
Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, "Were RNNs All We Needed?" (2024), appendix B.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid
from transformers import initialization as init

from ullage.core.rows import on_device
from ullage.models.cells import Cell, State, register_cell
from ullage.models.schedule import RunOrder, Schedule


def linear_scan(decay: Tensor, inflow: Tensor, starts: Tensor, state: Tensor | None = None) -> Tensor:
    """Every ``h[t] = decay[t] * h[t - 1] + inflow[t]`` [T, H], for sequences end to end.

    Args:
        decay: [T, H], the share of the state that each token keeps
        inflow: [T, H], what each token adds
        starts: int64 [n], the position of each sequence's first token, rising from 0; no sequence is empty
        state: [n, H], the initial state of each sequence; zeros if ``None``

    Does not wait for the device. Differentiable in all but ``starts``.
    """
    return _scan(decay, inflow, starts, state)[0]


@torch.library.custom_op("ullage::linear_scan", mutates_args=())
def _scan(decay: Tensor, inflow: Tensor, starts: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    kept = decay.index_fill(0, starts, 0.0)  # no sequence leaks into the next
    if state is not None:
        inflow = inflow.index_add(0, starts, decay.index_select(0, starts) * state)
    # ``kept`` is an output because backward can save nothing but an operator's inputs and outputs.
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
    # before[t] is h[t - 1]; the first token of a sequence has its initial state there.
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    first = torch.zeros_like(hidden[: len(starts)]) if state is None else state
    # The gradient of a decay is that of its inflow times the state before; the first one decays the initial state.
    decayed = inflow * before.index_copy(0, starts, first)
    entering = None
    if state is not None:
        entering = decay.index_select(0, starts) * inflow.index_select(0, starts)
    return decayed, inflow, None, entering


_scan.register_autograd(_backward, setup_context=_setup)


def _run(decay: Tensor, inflow: Tensor, backwards: bool = False) -> Tensor:
    """The recurrence over all of [T, H] from a zero state, from either end.

    On a CPU, a nan or an infinity stays within its sequence.
    """
    out = _run_chunks(decay, inflow, backwards, is_spoiled=False)
    # 0 · nan is nan: once there, it stays in its channel until the end, so that the last state tells of it.
    if out.device.type == "cpu" and not torch.isfinite(out[0 if backwards else -1]).all():
        out = _run_chunks(decay, inflow, backwards, is_spoiled=True)
    return out


def _run_chunks(decay: Tensor, inflow: Tensor, backwards: bool, is_spoiled: bool) -> Tensor:
    """``is_spoiled``: whether a state times a decay of 0 is to be 0 whatever the state is."""
    decay, inflow = decay.contiguous(), inflow.contiguous()
    size, width = inflow.shape
    out = torch.empty_like(inflow)
    # A step of the first and the last pass serves all chunks, one of the join a single chunk: 2·steps + T/steps steps
    # in all, which is least at √(T/2).
    steps = max(1, min(size, round((size / 2) ** 0.5)))
    chunks = size // steps
    bulk = chunks * steps
    # The remainder is a chunk of its own, after the others; backwards it comes first.
    parts = [(0, bulk, chunks), (bulk, size, 1)] if bulk < size else [(0, size, chunks)]
    entering = inflow.new_zeros(width)
    # Backwards, the decay between two tokens is that of the later one.
    if backwards:
        shifted = torch.empty_like(decay)
        shifted[:-1], shifted[-1] = decay[1:], 0
        decay = shifted
        parts.reverse()
    # The last pass: every chunk from the state that enters it, written in place.
    for start, stop, count in parts:
        a, b, h = (t[start:stop].view(count, -1, width).unbind(1) for t in (decay, inflow, out))
        if backwards:
            a, b, h = a[::-1], b[::-1], h[::-1]
        entering = _join(a, b, entering, backwards, is_spoiled) if count > 1 else entering.expand(1, width)
        for decay_now, inflow_now, now in zip(a, b, h, strict=True):
            torch.addcmul(inflow_now, decay_now, _keep(entering, decay_now, is_spoiled), out=now)
            entering = now
        entering = entering[0 if backwards else -1]
    return out


def _keep(state: Tensor, decay: Tensor, is_spoiled: bool) -> Tensor:
    return torch.where(decay == 0, 0.0, state) if is_spoiled else state


def _join(decay: Any, inflow: Any, entering: Tensor, backwards: bool, is_spoiled: bool) -> Tensor:
    """The state that enters each chunk [chunks, H], from the state [H] that enters the first of them.

    ``decay``, ``inflow``: for each step of a chunk, [chunks, H].
    """
    # First pass: a chunk maps what enters it to product * entering + ending, where ending comes of a zero state.
    product, ending = decay[0].clone(), inflow[0].clone()
    for decay_now, inflow_now in zip(decay[1:], inflow[1:], strict=True):
        product = _keep(product, decay_now, is_spoiled).mul_(decay_now)
        torch.addcmul(inflow_now, decay_now, _keep(ending, decay_now, is_spoiled), out=ending)
    # The join: through these maps, chunk after chunk.
    entering_each = torch.empty_like(ending)
    order = range(len(ending) - 1, -1, -1) if backwards else range(len(ending))
    for chunk in order:
        entering_each[chunk] = entering
        entering = torch.addcmul(ending[chunk], product[chunk], _keep(entering, product[chunk], is_spoiled))
    return entering_each


class MinimalCell(Cell):
    """Base of both: one product for all gates and the candidate, a scan, the last values as final states."""

    #: Rows of ``weight`` over ``hidden_size``: the gates, and the candidate last.
    num_parts: ClassVar[int]
    #: The initial bias of the first gate, so that the cell remembers at first.
    first_bias: ClassVar[float]

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(self.num_parts * hidden_size, input_size))
        self.bias = nn.Parameter(torch.empty(self.num_parts * hidden_size))
        self.reset_parameters()

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        return "flat"

    def reset_parameters(self) -> None:
        """Draw the weight as ``torch.nn.Linear`` does, and set a bias that remembers at first."""
        bound = self.input_size**-0.5
        init.uniform_(self.weight, -bound, bound)
        bias = torch.zeros_like(self.bias)
        bias[: self.hidden_size] = self.first_bias
        init.copy_(self.bias, bias)

    def update(self, *gates: Tensor) -> Tensor:
        """The share by which each token's state moves to its candidate, before a sigmoid, [T, hidden]."""
        raise NotImplementedError

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State]:
        """Outputs [T, hidden] of ``values`` [T, input] in flat order, and final states; see :class:`Cell`."""
        parts = linear(values, self.weight, self.bias)
        dtype = parts.dtype
        if dtype in (torch.float16, torch.bfloat16):  # a long product of decays wants more digits
            parts = parts.float()
        *gates, candidate = parts.chunk(self.num_parts, 1)
        update = self.update(*gates)
        # With u = sigmoid(update), the share that moves, the inflow is u·c and the decay 1 - u = sigmoid(-update).
        inflow = torch.sigmoid(update) * positive(candidate)
        # The scan knows no sequences without tokens, so it gets no states of them.
        is_dense = schedule.lengths is None
        starts = torch.arange(0, schedule.size, schedule.length, device=values.device) if is_dense else schedule.begins
        before = None if state is None else state[0].to(inflow.dtype)
        given = before
        if before is not None and schedule.lengths is not None and not schedule.lengths.all():
            given = before.index_select(0, on_device(np.flatnonzero(schedule.lengths), before.device))
        hidden = linear_scan(torch.sigmoid(-update), inflow, starts, given).to(dtype)
        return hidden, (schedule.last(hidden, None if before is None else before.to(dtype)),)


@register_cell("mingru")
class MinGRUCell(MinimalCell):
    """minGRU: one gate, by which the state moves to the candidate."""

    num_parts = 2
    first_bias = -1.0

    def update(self, *gates: Tensor) -> Tensor:
        return gates[0]


@register_cell("minlstm")
class MinLSTMCell(MinimalCell):
    """minLSTM: a forget and an input gate, of which only the ratio matters."""

    num_parts = 3
    first_bias = 1.0

    def update(self, *gates: Tensor) -> Tensor:
        forget, take = gates
        return logsigmoid(take) - logsigmoid(forget)  # its sigmoid is i / (f + i)


def positive(values: Tensor) -> Tensor:
    """The paper's *g*: ``x + 0.5`` from zero on, ``sigmoid(x)`` below; continuous, rising, never negative."""
    return values.relu() + torch.sigmoid(-(-values).relu())
