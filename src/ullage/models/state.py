"""The memory of a recurrent model between calls; to ``generate()`` it is the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

#: One tensor [n, hidden] for each part of a layer's state.
LayerState = tuple[Tensor, ...]

_TAIL = 16


@dataclass
class RecurrentState:
    """Each sequence's state after its last token: for each layer, tensors [n, hidden].

    ``seen``: how many tokens wide the rows have been so far. Beam search reorders it in place, exactly, because a
    state has no past that it shares with others. ``tail`` [n, at most 16]: the last tokens of the rows, where each row
    was one sequence; ``generate()`` tells by it rows that begin with what the state has seen.
    """

    layers: tuple[LayerState, ...]
    seen: int = 0
    tail: Tensor | None = None

    is_compileable: ClassVar[bool] = False

    @property
    def num_sequences(self) -> int:
        """How many sequences have a state here."""
        return len(self.layers[0][0])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens wide the rows have been."""
        return self.seen

    def remember(self, past: RecurrentState | None, rows: object) -> None:
        """Keeps the end of the token ids in ``rows`` [n, L], which came after ``past``."""
        if not isinstance(rows, Tensor) or len(rows) != self.num_sequences or (past is not None and past.tail is None):
            return
        before = [] if past is None or past.tail is None else [past.tail]
        self.tail = torch.cat([*before, rows.detach()], 1)[:, -_TAIL:]

    def copy(self) -> RecurrentState:
        """The same tensors in a state of its own, which can be reordered without the first."""
        return RecurrentState(self.layers, self.seen, self.tail)

    def anew(self) -> RecurrentState:
        """A copy for rows that hold nothing of what it has seen: it counts and remembers from here on."""
        state = self.layers[0][0]
        return RecurrentState(self.layers, 0, torch.zeros(len(state), 0, dtype=torch.int64, device=state.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence *i* goes on from the state of sequence ``beam_idx[i]``."""
        self._map(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences in ``indices``."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._map(lambda state: state.repeat_interleave(repeats, 0))

    def detach(self) -> RecurrentState:
        """The same state without its history, for backpropagation truncated at this point."""
        return RecurrentState(tuple(tuple(state.detach() for state in layer) for layer in self.layers), self.seen)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.layers = tuple(tuple(function(state) for state in layer) for layer in self.layers)
        self.tail = None if self.tail is None else function(self.tail)
