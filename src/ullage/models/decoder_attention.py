"""Attention of a decoder over the tokens of its own source: additive (Bahdanau) and dot (Luong).

Targets and sources of a batch have unequal lengths, so the pairs of a decoder step and a source token are rectangles
of unequal sizes. Rectangles of about one size are run as one block, padded to the largest in it: the tokens are laid
into their places in the blocks by one index, and taken back by another. What fills a block up is masked and is no
token of anybody, so it never matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.errors import InputError
from ullage.layout import Int64, Layout, starts_of
from ullage.places import Places

#: A block may waste this much of the pairs that it holds, or this many pairs, which is what another block costs.
WASTE = 0.25
BLOCK_COST = 2**12
#: How many elements of queries plus keys are held at once, so that they stay in the cache.
MAX_ELEMENTS = 2**20


@dataclass(frozen=True, eq=False)
class Blocks:
    """Groups of sequences that attend together, each padded to its longest target and its longest source.

    lengths: int64 [n], the length of each target in tokens
    members: the sequences of each block
    shapes: (sequences, target places, source places) of each block
    targets, sources: the place of each flat token in all blocks end to end; ``None`` where the tokens are one full
        block already
    """

    lengths: Int64
    members: tuple[Int64, ...]
    shapes: tuple[tuple[int, int, int], ...]
    targets: Places | None
    sources: Places | None

    @classmethod
    def of(cls, targets: Int64, sources: Int64, device: torch.device) -> Blocks:
        """Blocks for sequences of these lengths (host, tokens). Copies indices to ``device`` without waiting.

        Raises ``InputError`` for a source without tokens, which leaves nothing to attend to.
        """
        empty = np.flatnonzero(sources < 1)
        if len(empty):
            raise InputError("a source is empty", where=f"sequence {int(empty[0])}", expected="at least one token")
        if (targets == targets[0]).all() and (sources == sources[0]).all():
            shape = (len(targets), int(targets[0]), int(sources[0]))
            return cls(targets, (np.arange(len(targets)),), (shape,), None, None)
        members = _grouped(targets, sources)
        shapes = tuple((len(ids), int(targets[ids].max()), int(sources[ids].max())) for ids in members)
        order = np.concatenate(members)
        # A sequence's slot is as wide as the widest of its block, and slots lie in the order of the blocks.
        places = []
        for lengths, widths in ((targets, [s[1] for s in shapes]), (sources, [s[2] for s in shapes])):
            slots = np.empty_like(lengths)
            slots[order] = np.repeat(widths, [len(ids) for ids in members])
            starts = np.empty_like(lengths)
            starts[order] = starts_of(slots[order])
            layout = Layout(lengths)
            place_of = starts[layout.item_ids()] + layout.positions()
            places.append(Places.of(place_of, int(slots.sum()), device))
        return cls(targets, members, shapes, *places)

    def place(self, flat: Tensor, *, source: bool) -> list[Tensor]:
        """Flat values [tokens, ...] of targets or sources as blocks [rows, longest, ...], zeros where no token is."""
        sides = [(rows, shape[source]) for rows, *shape in self.shapes]
        places = self.sources if source else self.targets
        if places is not None:
            flat = places.place(flat)
        parts = flat.split([rows * width for rows, width in sides])
        return [part.unflatten(0, side) for part, side in zip(parts, sides, strict=True)]

    def take(self, blocks: list[Tensor]) -> Tensor:
        """What :meth:`place` did to the targets, undone: [target tokens, ...]."""
        flat = torch.cat([block.flatten(0, 1) for block in blocks])
        return flat if self.targets is None else self.targets.take(flat)

    def rows(self, blocks: list[Tensor]) -> Tensor:
        """Weights of the blocks as rows [n, longest target, longest source], zeros where no pair is."""
        longest = [max(shape[side] for shape in self.shapes) for side in (1, 2)]
        rows = blocks[0].new_zeros(len(self.lengths), *longest)
        for ids, block in zip(self.members, blocks, strict=True):
            real = torch.from_numpy(np.arange(block.shape[1]) < self.lengths[ids, None]).to(block.device)
            index = torch.from_numpy(ids).to(block.device)
            rows[index, : block.shape[1], : block.shape[2]] = block * real[..., None]
        return rows

    def masks(self) -> list[Tensor | None]:
        """True where a source token is, [rows, sources] for each block; ``None`` where there is nothing else."""
        if self.sources is None:
            return [None]
        place_of = self.sources.place_of
        return list(self.place(torch.ones_like(place_of, dtype=torch.bool), source=True))


class DecoderAttention(nn.Module):
    """A context for every decoder step: the mean of its source's hidden states, weighed by a learned score.

    Queries are the decoder's hidden states [., hidden], memories the encoder's [., memory]. Subclasses score.
    """

    def __init__(self, hidden_size: int, memory_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(memory_size, hidden_size, bias=False)

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores [n, targets, sources] of queries [n, targets, hidden] and keys [n, sources, hidden]."""
        raise NotImplementedError

    def forward(self, queries: Tensor, memory: Tensor, blocks: Blocks) -> tuple[Tensor, list[Tensor]]:
        """Contexts [target tokens, memory] of flat queries over flat memories, and the weights of each block.

        Does not wait for the device.
        """
        contexts, weights = [], []
        rectangles = zip(
            blocks.place(queries, source=False),
            blocks.place(self.key(memory), source=True),
            blocks.place(memory, source=True),
            blocks.masks(),
            strict=True,
        )
        for query, key, value, mask in rectangles:
            context, weight = self.attend(query, key, value, mask)
            contexts.append(context)
            weights.append(weight)
        return blocks.take(contexts), weights

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Contexts [n, targets, memory] and weights [n, targets, sources]; ``mask`` [n, sources] is True on tokens."""
        scores = self.score(queries, keys)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        precise = scores.dtype if scores.dtype == torch.float64 else torch.float32
        weights = scores.softmax(-1, dtype=precise).to(values.dtype)
        return weights @ values, weights


class DotAttention(DecoderAttention):
    """query · W memory ("general" in Luong, Pham and Manning 2015), scaled by the square root of the hidden size."""

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries * queries.shape[-1] ** -0.5) @ keys.transpose(1, 2)


class AdditiveAttention(DecoderAttention):
    """v · tanh(U query + W memory) (Bahdanau, Cho and Bengio 2015)."""

    def __init__(self, hidden_size: int, memory_size: int) -> None:
        super().__init__(hidden_size, memory_size)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.energy = nn.Linear(hidden_size, 1, bias=False)

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        queries = self.query(queries)
        return _AdditiveScore.apply(queries, keys, self.energy.weight[0].to(queries.dtype))


ATTENTIONS: dict[str, type[DecoderAttention]] = {"additive": AdditiveAttention, "dot": DotAttention}


class _AdditiveScore(torch.autograd.Function):
    """Σ_h v_h tanh(q + k) without holding on to the sums, which are hidden-size times as many as the scores.

    Both directions go through the pairs in pieces that fit the cache; backward computes the tanh again.
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
            slope = curve.square_().neg_().add_(1).mul_(given[..., None])
            grad_queries[n, t] = slope.sum(2)
            grad_keys[n] += slope.sum(1)
        return grad_queries * energy, grad_keys * energy, grad_energy


def _pieces(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and target steps in pieces whose sums with all keys are at most ``MAX_ELEMENTS``, or one step."""
    rows, targets, hidden = queries.shape
    step = keys.shape[1] * hidden
    height = min(targets, max(1, MAX_ELEMENTS // step))
    count = max(1, MAX_ELEMENTS // (step * targets))
    for n in range(0, rows, count):
        for t in range(0, targets, height):
            yield slice(n, n + count), slice(t, t + height)


def _grouped(targets: Int64, sources: Int64) -> tuple[Int64, ...]:
    """Sequences of about one shape together: from the longest source down, a new block where it would waste much."""
    order = np.lexsort((-targets, -sources))
    cuts: list[int] = []
    rows = pairs = widest = longest = 0
    for i, (target, source) in enumerate(zip(targets[order].tolist(), sources[order].tolist())):
        taller = max(widest, target)
        wasted = (rows + 1) * taller * longest - pairs - target * source
        if rows and wasted > max(BLOCK_COST, WASTE * (pairs + target * source)):
            cuts.append(i)
            rows = pairs = 0
            taller = target
        if not rows:
            longest = source
        rows, pairs, widest = rows + 1, pairs + target * source, taller
    return tuple(np.split(order, cuts))
