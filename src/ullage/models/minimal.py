"""minGRU and minLSTM: cells whose gates see the input alone, so that a layer is parallel in time.

Both are ``h[t] = d[t] * h[t - 1] + (1 - d[t]) * c[t]``. The decay ``d`` and the candidate ``c`` are one product over
all tokens; the recurrence is a scan over the flat batch (:mod:`ullage.models.scan`). The paper works with logarithms,
because its scan divides by products of ``d``; this scan does not divide, so it needs none, and takes any initial state.
``1 - d`` is a sigmoid of its own, so that neither gate loses digits near 0 or 1.

Source: Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, "Were RNNs All We Needed?" (2024), appendix B.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid
from transformers import initialization as init

from ullage.models.cells import Cell, State, register_cell
from ullage.models.scan import linear_scan
from ullage.models.schedule import RunOrder, Schedule


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
        starts = self._starts(schedule, values.device)
        before = None if state is None else state[0].to(inflow.dtype)
        given = before
        if before is not None and schedule.lengths is not None and not schedule.lengths.all():
            given = before.index_select(0, torch.from_numpy(np.flatnonzero(schedule.lengths)).to(before.device))
        hidden = linear_scan(torch.sigmoid(-update), inflow, starts, given).to(dtype)
        return hidden, (schedule.last(hidden, None if before is None else before.to(dtype)),)

    @staticmethod
    def _starts(schedule: Schedule, device: torch.device) -> Tensor:
        if schedule.lengths is None:
            return torch.arange(0, schedule.size, schedule.length, device=device)
        starts = schedule.starts[schedule.lengths > 0]
        return torch.from_numpy(starts).to(device, non_blocking=True)


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
