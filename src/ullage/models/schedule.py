"""The order in which a recurrent layer works through sequences of unequal length.

A cell names one of three run orders, and none of them holds padding that costs more than it saves:

* *flat*: as the sequences came, end to end. For a cell that is parallel in time.
* *packed*: time first, longest sequence first. Step *t* is ``rows[t]`` wide, the rows that still run. For cuDNN, and
  for a loop over time.
* *staircase*: packed, but cut into a few rectangles, each as wide as the rows that enter it, so that a dense kernel
  can run them one after another with the state carried on. Rows that end inside a rectangle run on over padding whose
  result nobody takes. Where to cut is a shortest path over the distinct lengths: a rectangle costs its area and a call.
  Torch's packed kernel on the CPU would need no padding, but its backward pass grows with the square of the longest
  length (pytorch#149194).

The last two are one idea: the token at time *t* of the sequence of rank *r* lies at ``sum(rows[:t]) + r``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ullage.layout import Int64, Layout

RunOrder = Literal["flat", "packed", "staircase"]

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

    ``rows``: how many sequences each time step is wide, a list on the host; empty in flat order. ``windows``: the
    rectangles of a staircase, in time order. ``order`` [n] lists sequences by falling length and ``inverse`` undoes
    it; both are ``None`` where the order is the given one. ``where`` [T] is the place of each flat token in the run
    order of ``size`` places; ``None`` where it is the same place, or where all are ``length`` tokens long and a
    transpose does it. ``lengths`` [n] are on the host; ``None`` where all are equal. ``keeps_state``: whether every
    sequence's final state can be told; in a staircase only where a cut lies at each end.
    """

    num_sequences: int
    size: int
    run_order: RunOrder
    keeps_state: bool = True
    rows: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()
    order: Tensor | None = None
    inverse: Tensor | None = None
    where: Tensor | None = None
    lengths: Int64 | None = None
    length: int = 0

    @classmethod
    def dense(cls, num_sequences: int, length: int, hidden_size: int, run_order: RunOrder = "staircase") -> Schedule:
        """The order for ``num_sequences`` of one ``length``; a rectangle is cut in time where it is large."""
        rows = () if run_order == "flat" else (num_sequences,) * length
        windows = tuple(_blocks(length, num_sequences, hidden_size)) if run_order == "staircase" else ()
        return cls(num_sequences, num_sequences * length, run_order, rows=rows, windows=windows, length=length)

    @classmethod
    def ragged(
        cls,
        lengths: Int64,
        hidden_size: int,
        device: torch.device,
        run_order: RunOrder = "staircase",
        *,
        keep_state: bool = True,
    ) -> Schedule:
        """The order for ``lengths`` [n] (host, tokens). Copies indices to ``device`` without waiting for it.

        ``keep_state`` cuts a staircase at every distinct length, so that final states can be told.
        """
        layout = Layout(lengths)
        if run_order == "flat":
            return cls(layout.num_items, layout.size, run_order, lengths=lengths)
        ranked = layout.time_major()
        windows: list[Window] = []
        rows = ranked.batch_sizes
        if run_order == "staircase":
            points = np.unique(np.concatenate([np.zeros(1, np.int64), lengths]))
            cuts = points if keep_state else _cheapest_cuts(points, rows)
            steps = np.diff(cuts)
            rows = np.repeat(ranked.batch_sizes[cuts[:-1]], steps)
            for start, count in zip(cuts[:-1], steps, strict=True):
                windows += _blocks(int(count), int(ranked.batch_sizes[start]), hidden_size)
        base = np.cumsum(rows) - rows
        where = base[layout.positions()] + ranked.inverse[layout.item_ids()]
        order, inverse, where = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (ranked.order, ranked.inverse, where)
        )
        return cls(
            layout.num_items,
            int(rows.sum()),
            run_order,
            keep_state or run_order == "packed",
            tuple(rows.tolist()),
            tuple(windows),
            order,
            inverse,
            where,
            lengths,
        )

    # Values between flat and run order.

    def place(self, flat: Tensor) -> Tensor:
        """Flat values [T, ...] in run order [size, ...]; padding holds zeros."""
        if self.run_order == "flat":
            return flat
        if self.where is None:
            return _swap(flat, self.num_sequences)
        return flat.new_zeros(self.size, *flat.shape[1:]).index_copy(0, self.where, flat)

    def take(self, run: Tensor) -> Tensor:
        """Values in run order [size, ...] as flat values [T, ...]; undoes :meth:`place`."""
        if self.run_order == "flat":
            return run
        if self.where is None:
            return _swap(run, self.length)
        return _Take.apply(run, self.where)

    def flip(self, run: Tensor) -> Tensor:
        """Each sequence backwards in time, at its own end, in run order [size, ...]; undoes itself."""
        if self.lengths is None:
            flat = self.run_order == "flat"
            first, second = (self.num_sequences, self.length) if flat else (self.length, self.num_sequences)
            return run.view(first, second, *run.shape[1:]).flip(1 if flat else 0).reshape(run.shape)
        if self._turned is None:
            return self.place(self.take(run).index_select(0, self._backwards))
        return _Take.apply(run, self._turned)

    # States between the order given and rank, which is by falling length.

    def ranked(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """States [n, H] of the sequences as given, by falling length."""
        order = self.order
        return state if order is None else tuple(s.index_select(0, order) for s in state)

    def unranked(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Undoes :meth:`ranked`."""
        inverse = self.inverse
        return state if inverse is None else tuple(s.index_select(0, inverse) for s in state)

    def last(self, run: Tensor, before: Tensor | None = None) -> Tensor:
        """The values of each sequence's last token, [n, ...] in the order given, from run order without padding.

        A sequence of no tokens has what was ``before`` it [n, ...]; zeros if that is ``None``.
        """
        if self.lengths is None:
            if self.run_order == "flat":
                return run.view(self.num_sequences, self.length, *run.shape[1:])[:, -1]
            return run[-self.num_sequences :]
        ends, empty = self._ends
        values = run.index_select(0, ends.to(run.device))
        if empty is None:
            return values
        empty = empty.to(run.device).view(-1, *(1,) * (run.ndim - 1))
        return torch.where(empty, torch.zeros_like(values) if before is None else before, values)

    @cached_property
    def starts(self) -> Int64:
        """The flat position of each sequence's first token, also of those that have none."""
        if self.lengths is None:
            return np.arange(self.num_sequences) * self.length
        return Layout(self.lengths).starts

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor | None]:
        assert self.lengths is not None
        ends = torch.from_numpy(np.maximum(self.starts + self.lengths - 1, 0))
        empty = torch.from_numpy(self.lengths == 0) if (self.lengths == 0).any() else None
        return (ends if self.where is None else self.where.index_select(0, ends.to(self.where.device))), empty

    @cached_property
    def _backwards(self) -> Tensor:
        """Flat values backwards, as an index over flat values."""
        assert self.lengths is not None
        layout = Layout(self.lengths)
        last = layout.starts + layout.lengths - 1
        index = torch.from_numpy((last + layout.starts)[layout.item_ids()] - np.arange(layout.size))
        return index if self.where is None else index.to(self.where.device, non_blocking=True)

    @cached_property
    def _turned(self) -> Tensor | None:
        """The same over values in run order; ``None`` where the run order has padding."""
        if self.where is None:
            return self._backwards
        if self.size != len(self.where):
            return None
        return torch.empty_like(self.where).index_copy(0, self.where, self.where.index_select(0, self._backwards))


class _Take(torch.autograd.Function):
    """``index_select`` with indices that never repeat: the gradient is written, not added row by row."""

    @staticmethod
    def forward(ctx: Any, run: Tensor, where: Tensor) -> Tensor:
        where = where.to(run.device)
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
