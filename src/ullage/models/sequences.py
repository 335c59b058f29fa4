"""Sequences found in the rows that a model is given, and the moves between those rows and tokens end to end.

A model runs on tokens only, laid end to end. It is given rows [N, L]: padded ones with an ``attention_mask`` or with
``input_lengths``, or a single row in which sequences lie end to end, bounded by ``cu_seq_lens_q`` or by
``position_ids`` that begin anew. Or it is given a ``PackedSequence``, and its output is one too. All of these
forms are read into the same :class:`Sequences`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ullage.attention.releases import named_cache
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout
from ullage.core.rows import beginnings, host_integers, on_device, read_row
from ullage.models.schedule import RunOrder, Schedule

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

        Waits for the device at most once (twice for positions beside ``cu_seq_lens``), and not at all for rows alone,
        for what is known on the host (:func:`~ullage.core.rows.on_host`), and on the CPU. Raises ``InputError`` for
        lengths that do not fit the rows, a mask with holes, and a row of padding alone.
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
        return cls._of(shape, layout.lengths, on_device(layout.token_index(), cu_seq_lens.device))

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
        return cls._of(shape, lengths, on_device(index, device))

    @classmethod
    def _read_positions(cls, shape: tuple[int, int], position_ids: Tensor) -> Sequences:
        # A row begins a sequence, even if its positions continue those that a cached state has seen.
        begins = beginnings(position_ids.cpu().numpy())
        return cls._of(shape, np.diff(np.append(begins, shape[0] * shape[1])))

    @property
    def host_lengths(self) -> Int64:
        """The length of each sequence in tokens, int64 [n], on the host."""
        return np.full(self.num_sequences, self.length) if self.lengths is None else self.lengths

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
            if not np.array_equal(batch.layout.lengths, self.host_lengths):
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
        return on_device(np.cumsum(self.lengths) - 1, device)

    def items(self, device: torch.device) -> Tensor:
        """The sequence of each flat token, int64 [T]. Raises ``InputError`` for a sequence without tokens."""
        if self.lengths is None:
            return torch.arange(self.num_sequences, device=device).repeat_interleave(self.length)
        self._require_tokens()
        return on_device(Layout(self.lengths).item_ids(), device)

    def _require_tokens(self) -> None:
        assert self.lengths is not None
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            raise InputError("a sequence without tokens has nothing to pool", where=f"sequence {int(empty[0])}")

    def starts(self, device: torch.device) -> Tensor:
        """The flat position of each sequence's first token, int64 [sequences that have tokens]."""
        if self.lengths is None:
            return torch.arange(0, self.num_tokens, self.length, device=device)
        return on_device(Layout(self.lengths).starts[self.lengths > 0], device)

    def locate(self, token: int) -> tuple[int, int]:
        """The sequence of a flat token, and the token's position in it."""
        layout = Layout(self.host_lengths)
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


# The keywords in which a batch reaches a recurrent model, named once for all of them.


Output = TypeVar("Output")


@dataclass(frozen=True, eq=False)
class RaggedInputs:
    """Token ids or embeddings in rows, and at most one description of the sequences in them.

    Attributes:
        input_ids: token ids [N, L], or a ``PackedSequence`` of them
        inputs_embeds: embeddings [N, L, D] in the place of ``input_ids``
        attention_mask: [N, L], not zero on tokens; padding on either side
        input_lengths: N lengths in tokens, a list or a tensor; padding on the right
        cu_seq_lens_q: [n + 1], where sequences begin that lie end to end in one row (N = 1); with ``input_lengths``,
            which part of each slot is tokens
        position_ids: [N, L], from 0 at the start of each sequence in a row

    Without a description each row is one sequence. Lengths that lie on the host cost no wait for the device.
    """

    input_ids: Rows | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    input_lengths: Lengths | None = None
    cu_seq_lens_q: Tensor | None = None
    inputs_embeds: Rows | None = None

    def rows(self) -> Rows:
        """The ids or the embeddings. Raises ``InputError`` if neither is given, or both."""
        if self.input_ids is not None and self.inputs_embeds is not None:
            raise InputError("a model takes input_ids or inputs_embeds", found="both")
        rows = self.input_ids if self.inputs_embeds is None else self.inputs_embeds
        if rows is None:
            raise InputError("a model needs input_ids or inputs_embeds", found="neither")
        return rows

    def read(self) -> tuple[Sequences, Tensor]:
        """The sequences, and the values [T, ...] of their tokens alone. Waits and raises as :meth:`Sequences.read`."""
        rows = self.rows()
        sequences = Sequences.read(
            rows,
            attention_mask=self.attention_mask,
            input_lengths=self.input_lengths,
            cu_seq_lens=self.cu_seq_lens_q,
            position_ids=self.position_ids,
        )
        return sequences, sequences.flatten(rows)

    def read_for_backbone(self) -> dict[str, Any]:
        """The tokens alone, end to end in one row [1, T, ...], and their sequences, as keywords of the backbone."""
        sequences, flat = self.read()
        return {"input_ids" if self.inputs_embeds is None else "inputs_embeds": flat[None], "sequences": sequences}


def takes_ragged_inputs(forward: Callable[Concatenate[Any, RaggedInputs, ...], Output]) -> Callable[..., Output]:
    """Decorate a ``forward(self, inputs, *, ...)`` so that callers give the fields of ``inputs`` as keywords.

    The keywords stand in the signature beside those of ``forward``: by it transformers' Trainer and ``generate()``,
    PEFT and :mod:`ullage.attention` find out what a model takes. The other keywords of ``batch.to_flattened()`` are
    taken too, and nothing is made of them: a recurrent model needs no ``cu_seq_lens_k`` and no ``max_length``. A cache
    may have either of its names.
    """

    @functools.wraps(forward, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def with_keywords(
        self: Any,
        input_ids: Rows | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        inputs_embeds: Rows | None = None,
        **others: Any,
    ) -> Output:
        named_cache(others)
        inputs = RaggedInputs(input_ids, attention_mask, position_ids, input_lengths, cu_seq_lens_q, inputs_embeds)
        return forward(self, inputs, **others)

    # The named keywords above without ``**others``, then those of ``forward`` without ``self`` and ``inputs``.
    *keywords, _ = inspect.signature(with_keywords, follow_wrapped=False).parameters.values()
    own = list(inspect.signature(forward).parameters.values())[2:]
    with_keywords.__signature__ = inspect.Signature([*keywords, *own])  # pyright: ignore[reportAttributeAccessIssue]
    return with_keywords
