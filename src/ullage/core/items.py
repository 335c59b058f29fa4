"""Items beside the tokens of sequences, such as images: their rows end to end in flat buffers of their own.

A field by item has some number of rows for each sequence, whatever the sequence's length in tokens: patches of its
images, or one row per image. Its :class:`~ullage.core.layout.Layout` says which rows belong to which sequence. There is
no padding: where the further dims of rows differ from sequence to sequence, as images of unequal size have them, the
buffer is flat, and :class:`UnequalRows` knows the dims. Only a model that takes one tensor gets zeros behind the
smaller ones, see :func:`padded_items`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Integers, Layout

#: The keyword of a packed call with the rows of each field by item, cumulated by sequence.
ITEM_LENGTHS = "cu_seq_items"
#: Rows by sequence, each sequence's with its own further dims.
Shape = tuple[int, ...]


class UnequalRows(Layout):
    """Rows per sequence, where the further dims of rows are not those of every sequence.

    ``counts``: rows of each sequence. ``dims``: of a row of each sequence; any for one without rows.

    >>> UnequalRows([1, 2], [(3, 2), (2, 2)]).num_elements
    14
    """

    dims: tuple[Shape, ...]

    def __init__(self, counts: Integers, dims: Sequence[Sequence[int]]) -> None:
        super().__init__(counts)
        object.__setattr__(self, "dims", tuple(tuple(map(int, each)) for each in dims))
        if len(self.dims) != self.num_items:
            raise InputError("counts and dims disagree", expected=f"{self.num_items} dims", found=len(self.dims))

    @property
    def num_elements(self) -> int:
        """Elements of all rows."""
        return sum(count * math.prod(dims) for count, dims in zip(self.lengths.tolist(), self.dims))

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) is True and isinstance(other, UnequalRows) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.dims))


def join_items(values: Sequence[Tensor]) -> tuple[Tensor, Layout] | None:
    """The rows of all sequences as one tensor, [rows, ...], or flat where their dims differ; None if there are none.

    ``values``: [rows of the sequence, ...] for each sequence, all with as many dims. Copies each once.

    >>> items, rows = join_items([torch.ones(1, 2), torch.zeros(0, 2), torch.ones(1, 3)])
    >>> items, rows.lengths.tolist(), rows.dims
    (tensor([1., 1., 1., 1., 1.]), [1, 0, 1], ((2,), (0,), (3,)))
    """
    there = [value for value in values if len(value)]
    if not there:
        return None
    counts = [len(value) for value in values]
    if all(value.shape[1:] == there[0].shape[1:] for value in there):
        return torch.cat(there), Layout(counts)
    nothing = (0,) * (there[0].ndim - 1)
    rows = UnequalRows(counts, [tuple(value.shape[1:]) if len(value) else nothing for value in values])
    return torch.cat([value.reshape(-1) for value in there]), rows


def split_items(items: Tensor, rows: Layout) -> list[Tensor]:
    """The rows [rows of the sequence, ...] of each sequence: views."""
    if isinstance(rows, UnequalRows):
        return in_shapes(items, np.column_stack([rows.lengths, np.array(rows.dims, np.int64)]))
    return list(items.split(rows.lengths.tolist()))


def in_shapes(flat: Tensor, shapes: Int64) -> list[Tensor]:
    """The values of these ``shapes`` [n, dims] that lie end to end in a flat tensor: views."""
    return [part.view(*shape) for part, shape in zip(flat.split(shapes.prod(1).tolist()), shapes.tolist())]


def padded_items(items: Tensor, rows: Layout) -> Tensor:
    """All rows as one tensor [rows, ...]; those of smaller dims with zeros behind, in each dim.

    >>> padded_items(*join_items([torch.ones(1, 2), torch.ones(1, 3)])).tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    if not isinstance(rows, UnequalRows):
        return items
    largest = np.array([dims for dims, count in zip(rows.dims, rows.lengths) if count]).max(0).tolist()
    whole = items.new_zeros(rows.size, *largest)
    for value, start, count, dims in zip(
        split_items(items, rows), rows.starts.tolist(), rows.lengths.tolist(), rows.dims
    ):
        whole[(slice(start, start + count), *map(slice, dims))] = value
    return whole


def rows_of_one(name: str, tensor: Tensor, num_sequences: int) -> Layout:
    """The rows of a field of images where there is one sequence, whose they are. Raises ``InputError`` for several."""
    if num_sequences != 1 or tensor.ndim == 0:
        raise InputError(
            "nobody says which images belong to which sequence",
            where=f"field {name!r}",
            expected=f"items={{{name!r}: [rows of each of the {num_sequences} sequences]}}",
            found=f"shape {list(tensor.shape)}",
            hint="name it in per_sequence if it has one entry a sequence",
        )
    return Layout([tensor.shape[0]])


def require_items(name: str, items: Any, rows: Layout, num_sequences: int) -> None:
    """Raise ``InputError`` unless ``rows`` tells the rows of every sequence in ``items``."""
    problem = {"where": f"field {name!r}", "hint": "give items={name: Layout(rows of each sequence)}"}
    if rows.num_items != num_sequences:
        raise InputError(
            "items and sequences disagree", expected=num_sequences, found=f"rows of {len(rows)}", **problem
        )
    if rows.size != rows.num_tokens:
        raise InputError(
            "rows of items are padded", expected="no padding", found=rows.size - rows.num_tokens, **problem
        )
    size, unit = (rows.num_elements, "elements") if isinstance(rows, UnequalRows) else (rows.size, "rows")
    if items.ndim == 0 or items.shape[0] != size or (unit == "elements" and items.ndim != 1):
        raise InputError(
            "values and their rows by sequence disagree",
            expected=f"{size} {unit} in dimension 0",
            found=f"shape {list(items.shape)}",
            **problem,
        )


def require_uncut(
    values: Mapping[str, Sequence[Tensor]],
    names: Sequence[str],
    lengths: np.ndarray,
    kept: np.ndarray,
    where: Callable[[int], str],
) -> None:
    """Raise ``InputError`` that names the first sequence with items that would be cut short: an image cannot be cut.

    A sequence may lose tokens where its ``mm_token_type_ids`` say that none of them stands for an item.

    Args:
        values: one tensor per sequence of each field.
        names: of the fields by item.
        lengths, kept: tokens that each sequence has, and how many of them stay.
        where: what to call sequence *i*.
    """
    for i in np.flatnonzero(kept < lengths).tolist() if names else ():
        name = next((name for name in names if len(values[name][i])), None)
        kinds = values.get("mm_token_type_ids")
        if name is None or (kinds is not None and not kinds[i][int(kept[i]) :].any()):
            continue
        raise InputError(
            "a sequence with items is too long, and cannot be truncated: an image cannot be cut",
            where=f"{where(i)}, field {name!r}",
            expected=f"at most {int(kept[i])} tokens",
            found=f"{int(lengths[i])} tokens, {len(values[name][i])} rows of {name}",
            hint="raise the capacity, make images smaller, or leave such sequences out with oversize='drop'",
        )


def require_no_items(items: Mapping[str, Layout], cp_size: int) -> None:
    """Raise ``InputError`` for a batch with items that several context-parallel ranks would each hold a part of."""
    if items and cp_size > 1:
        raise InputError(
            "a batch with items cannot be cut for context parallel: images belong to whole sequences",
            where=f"fields {list(items)}",
            expected="one context-parallel rank",
            found=cp_size,
            hint="use the ranks for data parallel, or leave sequences with images out",
        )
