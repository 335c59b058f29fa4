"""Ulysses context parallel: each rank gets the whole row for its share of the heads, and returns the results.

One all-to-all brings queries, keys and values of all tokens and some heads, the attention runs as it does on one
process, and one all-to-all takes the result back. Where there are fewer key heads than ranks, or the ranks do not
divide them, each key head is repeated until they do. Source: DeepSpeed-Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.attention.slices import Slices
from ullage.rows import permute


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
        return _AllToAll.apply(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None  # type: ignore[return-value]


def all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    """Send ``sends[j]`` rows, in order, to each rank *j* of the group; get ``receives[j]`` back. Differentiable."""
    return _AllToAll.apply(rows, sends, receives, group)  # type: ignore[return-value]


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slices: Slices,
    group: Any,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of this rank's slice, [t, query heads, value dim], by ``attend`` on the whole row and some heads.

    Args:
        query: [t, query heads, dim] of the slice; the number of query heads is a multiple of the ranks.
        key, value: [t, key heads, dim] of the slice.
        slices: how the row is cut.
        group: process group of the ranks.
        attend: attention of the whole row, [T, heads / ranks, dim] in the row's order.

    Collective; does not wait for the device.
    """
    size, own, counts = slices.size, len(query), slices.lengths
    # The fewest copies of each key head that the ranks divide. Copies are neighbours, so each rank's query heads still
    # meet the key heads of their groups.
    copies = size // math.gcd(size, key.shape[1])
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    # One buffer for the three, the heads of one rank after those of the other: [ranks, t, heads / ranks · dim].
    parts = [tensor.unflatten(1, (size, -1)).flatten(2).transpose(0, 1) for tensor in (query, key, value)]
    widths = [part.shape[-1] for part in parts]
    received = all_to_all(torch.cat(parts, -1).flatten(0, 1), [own] * size, counts, group)
    # Slices arrive rank by rank: put their tokens into the row's order, attend, and back again.
    to_row, to_slices = _orders(slices, query.device)
    row = permute(received, to_row, to_slices)
    mixed = attend(
        *(part.unflatten(1, (-1, tensor.shape[2])) for part, tensor in zip(row.split(widths, 1), (query, key, value)))
    )
    # Results of these heads go to the rank that holds the tokens.
    back = all_to_all(permute(mixed.flatten(1), to_slices, to_row), counts, [own] * size, group)
    # [ranks · t, heads / ranks · dim] to [t, heads, dim]: rank j computed the j-th block of neighbouring heads.
    return back.unflatten(0, (size, own)).transpose(0, 1).reshape(own, query.shape[1], -1)


def _orders(slices: Slices, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Permutation from slices laid end to end to the row's order, and its inverse; None if the orders are the same."""

    def make() -> tuple[Tensor | None, Tensor | None]:
        # order[i] is the row position of element i of the slices laid end to end, so its argsort leads the other way.
        order = np.concatenate(slices.indices)
        if np.array_equal(order, np.arange(len(order))):
            return None, None
        return torch.from_numpy(np.argsort(order)).to(device), torch.from_numpy(order).to(device)

    return slices.remember(("orders", device), make)
