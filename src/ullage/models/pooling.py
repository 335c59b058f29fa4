"""Pooling of the hidden states of each sequence's own tokens, which lie end to end, to one vector per sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ullage.models.configuration import RecurrentConfig
from ullage.models.sequences import Sequences


class Pooling(nn.Module):
    """Hidden states [T, D] of tokens to one row per sequence [n, D], by ``config.pooling``.

    *last*: the state after the last token; in a bidirectional model the last one of each direction, which for the
    backward one is at the first token. *mean*: over the tokens. *attention*: a mean weighted by the softmax, over the
    sequence, of a learned score (Yang et al., "Hierarchical Attention Networks", 2016).
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.kind = config.pooling
        self.hidden_size = config.hidden_size
        width = config.hidden_size * (2 if config.bidirectional else 1)
        if self.kind == "attention":
            self.project = nn.Linear(width, width)
            self.score = nn.Linear(width, 1, bias=False)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Hidden states [T, D] to [n, D]. Does not wait for the device.

        Raises ``InputError`` for a sequence without tokens.
        """
        if self.kind == "last":
            last = hidden.index_select(0, sequences.ends(hidden.device))
            if hidden.shape[1] == self.hidden_size:
                return last
            first = hidden.index_select(0, sequences.starts(hidden.device))
            return torch.cat([last[:, : self.hidden_size], first[:, self.hidden_size :]], 1)
        items = sequences.items(hidden.device)
        if self.kind == "mean":
            return _sums(hidden, items, sequences.num_sequences) / _sums(
                torch.ones_like(hidden[:, :1]), items, sequences.num_sequences
            )
        # A softmax over each sequence, less its highest score so that nothing overflows.
        scores = self.score(torch.tanh(self.project(hidden)))
        highest = scores.new_full((sequences.num_sequences, 1), -torch.inf)
        # The highest score only shifts the exponents and cancels out, so it needs no gradient.
        highest = highest.scatter_reduce(0, items[:, None], scores.detach(), "amax")
        weights = (scores - highest.index_select(0, items)).exp()
        weights = weights / _sums(weights, items, sequences.num_sequences).index_select(0, items)
        return _sums(hidden * weights, items, sequences.num_sequences)


def _sums(values: Tensor, items: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, values.shape[1]).index_add(0, items, values)
