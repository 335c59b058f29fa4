"""Targets of an encoder-decoder: the ids that the decoder reads and the labels that it predicts, as flat tokens.

Targets are given as ``labels`` alone, which are shifted right here, or as ``decoder_input_ids`` with or without labels
under them. Their form is padded rows (labels with -100, or a ``decoder_attention_mask``), one row bounded by
``decoder_cu_seq_lens_q``, a jagged nested tensor, or a ``PackedSequence``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.models.sequences import Lengths, Rows, Sequences
from ullage.schema import IGNORED_LABEL


@dataclass(frozen=True, eq=False)
class Targets:
    """Target tokens end to end.

    Attributes:
        ids: [T], the token that the decoder reads at each step
        labels: [T], the token that it predicts there; ``None`` where none were given
        sequences: which tokens belong to which target, and the rows they came in
    """

    ids: Tensor
    labels: Tensor | None
    sequences: Sequences

    @classmethod
    def read(
        cls,
        labels: Rows | None,
        decoder_input_ids: Rows | None,
        *,
        start: int,
        filler: int,
        attention_mask: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens: Tensor | None = None,
    ) -> Targets:
        """Targets in any of the forms of this module.

        Args:
            labels: [n, L], not shifted, or one of the other forms
            decoder_input_ids: the same form; by default the labels, shifted right
            start: the token in front of shifted labels
            filler: the token read in the place of a label -100 between others
            attention_mask: [n, L], not zero on tokens
            input_lengths: n lengths in tokens
            cu_seq_lens: [n + 1], where targets begin in one row [1, T]

        On CUDA waits once for the lengths. Raises ``InputError`` for rows that disagree.
        """
        if isinstance(labels, PackedSequence) or (labels is not None and labels.is_nested):
            labels, cu_seq_lens = _end_to_end(labels)
        if isinstance(decoder_input_ids, PackedSequence) or (
            decoder_input_ids is not None and decoder_input_ids.is_nested
        ):
            decoder_input_ids, cu_seq_lens = _end_to_end(decoder_input_ids)
        rows = labels if decoder_input_ids is None else decoder_input_ids
        if rows is None:
            raise InputError("a decoder needs labels or decoder_input_ids", found="neither")
        if labels is not None and labels.shape != rows.shape:
            raise InputError(
                "labels and decoder_input_ids disagree", expected=list(rows.shape), found=f"shape {list(labels.shape)}"
            )
        # Without a description, labels themselves show the padding; but data must not steer a compiled graph.
        described = attention_mask is not None or input_lengths is not None or cu_seq_lens is not None
        as_they_stand = decoder_input_ids is not None and torch.compiler.is_compiling()
        if labels is not None and not described and not as_they_stand:
            attention_mask = _labelled(labels, from_the_start=decoder_input_ids is not None)
        sequences = Sequences.read(
            rows, attention_mask=attention_mask, input_lengths=input_lengths, cu_seq_lens=cu_seq_lens
        )
        flat_labels = None if labels is None else sequences.flatten(labels).long()
        if decoder_input_ids is not None:
            return cls(sequences.flatten(decoder_input_ids), flat_labels, sequences)
        assert flat_labels is not None
        return cls(_shifted(flat_labels, sequences, start, filler), flat_labels, sequences)


def shift_right(labels: Tensor, start: int, filler: int) -> Tensor:
    """``labels`` [N, L] shifted right behind ``start``, with ``filler`` in the place of -100: a decoder's input."""
    ids = labels.roll(1, -1)
    ids[..., 0] = start
    return ids.masked_fill(ids == IGNORED_LABEL, filler)


def _shifted(labels: Tensor, sequences: Sequences, start: int, filler: int) -> Tensor:
    # Rolled over the whole flat row: a sequence's first id is that of the one before until the start token replaces
    # it.
    ids = labels.roll(1).index_fill(0, sequences.starts(labels.device), start)
    return ids.masked_fill(ids == IGNORED_LABEL, filler)


def _labelled(labels: Tensor, *, from_the_start: bool) -> Tensor:
    """True from a row's first label that counts, or from its start, to its last one; on one token if none counts."""
    real = labels != IGNORED_LABEL
    # A cumulated sum from the right is positive up to the last label that counts. The first column is always set, so
    # that a target without any such label still has one token.
    before_the_end = real.flip(1).cumsum(1).flip(1) > 0
    before_the_end[:, 0] |= ~before_the_end[:, 0]
    if from_the_start:
        return before_the_end
    return before_the_end & ((real.cumsum(1) > 0) | ~real.any(1, keepdim=True))


def _end_to_end(nested: Rows) -> tuple[Tensor, Tensor]:
    """A nested tensor [n, j] or a ``PackedSequence`` as one row [1, T] and its bounds [n + 1]."""
    if isinstance(nested, PackedSequence):
        batch = RaggedBatch.from_packed_sequence(nested, "ids")
        return batch["ids"][None], batch.cu_seqlens
    if nested.layout == torch.jagged and nested.lengths() is None:  # pyright: ignore[reportAttributeAccessIssue]
        return nested.values()[None], nested.offsets()  # pyright: ignore[reportAttributeAccessIssue]
    rows = nested.unbind()
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return torch.cat(rows)[None], lengths.cumsum(0)
