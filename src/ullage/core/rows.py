"""Packed rows: where the sequences of a row lie, calls of sequences of one length, and the moves there and back.

A packed row is [1, T, ...]. ``cu_seq_lens_q`` bounds the slots in it, and a slot may hold padding behind its sequence.
:func:`read_row` is the one reader of that, and gives a :class:`~ullage.core.layout.Layout`. :class:`Calls` puts
sequences into tensors [n, L, ...] that one call takes, and lays the results end to end again.

Rows of a tensor are moved by a gather each way, whose gradient is a gather too. Torch's own gradient of
``index_select`` adds row by row, since an index may repeat, and a scatter costs two to three times a gather on the CPU.
Here every row has one place, so the way back is known, and both directions only read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout, ranges, starts_of

#: Keywords that describe a packed row, as ``RaggedBatch.to_flattened`` writes them.
LENGTH_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


# Numbers of the host on a device, and the way back without a wait.

#: What was made of tensors, such as the lengths that they hold, by the tensor and its version.
_REMEMBERED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remembered(tensor: Tensor, name: Any, make: Callable[[], Any]) -> Any:
    """The result of ``make``, made once per state of ``tensor`` and kept for as long as that lives."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return make()
    # torch counts writes to a tensor in its version: a tensor that was written to holds other numbers.
    if tensor not in _REMEMBERED or _REMEMBERED[tensor][0] != tensor._version:
        _REMEMBERED[tensor] = (tensor._version, {})
    known = _REMEMBERED[tensor][1]
    if name not in known:
        known[name] = make()
    return known[name]


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array as a tensor on a device, without waiting for it; :func:`on_host` knows what it holds."""
    made = torch.from_numpy(array).to(device, non_blocking=True)
    if made.device.type != "cpu":
        remembered(made, "numbers", lambda: array)
    return made


def on_host(tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor. Waits for its device once, and not at all for one that was made of host numbers."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    return remembered(tensor, "numbers", lambda: tensor.cpu().numpy())


# Where sequences lie.


def read_row(
    cu_seq_lens: Any,
    size: int | None,
    position_ids: Tensor | None = None,
    *,
    name: str = "cu_seq_lens_q",
    are_counts: bool = True,
) -> Layout:
    """The sequences of one row, as the layout of its slots.

    Args:
        cu_seq_lens: [n + 1], the slots cumulated, from 0 to ``size``. A slot may be empty.
        size: elements of the row, T; None if that is not known.
        position_ids: [1, T]. Where they count from 0 in each slot and then stay at 0, as ``to_flattened`` writes them,
            those last elements are padding. Any other positions say nothing of padding.
        name: of the bounds, for the error.
        are_counts: whether positions mean something to the model. Where they do not, zeros at the end of a slot are
            padding whatever stands before them, as of a sequence that goes on from an earlier part.

    Waits for the device where :func:`on_host` does. Raises ``InputError`` for bounds that are no rising integers from 0
    to ``size``.

    >>> row = read_row(torch.tensor([0, 4, 4, 8]), 8, torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]]))
    >>> row.lengths.tolist(), row.slots.tolist()
    ([3, 0, 4], [4, 0, 4])
    """
    bounds = host_integers(cu_seq_lens, name)
    slots = np.diff(bounds)
    if len(slots) == 0 or bounds[0] != 0 or (slots < 0).any() or size not in (None, bounds[-1]):
        raise InputError(
            f"{name} does not cover the row",
            expected="rising from 0" if size is None else f"rising from 0 to {size}",
            found=f"{len(slots)} sequences, {int(slots.sum())} tokens",
            hint="pass what RaggedBatch.to_flattened() gives",
        )
    if position_ids is None or tuple(position_ids.shape) != (1, size):
        return Layout(slots)
    positions = on_host(position_ids)[0]
    if not (positions[bounds[1:][slots > 1] - 1] == 0).any():
        return Layout(slots)
    # Each sequence ends with the last element of its slot that is not at 0, or with the first. For positions
    # [0, 1, 2, 0, 0, 0], in slots of 4 and 2, the counts are [0, 2, 3, 3, 3, 3]: at the slots' ends 3 and 3, so the
    # first sequence has 3 tokens, and the second, whose last place lies before its slot, has 1.
    count = np.maximum.accumulate(np.where(positions != 0, np.arange(1, len(positions) + 1), 0))
    found = np.where(slots > 0, count[np.maximum(bounds[1:], 1) - 1], 0) - bounds[:-1]
    layout = Layout.from_slots(np.clip(found, np.minimum(slots, 1), slots), slots)
    return layout if not are_counts or np.array_equal(usual_positions(layout), positions) else Layout(slots)


def usual_positions(layout: Layout) -> Int64:
    """The positions that every model counts by itself, int64 [size]: from 0 in each slot, and 0 in padding."""
    positions = layout.positions()
    if layout.num_tokens < layout.size:
        positions[layout.padding_mask()] = 0
    return positions


def beginnings(numbers: npt.NDArray[Any], step: int = 1) -> Int64:
    """Where sequences begin among the flattened rows [N, L]: at each row, and where numbers do not run on by ``step``.

    >>> beginnings(np.array([[0, 1, 2, 0, 1]])).tolist()
    [0, 3]
    """
    begins = np.ones(numbers.shape, bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1] + step
    return np.flatnonzero(begins)


def host_integers(values: Any, name: str) -> Int64:
    """A flat list of integers on the host, int64, as :func:`on_host`; raises ``InputError`` for anything else."""
    array = on_host(values) if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name} must be a flat list of integers", found=f"shape {list(array.shape)} {array.dtype}")
    return array.astype(np.int64)


# Calls of several sequences.


class Calls:
    """Sequences of a row in calls that they share, and where their tokens go.

    Args:
        layout: of the row.
        members: the sequences of each call; every sequence with a token in exactly one.
        device: of the row's tensors.

    >>> calls = Calls(Layout([2, 1, 2]), [np.array([0, 2]), np.array([1])], torch.device("cpu"))
    >>> [part.tolist() for part in calls.cut(torch.arange(5))]
    [[[0, 1], [3, 4]], [[2]]]
    >>> calls.join(calls.cut(torch.arange(5))).tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, layout: Layout, members: Sequence[Int64], device: torch.device) -> None:
        self.widths = [int(layout.lengths[part].max()) for part in members]
        #: (number of sequences, tokens of each) of each call.
        self.shapes = [(len(part), width) for part, width in zip(members, self.widths)]
        slots = np.repeat(np.asarray(self.widths, np.int64), [len(part) for part in members])
        self.num_slots = layout.size
        self.places = arranged(layout, end_to_end(members), slots, device)

    def cut(self, row: Tensor) -> list[Tensor]:
        """A row [T, ...] as one tensor [n, L, ...] per call; zeros where a shorter sequence has ended."""
        placed = row if self.places is None else self.places.place(row)
        parts = placed.split([n * width for n, width in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [n, L, ...], one per call, as the row [T, ...]; zeros in the row's padding."""
        placed = torch.cat([part.flatten(0, 1) for part in parts])
        return placed if self.places is None else self.places.take(placed)


def end_to_end(members: Sequence[Int64]) -> Int64:
    """The sequences of all calls, one call after another."""
    return np.concatenate([*members, np.zeros(0, np.int64)]).astype(np.int64)


def arranged(layout: Layout, order: Int64, slots: Int64, device: torch.device) -> Places | None:
    """Places of a row's tokens where its sequences lie in another order and in other slots; None where nothing moves.

    Sequences of 2, 1 and 2 tokens in the order 0, 2, 1 have their tokens at 0, 1, at 4, and at 2, 3.
    """
    lengths = layout.lengths[order]
    place_of = np.full(layout.size, -1, np.int64)
    place_of[ranges(layout.starts[order], lengths)] = ranges(starts_of(slots), lengths)
    num_places = int(slots.sum())
    if np.array_equal(place_of, np.arange(num_places)):
        return None
    return Places.of(place_of, num_places, device)


def alike(keys: Sequence[Int64], is_there: npt.NDArray[np.bool_]) -> list[Int64]:
    """Sequences of equal keys in one call each, in the order in which keys first occur; only those that are there.

    >>> [part.tolist() for part in alike([np.array([3, 1, 3])], np.ones(3, bool))]
    [[0, 2], [1]]
    """
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    group = group.reshape(-1)  # numpy 2.0 gives it another shape than its neighbours
    there = np.flatnonzero(is_there)
    return [there[group[there] == each] for each in dict.fromkeys(group[there].tolist())]


def similar(lengths: Int64, price: int) -> list[Int64]:
    """Sequences in calls of similar lengths, such that padding and calls cost the least together.

    ``price``: of a call, in tokens of padding.

    >>> [part.tolist() for part in similar(np.array([9, 2, 8]), price=4)]
    [[1], [2, 0]]
    """
    there = np.flatnonzero(lengths > 0)
    order = there[np.argsort(lengths[there], kind="stable")]
    sizes = lengths[order]
    # A call of the sequences i to j - 1, by rising length, computes (j - i) times the longest of them.
    cuts = cheapest_cuts(lambda j: (j - np.arange(j)) * sizes[j - 1], len(order), price)
    return [order[begin:end] for begin, end in pairwise(cuts)]


def cheapest_cuts(areas: Callable[[int], Int64], count: int, price: int) -> list[int]:
    """The cuts of ``range(count)``, 0 and ``count`` among them, for which areas and calls together cost least.

    A shortest path by dynamic programming. ``areas(end)``: int64 [end], the area of a call from each start to ``end``;
    ``price``: of a call, in the same unit.
    """
    # Forwards: the least cost of all calls up to each end, over every start of the last one.
    cost, came_from = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        costs = cost[:end] + areas(end) + price
        came_from[end] = costs.argmin()
        cost[end] = costs[came_from[end]]
    # Backwards: the cuts by which the last end was reached at that cost.
    cuts = [count]
    while cuts[-1]:
        cuts.append(int(came_from[cuts[-1]]))
    return cuts[::-1]


# Rows moved to other places.


@dataclass(frozen=True, eq=False)
class Places:
    """The place of each row, and the row in each place.

    Attributes:
        place_of: int64 [rows], the place of each row; no two rows share one. Any place for a row that has none.
        row_of: int64 [places], the row in each place; any row where the place is padding.
        padding: int64 [places that hold no row]; ``None`` if there is none.
        homeless: int64 [rows that have no place]; ``None`` if there is none.
    """

    place_of: Tensor
    row_of: Tensor
    padding: Tensor | None = None
    homeless: Tensor | None = None

    @classmethod
    def of(cls, place_of: Int64, num_places: int, device: torch.device) -> Places:
        """Places from a host array, in which -1 stands for none. Copies to ``device`` without waiting for it."""
        row_of, is_padding = np.zeros(num_places, np.int64), np.ones(num_places, bool)
        placed = np.flatnonzero(place_of >= 0)
        # Padding keeps row 0, any row will do: its values are overwritten with zeros. So are those of homeless rows.
        row_of[place_of[placed]] = placed
        is_padding[place_of[placed]] = False
        padding = np.flatnonzero(is_padding) if num_places > len(placed) else None
        homeless = np.flatnonzero(place_of < 0) if len(placed) < len(place_of) else None
        place_of = np.maximum(place_of, 0)
        return cls(*(None if a is None else on_device(a, device) for a in (place_of, row_of, padding, homeless)))  # type: ignore[arg-type]

    def place(self, rows: Tensor) -> Tensor:
        """Rows [rows, ...] in their places [places, ...], zeros in the padding. Does not wait for the device."""
        return _gather(rows, self.row_of, self.place_of, self.padding, self.homeless)

    def take(self, placed: Tensor) -> Tensor:
        """Values [places, ...] as rows [rows, ...], zeros in rows without a place; undoes :meth:`place`.

        What the padding holds is left behind.
        """
        return _gather(placed, self.place_of, self.row_of, self.homeless, self.padding)


def permute(rows: Tensor, order: Tensor | None, inverse: Tensor | None, padding: Tensor | None = None) -> Tensor:
    """``rows[order]`` for an ``order`` [rows] that lists each row once, with its inverse; the rows for ``None``.

    ``padding``: rows that stay where they are and hold zeros, also in the gradient; their entries of ``order`` do not
    count.
    """
    return rows if order is None else _gather(rows, order, inverse, padding, padding)


class _Gather(torch.autograd.Function):
    """``values[index]`` with zeros at ``empty``.

    ``inverse`` and ``empty_before`` are the ``index`` and the ``empty`` of the way back, so the gradient is the same
    function with the two pairs exchanged, and can itself be differentiated.
    """

    # One function, as torch binds the arguments of a forward and a setup_context by their signature, in every call.
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, inverse: Tensor, empty: Tensor | None, empty_before: Tensor | None
    ) -> Tensor:
        # In the order of the arguments of the way back.
        ctx.save_for_backward(inverse, index, empty_before, empty)
        gathered = values.index_select(0, index)
        return gathered if empty is None else gathered.index_fill_(0, empty, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gather(gradients[0], *ctx.saved_tensors), None, None, None, None


def _gather(*arguments: Any) -> Tensor:
    return _Gather.apply(*arguments)  # type: ignore[return-value]
