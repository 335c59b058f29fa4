"""The order in which a recurrent layer works through sequences of unequal length: the staircase.

Sort the sequences by falling length and let time run downwards: the rows that still run form a staircase. Torch's
packed kernel takes it step by step, and on the CPU its backward pass grows with the square of the longest length
(pytorch#149194), while the dense kernel wants a rectangle. So the staircase is cut into a few rectangles, each as wide
as the rows that enter it, and the dense kernel runs them one after another with the state carried on. Rows that end
inside a rectangle run on over padding whose result nobody takes. Where to cut is a shortest path over the distinct
lengths: a rectangle costs its area and a call. On CUDA cuDNN takes the staircase itself, so there every step is as
wide as the rows that still run and nothing is padded.

Both orders are one idea: ``rows[t]``, how many rows step *t* is wide. The token at time *t* of the sequence of rank
*r* lies at ``sum(rows[:t]) + r``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.layout import Int64, Layout

#: What one call of a dense kernel costs beside its area, in steps of one row (measured for hidden sizes 64 to 512).
CALL_COST = 64
#: A rectangle of more elements than this is cut in time, so that what backward reads again is still in the cache.
MAX_ELEMENTS = 2**20
#: The shortest path is quadratic in its points; more distinct lengths than this are thinned out.
MAX_POINTS = 256


@dataclass(frozen=True)
class Window:
    """A rectangle of the staircase: ``steps`` time steps of ``rows`` sequences."""

    steps: int
    rows: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Run order of one batch.

    ``windows``: the rectangles, in time order; empty where the packed kernel runs. ``batch_sizes`` [max length] is the
    width of each step, on the host, for the packed kernel alone. ``order`` [n] lists sequences by falling length and
    ``inverse`` undoes it; both are ``None`` where the order is the given one. ``where`` [T] is the place of each flat
    token in the run order of ``size`` places; ``None`` where all lengths are equal and a transpose does it.
    ``keeps_state``: whether every sequence's final state can be told, because a cut lies at its end.
    """

    num_sequences: int
    size: int
    windows: tuple[Window, ...]
    keeps_state: bool
    batch_sizes: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    where: Tensor | None = None
    lengths: Int64 | None = None

    @classmethod
    def dense(cls, num_sequences: int, length: int, hidden_size: int, *, on_cpu: bool = True) -> Schedule:
        """The order for ``num_sequences`` of one ``length``: one rectangle, cut in time where it is large."""
        windows = _blocks(length, num_sequences, hidden_size) if on_cpu else (Window(length, num_sequences),)
        return cls(num_sequences, num_sequences * length, tuple(windows), keeps_state=True)

    @classmethod
    def ragged(
        cls, lengths: Int64, hidden_size: int, device: torch.device, *, keep_state: bool, packed: bool | None = None
    ) -> Schedule:
        """The order for ``lengths`` [n] (host, tokens): packed on CUDA unless told, a staircase elsewhere.

        ``keep_state`` cuts at every distinct length, so that final states can be told. Copies indices to ``device``
        without waiting for it.
        """
        layout = Layout(lengths)
        ranked = layout.time_major()
        windows: list[Window] = []
        rows = ranked.batch_sizes
        if packed is None:
            packed = device.type == "cuda"
        if not packed:
            points = np.unique(np.concatenate([np.zeros(1, np.int64), lengths]))
            cuts = points if keep_state else _cheapest_cuts(points, rows)
            steps = np.diff(cuts)
            rows = np.repeat(ranked.batch_sizes[cuts[:-1]], steps)
            for start, count in zip(cuts[:-1], steps, strict=True):
                windows += _blocks(int(count), int(ranked.batch_sizes[start]), hidden_size)
        base = np.cumsum(rows) - rows
        where = base[layout.positions()] + ranked.inverse[layout.item_ids()]

        def index(array: Int64) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            layout.num_items,
            int(rows.sum()),
            tuple(windows),
            keep_state or packed,
            batch_sizes=torch.from_numpy(rows) if packed else None,
            order=index(ranked.order),
            inverse=index(ranked.inverse),
            where=index(where),
            lengths=lengths,
        )

    def place(self, flat: Tensor) -> Tensor:
        """Flat values [T, ...] in run order [size, ...]; padding holds zeros."""
        if self.where is None:
            return _swap(flat, self.num_sequences)
        return flat.new_zeros(self.size, *flat.shape[1:]).index_copy(0, self.where, flat)

    def take(self, run: Tensor) -> Tensor:
        """Values in run order [size, ...] as flat values [T, ...]; undoes :meth:`place`."""
        if self.where is None:
            return _swap(run, self.size // self.num_sequences)
        return _Take.apply(run, self.where)

    def flip(self, run: Tensor) -> Tensor:
        """Each sequence backwards in time, at its own end, in run order [size, ...]; undoes itself."""
        if self.lengths is None:
            return run.view(-1, self.num_sequences, *run.shape[1:]).flip(0).reshape(run.shape)
        return self.place(self.take(run).index_select(0, self._backwards))

    def ranked(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """States [n, H] of the sequences as given, by falling length."""
        order = self.order
        return state if order is None else tuple(s.index_select(0, order) for s in state)

    def unranked(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Undoes :meth:`ranked`."""
        inverse = self.inverse
        return state if inverse is None else tuple(s.index_select(0, inverse) for s in state)

    @cached_property
    def _backwards(self) -> Tensor:
        assert self.lengths is not None
        assert self.where is not None
        layout = Layout(self.lengths)
        last = layout.starts + layout.lengths - 1
        index = (last + layout.starts)[layout.item_ids()] - np.arange(layout.size)
        return torch.from_numpy(index).to(self.where.device, non_blocking=True)


class _Take(torch.autograd.Function):
    """``index_select`` with indices that never repeat: the gradient is written, not added row by row."""

    @staticmethod
    def forward(ctx: Any, run: Tensor, where: Tensor) -> Tensor:
        ctx.save_for_backward(where)
        ctx.size = run.shape[0]
        return run.index_select(0, where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (where,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy(0, where, grad), None


def _swap(values: Tensor, first: int) -> Tensor:
    """[first * second, ...] as [second * first, ...]: rows become columns."""
    second = values.shape[0] // first
    if first == 1 or second == 1:
        return values
    return values.view(first, second, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


def _blocks(steps: int, rows: int, hidden_size: int) -> list[Window]:
    """A rectangle of ``steps`` by ``rows`` as equal blocks that the cache can hold."""
    count = min(steps, -(-steps * rows * hidden_size // MAX_ELEMENTS))
    ends = [steps * i // count for i in range(count + 1)]
    return [Window(end - start, rows) for start, end in pairwise(ends)]


def _cheapest_cuts(points: Int64, batch_sizes: Int64) -> Int64:
    """The cuts, first and last point among them, for which area and calls together cost least.

    ``points``: 0 and the distinct lengths, rising; ``batch_sizes[t]``: rows that run at step *t*. A rectangle from
    cut *a* to cut *b* is ``batch_sizes[a]`` rows wide. A shortest path by dynamic programming.
    """
    if len(points) > MAX_POINTS:
        points = points[np.linspace(0, len(points) - 1, MAX_POINTS).astype(np.int64)]
    rows = batch_sizes[points[:-1]]
    cost = np.zeros(len(points), np.int64)
    came_from = np.zeros(len(points), np.int64)
    for end in range(1, len(points)):
        costs = cost[:end] + (points[end] - points[:end]) * rows[:end] + CALL_COST
        came_from[end] = np.argmin(costs)
        cost[end] = costs[came_from[end]]
    cuts = [len(points) - 1]
    while cuts[-1]:
        cuts.append(int(came_from[cuts[-1]]))
    return points[cuts[::-1]]
