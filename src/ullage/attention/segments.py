"""Attention over sequences that lie end to end in one row, by torch's scaled dot product attention.

Sequences of equal length share one call. A row of T tokens has fewer than √(2T) different lengths, so a thousand
short sequences cost a few dozen calls. Sequences are not padded to share a call with longer ones: on a CPU the kernel's
work on padding was measured to cost more than the calls it would save.

A sliding window of ``w`` tokens over a longer sequence is cut into blocks of ``c`` tokens. A block of queries is
multiplied with its own keys and those of the blocks before it that the window reaches, so the work is about
``length·(w + c)`` pairs instead of ``length²``. Blocks of all sequences that reach equally far back share a call and
one mask. In both directions a block also sees those behind it.

The last block of a sequence is padded behind it. A causal query does not look there, from a query that sees both ways a
mask hides it, and the results of padding are not used, so its gradient is exactly zero. Tokens are moved once into the
order of the calls and once back; the order (:mod:`ullage.core.rows`) depends on the lengths alone and is cached for all
layers of a forward. Source of the kernels: ``torch.nn.functional.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ullage.core.layout import Layout, counting
from ullage.core.rows import Places, alike, arranged, end_to_end

#: Smallest number of tokens in a block of a sliding window.
_LEAST_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Order in which the tokens of a row are computed: first sequences by length, then windowed ones in blocks.

    Attributes:
        places: the place of each token; the padding of blocks takes places too, behind their tokens. None where nothing
            need be moved.
        buckets: (number of sequences, length) of each call, in order.
        blocks: for each block of a windowed sequence, how many blocks of that sequence precede it.
        filled: for each such block, its real tokens.
    """

    places: Places | None
    buckets: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    filled: tuple[int, ...]


@lru_cache(maxsize=32)
def arrange(lengths: tuple[int, ...], window: int | None, device: torch.device) -> Arrangement:
    """Order of computation for sequences of these lengths in tokens, copied to the device."""
    sizes = np.asarray(lengths, np.int64)
    # A sequence no longer than the window sees all of itself, so it is plain causal.
    windowed = np.flatnonzero(sizes > window) if window is not None else np.empty(0, np.int64)
    is_whole = sizes > 0
    is_whole[windowed] = False
    # One call per length, in the order in which lengths first occur: sequences of one length need not be moved at all.
    calls = alike([sizes], is_whole)
    items = end_to_end([*calls, windowed])
    # Each sequence gets as many places as it has tokens; a windowed one is filled up to whole blocks.
    block = _block_size(window)
    slots = sizes[items]
    num_blocks = -(-sizes[windowed] // block)
    slots[len(slots) - len(windowed) :] = num_blocks * block
    # The windowed sequences are the last items: number the blocks of each from 0. Sequences of 150 and 70 tokens in
    # blocks of 64 have blocks 0, 1, 2, 0, 1, filled with 64, 64, 22, 64 and 6 tokens.
    blocks = counting(num_blocks)
    filled = np.minimum(np.repeat(sizes[windowed], num_blocks) - blocks * block, block)
    return Arrangement(
        places=arranged(Layout(sizes), items, slots, device),
        buckets=tuple((len(call), int(sizes[call[0]])) for call in calls),
        blocks=tuple(blocks.tolist()),
        filled=tuple(filled.tolist()),
    )


def _block_size(window: int | None) -> int:
    """Tokens in a block of a sliding window: a quarter of it, so that a fifth of the work is masked; at least 64."""
    return max(_LEAST_BLOCK, -(-(window or 0) // 4))


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """Attention within each sequence of a row, [T, query heads, value dim].

    Args:
        query: [T, query heads, dim]; the number of query heads is a multiple of that of key heads.
        key: [T, key heads, dim].
        value: [T, key heads, value dim].
        lengths: tokens of each sequence, on the host; they sum to T, which is not checked here. May contain zeros.
        window: how many tokens a query sees, itself included, in both directions on each side; None for all.
        scale: factor of the scores; 1/√dim if None.
        dropout: probability of dropping an attention weight.
        causal: whether a token sees only those before it.

    Does not wait for the device.

    >>> q = torch.randn(5, 4, 8); kv = torch.randn(5, 2, 8)
    >>> torch.allclose(packed_attention(q, kv, kv, [3, 2])[3:], packed_attention(q[3:], kv[3:], kv[3:], [2]))
    True
    """
    order = arrange(tuple(lengths), window, query.device)
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    if order.places is not None:
        query, key, value = (order.places.place(tensor) for tensor in (query, key, value))
    # One part per call; the last part holds the windowed sequences and may be empty.
    sizes = [rows * width for rows, width in order.buckets]
    sizes.append(len(query) - sum(sizes))
    parts = list(zip(query.split(sizes), key.split(sizes), value.split(sizes)))
    # Sequences of equal length: one batched causal call.
    outputs = []
    for (rows, width), part in zip(order.buckets, parts):
        queries, keys, values = (tensor.unflatten(0, (rows, width)).transpose(1, 2) for tensor in part)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal and width > 1, **options)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    if order.blocks and window is not None:
        outputs.append(_windowed(*parts[-1], order, window, causal, options))
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return mixed if order.places is None else order.places.take(mixed)


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, order: Arrangement, window: int, causal: bool, options: dict[str, Any]
) -> Tensor:
    """Attention of whole blocks, each with the blocks around it that its window reaches.

    Args:
        query, key, value: [blocks · tokens of a block, heads, dim], the blocks of all windowed sequences end to end.
        order: of these blocks.
        window: how many tokens a query sees, itself included.
        causal: whether a token sees only those before it.
        options: of scaled dot product attention.
    """
    query, key, value = (tensor.unflatten(0, (-1, _block_size(window))) for tensor in (query, key, value))
    calls, back_to_row = _block_calls(order, window, causal, query.device)
    outputs = []
    for rows, seen, num_seen, mask in calls:
        # [blocks, heads, tokens, dim]: a block's queries, and its keys with those of the blocks that it looks at
        queries = query.index_select(0, rows).transpose(1, 2)
        keys, values = (
            tensor.index_select(0, seen).unflatten(0, (-1, num_seen)).flatten(1, 2).transpose(1, 2)
            for tensor in (key, value)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, **options)
        outputs.append(mixed.transpose(1, 2))
    # Results came grouped by their reach: return them to the order of the blocks.
    return torch.cat(outputs).index_select(0, back_to_row).flatten(0, 1)


@lru_cache(maxsize=16)
def _block_calls(
    order: Arrangement, window: int, causal: bool, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor, int, Tensor]], Tensor]:
    """Calls of blocks that reach equally far: their places, those of the blocks that each sees, how many, and the mask.

    Beside them the place of each block among the results. The arrangement is the same object in all layers.
    """
    block = _block_size(window)
    # The first query of a block sees window - 1 tokens in front of the block; near its start a sequence has fewer
    # blocks, and so near its end.
    reach = -(-(window - 1) // block)
    preceding, filled = np.asarray(order.blocks), np.asarray(order.filled)
    behind = np.minimum(_following(preceding), 0 if causal else reach)
    # Both ways a block may see the padding of the last one.
    last = np.arange(len(filled)) + behind
    padded = np.zeros(len(filled), np.int64) if causal else block - filled[last]
    reaches = np.stack([np.minimum(preceding, reach), behind, padded > 0])
    calls, places = [], []
    for back, front, is_padded in np.unique(reaches, axis=1).T.tolist():
        place = np.flatnonzero((reaches == [[back], [front], [is_padded]]).all(0))
        places.append(place)
        # The blocks of a sequence are neighbours, so a block at place p sees those at p - back, ..., p + front.
        seen = np.add.outer(place, np.arange(-back, front + 1)).ravel()
        mask = _band(block, back, front, window, causal, device)
        if is_padded:
            mask = _without_padding(mask, back * block, torch.from_numpy(padded[place]).to(device))
        calls.append((torch.from_numpy(place).to(device), torch.from_numpy(seen).to(device), back + 1 + front, mask))
    return calls, torch.from_numpy(np.argsort(np.concatenate(places))).to(device)


def _following(preceding: np.ndarray) -> np.ndarray:
    """For each block, how many blocks of its sequence follow it, from how many precede it.

    >>> _following(np.array([0, 1, 2, 0, 1])).tolist()
    [2, 1, 0, 1, 0]
    """
    ends = np.flatnonzero(np.append(preceding[1:] == 0, True))
    return np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(preceding))


@lru_cache(maxsize=32)
def _band(block: int, back: int, front: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """Mask of the keys of ``back + 1 + front`` blocks that a block of queries sees, bool [block, keys]."""
    # distance[i, j]: how far key j lies before query i. ``back`` blocks of keys lie in front of the queries.
    distance = np.add.outer(np.arange(block) + back * block, -np.arange((back + 1 + front) * block))
    if not causal:
        distance = np.abs(distance)
    return torch.from_numpy((distance >= 0) & (distance < window)).to(device)


def _without_padding(band: Tensor, start: int, padded: Tensor) -> Tensor:
    """A mask [block, keys] for each block, bool [blocks, 1, block, keys], that hides its last ``padded`` [blocks] keys.

    A query that is padding itself keeps itself, since one that sees nothing is nan. The queries begin at key ``start``.
    """
    keys = torch.arange(band.shape[1], device=band.device)
    is_itself = keys[start : start + len(band), None] == keys
    is_real = keys < band.shape[1] - padded[:, None]
    return (band & (is_real[:, None] | is_itself))[:, None]
