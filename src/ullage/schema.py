"""Schema of a batch: names, dtypes and shapes of its fields, and the bytes that they take.

A :class:`Schema` is what ranks must agree on before bytes can travel without descriptions of their own. Given a schema
and the lengths, both ends of a transfer know the size and the place of every value, so nothing is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.layout import Int64, Layout

#: The label that no loss counts.
IGNORED_LABEL = -100
LABEL_NAMES = ("labels", "shift_labels")
#: Fields that hold places in a row, counted from its first token: the answer to a question, the token of a class.
POSITION_NAMES = ("start_positions", "end_positions", "cls_index")
#: Every block of bytes begins on such a boundary: enough for a view as any dtype, and what NCCL prefers.
ALIGNMENT = 16


def is_target(name: str) -> bool:
    """Whether a field of an encoder-decoder's batch belongs to its targets; the others belong to its sources."""
    return name == "labels" or name.startswith("decoder_")


def fill_value(name: str, dtype: torch.dtype) -> int:
    """The value of padding in a field: -100 in labels whose dtype has such a number, 0 elsewhere."""
    return IGNORED_LABEL if name in LABEL_NAMES and dtype.is_signed else 0


def holding_ignored(labels: Tensor) -> Tensor:
    """Labels in a dtype that has -100: as they are, or int64 where theirs is bool or unsigned (156 in uint8)."""
    return labels if labels.dtype.is_signed else labels.long()


def behind_padding(positions: Any, starts: Any) -> Any:
    """Places in rows as places in their sequences, which begin at ``starts``.

    A place in the padding before a sequence is its first token, as one below 0 is for the heads of transformers. One
    behind the row stays behind the sequence.

    >>> behind_padding(torch.tensor([7, 0, 5]), 5).tolist()
    [2, 0, 0]
    """
    if isinstance(positions, Tensor):
        return (positions - starts).clamp(min=0)
    return np.maximum(np.asarray(positions) - starts, 0)


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment of blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Field:
    """One field of a batch.

    Attributes:
        name: of the field.
        dtype: of its values.
        shape: of one entry, without the dimension of tokens or sequences.
        per_sequence: whether there is one entry per sequence, and not one per token.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    per_sequence: bool = False

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize * math.prod(self.shape)

    def num_bytes(self, num_sequences: int, num_tokens: int) -> int:
        """Bytes of the block that holds this field of so many sequences, rounded up to the alignment of blocks."""
        return aligned(self.entry_bytes * (num_sequences if self.per_sequence else num_tokens))

    def view(self, buffer: Tensor, start: int, entries: int) -> Tensor:
        """So many entries in a buffer of bytes, from byte ``start`` on, typed: a view."""
        flat = buffer[start : start + entries * self.entry_bytes].view(self.dtype)
        return flat.view(entries, *self.shape) if self.shape else flat

    @property
    def padding(self) -> int:
        """The value of padding: see :func:`fill_value`."""
        return fill_value(self.name, self.dtype)

    @property
    def untyped(self) -> tuple[str, tuple[int, ...], bool]:
        """The properties that must be equal before dtypes can be promoted: name, shape and unit."""
        return self.name, self.shape, self.per_sequence

    def __str__(self) -> str:
        unit = "per sequence" if self.per_sequence else "per token"
        return f"{str(self.dtype)[6:]} {unit}" + (f" of shape {list(self.shape)}" if self.shape else "")


@dataclass(frozen=True)
class Schema:
    """The fields of a batch, in order."""

    fields: tuple[Field, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Tensor], per_sequence: Iterable[str]) -> Schema:
        """The schema of flat tensors [T, ...], and [N, ...] for the names in ``per_sequence``."""
        whole = set(per_sequence)
        return cls(tuple(Field(n, t.dtype, tuple(t.shape[1:]), n in whole) for n, t in values.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(field.name for field in self.fields)

    @property
    def per_sequence(self) -> tuple[str, ...]:
        """The names of the fields with one entry per sequence."""
        return tuple(field.name for field in self.fields if field.per_sequence)

    def num_bytes(self, num_sequences: int, num_tokens: int) -> int:
        """Bytes of the blocks of all fields of so many sequences."""
        return sum(field.num_bytes(num_sequences, num_tokens) for field in self.fields)

    def block_bytes(self, num_sequences: Int64, num_tokens: Int64) -> Int64:
        """:meth:`num_bytes` of many ranks' blocks at once."""
        total = np.zeros(len(num_sequences), np.int64)
        for field in self.fields:
            entries = num_sequences if field.per_sequence else num_tokens
            total += -(-field.entry_bytes * entries // ALIGNMENT) * ALIGNMENT
        return total

    def blocks(self, buffer: Tensor, start: int, num_sequences: int, num_tokens: int) -> dict[str, Tensor]:
        """The typed views of every field in the ``buffer`` of bytes from ``start``."""
        # Field by field from ``start``, each on an aligned boundary: both ends of a transfer walk this order.
        views = {}
        for field in self.fields:
            views[field.name] = field.view(buffer, start, num_sequences if field.per_sequence else num_tokens)
            start += field.num_bytes(num_sequences, num_tokens)
        return views

    def by_name(self) -> Schema:
        """The same fields in the order of their names."""
        return Schema(tuple(sorted(self.fields, key=lambda field: field.name)))

    def to_list(self) -> list[Any]:
        """The fields as JSON takes them."""
        return [[f.name, str(f.dtype)[6:], list(f.shape), f.per_sequence] for f in self.fields]

    @classmethod
    def from_list(cls, rows: list[Any]) -> Schema:
        """The inverse of :meth:`to_list`."""
        return cls(tuple(Field(name, getattr(torch, dtype), tuple(s), whole) for name, dtype, s, whole in rows))

    def pack(
        self,
        values: Mapping[str, Sequence[Tensor]],
        layouts: Sequence[Layout],
        device: torch.device | None = None,
    ) -> list[dict[str, Tensor]]:
        """The flat tensors of each layout, by name; one copy, and nothing is shared with ``values``.

        Args:
            values: for each field one tensor per sequence, layout after layout; each as long as its layout says.
            layouts: one per result; those without items get tensors of no entries.
            device: where those lie if there are no sequences at all; otherwise all lie where ``values`` do.
        """
        num_sequences = sum(layout.num_items for layout in layouts)
        if not num_sequences:
            # No value tells the device then, so the caller names it.
            empty = {f.name: torch.empty(0, *f.shape, dtype=f.dtype, device=device) for f in self.fields}
            return [dict(empty) for _ in layouts]
        # All microbatches are written as one long row per field, and split afterwards.
        gaps = np.concatenate([layout.slots - layout.lengths for layout in layouts])
        room = self._allocate(num_sequences, sum(layout.size for layout in layouts), values)
        parts = {}
        for field in self.fields:
            whole = lay_out(field, values[field.name], gaps, out=room[field.name])
            parts[field.name] = whole.split([len(layout) if field.per_sequence else layout.size for layout in layouts])
        return [{name: part[k] for name, part in parts.items()} for k in range(len(layouts))]

    def _allocate(
        self, num_sequences: int, num_elements: int, values: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """Room for every field, fields of one dtype in one allocation.

        Large allocations come back from the heap with their pages in place; many small ones are returned to the system
        and faulted in again at every step, which costs more than the copy into them.
        """
        room: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(field.dtype for field in self.fields):
            fields = [field for field in self.fields if field.dtype == dtype]
            counts = [num_sequences if field.per_sequence else num_elements for field in fields]
            # Elements of the common dtype, rounded up so that every field begins on an aligned boundary.
            sizes = [aligned(count * field.entry_bytes) // dtype.itemsize for field, count in zip(fields, counts)]
            block = torch.empty(sum(sizes), dtype=dtype, device=values[fields[0].name][0].device)
            for field, count, part in zip(fields, counts, block.split(sizes)):
                room[field.name] = part[: count * math.prod(field.shape)].view(count, *field.shape)
        return room


def lay_out(field: Field, values: Sequence[Tensor], gaps: Int64, out: Tensor | None = None) -> Tensor:
    """The values of sequences as one tensor: stacked [N, ...], or end to end [T, ...] with padding after each.

    ``gaps`` [N]: elements of padding after each sequence. ``out``: where to write, which keeps no gradients.
    """
    if field.per_sequence:
        return torch.stack(list(values), out=out)
    if gaps.any():
        # One block of padding, of which each sequence takes what its slot lacks.
        blank = values[0].new_full((int(gaps.max()), *field.shape), field.padding)
        values = [part for value, gap in zip(values, gaps.tolist()) for part in (value, blank[:gap])]
    return torch.cat(list(values), out=out)


def promoted(fields: Sequence[Field]) -> Field:
    """One field for several that differ in dtype only. Raises ``TypeError`` for dtypes that torch does not promote."""
    try:
        return replace(fields[0], dtype=reduce(torch.promote_types, (field.dtype for field in fields)))
    except RuntimeError as error:
        raise TypeError(str(error)) from error
