"""Classical cells (LSTM, GRU, Elman's network) with the parameter names and the numbers of torch's layers.

On CUDA they run cuDNN's packed kernel, or its dense one where all lengths are equal. On the CPU the LSTM runs torch's
dense kernel over the rectangles of a staircase, and the others a loop over time (:mod:`ullage.models.timeloop`),
because torch's kernels for them spend their time on steps of few sequences.

Parameters lie in the cell itself, rather than in a layer within it, because sharded training (ZeRO-3, FSDP) gathers a
module's parameters whenever the module is called: a cell is called once, however many rectangles its schedule has, so
ranks with other lengths gather equally often. Nor is a cell a ``torch.nn.RNNBase``, which torch.compile refuses.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn
from transformers import initialization as init

from ullage.models.cells import Cell, State, register_cell, run_blocks
from ullage.models.schedule import RunOrder, Schedule
from ullage.models.timeloop import gru_loop, rnn_loop


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
        ready = own and weights[0].is_cuda and torch.backends.cudnn.is_acceptable(weights[0])
        if ready and private._use_cudnn_rnn_flatten_weight():
            mode = cudnn.get_cudnn_mode(self.kernel.upper())
            with torch.cuda.device_of(weights[0]), torch.no_grad():
                sizes = (self.input_size, mode, self.hidden_size, 0, 1)
                private._cudnn_rnn_flatten_weight(weights, len(weights), *sizes, False, False)
        return self


class LoopedCell(TorchCell):
    """Base of the cells whose state is their output, run by a loop of :mod:`ullage.models.timeloop` on the CPU."""

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
