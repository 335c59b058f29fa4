"""The classical cells, with torch's parameters and torch's numbers.

On CUDA they run cuDNN's packed kernel, or its dense one where all lengths are equal. On the CPU the LSTM runs torch's
dense kernel over the rectangles of a staircase, and the others a loop over time of our own
(:mod:`ullage.models.timeloop`), because torch's kernels for them spend their time on rows of few sequences.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import initialization as init

from ullage.models.cells import Cell, State, register_cell
from ullage.models.schedule import RunOrder, Schedule
from ullage.models.timeloop import gru_loop, rnn_loop


class TorchCell(Cell):
    """A cell that is a layer of torch.

    It inherits from the layer, rather than holding it, because sharded training (ZeRO-3, FSDP) gathers a module's
    parameters whenever the module is called: this one is called once, however many rectangles its schedule has, so
    ranks with other lengths gather equally often. So the layer's own forward is hidden behind another signature.
    """

    kernel: ClassVar[type[nn.RNNBase]]

    hidden_size: int

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        return "packed" if device.type == "cuda" else "staircase"

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        if state is None:
            zeros = values.new_zeros(schedule.num_sequences, self.hidden_size)
            state = (zeros,) * len(self.state_names)
        else:
            state = schedule.ranked(state)
        if schedule.run_order == "staircase":
            outputs, final = self._staircase(values, schedule, state)
        elif schedule.lengths is None:
            outputs, final = self._call(values.view(schedule.length, schedule.num_sequences, -1), state)
            outputs = outputs.reshape(schedule.size, -1)
        else:
            outputs, final = self._packed(values, schedule, state)
        return outputs, schedule.unranked(final) if schedule.keeps_state else None

    def _staircase(self, values: Tensor, schedule: Schedule, state: State) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        ended: list[State] = []
        blocks = values.split([window.steps * window.rows for window in schedule.windows])
        for window, block in zip(schedule.windows, blocks, strict=True):
            if len(state[0]) > window.rows:
                ended.append(tuple(s[window.rows :] for s in state))
                state = tuple(s[: window.rows] for s in state)
            output, state = self._call(block.view(window.steps, window.rows, -1), state)
            outputs.append(output.reshape(len(block), -1))
        final = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), final

    def _packed(self, values: Tensor, schedule: Schedule, state: State) -> tuple[Tensor, State]:
        running = schedule.rows[0]  # sequences of no tokens keep their state
        packed = PackedSequence(values, torch.tensor(schedule.rows))
        output, final = self._call(packed, tuple(s[:running].contiguous() for s in state))
        return output.data, tuple(torch.cat([f, s[running:]]) for f, s in zip(final, state))

    def _call(self, values: Tensor | PackedSequence, state: State) -> tuple[Tensor, State]:
        """Torch's kernel, which knows the state as [layers, n, hidden], bare if it is but one tensor."""
        given = tuple(s.unsqueeze(0) for s in state)
        output, final = self.kernel.forward(
            cast(nn.RNNBase, self), values, given if len(given) > 1 else given[0]
        )
        return output, tuple(s.squeeze(0) for s in (final if isinstance(final, tuple) else (final,)))


class LoopedCell(TorchCell):
    """A torch layer whose kernel on the CPU our own loop outruns; its state is its output."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        return "packed" if device.type in ("cpu", "cuda") else "staircase"

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        if values.device.type != "cpu" or schedule.run_order != "packed":
            return super().forward(values, schedule, state)
        before = values.new_zeros(schedule.num_sequences, self.hidden_size) if state is None else state[0]
        ranked = before if state is None else schedule.ranked(state)[0]
        outputs = self.loop(values, ranked[: schedule.rows[0]], schedule.rows)
        return outputs, (schedule.last(outputs, before),)

    def loop(self, values: Tensor, state: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Outputs [size, hidden] of ``values`` in packed order, from the state [rows[0], hidden] before them.

        The input's part sets the dtype, which autocast may have lowered; the loop keeps to it.
        """
        raise NotImplementedError


@register_cell("lstm")
class LSTMCell(TorchCell, nn.LSTM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with forget gate), as in ``torch.nn.LSTM``."""

    kernel = nn.LSTM
    state_names = ("hidden", "memory")

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.LSTM.__init__(self, input_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draws the weights as torch does, except that the cell remembers at first."""
        super().reset_parameters()
        parameter = cast(Tensor, self.bias_ih_l0)
        bias = parameter.detach().clone()
        bias[self.hidden_size : 2 * self.hidden_size] = 1.0  # Jozefowicz, Zaremba and Sutskever 2015
        init.copy_(parameter, bias)


@register_cell("gru")
class GRUCell(LoopedCell, nn.GRU):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Gated recurrent unit (Cho et al. 2014), as in ``torch.nn.GRU``."""

    kernel = nn.GRU

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.GRU.__init__(self, input_size, hidden_size)

    def loop(self, values: Tensor, state: Tensor, rows: tuple[int, ...]) -> Tensor:
        gates = nn.functional.linear(values, self.weight_ih_l0, self.bias_ih_l0)
        weight, bias, state = (tensor.to(gates.dtype) for tensor in (self.weight_hh_l0, self.bias_hh_l0, state))
        return gru_loop(gates, weight, bias, state, rows)


class _ElmanCell(LoopedCell, nn.RNN):  # pyright: ignore[reportIncompatibleMethodOverride]
    kernel = nn.RNN
    relu: ClassVar[bool]

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.RNN.__init__(self, input_size, hidden_size, nonlinearity="relu" if self.relu else "tanh")

    def loop(self, values: Tensor, state: Tensor, rows: tuple[int, ...]) -> Tensor:
        gates = nn.functional.linear(values, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        return rnn_loop(gates, self.weight_hh_l0.to(gates.dtype), state.to(gates.dtype), rows, self.relu)


@register_cell("rnn_tanh")
class TanhCell(_ElmanCell):
    """Elman's network with tanh, as in ``torch.nn.RNN``."""

    relu = False


@register_cell("rnn_relu")
class ReLUCell(_ElmanCell):
    """Elman's network with ReLU, as in ``torch.nn.RNN``."""

    relu = True
