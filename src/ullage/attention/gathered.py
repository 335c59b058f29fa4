"""Context parallel over gathered keys: every rank keeps its queries and gets the keys and values that they see.

A key travels only to ranks with a query that sees it: not to those that hold what lies before it, not past its own
sequence, not out of its window. A piece of neighbouring queries meets the keys that end where it ends, so what a
causal mask hides in front of it is never computed. On CUDA torch's varlen kernel takes pieces as they are (its causal
mask is aligned at the end); elsewhere pieces of one shape share a call, and long ones are cut so that the corner that
the mask hides stays small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ullage.attention.segments import block_size
from ullage.attention.slices import Runs, Slices
from ullage.attention.ulysses import all_to_all
from ullage.attention.varlen import serves_varlen, varlen_attention
from ullage.layout import Int64, counting, ranges, starts_of
from ullage.places import permute

#: A piece is cut into at most this many blocks of queries, of at least ``_LEAST_BLOCK``.
_MOST_BLOCKS = 16
_LEAST_BLOCK = 32


@dataclass(frozen=True, eq=False)
class _Route:
    """What a rank sends to each other one, as local places end to end, and what it gets from each."""

    take: Tensor
    sends: list[int]
    receives: list[int]
    where: Int64


@dataclass(frozen=True, eq=False)
class _Calls:
    """Pieces in order of their shape: (pieces, queries, keys) of each call, and the orders of queries and keys."""

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

    ``query`` [t, query heads, dim], ``key`` and ``value`` [t, key heads, dim] of the slice. ``window``, ``scale`` and
    ``dropout`` as in ``segments.packed_attention``.
    """
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
    owner, place = np.empty((2, slices.layout.size), np.int64)
    for rank, index in enumerate(slices.indices):
        owner[index], place[index] = rank, np.arange(len(index))
    every = [slices.needs(rank, window) for rank in range(slices.size)]
    wanted = [needs[owner[needs] == slices.rank] for needs in every]
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
    """The keys of each piece, end to end, as places among the received rows."""
    return torch.from_numpy(where[ranges(pieces.key_start, pieces.keys)])


def _by_varlen(
    query: Tensor, key: Tensor, value: Tensor, slices: Slices, route: _Route, *, window: int | None, scale: float | None
) -> Tensor:
    """By torch's varlen kernel, which takes the pieces as they lie in the slice."""
    pieces = slices.runs(slices.rank, window)

    def make() -> tuple[Tensor, ...]:
        lengths = (np.append(0, counts).cumsum() for counts in (pieces.queries, pieces.keys))
        sums = (torch.from_numpy(cumulated.astype(np.int32)) for cumulated in lengths)
        return tuple(tensor.to(query.device) for tensor in (_seen(pieces, route.where), *sums))

    seen, queries, keys = slices.remember(("varlen", window, query.device), make)
    longest = (int(pieces.queries.max()), int(pieces.keys.max()))
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
    calls = slices.remember(("calls", window, query.device), lambda: _calls(slices, route, window, query.device))
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
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
    if queries == keys and (window is None or keys <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=queries > 1, **options)
    outputs = []
    for begin, end in blocks(queries, keys, window):
        last = keys - queries + end
        mask = _corner(end - begin, last, window, query.device)
        seen = (key[:, :, :last], value[:, :, :last])
        outputs.append(F.scaled_dot_product_attention(query[:, :, begin:end], *seen, attn_mask=mask, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def blocks(queries: int, keys: int, window: int | None) -> list[tuple[int, int]]:
    """The blocks of queries that a piece with more keys than queries is computed in, (begin, end)."""
    size = queries if window is not None else max(_LEAST_BLOCK, -(-queries // _MOST_BLOCKS))
    return [(begin, min(begin + size, queries)) for begin in range(0, queries, size)]


def computed_pairs(slices: Slices, window: int | None = None) -> int:
    """Pairs of a query and a key that this rank computes without the varlen kernel, the masked ones included.

    A call that is causal from its first key counts as half: kernels skip what it hides.
    """
    total = 0
    pieces = slices.runs(slices.rank, window)
    if window is not None:
        pieces = _in_blocks(pieces, window)
    for queries, keys in zip(pieces.queries.tolist(), pieces.keys.tolist()):
        if queries == keys and (window is None or keys <= window):
            total += queries * (queries + 1) // 2
            continue
        total += sum((end - begin) * (keys - queries + end) for begin, end in blocks(queries, keys, window))
    return total


def _corner(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees, bool [queries, keys]; the last query sees the last key. Too large to be kept."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return seen if window is None else seen.triu_(keys - queries - window + 1)


def _calls(slices: Slices, route: _Route, window: int | None, device: torch.device) -> _Calls:
    pieces = slices.runs(slices.rank, window)
    if window is not None:
        pieces = _in_blocks(pieces, window)
    shapes, which, counts = np.unique(
        np.stack([pieces.queries, pieces.keys], 1), axis=0, return_inverse=True, return_counts=True
    )
    order = np.argsort(which.reshape(-1), kind="stable")
    local = starts_of(pieces.queries)
    queries = ranges(local[order], pieces.queries[order])
    sorted_pieces = Runs(pieces.start[order], pieces.queries[order], pieces.keys[order])
    return _Calls(
        [(int(n), int(q), int(k)) for n, (q, k) in zip(counts, shapes)],
        torch.from_numpy(queries).to(device),
        torch.from_numpy(np.argsort(queries)).to(device),
        _seen(sorted_pieces, route.where).to(device),
    )


def _in_blocks(pieces: Runs, window: int) -> Runs:
    """The pieces cut to blocks of a window, each with the keys that its own first query sees."""
    block = block_size(window)
    parts = -(-pieces.queries // block)
    part = counting(parts)
    start = np.repeat(pieces.start, parts) + part * block
    queries = np.minimum(block, np.repeat(pieces.start + pieces.queries, parts) - start)
    begin = np.maximum(np.repeat(pieces.key_start, parts), start - window + 1)
    return Runs(start, queries, start + queries - begin)
