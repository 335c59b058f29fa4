"""One microbatch cut into context-parallel slices; pure, without groups.

The row is cut by :meth:`Layout.cut`; here every slot (with ``"contiguous"``, the row) has to divide evenly, as the
kernels of Transformer Engine and Ulysses require.

Attention has to know what the slices are slices of: a :class:`Shard` carries the true position of each element and the
layout of the whole, because positions alone ([0, 1, 6, 7] of one sequence) would read as two sequences. A label that
belongs to the next token may lie in another slice, so labels are shifted before they are cut.

>>> whole = RaggedBatch.from_samples([{"input_ids": list(range(8))}], pad_to_multiple_of=4)
>>> [shard(whole, 2, rank)["input_ids"].tolist() for rank in range(2)]
[[0, 1, 6, 7], [2, 3, 4, 5]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.items import require_no_items
from ullage.core.layout import Int64, Layout
from ullage.core.rows import on_device


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's slice of a microbatch.

    Attributes:
        batch: its elements, with a layout of their own: item *i* is what this rank holds of sequence *i*, possibly
            nothing.
        position_ids [elements]: each element's position in its sequence, int64, on the batch's device.
        layout: of the whole microbatch.
        cp_size, cp_rank: number of slices, and which of them this is.
        order: how the row was cut, see :meth:`ullage.Layout.cut`.
        added: fields that the whole did not have; :func:`unshard` leaves them out.
    """

    batch: RaggedBatch
    position_ids: Tensor
    layout: Layout
    cp_size: int
    cp_rank: int
    order: str
    added: tuple[str, ...] = ()

    @property
    def index(self) -> Int64:
        """Position of each element in the whole row, int64 [elements]."""
        return shard_index(self.layout, self.cp_size, self.cp_rank, self.order)

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Shard:
        """The same slice with its values on ``device``."""
        return Shard(
            self.batch.to(device, non_blocking),
            self.position_ids.to(device, non_blocking=non_blocking),
            self.layout,
            self.cp_size,
            self.cp_rank,
            self.order,
            self.added,
        )


def shard_index(layout: Layout, cp_size: int, cp_rank: int, order: str = "zigzag") -> Int64:
    """Position in the whole row of each element of a rank's slice, int64 [layout.size / cp_size].

    ``whole[index]`` is the slice, and ``whole[index] = slice`` puts it back. Raises ``InputError`` for a rank or an
    order that does not exist, and for a slot (a row, if contiguous) that cannot be cut into equal parts.
    """
    index = layout.cut(cp_size, cp_rank, order)
    _require_equal_parts(layout, cp_size, order)
    return index


def shard(
    batch: RaggedBatch, cp_size: int, cp_rank: int, order: str = "zigzag", *, shift_labels: bool | None = None
) -> Shard:
    """The slice of ``batch`` that context-parallel rank ``cp_rank`` of ``cp_size`` holds.

    Token-aligned fields are cut, per-sequence fields stay whole. ``shift_labels``: whether to add ``shift_labels``,
    made of the labels before the cut. ``None`` adds them where ``labels`` are aligned with the tokens, which they are
    not in Megatron's samples: those call their input ``tokens``, and each label is already the next token. Pure; the
    batch stays as it is; does not wait for the device. Raises ``InputError`` as :func:`shard_index` does, and for a
    batch with items.
    """
    index = shard_index(batch.layout, cp_size, cp_rank, order)
    require_no_items(batch.items, cp_size)
    # The label of a chunk's last token is the first token of the next chunk, which another rank may hold. So labels
    # are shifted while the row is whole.
    added = ()
    if shift_labels is None:
        # Labels of tokens; in Megatron's samples they are shifted already.
        names = set(batch.names)
        shift_labels = "labels" in names.difference(batch.per_sequence, batch.items) and "tokens" not in names
    if shift_labels and "shift_labels" not in batch:
        batch, added = batch.with_shift_labels(), ("shift_labels",)
    # Positions count from the start of the sequence in the whole, as rotary embeddings need them.
    positions = batch.layout.positions()[index]
    # Per-sequence fields stay whole: the slice has every sequence as an item, possibly an empty one.
    take = on_device(index, batch.device)
    values = {
        name: batch[name] if cp_size == 1 or name in batch.per_sequence else batch[name].index_select(0, take)
        for name in batch.names
    }
    layout = _local_layout(batch.layout, index, positions)
    return Shard(
        RaggedBatch(values, layout, batch.per_sequence, batch.items),
        on_device(positions, batch.device),
        batch.layout,
        cp_size,
        cp_rank,
        order,
        added,
    )


def unshard(shards: Sequence[Shard]) -> RaggedBatch:
    """The microbatch that :func:`shard` cut, from the slices of all its ranks in any order; the inverse.

    Fields that were added for the cut are left out. Raises ``InputError`` unless each slice is there exactly once.
    """
    if not shards:
        raise InputError("there are no slices to put together")
    first = shards[0]
    ranks = sorted(part.cp_rank for part in shards)
    same = all((s.cp_size, s.order, s.layout) == (first.cp_size, first.order, first.layout) for s in shards)
    if not same or ranks != list(range(first.cp_size)):
        raise InputError(
            "these are not the slices of one microbatch",
            expected=f"ranks {list(range(first.cp_size))} of one layout and order",
            found=f"ranks {ranks}" + ("" if same else " of several"),
        )
    batch = first.batch
    values = {}
    for name in batch.names:
        if name in first.added:
            continue
        if name in batch.per_sequence or name in batch.items:
            values[name] = batch[name]
            continue
        # Every element is in exactly one slice, so nothing stays unset.
        whole = batch[name].new_empty(first.layout.size, *batch[name].shape[1:])
        for part in shards:
            whole = whole.index_copy(0, on_device(part.index, whole.device), part.batch[name])
        values[name] = whole
    return RaggedBatch(values, first.layout, batch.per_sequence, batch.items)


def _local_layout(layout: Layout, index: Int64, positions: Int64) -> Layout:
    """Tokens and slots of each sequence in a slice.

    Tokens come before padding in it too: of two chunks of a sequence, the second has tokens only where the first is
    full.
    """
    item = layout.item_ids()[index]
    real = positions < layout.lengths[item]
    return Layout.from_slots(*(np.bincount(each, minlength=layout.num_items) for each in (item[real], item)))


def _require_equal_parts(layout: Layout, cp_size: int, order: str) -> None:
    if order == "contiguous":
        if layout.size % cp_size:
            raise InputError(
                "a row cannot be cut into equal slices",
                expected=f"a multiple of cp = {cp_size}",
                found=layout.size,
                hint="plan with pad_to_multiple_of so that every slot is one",
            )
    elif cp_size > 1:
        bad = np.flatnonzero(layout.slots % (2 * cp_size))
        if len(bad):
            i = int(bad[0])
            raise InputError(
                "a slot cannot be cut into equal chunks",
                where=f"sequence {i} of the microbatch",
                expected=f"a multiple of 2·cp = {2 * cp_size}",
                found=int(layout.slots[i]),
                hint=f"plan with pad_to_multiple_of={2 * cp_size}",
            )
