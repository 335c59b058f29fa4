"""What a recurrent cell is, one's own among them, and the registry through which a configuration names cells.

A cell is a module of one layer and one direction. One's own is one class with one method, a single time step::

    @register_cell("my_cell")
    class MyCell(Cell):
        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            ...

        def step(self, values, state):
            ...

:class:`Cell` loops it over time, each step as wide as the sequences that still run. A cell that can do better than a
loop overrides ``forward`` and, if need be, ``run_order``: torch's kernels do (:mod:`ullage.models.classical`), and the
cells that are parallel in time (:mod:`ullage.models.minimal`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ullage.errors import InputError
from ullage.models.schedule import RunOrder, Schedule

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
    """One recurrent layer in one direction. Subclasses take ``(input_size, hidden_size)``.

    A subclass gives :meth:`step`, or overrides :meth:`forward`. Under ZeRO-3 a step may call no submodules, because
    ranks with other lengths would gather their parameters less often: parameters then lie in the cell itself.
    """

    #: What the state of a sequence consists of; the first is the output of its last step.
    state_names: ClassVar[tuple[str, ...]] = ("hidden",)
    #: Whether a sequence may go on from the state of another, as beam search lets it.
    reorderable: ClassVar[bool] = True
    input_size: int
    hidden_size: int

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        """The order (:mod:`ullage.models.schedule`) in which :meth:`forward` takes values on ``device``."""
        return "packed"

    def step(self, values: Tensor, state: State) -> State:
        """One time step: ``values`` [rows, input], states [rows, hidden] to new states; the first is the output."""
        raise NotImplementedError(f"{type(self).__name__} needs a step() or a forward()")

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        """``values`` [size, input] in run order and states [n, hidden] to outputs [size, hidden] and final states.

        Final states may be ``None`` where the schedule does not keep them. Does not wait for the device.
        """
        if state is None:
            state = (values.new_zeros(schedule.num_sequences, self.hidden_size),) * len(self.state_names)
        else:
            state = schedule.ranked(state)
        outputs: list[Tensor] = []
        ended: list[State] = []
        for block in values.split(schedule.rows):
            if len(block) < len(state[0]):
                ended.append(tuple(part[len(block) :] for part in state))
                state = tuple(part[: len(block)] for part in state)
            state = self.step(block, state)
            outputs.append(state[0])
        final = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended)))
        return torch.cat(outputs), schedule.unranked(final)

    def reset_parameters(self) -> None:
        """Draws the parameters that lie in the cell itself, for a model that is not loaded; else they stay as made.

        To be done by ``transformers.initialization``, whose functions leave loaded parameters alone. Submodules are
        drawn as everywhere in transformers.
        """
