"""The order in which a recurrent layer works through sequences of unequal length.

A cell names one of three run orders; none of them holds padding that costs more than it saves:

* *flat*: as the sequences were given, end to end. For a cell that is parallel in time.
* *packed*: time first, longest sequence first. Step *t* is ``rows[t]`` wide: the sequences that are still running. For
  cuDNN, and for a loop over time.
* *staircase*: packed, but cut into a few rectangles, each as wide as the sequences that enter it, so that a dense
  kernel can run them one after another and carry the state on. A sequence that ends inside a rectangle runs on over
  padding, whose result is never taken. The cuts are a shortest path over the distinct lengths: a rectangle costs its
  area and a call. Torch's packed kernel on the CPU would need no padding, but its backward pass grows with the square
  of the longest length (pytorch#149194).

Packed and staircase are one formula: the token at time *t* of the sequence of rank *r*, counted by falling length, lies
at ``sum(rows[:t]) + r``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ullage.core.layout import Int64, Layout, starts_of
from ullage.core.rows import Places, cheapest_cuts, on_device, permute

RunOrder = Literal["flat", "packed", "staircase"]

#: The cost of one call of a dense kernel beside its area, in steps of one row (measured for hidden sizes 64 to 512).
CALL_COST = 64
#: Most elements of a rectangle; a larger one is cut in time, so that what backward reads again is still in the cache.
MAX_ELEMENTS = 2**20
#: Most distinct lengths among which cuts are chosen, since a shortest path takes the square of their number.
MAX_POINTS = 256


@dataclass(frozen=True)
class Window:
    """A rectangle of the staircase.

    Attributes:
        steps: time steps
        rows: sequences that run in each of them, the longest ones
    """

    steps: int
    rows: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Run order of one batch.

    Attributes:
        num_sequences: sequences in the batch, empty ones too
        size: places in the run order, padding of a staircase included
        run_order: flat, packed or staircase
        keeps_state: whether every sequence's final state is known; in a staircase only where a cut lies at each end
        rows: sequences in each time step, on the host; empty in flat order
        windows: the rectangles of a staircase, in time order
        order, inverse: int64 [n], the sequences by falling length and back; ``None`` where that is the order given
        places: the place of each flat token; ``None`` in flat order, and where a transpose does it
        lengths: int64 [n] in tokens, on the host; ``None`` where all are equal
        length: the length of all sequences where ``lengths`` is ``None``
        device: of the values, where there are ``lengths``
    """

    num_sequences: int
    size: int
    run_order: RunOrder
    keeps_state: bool = True
    rows: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()
    order: Tensor | None = None
    inverse: Tensor | None = None
    places: Places | None = None
    lengths: Int64 | None = None
    length: int = 0
    device: Any = None

    @classmethod
    def dense(cls, num_sequences: int, length: int, hidden_size: int, run_order: RunOrder = "staircase") -> Schedule:
        """The order for ``num_sequences`` sequences of one ``length`` in tokens. Touches no device."""
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
        """The order for sequences of unequal length. Copies indices to ``device`` without waiting for it.

        Args:
            lengths: int64 [n] in tokens, on the host
            hidden_size: elements per token, by which large rectangles are cut
            device: of the values
            run_order: flat, packed or staircase
            keep_state: cut a staircase at every distinct length, so that every final state is known
        """
        layout = Layout(lengths)
        if run_order == "flat":
            return cls(layout.num_items, layout.size, run_order, lengths=lengths, device=device)
        ranked = layout.time_major()
        windows: list[Window] = []
        rows = ranked.batch_sizes
        if run_order == "staircase":
            # Between two cuts all steps are as wide as the first one: the sequences that end before the next cut run
            # on over padding. A final state is known only at a cut, so keeping states takes a cut at every length.
            points = np.unique(np.concatenate([np.zeros(1, np.int64), lengths]))
            cuts = points if keep_state else _cheapest_cuts(points, rows)
            steps = np.diff(cuts)
            rows = np.repeat(ranked.batch_sizes[cuts[:-1]], steps)
            for start, count in zip(cuts[:-1], steps, strict=True):
                windows += _blocks(int(count), int(ranked.batch_sizes[start]), hidden_size)
        # The formula of the module's opening, for all tokens at once.
        step_starts = starts_of(rows)
        place_of = step_starts[layout.positions()] + ranked.inverse[layout.item_ids()]
        order, inverse = (on_device(array, device) for array in (ranked.order, ranked.inverse))
        return cls(
            layout.num_items,
            int(rows.sum()),
            run_order,
            keep_state or run_order == "packed",
            tuple(rows.tolist()),
            tuple(windows),
            order,
            inverse,
            Places.of(place_of, int(rows.sum()), device),
            lengths,
            device=device,
        )

    # Values between flat and run order.

    def place(self, flat: Tensor) -> Tensor:
        """Flat values [T, ...] in run order [size, ...], zeros in the padding. Does not wait for the device."""
        if self.run_order == "flat":
            return flat
        return _swap(flat, self.num_sequences) if self.places is None else self.places.place(flat)

    def take(self, run: Tensor) -> Tensor:
        """Values in run order [size, ...] as flat values [T, ...]; undoes :meth:`place`."""
        if self.run_order == "flat":
            return run
        return _swap(run, self.length) if self.places is None else self.places.take(run)

    def flip(self, run: Tensor) -> Tensor:
        """Values in run order [size, ...] with each sequence reversed in time, at its own end; undoes itself."""
        if self._reversal is not None:
            index, padding = self._reversal
            return permute(run, index, index, padding)
        flat = self.run_order == "flat"
        first, second = (self.num_sequences, self.length) if flat else (self.length, self.num_sequences)
        return run.view(first, second, *run.shape[1:]).flip(1 if flat else 0).reshape(run.shape)

    # States between the order given and falling length.

    def ranked(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """States [n, H] of the sequences as given, by falling length."""
        order = self.order
        return state if order is None else tuple(s.index_select(0, order) for s in state)

    def unranked(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """States [n, H] by falling length, back in the order given; undoes :meth:`ranked`."""
        inverse = self.inverse
        return state if inverse is None else tuple(s.index_select(0, inverse) for s in state)

    def last(self, run: Tensor, before: Tensor | None = None) -> Tensor:
        """The values of each sequence's last token, [n, ...] in the order given, from run order without padding.

        A sequence without tokens has its row of ``before`` [n, ...]; zeros if that is ``None``.
        """
        if self.lengths is None:
            if self.run_order == "flat":
                return run.view(self.num_sequences, self.length, *run.shape[1:])[:, -1]
            # Time comes first, so the last step is the last rows.
            return run[-self.num_sequences :]
        ends, empty = self._ends
        values = run.index_select(0, ends)
        if empty is None:
            return values
        # An empty sequence has no last token: what was read for it is a neighbour's, and is replaced.
        empty = empty.view(-1, *(1,) * (run.ndim - 1))
        return torch.where(empty, torch.zeros_like(values) if before is None else before, values)

    @cached_property
    def begins(self) -> Tensor:
        """The flat position of the first token of each sequence that has any, on the values' device."""
        assert self.lengths is not None
        return on_device(self.starts[self.lengths > 0], self.device)

    @cached_property
    def starts(self) -> Int64:
        """The flat position of each sequence's first token, also of those that have none; int64 [n], on the host."""
        if self.lengths is None:
            return np.arange(self.num_sequences) * self.length
        return Layout(self.lengths).starts

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor | None]:
        """The place of each sequence's last token [n], and which sequences have none (bool [n]; ``None``: all have)."""
        assert self.lengths is not None
        # 0 for a sequence without tokens at the very front, whose end would be at -1.
        ends = on_device(np.maximum(self.starts + self.lengths - 1, 0), self.device)
        empty = on_device(self.lengths == 0, self.device) if (self.lengths == 0).any() else None
        return ends if self.places is None else self.places.place_of.index_select(0, ends), empty

    @cached_property
    def _reversal(self) -> tuple[Tensor, Tensor | None] | None:
        """For each place the place of the token as far from its sequence's other end, and the places of padding."""
        if self.lengths is None:
            return None
        layout = Layout(self.lengths)
        # A token at i is mirrored to first + last - i of its own sequence.
        last = layout.starts + layout.lengths - 1
        index = on_device((last + layout.starts)[layout.item_ids()] - np.arange(layout.size), self.device)
        if self.places is None:
            return index, None
        # In run order: the place of the token that mirrors the token in this place.
        places = self.places
        mirrored = index.index_select(0, places.row_of)
        return places.place_of.index_select(0, mirrored), places.padding


def _swap(values: Tensor, first: int) -> Tensor:
    """[first * second, ...] as [second * first, ...]: rows become columns."""
    second = values.shape[0] // first
    if first == 1 or second == 1:
        return values
    return values.view(first, second, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


def _blocks(steps: int, rows: int, hidden_size: int) -> list[Window]:
    """A rectangle of ``steps`` by ``rows``, cut in time into equal blocks that the cache can hold."""
    count = min(steps, -(-steps * rows * hidden_size // MAX_ELEMENTS))
    ends = [steps * i // count for i in range(count + 1)]
    return [Window(end - start, rows) for start, end in pairwise(ends)]


def _cheapest_cuts(points: Int64, batch_sizes: Int64) -> Int64:
    """The cuts, first and last point among them, for which area and calls together cost least.

    ``points``: 0 and the distinct lengths, rising; ``batch_sizes[t]``: sequences that run at step *t*. A rectangle from
    cut *a* to cut *b* is ``batch_sizes[a]`` wide.
    """
    if len(points) > MAX_POINTS:
        points = points[np.linspace(0, len(points) - 1, MAX_POINTS).astype(np.int64)]
    rows = batch_sizes[points[:-1]]
    # In steps of one row, the unit of CALL_COST.
    cuts = cheapest_cuts(lambda end: (points[end] - points[:end]) * rows[:end], len(points) - 1, CALL_COST)
    return points[cuts]
