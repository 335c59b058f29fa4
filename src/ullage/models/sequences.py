"""The ways into a model, and back out: which elements of the rows a model is given are tokens of which sequence.

A model runs on real tokens only, laid end to end. What it is given is rows [N, L]: padded ones with an
``attention_mask`` or with ``input_lengths``, or a single row in which sequences lie end to end, bounded by
``cu_seq_lens_q`` or by ``position_ids`` that start anew. Each way ends in the same :class:`Sequences`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Int64, Layout
from ullage.models.schedule import RunOrder, Schedule

Lengths = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences in rows of ``shape`` (N, L).

    ``num_sequences`` of them, with ``lengths`` [n] on the host; where that is ``None``, all are ``length`` tokens long.
    ``index`` [T]: where in the flattened rows each token lies; ``None`` where every element is a token.
    """

    shape: tuple[int, int]
    num_sequences: int
    length: int = 0
    lengths: Int64 | None = None
    index: Tensor | None = None

    @classmethod
    def read(
        cls,
        rows: Tensor,
        *,
        attention_mask: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Sequences:
        """The sequences in ``rows`` [N, L, ...], told by whichever of the keywords is given; else each row is one.

        ``cu_seq_lens`` [n + 1] cumulates the slots of one row of sequences; ``input_lengths`` beside it are the same
        lengths on the host. Waits for the device at most once, and not at all for rows alone, for ``input_lengths``
        that are a list, and on the CPU. Raises ``InputError`` for lengths that do not fit the rows, a mask with
        holes, and a row of padding alone.
        """
        if rows.ndim < 2 or rows.shape[0] * rows.shape[1] == 0:
            raise InputError(
                "a model needs rows of tokens", expected="[N, L] of at least one token", found=_shape(rows)
            )
        shape = (rows.shape[0], rows.shape[1])
        if attention_mask is not None:
            attention_mask = _fitting_mask(attention_mask, shape)
        if cu_seq_lens is not None:
            return cls._read_flat(shape, cu_seq_lens, attention_mask, input_lengths)
        if input_lengths is not None:
            return cls._read_lengths(shape, _host(input_lengths, "input_lengths"), rows.device)
        if attention_mask is not None:
            place = torch.arange(shape[0] * shape[1], device=attention_mask.device).view(shape)
            batch = RaggedBatch.from_padded({"place": place}, attention_mask)
            return cls._of(shape, batch.layout.lengths, batch["place"].to(rows.device))
        if position_ids is not None and position_ids.shape == shape and shape[1] > 1:
            return cls._read_positions(shape, position_ids)
        return cls(shape, shape[0], shape[1])

    @classmethod
    def _of(cls, shape: tuple[int, int], lengths: Int64, index: Tensor | None = None) -> Sequences:
        if int(lengths.sum()) == shape[0] * shape[1]:
            index = None
        if (lengths == lengths[0]).all():
            return cls(shape, len(lengths), int(lengths[0]), index=index)
        return cls(shape, len(lengths), lengths=lengths, index=index)

    @classmethod
    def _read_flat(
        cls, shape: tuple[int, int], cu_seq_lens: Tensor, mask: Tensor | None, lengths: Lengths | None
    ) -> Sequences:
        if mask is not None and not bool((mask != 0).all()):
            raise InputError("rows without padding take no attention_mask", where="attention_mask beside cu_seq_lens_q")
        slots = np.diff(_host(cu_seq_lens, "cu_seq_lens_q")) if lengths is None else _host(lengths, "input_lengths")
        if shape[0] != 1:
            raise InputError("sequences that lie end to end come in one row", expected="[1, T]", found=list(shape))
        if len(slots) == 0 or (slots < 0).any() or int(slots.sum()) != shape[1]:
            raise InputError(
                "cu_seq_lens_q does not cover the row",
                expected=f"rising from 0 to {shape[1]}",
                found=f"{len(slots)} sequences, {int(slots.sum())} tokens",
            )
        return cls._of(shape, slots)

    @classmethod
    def _read_lengths(cls, shape: tuple[int, int], lengths: Int64, device: torch.device) -> Sequences:
        rows, width = shape
        if len(lengths) != rows:
            raise InputError("input_lengths and rows disagree", expected=f"{rows} lengths", found=len(lengths))
        bad = np.flatnonzero((lengths < 1) | (lengths > width))
        if len(bad):
            i = int(bad[0])
            raise InputError(
                "a length does not fit its row", where=f"row {i}", expected=f"1 to {width}", found=lengths[i]
            )
        index = Layout.from_slots(lengths, np.full(rows, width)).token_index()
        return cls._of(shape, lengths, torch.from_numpy(index).to(device, non_blocking=True))

    @classmethod
    def _read_positions(cls, shape: tuple[int, int], position_ids: Tensor) -> Sequences:
        host = position_ids.cpu().numpy()
        starts = host == 0
        starts[:, 0] = True
        bounds = np.append(np.flatnonzero(starts), host.size)
        return cls._of(shape, np.diff(bounds).astype(np.int64))

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return self.num_sequences * self.length if self.lengths is None else int(self.lengths.sum())

    def schedule(
        self, hidden_size: int, device: torch.device, run_order: RunOrder = "staircase", *, keep_state: bool = True
    ) -> Schedule:
        """The order in which a recurrent layer runs these sequences."""
        if self.lengths is None:
            return Schedule.dense(self.num_sequences, self.length, hidden_size, run_order)
        return Schedule.ragged(self.lengths, hidden_size, device, run_order, keep_state=keep_state)

    def flatten(self, rows: Tensor) -> Tensor:
        """Values [N, L, ...] of the tokens alone, [T, ...]."""
        flat = rows.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index.to(flat.device))

    def unflatten(self, flat: Tensor) -> Tensor:
        """Values [T, ...] in their rows, [N, L, ...]; zeros in the padding."""
        rows, width = self.shape
        if self.index is not None:
            flat = flat.new_zeros(rows * width, *flat.shape[1:]).index_copy(0, self.index, flat)
        return flat.unflatten(0, self.shape)

    def starts(self, device: torch.device) -> Tensor:
        """The flat position of each sequence's first token, int64 [at most n]; sequences of no tokens have none."""
        if self.lengths is None:
            return torch.arange(0, self.num_tokens, self.length, device=device)
        starts = Layout(self.lengths).starts[self.lengths > 0]
        return torch.from_numpy(starts).to(device, non_blocking=True)

    def locate(self, token: int) -> tuple[int, int]:
        """The sequence that flat token lies in and its position there."""
        layout = Layout(self.lengths if self.lengths is not None else [self.length] * self.num_sequences)
        sequence = int(layout.item_ids()[token])
        return sequence, token - int(layout.starts[sequence])


def _fitting_mask(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """The mask of these rows: a mask that also covers what a cached state has seen is cut to its end."""
    if mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise InputError("attention_mask and rows disagree", expected=list(shape), found=_shape(mask))
    return mask[:, mask.shape[1] - shape[1] :]


def _host(values: Lengths, name: str) -> Int64:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name} must be a flat list of integers", found=f"shape {list(array.shape)} {array.dtype}")
    return array.astype(np.int64)


def _shape(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"
