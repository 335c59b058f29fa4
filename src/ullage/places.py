"""Rows of a tensor moved to other places and back, each way by a gather whose gradient is a gather too.

Torch's own gradient of ``index_select`` adds row by row, since an index may repeat, and a scatter costs two to three
times a gather on the CPU. Here every row has one place, so the way back is known, and both directions only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.layout import Int64


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
        return cls(*(None if a is None else _on(a, device) for a in (place_of, row_of, padding, homeless)))  # type: ignore[arg-type]

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

    @staticmethod
    def forward(
        values: Tensor, index: Tensor, inverse: Tensor, empty: Tensor | None, empty_before: Tensor | None
    ) -> Tensor:
        gathered = values.index_select(0, index)
        return gathered if empty is None else gathered.index_fill_(0, empty, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, inverse, empty, empty_before = inputs
        # In the order of the arguments of the way back.
        ctx.save_for_backward(inverse, index, empty_before, empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gather(gradients[0], *ctx.saved_tensors), None, None, None, None


def _gather(*arguments: Any) -> Tensor:
    return _Gather.apply(*arguments)  # type: ignore[return-value]


def _on(array: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
