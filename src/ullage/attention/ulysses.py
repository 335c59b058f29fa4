"""Context parallel by exchanged heads (Ulysses): each rank gets the whole row for its share of the heads.

A packed row is cut into equal parts of neighbouring tokens, wherever sequences end: :class:`Slices` says how many each
rank has. In an attention one all-to-all brings queries, keys and values of all tokens and some heads, the attention
runs as it does on one process, and one all-to-all takes the result back to the ranks of the tokens. All ranks have the
same work, whatever the lengths. Source: DeepSpeed-Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ullage.core.layout import Int64, Layout


class Slices:
    """One rank's slice of a packed row, and how the row is cut for the others.

    Plain host data. Not a dataclass, a mapping or a tuple, because training wrappers take those apart.

    Attributes:
        layout: of the whole row.
        size: number of ranks that share the row.
        rank: the rank that this slice belongs to.
        lengths: elements of each rank's slice, in the order of the row; they differ by one at most.
        served_by: the ``ContextParallel`` that ran the row's first layer, kept for layers that are recomputed later.
    """

    def __init__(self, layout: Layout, size: int, rank: int) -> None:
        self.layout, self.size, self.rank = layout, size, rank
        # A row of 10 elements over 4 ranks is cut into slices of [2, 3, 2, 3].
        #: Places of this rank's elements in the whole row, int64 [elements].
        self.index: Int64 = layout.cut(size, rank, "contiguous")
        self.lengths = [len(layout.cut(size, each, "contiguous")) for each in range(size)]
        self.served_by: Any = None

    def __repr__(self) -> str:
        return f"Slices(rank {self.rank} of {self.size}, {len(self.index)} of {self.layout.size} elements)"

    @cached_property
    def digest(self) -> int:
        """63 bits that tell this cut of this row from any other, the same on every machine."""
        # Slots rather than lengths: the cut treats padding as tokens. 63 bits fit into a signed int64.
        text = hashlib.blake2b(str(self.size).encode(), digest_size=8)
        text.update(self.layout.slots.tobytes())
        return int.from_bytes(text.digest(), "little") >> 1


class _AllToAll(torch.autograd.Function):
    """Exchange of blocks of rows between the ranks of a group; backward sends the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def exchange_rows(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    """Send ``sends[j]`` rows, in order, to each rank *j* of the group; get ``receives[j]`` back. Differentiable."""
    return _AllToAll.apply(rows, sends, receives, group)  # type: ignore[return-value]


def exchange_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slices: Slices,
    group: Any,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of this rank's slice, [t, query heads, value dim], by ``attend`` on the whole row and some heads.

    Args:
        query: [t, query heads, dim] of the slice.
        key, value: [t, key heads, dim] of the slice.
        slices: how the row is cut.
        group: process group of the ranks.
        attend: attention of the whole row, [T, heads / ranks, dim] in the row's order.

    Collective; does not wait for the device.
    """
    size, own, counts, num_heads = slices.size, len(query), slices.lengths, query.shape[1]
    query, key, value = _divisible(query, key, value, size)
    # One buffer for the three, the heads of one rank after those of the other: [ranks, t, heads / ranks · dim].
    parts = [tensor.unflatten(1, (size, -1)).flatten(2).transpose(0, 1) for tensor in (query, key, value)]
    widths = [part.shape[-1] for part in parts]
    # Slices arrive rank by rank, which is the order of the row.
    row = exchange_rows(torch.cat(parts, -1).flatten(0, 1), [own] * size, counts, group)
    mixed = attend(
        *(part.unflatten(1, (-1, tensor.shape[2])) for part, tensor in zip(row.split(widths, 1), (query, key, value)))
    )
    # Results of these heads go to the rank that holds the tokens.
    back = exchange_rows(mixed.flatten(1), counts, [own] * size, group)
    # [ranks · t, heads / ranks · dim] to [t, heads, dim]: rank j computed the j-th block of neighbouring heads.
    return back.unflatten(0, (size, own)).transpose(0, 1).reshape(own, query.shape[1], -1)[:, :num_heads]


def _divisible(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three with heads that ``size`` ranks divide, so that each rank's query heads still meet their key heads."""
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % size == 0:
        # The fewest copies of each key head that the ranks divide, side by side: 2 key heads over 4 ranks become
        # 0, 0, 1, 1.
        copies = size // math.gcd(size, key_heads)
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        return query, key, value
    # Each query head gets a key head of its own, and heads of zeros fill up the last rank: 4 heads over 3 ranks become
    # 6. What comes out of those is zero and is dropped, and so is their gradient.
    key, value = (tensor.repeat_interleave(heads // key_heads, 1) for tensor in (key, value))
    query, key, value = (F.pad(tensor, (0, 0, 0, -heads % size)) for tensor in (query, key, value))
    return query, key, value
