"""Context parallel by gathered keys, and by exchanged heads (Ulysses, at the end of the module).

By gathered keys each rank keeps its queries and receives the keys and values that they see.

A key is sent only to ranks with a query that sees it: not to ranks whose tokens all lie before it, nor to other
sequences, nor beyond its window. The queries of a rank are computed in pieces, each a run of neighbouring tokens of one
sequence. A piece is multiplied with the keys up to its own end only, so most of what a causal mask hides is never
computed. On CUDA torch's varlen kernel takes pieces as they are (its causal mask is aligned at the end); elsewhere
pieces of one shape share a call, and long ones are cut into blocks so that the masked corner stays small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ullage.attention.segments import block_size
from ullage.attention.slices import Runs, Slices
from ullage.attention.varlen import serves_varlen, varlen_attention
from ullage.layout import Int64, counting, ranges, starts_of
from ullage.rows import permute

#: A piece is cut into at most this many blocks of queries, of at least ``_LEAST_BLOCK``.
_MOST_BLOCKS = 16
_LEAST_BLOCK = 32


@dataclass(frozen=True, eq=False)
class _Route:
    """Keys that this rank sends and receives.

    Attributes:
        take: index in the slice of each key to send, the keys for rank 0 first, then those for rank 1, ...
        sends, receives: number of keys to and from each rank.
        where: index among the received keys of each token of the whole row; -1 if it was not received.
    """

    take: Tensor
    sends: list[int]
    receives: list[int]
    where: Int64


@dataclass(frozen=True, eq=False)
class _Calls:
    """Pieces sorted by shape, so that pieces of one shape share a call.

    Attributes:
        shapes: (number of pieces, queries of each, keys of each) per call.
        queries, back: order of the slice's queries in the calls, and its inverse.
        keys: index among the received keys of each key of the calls, end to end.
    """

    shapes: list[tuple[int, int, int]]
    queries: Tensor
    back: Tensor
    keys: Tensor


def gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slices: Slices,
    group: Any,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of this rank's slice, [t, query heads, value dim]; collective.

    Args:
        query: [t, query heads, dim] of the slice.
        key, value: [t, key heads, dim] of the slice.
        slices: how the row is cut.
        group: process group of the ranks.
        window: how many tokens a query sees, itself included; None for all.
        scale: factor of the scores; 1/√dim if None.
        dropout: probability of dropping an attention weight.

    Does not wait for the device.
    """
    # Keys and values travel side by side, in one all-to-all. A key may go to several ranks: their gradients come back
    # by the same way, and that of index_select adds them up.
    route = slices.remember(("route", window, query.device), lambda: _route(slices, window, query.device))
    rows = torch.cat([key.flatten(1), value.flatten(1)], 1).index_select(0, route.take)
    rows = all_to_all(rows, route.sends, route.receives, group)
    key, value = (
        part.unflatten(1, tensor.shape[1:])
        for part, tensor in zip(rows.split([math.prod(t.shape[1:]) for t in (key, value)], 1), (key, value))
    )
    if serves_varlen(query, value, dropout):
        return _by_varlen(query, key, value, slices, route, window=window, scale=scale)
    return _by_calls(query, key, value, slices, route, window=window, scale=scale, dropout=dropout)


def _route(slices: Slices, window: int | None, device: torch.device) -> _Route:
    # Each token of the row: the rank that holds it, and its index in that rank's slice.
    owner, place = np.empty((2, slices.layout.size), np.int64)
    for rank, index in enumerate(slices.indices):
        owner[index], place[index] = rank, np.arange(len(index))
    # To send: of the keys that each rank's queries see, those that this rank holds. Every rank derives this for all
    # ranks from the lengths, so no sizes are exchanged; sender and receiver list a pair's keys in ascending order.
    every = [slices.needs(rank, window) for rank in range(slices.size)]
    wanted = [needs[owner[needs] == slices.rank] for needs in every]
    # To receive: the keys that this rank's queries see, in the order of the ranks that hold them.
    mine = every[slices.rank]
    by_owner = np.argsort(owner[mine], kind="stable")
    where = np.full(slices.layout.size, -1)
    where[mine[by_owner]] = np.arange(len(mine))
    return _Route(
        torch.from_numpy(place[np.concatenate(wanted)]).to(device),
        [len(places) for places in wanted],
        np.bincount(owner[mine], minlength=slices.size).tolist(),
        where,
    )


def _seen(pieces: Runs, where: Int64) -> Tensor:
    """Index among the received keys of each key of each piece, the pieces end to end."""
    return torch.from_numpy(where[ranges(pieces.key_start, pieces.keys)])


def _by_varlen(
    query: Tensor, key: Tensor, value: Tensor, slices: Slices, route: _Route, *, window: int | None, scale: float | None
) -> Tensor:
    """Attention by torch's varlen kernel, which takes the pieces in the order of the slice, each as a sequence.

    Arguments as for :func:`gathered`, but ``key`` and ``value`` [received keys, key heads, dim] in the order of
    ``route.where``.
    """
    pieces = slices.runs(slices.rank, window)

    def make() -> tuple[Tensor, ...]:
        # Cumulated with a leading 0 and in int32, as the kernel takes them, once for queries and once for keys.
        lengths = (np.append(0, counts).cumsum() for counts in (pieces.queries, pieces.keys))
        sums = (torch.from_numpy(cumulated.astype(np.int32)) for cumulated in lengths)
        return tuple(tensor.to(query.device) for tensor in (_seen(pieces, route.where), *sums))

    seen, queries, keys = slices.remember(("varlen", window, query.device), make)
    longest = (int(pieces.queries.max()), int(pieces.keys.max()))
    # A key is repeated for each piece that sees it: a later chunk of a sequence sees the keys of an earlier one again.
    key, value = key.index_select(0, seen), value.index_select(0, seen)
    return varlen_attention(query, key, value, queries, longest[0], keys=(keys, longest[1]), window=window, scale=scale)


def _by_calls(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slices: Slices,
    route: _Route,
    *,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Attention by scaled dot product attention, one call per shape of a piece; arguments as for :func:`_by_varlen`."""
    calls = slices.remember(("calls", window, query.device), lambda: _calls(slices, route, window, query.device))
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    # Bring queries and keys into the order of the calls, split them by call, and bring the results back.
    query = permute(query, calls.queries, calls.back)
    key, value = key.index_select(0, calls.keys), value.index_select(0, calls.keys)
    parts = zip(
        query.split([count * queries for count, queries, _ in calls.shapes]),
        *(tensor.split([count * keys for count, _, keys in calls.shapes]) for tensor in (key, value)),
    )
    outputs = []
    for (count, _, _), part in zip(calls.shapes, parts):
        queries, keys, values = (tensor.unflatten(0, (count, -1)).transpose(1, 2) for tensor in part)
        outputs.append(_call(queries, keys, values, window, options).transpose(1, 2).flatten(0, 1))
    return permute(torch.cat(outputs), calls.back, calls.queries)


def _call(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """Attention of pieces of one shape, [pieces, heads, queries, dim] over [pieces, heads, keys, dim]."""
    queries, keys = query.shape[2], key.shape[2]
    # A piece that begins with its sequence: the kernel's own causal mask, which skips what it hides.
    if queries == keys and (window is None or keys <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=queries > 1, **options)
    # Any other: block by block, each with the keys up to its end and a mask for its corner.
    outputs = []
    for begin, end in blocks(queries, keys, window):
        last = keys - queries + end
        mask = _corner(end - begin, last, window, query.device)
        seen = (key[:, :, :last], value[:, :, :last])
        outputs.append(F.scaled_dot_product_attention(query[:, :, begin:end], *seen, attn_mask=mask, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def blocks(queries: int, keys: int, window: int | None) -> list[tuple[int, int]]:
    """Blocks of queries, (begin, end), in which a piece with more keys than queries is computed."""
    # With a window, in_blocks has cut the piece already. Without one, smaller blocks compute less that is masked, but
    # take more calls; -(-a // b) rounds up.
    size = queries if window is not None else max(_LEAST_BLOCK, -(-queries // _MOST_BLOCKS))
    return [(begin, min(begin + size, queries)) for begin in range(0, queries, size)]


def _corner(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Mask of the keys that each query sees, bool [queries, keys], aligned at the end. Too large to cache."""
    # Query i is key p = keys - queries + i: it sees keys up to p, and with a window those from p - window + 1 on.
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return seen if window is None else seen.triu_(keys - queries - window + 1)


def _calls(slices: Slices, route: _Route, window: int | None, device: torch.device) -> _Calls:
    pieces = slices.runs(slices.rank, window)
    if window is not None:
        pieces = in_blocks(pieces, window)
    # One call per shape (queries, keys).
    shapes, which, counts = np.unique(
        np.stack([pieces.queries, pieces.keys], 1), axis=0, return_inverse=True, return_counts=True
    )
    # Stable, so that pieces of one shape keep the order of the slice. numpy 2.0 gives the inverse a second dimension.
    order = np.argsort(which.reshape(-1), kind="stable")
    # From places in the row to places in this rank's slice, where the pieces lie end to end.
    local = starts_of(pieces.queries)
    queries = ranges(local[order], pieces.queries[order])
    sorted_pieces = Runs(pieces.start[order], pieces.queries[order], pieces.keys[order])
    return _Calls(
        [(int(n), int(q), int(k)) for n, (q, k) in zip(counts, shapes)],
        torch.from_numpy(queries).to(device),
        torch.from_numpy(np.argsort(queries)).to(device),
        _seen(sorted_pieces, route.where).to(device),
    )


def in_blocks(pieces: Runs, window: int) -> Runs:
    """Runs cut into blocks of a sliding window, each with the keys from the first one that its first query sees."""
    block = block_size(window)
    # The blocks of each run, rounded up; ``part`` numbers them within their run, and the last may be shorter.
    parts = -(-pieces.queries // block)
    part = counting(parts)
    start = np.repeat(pieces.start, parts) + part * block
    queries = np.minimum(block, np.repeat(pieces.start + pieces.queries, parts) - start)
    begin = np.maximum(np.repeat(pieces.key_start, parts), start - window + 1)
    return Runs(start, queries, start + queries - begin)


# Ulysses context parallel: each rank gets the whole row for its share of the heads, and returns the results.
#
# One all-to-all brings queries, keys and values of all tokens and some heads, the attention runs as it does on one
# process, and one all-to-all takes the result back. Where there are fewer key heads than ranks, or the ranks do not
# divide them, each key head is repeated until they do. Source: DeepSpeed-Ulysses (Jacobs et al. 2023).


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
