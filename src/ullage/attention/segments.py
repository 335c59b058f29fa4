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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ullage.attention.kernels import Flash, Scores, attend, with_sinks
from ullage.core.errors import InputError
from ullage.core.layout import Layout, counting
from ullage.core.rows import Places, alike, arranged, end_to_end, on_device, on_host

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
        device: of the row.
    """

    places: Places | None
    buckets: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    filled: tuple[int, ...]
    device: torch.device


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
        device=device,
    )


def host_lengths(cu_seqlens: Tensor) -> list[int]:
    """The lengths in tokens; waits for the device once per forward, unless they are known on the host."""
    return np.diff(on_host(cu_seqlens)).tolist()


def in_chunks(lengths: Sequence[int], chunk: int) -> list[int]:
    """Lengths in tokens, cut into chunks that see themselves alone.

    >>> in_chunks([5, 0, 2], 2)
    [2, 2, 1, 2]
    """
    whole = ([chunk] * (length // chunk) + [length % chunk] for length in lengths)
    return [part for parts in whole for part in parts if part]


def lengths_of_row(cu_seqlens: Tensor, num_tokens: int, chunk: int | None = None) -> list[int]:
    """The lengths of a row's sequences, or of their chunks; waits for the device once per forward.

    Raises ``InputError`` for lengths that do not sum to the row's tokens.
    """
    lengths = host_lengths(cu_seqlens)
    if sum(lengths) != num_tokens or min(lengths, default=0) < 0:
        raise InputError(
            "cu_seq_lens_q does not tile the row",
            expected=f"lengths that sum to {num_tokens} tokens",
            found=f"{sum(lengths)} in {len(lengths)} sequences",
            hint="something has lengthened the row, as a learned prompt (PEFT's prompt tuning) does: leave packing out",
        )
    return lengths if chunk is None else in_chunks(lengths, chunk)


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
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
        softcap: a score ``s`` becomes ``softcap·tanh(s / softcap)``; None leaves it.
        sinks: [query heads], a score more for each query, of a key without a value.

    Does not wait for the device.

    >>> q = torch.randn(5, 4, 8); kv = torch.randn(5, 2, 8)
    >>> torch.allclose(packed_attention(q, kv, kv, [3, 2])[3:], packed_attention(q[3:], kv[3:], kv[3:], [2]))
    True
    """
    value_dim, is_plain = value.shape[-1], softcap is None and sinks is None
    if query.device.type == "cpu" and (is_plain or not dropout):
        (query, key, value), scale = _alike(query, key, value, scale)
    # Where nothing is done to the scores, torch's own gradients: ours take as much time, and Python for each call.
    if len(query) and (query.device.type != "cpu" or dropout or is_plain):
        order = arrange(tuple(lengths), window, query.device)
        placed = (query, key, value) if order.places is None else map(order.places.place, (query, key, value))
        scores = Scores(causal, scale, softcap)
        mixed = _by_autograd(tuple(placed), _calls(order, window, causal), scores, dropout, sinks)
        return (mixed if order.places is None else order.places.take(mixed))[..., :value_dim]
    mixed: Any = _OfRow.apply(query, key, value, sinks, tuple(lengths), window, Scores(causal, scale, softcap))
    return mixed[..., :value_dim]


@dataclass(frozen=True, eq=False)
class _KernelCall:
    """One call of the kernel: sequences of one length, or blocks that reach equally far.

    Attributes:
        tokens: those of its queries, among the places of the row.
        shape: (sequences or blocks, tokens of each).
        causal: whether the kernel has to hide later tokens; a mask does it for blocks.
        rows, seen: for blocks, their places among all blocks, and those of the blocks that each sees.
        mask: of blocks, bool [tokens, keys] or [blocks, 1, tokens, keys].
    """

    tokens: slice
    shape: tuple[int, int]
    causal: bool
    rows: Tensor | None = None
    seen: Tensor | None = None
    mask: Tensor | None = None

    def queries(self, tokens: Tensor) -> Tensor:
        """Those of the call's tokens [places, heads, ...] as [n, heads, L, ...]."""
        parts = tokens.unflatten(0, (-1, self.shape[1]))
        return (parts if self.rows is None else parts.index_select(0, self.rows)).transpose(1, 2)

    def keys(self, tokens: Tensor) -> Tensor:
        """Those that the queries see among the call's tokens [places, heads, dim], as [n, heads, keys, dim]."""
        if self.seen is None:
            return self.queries(tokens)
        parts = tokens.unflatten(0, (-1, self.shape[1])).index_select(0, self.seen)
        return parts.unflatten(0, (self.shape[0], -1)).flatten(1, 2).transpose(1, 2)

    def write(self, values: Tensor, row: Tensor) -> None:
        """Put values [n, heads, L, ...] of queries into [places, heads, ...]."""
        parts = row[self.tokens].unflatten(0, (-1, self.shape[1]))
        if self.rows is None:
            parts.copy_(values.transpose(1, 2))
        else:
            parts.index_copy_(0, self.rows, values.transpose(1, 2))

    def add(self, values: Tensor, row: Tensor) -> None:
        """Add values [n, heads, keys, dim] of keys to [places, heads, dim], which is zero where blocks are."""
        if self.seen is None:
            return self.write(values, row)
        parts = row[self.tokens].unflatten(0, (-1, self.shape[1]))
        parts.index_add_(0, self.seen, values.transpose(1, 2).unflatten(1, (-1, self.shape[1])).flatten(0, 1))
        return None

    def added_mask(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add to scores."""
        if self.mask is None:
            return None
        return torch.zeros(self.mask.shape, dtype=dtype).masked_fill_(~self.mask, float("-inf"))


def _by_autograd(
    row: tuple[Tensor, ...],
    calls: tuple[list[_KernelCall], Tensor | None],
    scores: Scores,
    dropout: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by calls of what is differentiable by itself; ``row`` is query, key and value."""
    # Cut once: the gradient of a split is one concatenation, that of a slice a whole row of zeros for each call.
    starts = list(dict.fromkeys(call.tokens.start for call in calls[0]))
    sizes = np.diff([*starts, len(row[0])]).tolist()
    query, key, value = (dict(zip(starts, each.split(sizes))) for each in row)
    outputs = []
    for call in calls[0]:
        at = call.tokens.start
        tensors = call.queries(query[at]), call.keys(key[at]), call.keys(value[at])
        options: dict[str, Any] = {"mask": call.mask, "dropout": dropout, "sinks": sinks}
        mixed = attend(*tensors, scores._replace(causal=call.causal), **options)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return mixed if calls[1] is None else mixed.index_select(0, calls[1])


# A packed row on a CPU: one function of torch's autograd, and, in a compiled graph, one operator: lengths are its data.


class _OfRow(torch.autograd.Function):
    """Attention within each sequence of a row on a CPU: :func:`_forward` and :func:`_backward`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output, log_sums = _forward(*inputs)
        ctx.save_for_backward(*inputs[:4], output, log_sums)
        ctx.rest = inputs[4:]
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_backward(gradients[0], *ctx.saved_tensors, *ctx.rest), None, None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    lengths: tuple[int, ...],
    window: int | None,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, query heads, dim] and the log-sum-exp [T, query heads] of the scores, without a sink."""
    order = arrange(lengths, window, query.device)
    if order.places is not None:
        query, key, value = map(order.places.place, (query, key, value))
    output = query.new_empty(query.shape)
    log_sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    for call in _calls(order, window, scores.causal)[0]:
        tensors = call.queries(query[call.tokens]), call.keys(key[call.tokens]), call.keys(value[call.tokens])
        found = Flash.forward(*tensors, scores._replace(causal=call.causal), call.added_mask(query.dtype))
        call.write(found[0], output)
        call.write(found[1], log_sums)
    if sinks is not None:
        output = with_sinks(output, log_sums, sinks)
    if order.places is not None:
        output, log_sums = map(order.places.take, (output, log_sums))
    return output, log_sums


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    output: Tensor,
    log_sums: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and sinks."""
    order = arrange(lengths, window, query.device)
    of_sinks = None
    if sinks is not None:
        factor = torch.sigmoid(log_sums - sinks.to(log_sums.dtype))
        products = (gradient * output).sum(-1, dtype=log_sums.dtype)
        of_sinks = -(products * (1 - factor)).sum(0).to(sinks.dtype)
        gradient = gradient * factor.to(gradient.dtype)[..., None]
    rows = (gradient, query, key, value, output, log_sums)
    gradient, query, key, value, output, log_sums = rows if order.places is None else map(order.places.place, rows)
    of_query, of_key, of_value = (each.new_empty(each.shape) for each in (query, key, value))
    if order.blocks:
        of_key, of_value = of_key.zero_(), of_value.zero_()
    for call in _calls(order, window, scores.causal)[0]:
        of_gradient, of_queries, of_outputs, of_sums = (
            call.queries(each[call.tokens]) for each in (gradient, query, output, log_sums)
        )
        tensors = of_gradient, of_queries, call.keys(key[call.tokens]), call.keys(value[call.tokens])
        mask = call.added_mask(query.dtype)
        found = Flash.backward(*tensors, of_outputs, of_sums, scores._replace(causal=call.causal), mask)
        call.write(found[0], of_query)
        call.add(found[1], of_key)
        call.add(found[2], of_value)
    gradients = of_query, of_key, of_value
    of_query, of_key, of_value = gradients if order.places is None else map(order.places.take, gradients)
    return of_query, of_key, of_value, of_sinks


_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, {}Tensor cu_seqlens, int? chunk, int? window, "
    "bool causal, float? scale, float? softcap) -> ({})"
)


@torch.library.custom_op("ullage::attention_of_row", mutates_args=(), schema=_SCHEMA.format("", "Tensor, Tensor"))
def _operator(*inputs: Any) -> tuple[Tensor, Tensor]:
    query, key, value, sinks = inputs[:4]
    lengths, window, scores = _rest(len(query), *inputs[4:])
    return _forward(query, key, value, sinks, lengths, window, scores)


@_operator.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    log_sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(query.shape), log_sums


@torch.library.custom_op(
    "ullage::attention_of_row_backward",
    mutates_args=(),
    schema=_SCHEMA.format("Tensor output, Tensor log_sums, Tensor gradient, ", "Tensor, Tensor, Tensor, Tensor"),
)
def _operator_backward(*inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, sinks, output, log_sums, gradient = inputs[:7]
    lengths, window, scores = _rest(len(query), *inputs[7:])
    *found, of_sinks = _backward(gradient, query, key, value, sinks, output, log_sums, lengths, window, scores)
    return *found, query.new_empty(0) if of_sinks is None else of_sinks


@_operator_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    inputs = (query, key, value, query.new_empty(0) if sinks is None else sinks)
    return tuple(each.new_empty(each.shape) for each in inputs)


def _rest(size: int, cu_seqlens: Tensor, chunk: Any, window: Any, *scores: Any) -> tuple[Any, ...]:
    return tuple(lengths_of_row(cu_seqlens, size, chunk)), window, Scores(*scores)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output, inputs[4])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    *saved, cu_seqlens = ctx.saved_tensors
    *found, of_sinks = _operator_backward(*saved, gradient, cu_seqlens, *ctx.rest)
    return *found, None if saved[3] is None else of_sinks, *[None] * 6


_operator.register_autograd(_differentiate, setup_context=_keep)


def attention_of_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    chunk: int | None,
    window: int | None,
    scale: float | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """:func:`packed_attention` on a CPU as one operator of a compiled graph, without dropout."""
    value_dim = value.shape[-1]
    (query, key, value), scale = _alike(query, key, value, scale)
    return _operator(query, key, value, sinks, cu_seqlens, chunk, window, causal, scale, softcap)[0][..., :value_dim]


def autocast(*rows: Tensor) -> list[Tensor]:
    """The rows in the dtype of autocast, where it is on, as torch's own attention gets them; float64 stays.

    Queries and keys come in float32 from their rotary positions, values in the dtype of their projection.
    """
    device = rows[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(rows)
    dtype = torch.get_autocast_dtype(device)
    return [each if each.dtype == torch.float64 else each.to(dtype) for each in rows]


def _alike(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[list[Tensor], float | None]:
    """Rows of one dtype and one dim, which the kernel asks for, and the scale of the scores.

    Zeros behind change no product.
    """
    rows, dim = autocast(query, key, value), query.shape[-1]
    most = max(dim, value.shape[-1])
    if dim == value.shape[-1]:
        return rows, scale
    return [F.pad(each, (0, most - each.shape[-1])) for each in rows], dim**-0.5 if scale is None else scale


@lru_cache(maxsize=16)
def _calls(order: Arrangement, window: int | None, causal: bool) -> tuple[list[_KernelCall], Tensor | None]:
    """The calls of an arrangement, and where the tokens of the row are among their results; None for the same order.

    The arrangement is the same object in all layers.
    """
    calls, start = [], 0
    for rows, width in order.buckets:
        stop = start + rows * width
        calls.append(_KernelCall(slice(start, stop), (rows, width), causal and width > 1))
        start = stop
    if not order.blocks or window is None:
        return calls, None
    block = _block_size(window)
    blocks, place_of = _block_calls(order, window, causal)
    behind = torch.from_numpy(np.add.outer(place_of * block, np.arange(block)).ravel() + start)
    places = torch.cat([torch.arange(start), behind]).to(order.device)
    return [*calls, *(replace(call, tokens=slice(start, None)) for call in blocks)], places


def _block_calls(order: Arrangement, window: int, causal: bool) -> tuple[list[_KernelCall], np.ndarray]:
    """Calls of blocks that reach equally far, and the place of each block among the results.

    A block is multiplied with those that it looks at, behind a mask.
    """
    device = order.device
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
            mask = _without_padding(mask, back * block, on_device(padded[place], device))
        rows, sees = (on_device(each, device) for each in (place, seen))
        calls.append(_KernelCall(slice(0), (len(place), block), False, rows, sees, mask))
    return calls, np.argsort(np.concatenate(places))


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
    return on_device((distance >= 0) & (distance < window), device)


def _without_padding(band: Tensor, start: int, padded: Tensor) -> Tensor:
    """A mask [block, keys] for each block, bool [blocks, 1, block, keys], that hides its last ``padded`` [blocks] keys.

    A query that is padding itself keeps itself, since one that sees nothing is nan. The queries begin at key ``start``.
    """
    keys = torch.arange(band.shape[1], device=band.device)
    is_itself = keys[start : start + len(band), None] == keys
    is_real = keys < band.shape[1] - padded[:, None]
    return (band & (is_real[:, None] | is_itself))[:, None]
