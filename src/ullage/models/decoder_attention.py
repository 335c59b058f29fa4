"""Attention of a decoder over the tokens of its own source: additive (Bahdanau) and dot (Luong).

Targets and sources of a batch have unequal lengths, so the pairs of a decoder step and a source token are rectangles
of unequal sizes. Rectangles of about one size are run as one block, padded to the largest in it. Tokens are gathered
into their places in the blocks and back (:mod:`ullage.core.rows`); the padding of a block is masked and never matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout
from ullage.core.rows import Calls, on_device

#: Padded pairs that a block may have, as a share of its real pairs (a pair is a decoder step and a source token),
WASTE = 0.25
#: or this many pairs, if that is more: what the calls of another block cost.
BLOCK_COST = 2**12
#: Most elements of queries plus keys held at once, so that they stay in the cache.
MAX_ELEMENTS = 2**20


@dataclass(frozen=True, eq=False)
class Blocks:
    """Groups of sequences that attend together, each padded to its longest target and its longest source.

    Attributes:
        lengths: int64 [n], the length of each target in tokens
        members: the sequences of each block
        targets, sources: the calls of either side, one per block
    """

    lengths: Int64
    members: tuple[Int64, ...]
    targets: Calls
    sources: Calls

    @classmethod
    def of(cls, targets: Int64, sources: Int64, device: torch.device) -> Blocks:
        """Blocks for sequences of these lengths (host, tokens). Copies indices to ``device`` without waiting.

        Raises ``InputError`` for a source without tokens, which leaves nothing to attend to.
        """
        empty = np.flatnonzero(sources < 1)
        if len(empty):
            raise InputError("a source is empty", where=f"sequence {int(empty[0])}", expected="at least one token")
        # Equal lengths on both sides are one full block.
        is_equal = (targets == targets[0]).all() and (sources == sources[0]).all()
        members = (np.arange(len(targets)),) if is_equal else _group_by_shape(targets, sources)
        return cls(targets, members, *(Calls(Layout(side), members, device) for side in (targets, sources)))

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(sequences, target places, source places) of each block."""
        widths = zip(self.targets.widths, self.sources.widths)
        return [(len(ids), target, source) for ids, (target, source) in zip(self.members, widths)]

    def rows(self, blocks: list[Tensor]) -> Tensor:
        """Weights of the blocks as rows [n, longest target, longest source], zeros in the padding."""
        longest = (max(self.targets.widths), max(self.sources.widths))
        rows = blocks[0].new_zeros(len(self.lengths), *longest)
        for ids, block in zip(self.members, blocks, strict=True):
            # A padded decoder step has weights too, a softmax over the real sources: they are blanked.
            real = on_device(np.arange(block.shape[1]) < self.lengths[ids, None], block.device)
            index = on_device(ids, block.device)
            rows[index, : block.shape[1], : block.shape[2]] = block * real[..., None]
        return rows

    def masks(self) -> list[Tensor | None]:
        """For each block, True on source tokens, [sequences, source places]; ``None`` where all places hold one."""
        places = self.sources.places
        if places is None or places.padding is None:
            return [None] * len(self.members)
        return list(self.sources.cut(torch.ones_like(places.place_of, dtype=torch.bool)))


class DecoderAttention(nn.Module):
    """Base of attentions: a context per decoder step, the mean of its source's hidden states weighted by a score.

    Queries are the decoder's hidden states [..., hidden], memories the encoder's [..., memory]. Subclasses define
    :meth:`score`.
    """

    def __init__(self, hidden_size: int, memory_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(memory_size, hidden_size, bias=False)

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores [n, targets, sources] of queries [n, targets, hidden] and keys [n, sources, hidden]."""
        raise NotImplementedError

    def forward(self, queries: Tensor, memory: Tensor, blocks: Blocks) -> tuple[Tensor, list[Tensor]]:
        """Contexts [target tokens, memory], and the attention weights of each block.

        ``queries`` [target tokens, hidden] and ``memory`` [source tokens, memory] are flat. Does not wait for the
        device.
        """
        contexts, weights = [], []
        rectangles = zip(
            blocks.targets.cut(queries),
            blocks.sources.cut(self.key(memory)),
            blocks.sources.cut(memory),
            blocks.masks(),
            strict=True,
        )
        for query, key, value, mask in rectangles:
            context, weight = self.attend(query, key, value, mask)
            contexts.append(context)
            weights.append(weight)
        return blocks.targets.join(contexts), weights

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Contexts [n, targets, memory] and weights [n, targets, sources] of one block.

        Args:
            queries: [n, targets, hidden]
            keys: [n, sources, hidden]
            values: [n, sources, memory]
            mask: [n, sources], True on tokens; all are tokens if ``None``
        """
        scores = self.score(queries, keys)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        # Every source has a token, so no row of scores is -inf throughout. Half precision would lose small weights.
        precise = scores.dtype if scores.dtype == torch.float64 else torch.float32
        weights = scores.softmax(-1, dtype=precise).to(values.dtype)
        return weights @ values, weights


class DotAttention(DecoderAttention):
    """Dot attention, query · W memory / √hidden ("general" in Luong, Pham and Manning 2015)."""

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries * queries.shape[-1] ** -0.5) @ keys.transpose(1, 2)


class AdditiveAttention(DecoderAttention):
    """Additive attention, v · tanh(U query + W memory) (Bahdanau, Cho and Bengio 2015)."""

    def __init__(self, hidden_size: int, memory_size: int) -> None:
        super().__init__(hidden_size, memory_size)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.energy = nn.Linear(hidden_size, 1, bias=False)

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        queries = self.query(queries)
        return _AdditiveScore.apply(queries, keys, self.energy.weight[0].to(queries.dtype))


ATTENTIONS: dict[str, type[DecoderAttention]] = {"additive": AdditiveAttention, "dot": DotAttention}


class _AdditiveScore(torch.autograd.Function):
    """Σ_h v_h tanh(q + k), without keeping the sums, which take the memory of the scores times the hidden size.

    Forward and backward go through the pairs in parts that fit the cache; backward computes the tanh again.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, energy)
        scores = queries.new_empty(queries.shape[0], queries.shape[1], keys.shape[1])
        for n, t in _pieces(queries, keys):
            scores[n, t] = (queries[n, t, None] + keys[n, None]).tanh_() @ energy
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        queries, keys, energy = ctx.saved_tensors
        (grad,) = grads
        grad_queries, grad_keys = torch.empty_like(queries), torch.zeros_like(keys)
        grad_energy = torch.zeros_like(energy)
        for n, t in _pieces(queries, keys):
            curve = (queries[n, t, None] + keys[n, None]).tanh_()
            given = grad[n, t]
            grad_energy += given.flatten() @ curve.flatten(0, 2)
            # The derivative by q + k is v·(1 - tanh²). v is multiplied in at the end, once per token and not once per
            # pair.
            slope = curve.square_().neg_().add_(1).mul_(given[..., None])
            grad_queries[n, t] = slope.sum(2)
            grad_keys[n] += slope.sum(1)
        return grad_queries * energy, grad_keys * energy, grad_energy


def _pieces(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and target steps whose sums with all keys are at most ``MAX_ELEMENTS``, or one step."""
    rows, targets, hidden = queries.shape
    step = keys.shape[1] * hidden
    # Several rows at once where whole rows fit, otherwise one row in parts of ``height`` steps.
    height = min(targets, max(1, MAX_ELEMENTS // step))
    count = max(1, MAX_ELEMENTS // (step * targets))
    for n in range(0, rows, count):
        for t in range(0, targets, height):
            yield slice(n, n + count), slice(t, t + height)


def _group_by_shape(targets: Int64, sources: Int64) -> tuple[Int64, ...]:
    """Sequences of about one shape together, each array the sequences of one block."""
    # Longest source first, so that a block is as wide as its first sequence; a new block begins where the next
    # sequence would leave too much padding.
    order = np.lexsort((-targets, -sources))
    cuts: list[int] = []
    # Of the block so far: its sequences, their real pairs, its longest target and its longest source.
    rows = pairs = widest = longest = 0
    for i, (target, source) in enumerate(zip(targets[order].tolist(), sources[order].tolist())):
        taller = max(widest, target)
        # The block's area with this sequence, less the real pairs in it.
        wasted = (rows + 1) * taller * longest - pairs - target * source
        if rows and wasted > max(BLOCK_COST, WASTE * (pairs + target * source)):
            cuts.append(i)
            rows = pairs = 0
            taller = target
        if not rows:
            longest = source
        rows, pairs, widest = rows + 1, pairs + target * source, taller
    return tuple(np.split(order, cuts))
