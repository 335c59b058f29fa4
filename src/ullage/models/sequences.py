"""Sequences found in the rows that a model is given, and the moves between those rows and tokens end to end.

A model runs on tokens only, laid end to end. It is given rows [N, L]: padded ones with an ``attention_mask`` or with
``input_lengths``, or a single row in which sequences lie end to end, bounded by ``cu_seq_lens_q`` or by
``position_ids`` that begin anew. Or it is given a ``PackedSequence``, and its output is one too. All of these
forms are read into the same :class:`Sequences`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Int64, Layout
from ullage.models.schedule import RunOrder, Schedule
from ullage.rows import beginnings, host_integers, read_row

Lengths = Tensor | Sequence[int]
#: Rows [N, L, ...], or the sequences of a ``PackedSequence``.
Rows = Tensor | PackedSequence


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences in a batch of rows.

    Attributes:
        shape: (N, L) of the rows
        num_sequences: sequences in all rows, n
        length: tokens of each sequence where ``lengths`` is ``None``
        lengths: int64 [n] in tokens, on the host; ``None`` where all are equal
        index: int64 [T], the place of each token in the flattened rows; ``None`` where every element is a token
        packed: the ``PackedSequence`` that was given in the place of rows
        time_major: int64 [T], the flat position of each element of ``packed``
    """

    shape: tuple[int, int]
    num_sequences: int
    length: int = 0
    lengths: Int64 | None = None
    index: Tensor | None = None
    packed: PackedSequence | None = None
    time_major: Tensor | None = None

    @classmethod
    def read(
        cls,
        rows: Rows,
        *,
        attention_mask: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Sequences:
        """The sequences in ``rows``, described by one of the keywords; without any, each row is one sequence.

        Args:
            rows: [N, L, ...], or a ``PackedSequence``, which has lengths of its own
            attention_mask: [N, L], not zero on tokens; padding on either side
            input_lengths: N lengths in tokens, padding on the right; beside ``cu_seq_lens`` the tokens in each slot
            cu_seq_lens: [n + 1], the slots of one row (N = 1), cumulated
            position_ids: [N, L], which run on within each sequence; beside ``cu_seq_lens``, zeros at the end
                of a slot are padding

        Waits for the device at most once (twice where only positions show the padding), and not at all for rows alone,
        for ``input_lengths`` that are a list, and on the CPU. Raises ``InputError`` for lengths that do not fit the
        rows, a mask with holes, and a row of padding alone.
        """
        if isinstance(rows, PackedSequence):
            others = {"attention_mask": attention_mask, "input_lengths": input_lengths, "cu_seq_lens_q": cu_seq_lens}
            extra = [name for name, value in others.items() if value is not None]
            if extra:
                raise InputError("a PackedSequence knows its own lengths", where=f"{extra[0]} beside it")
            return cls._read_packed(rows)
        if rows.ndim < 2 or rows.shape[0] * rows.shape[1] == 0:
            raise InputError(
                "a model needs rows of tokens", expected="[N, L] of at least one token", found=_shape(rows)
            )
        shape = (rows.shape[0], rows.shape[1])
        if attention_mask is not None:
            attention_mask = _fitting_mask(attention_mask, shape)
        if cu_seq_lens is not None:
            return cls._read_flat(shape, torch.as_tensor(cu_seq_lens), attention_mask, input_lengths, position_ids)
        if input_lengths is not None and attention_mask is None:
            return cls._read_lengths(shape, host_integers(input_lengths, "input_lengths"), rows.device)
        if attention_mask is not None:
            # Places are sent through the same move as the values of padded rows, and what comes out is the index.
            place = torch.arange(shape[0] * shape[1], device=attention_mask.device).view(shape)
            batch = RaggedBatch.from_padded({"place": place}, attention_mask)
            if input_lengths is not None:
                _require_agree(batch.layout.lengths, host_integers(input_lengths, "input_lengths"))
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
    def _read_packed(cls, packed: PackedSequence) -> Sequences:
        if packed.data.shape[0] == 0:
            raise InputError("a model needs tokens", found="an empty PackedSequence")
        batch = RaggedBatch.from_packed_sequence(packed._replace(data=torch.arange(len(packed.data))), "element")
        # ``element`` is the packed element of each flat token; inverted, it is the flat position of each element.
        flat_position = torch.empty_like(batch["element"])
        flat_position[batch["element"]] = torch.arange(len(flat_position))
        sequences = cls._of((1, len(packed.data)), batch.layout.lengths)
        return replace(sequences, packed=packed, time_major=flat_position.to(packed.data.device, non_blocking=True))

    @classmethod
    def _read_flat(
        cls,
        shape: tuple[int, int],
        cu_seq_lens: Tensor,
        mask: Tensor | None,
        lengths: Lengths | None,
        position_ids: Tensor | None,
    ) -> Sequences:
        if mask is not None and not bool((mask != 0).all()):
            raise InputError("rows without padding take no attention_mask", where="attention_mask beside cu_seq_lens_q")
        if shape[0] != 1:
            raise InputError("sequences that lie end to end come in one row", expected="[1, T]", found=list(shape))
        # Lengths that fill the row need no second look: slots and lengths are the same.
        real = None if lengths is None else host_integers(lengths, "input_lengths")
        if real is not None and int(real.sum()) == shape[1] and len(real) == len(cu_seq_lens) - 1 and real.min() >= 0:
            return cls._of(shape, real)
        layout = read_row(cu_seq_lens, shape[1], position_ids if real is None else None, are_counts=False)
        if real is not None:
            if len(real) != layout.num_items or (real < 0).any() or (real > layout.slots).any() or not real.any():
                raise InputError(
                    "input_lengths and cu_seq_lens_q disagree",
                    expected=f"{layout.num_items} lengths, each at most its slot",
                    found=f"{len(real)} lengths, {int(real.sum())} tokens",
                )
            layout = Layout.from_slots(real, layout.slots)
        if layout.num_tokens == layout.size:
            return cls._of(shape, layout.lengths)
        index = torch.from_numpy(layout.token_index())
        return cls._of(shape, layout.lengths, index.to(cu_seq_lens.device, non_blocking=True))

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
        # A row begins a sequence, even if its positions continue those that a cached state has seen.
        begins = beginnings(position_ids.cpu().numpy())
        return cls._of(shape, np.diff(np.append(begins, shape[0] * shape[1])))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return self.num_sequences * self.length if self.lengths is None else int(self.lengths.sum())

    def schedule(
        self, hidden_size: int, device: torch.device, run_order: RunOrder = "staircase", *, keep_state: bool = True
    ) -> Schedule:
        """The order in which a recurrent layer runs these sequences."""
        if self.lengths is None:
            return Schedule.dense(self.num_sequences, self.length, hidden_size, run_order)
        return Schedule.ragged(self.lengths, hidden_size, device, run_order, keep_state=keep_state)

    def flatten(self, rows: Rows) -> Tensor:
        """Values [T, ...] of the tokens alone, from rows [N, L, ...] or a ``PackedSequence``."""
        if isinstance(rows, PackedSequence):
            assert self.time_major is not None
            return torch.empty_like(rows.data).index_copy(0, self.time_major, rows.data)
        flat = rows.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index.to(flat.device))

    def unflatten(self, flat: Tensor) -> Rows:
        """Values [T, ...] in the form given: rows [N, L, ...], zeros in the padding, or a ``PackedSequence``."""
        if self.packed is not None:
            assert self.time_major is not None
            return self.packed._replace(data=flat.index_select(0, self.time_major))
        rows, width = self.shape
        if self.index is not None:
            index = self.index.to(flat.device)
            flat = flat.new_zeros(rows * width, *flat.shape[1:]).index_copy(0, index, flat)
        return flat.unflatten(0, self.shape)

    def unflatten_states(self, states: tuple[Tensor, ...] | None) -> Any:
        """Hidden states [1, T, D] of every layer, each in the form given; ``None`` for ``None``."""
        return states and tuple(self.unflatten(state[0]) for state in states)

    def flatten_labels(self, labels: Rows, name: str = "labels") -> Tensor:
        """Labels [T] of the tokens alone. Raises ``InputError`` for labels in another form than the input."""
        if self.packed is not None:
            expected = "a PackedSequence of the same lengths"
            if not isinstance(labels, PackedSequence):
                raise InputError(f"{name} and input_ids disagree", expected=expected, found=_shape(labels))
            batch = RaggedBatch.from_packed_sequence(labels, name)  # packed in an order of its own, perhaps
            own = self.lengths if self.lengths is not None else np.full(self.num_sequences, self.length)
            if not np.array_equal(batch.layout.lengths, own):
                found = batch.layout.lengths.tolist()[:8]
                raise InputError(f"{name} and input_ids disagree", expected=expected, found=f"lengths {found}")
            return batch[name]
        if isinstance(labels, PackedSequence) or tuple(labels.shape) != self.shape:
            found = "a PackedSequence" if isinstance(labels, PackedSequence) else _shape(labels)
            raise InputError(f"{name} and input_ids disagree", expected=list(self.shape), found=found)
        return self.flatten(labels)

    def ends(self, device: torch.device) -> Tensor:
        """The flat position of each sequence's last token, int64 [n]. Raises ``InputError`` for one without tokens."""
        if self.lengths is None:
            return torch.arange(self.length - 1, self.num_tokens, self.length, device=device)
        self._require_tokens()
        return torch.from_numpy(np.cumsum(self.lengths) - 1).to(device, non_blocking=True)

    def items(self, device: torch.device) -> Tensor:
        """The sequence of each flat token, int64 [T]. Raises ``InputError`` for a sequence without tokens."""
        if self.lengths is None:
            return torch.arange(self.num_sequences, device=device).repeat_interleave(self.length)
        self._require_tokens()
        return torch.from_numpy(Layout(self.lengths).item_ids()).to(device, non_blocking=True)

    def _require_tokens(self) -> None:
        assert self.lengths is not None
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            raise InputError("a sequence without tokens has nothing to pool", where=f"sequence {int(empty[0])}")

    def starts(self, device: torch.device) -> Tensor:
        """The flat position of each sequence's first token, int64 [sequences that have tokens]."""
        if self.lengths is None:
            return torch.arange(0, self.num_tokens, self.length, device=device)
        starts = Layout(self.lengths).starts[self.lengths > 0]
        return torch.from_numpy(starts).to(device, non_blocking=True)

    def locate(self, token: int) -> tuple[int, int]:
        """The sequence of a flat token, and the token's position in it."""
        layout = Layout(self.lengths if self.lengths is not None else [self.length] * self.num_sequences)
        sequence = int(layout.item_ids()[token])
        return sequence, token - int(layout.starts[sequence])


def _fitting_mask(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """The mask of these rows, which is the end of a mask that also covers what a cached state has seen."""
    if mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise InputError("attention_mask and rows disagree", expected=list(shape), found=_shape(mask))
    return mask[:, mask.shape[1] - shape[1] :]


def _require_agree(masked: Int64, given: Int64) -> None:
    if len(masked) != len(given) or (masked != given).any():
        raise InputError(
            "attention_mask and input_lengths disagree", expected=masked.tolist()[:8], found=given.tolist()[:8]
        )


def _shape(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"
