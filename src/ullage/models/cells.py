"""Base class of recurrent cells, and the registry through which a configuration names them.

A cell is a module of one layer and one direction. A cell of your own is one class with one method, a time step::

    @register_cell("my_cell")
    class MyCell(Cell):
        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            ...

        def step(self, values, state):
            ...

:class:`Cell` loops it over time, each step as wide as the sequences that still run. A cell that is faster without
that loop overrides ``forward`` and, if need be, ``run_order``, as the cells of torch's kernels do
(:mod:`ullage.models.classical`) and those that are parallel in time (:mod:`ullage.models.minimal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ullage.core.errors import require_one_of
from ullage.models.schedule import RunOrder, Schedule

#: One tensor [n, hidden] for each name in ``state_names``.
State = tuple[Tensor, ...]

CELLS: dict[str, type[Cell]] = {}


def register_cell(name: str) -> Callable[[type[Cell]], type[Cell]]:
    """Decorate a :class:`Cell` so that ``RecurrentConfig(cell=name)`` finds it."""

    def register(cell: type[Cell]) -> type[Cell]:
        CELLS[name] = cell
        return cell

    return register


def cell_class(name: str) -> type[Cell]:
    """The cell registered as ``name``. Raises ``InputError`` that lists the registered names."""
    return CELLS[require_one_of(name, CELLS, "recurrent cell")]


class Cell(nn.Module):
    """One recurrent layer in one direction. Subclasses take ``(input_size, hidden_size)``.

    A subclass defines :meth:`step`, or overrides :meth:`forward`. Under ZeRO-3 a step may call no submodules, because
    ranks with other lengths would gather their parameters less often: keep parameters in the cell itself.
    """

    #: The parts of a sequence's state; the first is the output of its last step.
    state_names: ClassVar[tuple[str, ...]] = ("hidden",)
    #: Whether a sequence may go on from the state of another, as in beam search.
    reorderable: ClassVar[bool] = True
    input_size: int
    hidden_size: int

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size

    @classmethod
    def run_order(cls, device: torch.device) -> RunOrder:
        """The order of the values that :meth:`forward` takes on ``device`` (:mod:`ullage.models.schedule`)."""
        return "packed"

    def step(self, values: Tensor, state: State) -> State:
        """New states [rows, hidden] after one time step, from ``values`` [rows, input]; the first is the output."""
        raise NotImplementedError(f"{type(self).__name__} needs a step() or a forward()")

    def forward(self, values: Tensor, schedule: Schedule, state: State | None = None) -> tuple[Tensor, State | None]:
        """Outputs [size, hidden] of ``values`` [size, input], both in run order, and final states [n, hidden].

        ``state``: [n, hidden] for each name in ``state_names``, in the order given; zeros if ``None``. Final states may
        be ``None`` where the schedule does not keep them. Does not wait for the device.
        """

        def step(block: Tensor, rows: int, state: State) -> tuple[Tensor, State]:
            state = self.step(block, state)
            return state[0], state

        blocks = zip(values.split(schedule.rows), schedule.rows)
        outputs, final = run_blocks(step, blocks, self.first_state(values, schedule, state))
        return outputs, schedule.unranked(final)

    def first_state(self, values: Tensor, schedule: Schedule, state: State | None) -> State:
        """The states [n, hidden] to start from, by falling length; zeros where none are given."""
        if state is not None:
            return schedule.ranked(state)
        return (values.new_zeros(schedule.num_sequences, self.hidden_size),) * len(self.state_names)

    def reset_parameters(self) -> None:
        """Draw the parameters that lie in the cell itself; by default they stay as the constructor made them.

        Draw by ``transformers.initialization``, whose functions leave loaded parameters alone. Submodules are drawn as
        everywhere in transformers.
        """


def run_blocks(
    run: Callable[[Tensor, int, State], tuple[Tensor, State]], blocks: Iterable[tuple[Tensor, int]], state: State
) -> tuple[Tensor, State]:
    """Outputs of all blocks end to end and final states, by falling length; each block goes on from the one before.

    Args:
        run: gives a block's outputs and the states after it, of the rows that run in it
        blocks: values of each block, and its number of rows, which never grows
        state: [n, hidden] of all sequences by falling length, before the first block
    """
    outputs: list[Tensor] = []
    ended: list[State] = []
    for block, rows in blocks:
        # The shortest sequences are the last rows; those that are not in this block have their final state.
        if rows < len(state[0]):
            ended.append(tuple(part[rows:] for part in state))
            state = tuple(part[:rows] for part in state)
        output, state = run(block, rows, state)
        outputs.append(output)
    # The shortest ended first: what runs to the end, then the ended ones in reverse.
    final = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), final
