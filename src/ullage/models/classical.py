"""Classical cells (LSTM, GRU, Elman's network) with the parameter names and the numbers of torch's layers.

On CUDA they run cuDNN's packed kernel, or its dense one where all lengths are equal. On the CPU the LSTM runs torch's
dense kernel over the rectangles of a staircase, and the others a loop over time (``gru_loop``, ``rnn_loop``),
because torch's kernels for them spend their time on steps of few sequences.

Parameters lie in the cell itself, rather than in a layer within it, because sharded training (ZeRO-3, FSDP) gathers a
module's parameters whenever the module is called: a cell is called once, however many rectangles its schedule has, so
ranks with other lengths gather equally often. Nor is a cell a ``torch.nn.RNNBase``, which torch.compile refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn
from transformers import initialization as init

from ullage.models.cells import Cell, State, register_cell, run_blocks
from ullage.models.schedule import RunOrder, Schedule

# Loops over time of the GRU and of Elman's network on the CPU, forwards and backwards.
#
# Torch's own CPU kernels for both record an autograd node for every operation of every step, and take the gradient of
# the recurrent weight by one product per step, which costs as much for one row as for sixty. Here each step is only as
# wide as the sequences that still run; whatever does not depend on the step before (the input's part of the gates, the
# gradients of both weights) is one product over all tokens. The loops are torch operators of their own, so that
# ``torch.compile`` takes them whole.
#
# Values are in packed order: [size, ...], of which ``rows[t]`` belong to step *t*, and ``rows`` never grow: [3, 2, 2]
# are sequences of 3, 3 and 1 tokens. ``state`` [rows[0], H] is the state before the first step. H is the hidden size.


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
    # Of rows [3, 2, 1] those are the first states of a, b and c, then the outputs of a and b in step 0, and of a in 1.
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


class TorchCell(Cell):
    """Base of the cells that torch has a kernel for, in torch's parametrisation."""

    #: The kernel's name in torch, and how many gates its weights hold.
    kernel: ClassVar[str]
    num_gates: ClassVar[int] = 1

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        size = self.num_gates * hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(size, hidden_size))
        self.bias_ih_l0 = nn.Parameter(torch.empty(size))
        self.bias_hh_l0 = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as torch's layers do."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters(recurse=False):
            init.uniform_(parameter, -bound, bound)

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        return "packed" if device.type == "cuda" else "staircase"

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        """Outputs [size, hidden] of ``values`` [size, input] in run order, and final states; see :class:`Cell`."""
        state = self.first_state(values, schedule, state)
        if schedule.run_order == "staircase":
            outputs, final = self._staircase(values, schedule, state)
        elif schedule.lengths is None:
            outputs, final = self._dense(values.view(schedule.length, schedule.num_sequences, -1), state)
            outputs = outputs.reshape(schedule.size, -1)
        else:
            outputs, final = self._packed(values, schedule, state)
        return outputs, schedule.unranked(final) if schedule.keeps_state else None

    def _staircase(self, values: Tensor, schedule: Schedule, state: State) -> tuple[Tensor, State]:
        """One dense call per rectangle, from the state in which the rectangle before it ended."""

        def run(block: Tensor, rows: int, state: State) -> tuple[Tensor, State]:
            output, state = self._dense(block.view(-1, rows, block.shape[1]), state)
            return output.reshape(len(block), -1), state

        blocks = values.split([window.steps * window.rows for window in schedule.windows])
        return run_blocks(run, zip(blocks, (window.rows for window in schedule.windows), strict=True), state)

    def _dense(self, values: Tensor, state: State) -> tuple[Tensor, State]:
        """Torch's kernel on a rectangle [steps, rows, input]."""
        run = _opaque_kernel if torch.compiler.is_compiling() else _kernel
        output, *final = run(self.kernel, values, None, list(state), self._weights())
        return output, tuple(final)

    def _packed(self, values: Tensor, schedule: Schedule, state: State) -> tuple[Tensor, State]:
        running = schedule.rows[0]  # sequences without tokens are behind these, and keep their state
        started = [part[:running].contiguous() for part in state]
        output, *final = _kernel(self.kernel, values, torch.tensor(schedule.rows), started, self._weights())
        return output, tuple(torch.cat([f, s[running:]]) for f, s in zip(final, state))

    def _weights(self) -> list[Tensor]:
        return [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """On CUDA, make one buffer of the cell's weights, which cuDNN would else put together at every call."""
        super()._apply(fn, recurse)
        weights, private = self._weights(), cast(Any, torch)
        own = all(isinstance(weight, nn.Parameter) for weight in weights)  # not while a parametrisation stands in
        ready = own and weights[0].is_cuda and _is_acceptable(weights[0])
        if ready and private._use_cudnn_rnn_flatten_weight():
            mode = cudnn.get_cudnn_mode(self.kernel.upper())
            with torch.cuda.device_of(weights[0]), torch.no_grad():
                sizes = (self.input_size, mode, self.hidden_size, 0, 1)
                private._cudnn_rnn_flatten_weight(weights, len(weights), *sizes, False, False)
        return self


class LoopedCell(TorchCell):
    """Base of the cells whose state is their output, run by a loop over time on the CPU."""

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        return "packed" if device.type in ("cpu", "cuda") else "staircase"

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        """Outputs [size, hidden] of ``values`` [size, input] in run order, and final states; see :class:`Cell`."""
        if values.device.type != "cpu" or schedule.run_order != "packed":
            return super().forward(values, schedule, state)
        before = values.new_zeros(schedule.num_sequences, self.hidden_size) if state is None else state[0]
        ranked = before if state is None else schedule.ranked(state)[0]
        # Sequences without tokens rank last and take no step; their final state is the one they came with.
        outputs = self.loop(values, ranked[: schedule.rows[0]], schedule.rows)
        return outputs, (schedule.last(outputs, before),)

    def loop(self, values: Tensor, state: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Outputs [size, hidden] of ``values`` [size, input] in packed order, from a ``state`` [rows[0], hidden].

        The loop computes in the dtype of the input's part of the gates, which autocast may have lowered.
        """
        raise NotImplementedError


@register_cell("lstm")
class LSTMCell(TorchCell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with forget gate), as in ``torch.nn.LSTM``."""

    kernel = "lstm"
    num_gates = 4
    state_names = ("hidden", "memory")

    def reset_parameters(self) -> None:
        """Draw the weights as torch does, except for a forget gate that remembers at first."""
        super().reset_parameters()
        # torch's order of gates: input, forget, cell, output.
        bias = self.bias_ih_l0.detach().clone()
        bias[self.hidden_size : 2 * self.hidden_size] = 1.0  # Jozefowicz, Zaremba and Sutskever 2015
        init.copy_(self.bias_ih_l0, bias)


@register_cell("gru")
class GRUCell(LoopedCell):
    """Gated recurrent unit (Cho et al. 2014), as in ``torch.nn.GRU``."""

    kernel = "gru"
    num_gates = 3

    def loop(self, values: Tensor, state: Tensor, rows: tuple[int, ...]) -> Tensor:
        gates = nn.functional.linear(values, self.weight_ih_l0, self.bias_ih_l0)
        weight, bias, state = (tensor.to(gates.dtype) for tensor in (self.weight_hh_l0, self.bias_hh_l0, state))
        return gru_loop(gates, weight, bias, state, rows)


class _ElmanCell(LoopedCell):
    """Base of Elman's network with either activation."""

    def loop(self, values: Tensor, state: Tensor, rows: tuple[int, ...]) -> Tensor:
        gates = nn.functional.linear(values, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        weight, state = self.weight_hh_l0.to(gates.dtype), state.to(gates.dtype)
        return rnn_loop(gates, weight, state, rows, relu=self.kernel == "rnn_relu")


@register_cell("rnn_tanh")
class TanhCell(_ElmanCell):
    """Elman's network with tanh, as in ``torch.nn.RNN``."""

    kernel = "rnn_tanh"


@register_cell("rnn_relu")
class ReLUCell(_ElmanCell):
    """Elman's network with ReLU, as in ``torch.nn.RNN``."""

    kernel = "rnn_relu"


def _is_acceptable(weight: Tensor) -> bool:
    """Whether cuDNN runs cells of this weight; torch's check does not know bfloat16, which it takes from Ampere on."""
    if weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= (8, 0):
        weight = weight.new_empty(0, dtype=torch.half)
    return torch.backends.cudnn.is_acceptable(weight)


def _kernel(
    name: str, values: Tensor, batch_sizes: Tensor | None, state: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """Torch's kernel of one layer and one direction.

    Args:
        name: of the kernel in torch
        values: [steps, rows, input], or [size, input] in packed order
        batch_sizes: int64 [steps], rows of each step in packed order; ``None`` for a rectangle
        state: the parts of the state before, each [rows, hidden]
        weights: as torch's layers list them

    Returns outputs shaped like ``values``, and the parts of the final state.
    """
    dtype = torch.get_autocast_dtype("cuda") if values.is_cuda and torch.is_autocast_enabled("cuda") else None
    if dtype not in (None, torch.float16):
        # torch would cast all to float16, whatever autocast asks for. Weights in one buffer, as cuDNN wants them.
        with torch.autocast("cuda", enabled=False):
            flat = torch.cat([weight.reshape(-1) for weight in weights]).to(dtype)
            cast = [part.view_as(own) for part, own in zip(flat.split([own.numel() for own in weights]), weights)]
            return _kernel(name, values.to(dtype), batch_sizes, [part.to(dtype) for part in state], cast)
    # The kernels take states of all layers, [1, rows, hidden]: a pair for the LSTM, one tensor for the others.
    given: Any = [part.unsqueeze(0) for part in state]
    given = given if len(given) > 1 else given[0]
    run = getattr(torch, name)
    # ``train`` says whether cuDNN keeps what a backward pass needs. The last argument below is batch_first.
    settings = (weights, True, 1, 0.0, torch.is_grad_enabled(), False)  # biases, layers, dropout, train, directions
    if batch_sizes is None:
        output, *final = run(values, given, *settings, False)
    else:
        output, *final = run(values, batch_sizes, given, *settings)
    return [output, *(part.squeeze(0) for part in final)]


@torch.library.custom_op("ullage::rnn_kernel", mutates_args=())
def _opaque_kernel(
    name: str, values: Tensor, batch_sizes: Tensor | None, state: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """:func:`_kernel` as one operator, for torch.compile, which would otherwise unroll it step by step.

    Its backward runs forward again, because an operator cannot hand out what the kernel saves for its own backward.
    """
    # Cloned, because what a custom operator returns must not share memory with its inputs.
    return [part.clone() for part in _kernel(name, values, batch_sizes, state, weights)]


@_opaque_kernel.register_fake
def _(
    name: str, values: Tensor, batch_sizes: Tensor | None, state: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    return [values.new_empty(*values.shape[:-1], state[0].shape[1]), *(torch.empty_like(part) for part in state)]


@torch.library.custom_op("ullage::rnn_kernel_backward", mutates_args=())
def _opaque_backward(
    name: str, values: Tensor, state: list[Tensor], weights: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (values, *state, *weights)]
    recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), recording:  # inside an operator torch would not record
        given, learned = inputs[1 : 1 + len(state)], inputs[1 + len(state) :]
        outputs = _kernel(name, inputs[0], None, given, learned)
    return [grad.clone() for grad in torch.autograd.grad(outputs, inputs, grads)]


@_opaque_backward.register_fake
def _(name: str, values: Tensor, state: list[Tensor], weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (values, *state, *weights)]


def _save_kernel(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.name, values, _, state, weights = inputs
    ctx.parts = len(state)
    ctx.save_for_backward(values, *state, *weights)


def _kernel_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    values, *others = ctx.saved_tensors
    state, weights = others[: ctx.parts], others[ctx.parts :]
    of_values, *rest = _opaque_backward(ctx.name, values, state, weights, [grad.contiguous() for grad in grads])
    return None, of_values, None, rest[: ctx.parts], rest[ctx.parts :]


_opaque_kernel.register_autograd(_kernel_gradients, setup_context=_save_kernel)
