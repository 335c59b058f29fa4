"""State of a recurrent model between calls, which is the cache of ``generate()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

#: One tensor [n, hidden] for each part of a layer's state.
LayerState = tuple[Tensor, ...]

# Tokens by which rows that go on are told from new text; a few suffice, and the comparison waits for the device.
_TAIL = 16


@dataclass
class RecurrentState:
    """Each sequence's state after its last token.

    Attributes:
        layers: for each layer, tensors [n, hidden]
        seen: columns of all rows that the model has read so far
        tail: [n, at most 16], the last tokens of the rows, where each row was one sequence; ``generate()`` compares it
            with rows that may begin with what the state has seen

    Beam search reorders it in place, exactly, because no two sequences share a past in it.
    """

    layers: tuple[LayerState, ...]
    seen: int = 0
    tail: Tensor | None = None

    # Asked by generate() before it compiles a step.
    is_compileable: ClassVar[bool] = False
    # Asked by generate() since transformers 5.24: rows that hold the past are cut, as those of an attention.
    is_linear: ClassVar[tuple[bool, ...]] = (False,)

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.layers[0][0])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of all rows so far, ``seen``; the name is that of transformers' caches."""
        return self.seen

    def remember(self, past: RecurrentState | None, rows: object) -> None:
        """Keep the end of the token ids ``rows`` [n, L], which came after ``past``, as :attr:`tail`."""
        # Embeddings, rows that hold several sequences, and a past that is unknown itself leave nothing to compare
        # with.
        if not isinstance(rows, Tensor) or len(rows) != self.num_sequences or (past is not None and past.tail is None):
            return
        before = [] if past is None or past.tail is None else [past.tail]
        self.tail = torch.cat([*before, rows.detach()], 1)[:, -_TAIL:]

    def copy(self) -> RecurrentState:
        """Another state of the same tensors, which is reordered by itself."""
        return RecurrentState(self.layers, self.seen, self.tail)

    def without_past(self) -> RecurrentState:
        """A copy that counts and remembers from here on, for rows that hold nothing of what it has seen."""
        state = self.layers[0][0]
        return RecurrentState(self.layers, 0, torch.zeros(len(state), 0, dtype=torch.int64, device=state.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give sequence *i* the state of sequence ``beam_idx[i]``."""
        self._map(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        self._map(lambda state: state.repeat_interleave(repeats, 0))

    def detach(self) -> RecurrentState:
        """The same state without its autograd history, for backpropagation truncated at this point."""
        return RecurrentState(tuple(tuple(state.detach() for state in layer) for layer in self.layers), self.seen)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.layers = tuple(tuple(function(state) for state in layer) for layer in self.layers)
        self.tail = None if self.tail is None else function(self.tail)
