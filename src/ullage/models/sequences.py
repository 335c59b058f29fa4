"""The ways into a model, and back out: which elements of the rows a model is given are tokens of which sequence.

A model runs on real tokens only, laid end to end. What it is given is rows [N, L]: padded ones with an
``attention_mask`` or with ``input_lengths``, or a single row in which sequences lie end to end, bounded by
``cu_seq_lens_q`` or by ``position_ids`` that start anew. Or it is a ``PackedSequence``, and what comes out is one too.
Each way ends in the same :class:`Sequences`.
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

Lengths = Tensor | Sequence[int]
#: Rows [N, L, ...], or the sequences of a ``PackedSequence``.
Rows = Tensor | PackedSequence


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences in rows of ``shape`` (N, L).

    ``num_sequences`` of them, with ``lengths`` [n] on the host; where that is ``None``, all are ``length`` tokens long.
    ``index`` [T]: where in the flattened rows each token lies; ``None`` where every element is a token. ``packed``:
    the ``PackedSequence`` that they came in, with ``time_major`` [T], the flat position of each of its elements.
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
        """The sequences in ``rows`` [N, L, ...], told by whichever of the keywords is given; else each row is one.

        ``cu_seq_lens`` [n + 1] cumulates the slots of one row of sequences; ``input_lengths`` beside it are the tokens
        in each slot, and spare a look at the device. Without them ``position_ids`` that end a slot with zeros say that
        it ends with padding. A ``PackedSequence`` tells its own. Waits for the device at most once (twice where only
        positions tell of padding), and not at all for rows alone, for ``input_lengths`` that are a list, and on the
        CPU. Raises ``InputError`` for lengths that do not fit the rows, a mask with holes, and a row of padding alone.
        """
        if isinstance(rows, PackedSequence):
            told = {"attention_mask": attention_mask, "input_lengths": input_lengths, "cu_seq_lens_q": cu_seq_lens}
            extra = [name for name, value in told.items() if value is not None]
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
            return cls._read_lengths(shape, _host(input_lengths, "input_lengths"), rows.device)
        if attention_mask is not None:
            place = torch.arange(shape[0] * shape[1], device=attention_mask.device).view(shape)
            batch = RaggedBatch.from_padded({"place": place}, attention_mask)
            if input_lengths is not None:
                _require_agree(batch.layout.lengths, _host(input_lengths, "input_lengths"))
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
        real = None if lengths is None else _host(lengths, "input_lengths")
        if real is not None and int(real.sum()) == shape[1] and len(real) == len(cu_seq_lens) - 1 and real.min() >= 0:
            return cls._of(shape, real)
        told = position_ids if position_ids is not None and position_ids.shape == shape and real is None else None
        slots, last_positions = _slots(cu_seq_lens, told)
        if len(slots) == 0 or (slots < 0).any() or int(slots.sum()) != shape[1]:
            raise InputError(
                "cu_seq_lens_q does not cover the row",
                expected=f"rising from 0 to {shape[1]}",
                found=f"{len(slots)} sequences, {int(slots.sum())} tokens",
            )
        if told is not None and ((slots > 1) & (last_positions == 0)).any():
            real = _lengths_by_positions(told[0].cpu().numpy(), slots)
        if real is None:
            return cls._of(shape, slots)
        if len(real) != len(slots) or (real < 0).any() or (real > slots).any() or not real.any():
            raise InputError(
                "input_lengths and cu_seq_lens_q disagree",
                expected=f"{len(slots)} lengths, each at most its slot",
                found=f"{len(real)} lengths, {int(real.sum())} tokens",
            )
        index = torch.from_numpy(Layout.from_slots(real, slots).token_index())
        return cls._of(shape, real, index.to(cu_seq_lens.device, non_blocking=True))

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

    def flatten(self, rows: Rows) -> Tensor:
        """Values [N, L, ...] of the tokens alone, [T, ...]."""
        if isinstance(rows, PackedSequence):
            assert self.time_major is not None
            return torch.empty_like(rows.data).index_copy(0, self.time_major, rows.data)
        flat = rows.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index.to(flat.device))

    def unflatten(self, flat: Tensor) -> Rows:
        """Values [T, ...] as they came: in their rows [N, L, ...], zeros in the padding, or as a ``PackedSequence``."""
        if self.packed is not None:
            assert self.time_major is not None
            return self.packed._replace(data=flat.index_select(0, self.time_major))
        rows, width = self.shape
        if self.index is not None:
            index = self.index.to(flat.device)
            flat = flat.new_zeros(rows * width, *flat.shape[1:]).index_copy(0, index, flat)
        return flat.unflatten(0, self.shape)

    def unflatten_states(self, states: tuple[Tensor, ...] | None) -> Any:
        """Hidden states [1, T, D] of every layer as they came; None if there are none."""
        return states and tuple(self.unflatten(state[0]) for state in states)

    def flatten_labels(self, labels: Rows, name: str = "labels") -> Tensor:
        """Labels of the tokens alone [T]. Raises ``InputError`` for labels that do not lie as the input does."""
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
        """The sequence that each flat token is of, int64 [T]. Raises ``InputError`` for a sequence without tokens."""
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


def _require_agree(masked: Int64, given: Int64) -> None:
    if len(masked) != len(given) or (masked != given).any():
        raise InputError(
            "attention_mask and input_lengths disagree", expected=masked.tolist()[:8], found=given.tolist()[:8]
        )


def _host(values: Lengths, name: str) -> Int64:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name} must be a flat list of integers", found=f"shape {list(array.shape)} {array.dtype}")
    return array.astype(np.int64)


def _slots(cu_seq_lens: Tensor, position_ids: Tensor | None) -> tuple[Int64, Int64]:
    """What ``cu_seq_lens`` cumulates, and the last of the ``position_ids`` [1, T] in each slot, if there are any."""
    if position_ids is not None:
        bounds = cu_seq_lens.to(position_ids.device)
        if bounds.ndim == 1 and len(bounds) > 1 and bounds.dtype in (torch.int32, torch.int64):
            last = position_ids[0].index_select(0, (bounds[1:] - 1).clamp(0, position_ids.shape[1] - 1))
            both = _host(torch.cat([bounds, last]), "cu_seq_lens_q")
            return np.diff(both[: len(bounds)]), both[len(bounds) :]
    return np.diff(_host(cu_seq_lens, "cu_seq_lens_q")), np.empty(0, np.int64)


def _lengths_by_positions(positions: Int64, slots: Int64) -> Int64:
    """The tokens in each slot: what comes before the zeros at its end, or one, for there the first position is 0."""
    ends = np.cumsum(slots)
    counted = np.maximum.accumulate(np.where(positions != 0, np.arange(1, len(positions) + 1), 0))
    last = np.where(slots > 0, counted[np.maximum(ends, 1) - 1], 0)
    return np.clip(last - (ends - slots), np.minimum(slots, 1), slots)


def _shape(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"
