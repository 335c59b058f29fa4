"""Recurrent cells, one class each, and the registry through which a configuration names them.

A cell is a module of one layer and one direction. It takes values in the run order of a :class:`Schedule` and the
state of each sequence, and returns values in the same order and the final states. The classical cells run torch's
own kernels: one dense call a rectangle (on the CPU), or one packed call (cuDNN). A cell of one's own subclasses
:class:`Cell` and registers itself::

    @register_cell("my_cell")
    class MyCell(Cell):
        ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import initialization as init

from ullage.errors import InputError
from ullage.models.schedule import Schedule

#: One tensor [n, hidden] for each name in ``state_names``.
State = tuple[Tensor, ...]

CELLS: dict[str, type[Cell]] = {}


def register_cell(name: str) -> Callable[[type[Cell]], type[Cell]]:
    """A class decorator that lets ``RecurrentConfig(cell=name)`` find a :class:`Cell`."""

    def register(cell: type[Cell]) -> type[Cell]:
        CELLS[name] = cell
        return cell

    return register


def cell_class(name: str) -> type[Cell]:
    """The cell registered as ``name``. Raises ``InputError`` that lists those there are."""
    if name not in CELLS:
        raise InputError("no such recurrent cell", expected=f"one of {', '.join(CELLS)}", found=repr(name))
    return CELLS[name]


class Cell(nn.Module):
    """One recurrent layer in one direction. Subclasses take ``(input_size, hidden_size)``."""

    #: What the state of a sequence consists of; the first is the output of its last step.
    state_names: ClassVar[tuple[str, ...]] = ("hidden",)
    #: Whether a sequence may go on from the state of another, as beam search lets it.
    reorderable: ClassVar[bool] = True

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        """``values`` [size, input] in run order and states [n, hidden] to outputs [size, hidden] and final states.

        Final states are ``None`` where the schedule does not keep them. Does not wait for the device.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws the parameters that lie in the cell itself, not in its submodules; for a model that is not loaded."""


class _TorchCell(Cell):
    """A cell that is a layer of torch and runs its kernel.

    It inherits from the layer, rather than holding it, because sharded training (ZeRO-3, FSDP) gathers a module's
    parameters whenever the module is called: this one is called once, however many rectangles its schedule has, so
    ranks with other lengths gather equally often. So the layer's own forward is hidden behind another signature.
    """

    kernel: ClassVar[type[nn.RNNBase]]
    hidden_size: int

    def reset_parameters(self) -> None:
        """Draws the weights as torch does, except that an LSTM remembers at first."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound)
        if isinstance(self, nn.LSTM):  # forget gate open (Jozefowicz, Zaremba and Sutskever 2015)
            parameter = cast(Tensor, self.bias_ih_l0)
            bias = parameter.detach().clone()
            bias[self.hidden_size : 2 * self.hidden_size] = 1.0
            init.copy_(parameter, bias)

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        if state is None and schedule.keeps_state:
            zeros = values.new_zeros(schedule.num_sequences, self.hidden_size)
            state = (zeros,) * len(self.state_names)
        elif state is not None:
            state = schedule.ranked(state)
        run = self._staircase if schedule.batch_sizes is None else self._packed
        outputs, final = run(values, schedule, state)
        return outputs, schedule.unranked(final) if schedule.keeps_state else None

    def _staircase(self, values: Tensor, schedule: Schedule, state: State | None) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        ended: list[State] = []
        blocks = values.split([window.steps * window.rows for window in schedule.windows])
        for window, block in zip(schedule.windows, blocks, strict=True):
            if state is not None and len(state[0]) > window.rows:
                ended.append(tuple(s[window.rows :] for s in state))
                state = tuple(s[: window.rows] for s in state)
            output, state = self._call(block.view(window.steps, window.rows, -1), state)
            outputs.append(output.reshape(len(block), -1))
        assert state is not None
        final = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), final

    def _packed(self, values: Tensor, schedule: Schedule, state: State | None) -> tuple[Tensor, State]:
        assert schedule.batch_sizes is not None
        assert state is not None
        running = int(schedule.batch_sizes[0])  # on the host; sequences of no tokens keep their state
        output, final = self._call(PackedSequence(values, schedule.batch_sizes), tuple(s[:running] for s in state))
        return output.data, tuple(torch.cat([f, s[running:]]) for f, s in zip(final, state))

    def _call(self, values: Tensor | PackedSequence, state: State | None) -> tuple[Tensor, State]:
        """Torch's kernel, which knows the state as [layers, n, hidden], bare if it is but one tensor."""
        given = None if state is None else tuple(s.unsqueeze(0) for s in state)
        bare = given[0] if given is not None and len(given) == 1 else given
        output, final = self.kernel.forward(cast(nn.RNNBase, self), values, bare)
        return output, tuple(s.squeeze(0) for s in (final if isinstance(final, tuple) else (final,)))


@register_cell("lstm")
class LSTMCell(_TorchCell, nn.LSTM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with forget gate), as in ``torch.nn.LSTM``."""

    kernel = nn.LSTM
    state_names = ("hidden", "memory")

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.LSTM.__init__(self, input_size, hidden_size)


@register_cell("gru")
class GRUCell(_TorchCell, nn.GRU):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Gated recurrent unit (Cho et al. 2014), as in ``torch.nn.GRU``."""

    kernel = nn.GRU

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.GRU.__init__(self, input_size, hidden_size)


@register_cell("rnn_tanh")
class TanhCell(_TorchCell, nn.RNN):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Elman's network with tanh, as in ``torch.nn.RNN``."""

    kernel = nn.RNN

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.RNN.__init__(self, input_size, hidden_size, nonlinearity="tanh")


@register_cell("rnn_relu")
class ReLUCell(_TorchCell, nn.RNN):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Elman's network with ReLU, as in ``torch.nn.RNN``."""

    kernel = nn.RNN

    def __init__(self, input_size: int, hidden_size: int) -> None:
        nn.RNN.__init__(self, input_size, hidden_size, nonlinearity="relu")
