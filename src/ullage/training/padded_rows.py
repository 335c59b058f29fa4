"""Outputs and labels in padded rows, as transformers gives them, whatever form a batch had.

Where a batch's samples lie end to end, or packed, each gets a row, filled with -100 behind its tokens. Rows that came
padded stay as they are; where packing cut their padding away, what the model gives is laid back into their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.schema import IGNORED_LABEL
from ullage.training.forms import SampleRows


@dataclass(frozen=True)
class Frame:
    """The padded rows that samples came in before packing cut the padding away.

    Attributes:
        fields: of the batch, [n, ...].
        starts: [n], position of the first token of each row.
        width: of the rows.
    """

    fields: Mapping[str, Tensor]
    starts: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, batch: Any, main_input: str) -> Frame | None:
        """The rows of a collated batch on the host; None for one that is not of padded rows with a mask."""
        if not isinstance(batch, Mapping):
            return None
        fields = {name: torch.as_tensor(v) for name, v in batch.items() if isinstance(v, (Tensor, np.ndarray))}
        mask, main = fields.get("attention_mask"), fields.get(main_input)
        if mask is None or main is None or mask.ndim != 2 or main.shape[:2] != mask.shape or "cu_seq_lens_q" in fields:
            return None
        starts = (mask != 0).int().argmax(1).tolist()
        return cls({k: v for k, v in fields.items() if v.shape[:1] == mask.shape[:1]}, tuple(starts), mask.shape[1])

    @classmethod
    def of_ragged(cls, batch: RaggedBatch, names: Sequence[str]) -> Frame:
        """Rows as wide as the longest sample of a batch, from which a part of it is taken; ``names``: of labels."""
        fields = {}
        for name in names:
            if name in batch.per_sequence and not batch[name].is_nested:
                fields[name] = batch[name]
            elif name in batch:
                each = batch[name].unbind() if name in batch.per_sequence else batch.to_nested(name).unbind()
                fields[name] = in_rows(each)
        return cls(fields, (0,) * len(batch), batch.max_seqlen)

    def part(self, first: int, last: int) -> Frame:
        """The rows from ``first`` up to ``last``."""
        fields = {name: value[first:last] for name, value in self.fields.items()}
        return Frame(fields, self.starts[first:last], self.width)


def padded(value: Any, rows: SampleRows, *, keeps_rows: bool, per_row: bool = False, frame: Frame | None = None) -> Any:
    """Tensors of a batch with one row per sample [N, L, ...], in tuples and dicts part by part.

    Args:
        value: tensors in the form of the model.
        rows: where the samples lie in it.
        keeps_rows: the batch came as rows, and stays as it is.
        per_row: settles shapes that may be read in two ways (:meth:`SampleRows.split`).
        frame: the places in which rows lay before packing.
    """
    if isinstance(value, Mapping):
        options: dict[str, Any] = {"keeps_rows": keeps_rows, "per_row": per_row, "frame": frame}
        return {name: padded(part, rows, **options) for name, part in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        return tuple(padded(part, rows, keeps_rows=keeps_rows, per_row=per_row, frame=frame) for part in value)
    if isinstance(value, Tensor) and not value.is_nested:
        if value.ndim == 0:
            return value[None]  # one for the batch, as transformers keeps it
        if keeps_rows:
            return value
    if not isinstance(value, (Tensor, PackedSequence)):
        return value
    entries, ragged = rows.split(value, per_row=per_row)
    return in_rows(entries, frame) if ragged else torch.stack(entries)


def in_rows(entries: Sequence[Tensor], frame: Frame | None = None) -> Tensor:
    """Entries of samples, [n_i, ...] each, as rows [N, L, ...] with -100 where there is nothing.

    ``L`` is the longest, or the width of ``frame``, whose places the entries take.
    """
    shape = [max(sizes) for sizes in zip(*(entry.shape for entry in entries))]
    starts = [0] * len(entries)
    if frame is not None and shape and shape[0] <= frame.width:
        fits = all(start + len(entry) <= frame.width for start, entry in zip(frame.starts, entries))
        shape[0], starts = frame.width, list(frame.starts) if fits else starts
    if all(list(entry.shape) == shape for entry in entries):
        return torch.stack(list(entries))
    made = entries[0].new_full((len(entries), *shape), IGNORED_LABEL)
    for row, entry, start in zip(made, entries, starts):
        row[(slice(start, start + len(entry)), *map(slice, entry.shape[1:]))] = entry
    return made


def concatenated(blocks: list[Any]) -> Any:
    """Arrays of batches [n, ...] as one, filled with -100 up to the largest; in tuples and dicts part by part.

    transformers' ``nested_concat`` over all batches at once, and in every dim but the first. ``blocks`` is emptied, so
    that at no time all of it is there twice.
    """
    first = blocks[0]
    if isinstance(first, (tuple, Mapping)):
        names = range(len(first)) if isinstance(first, tuple) else list(first)
        parts = {name: [block[name] for block in blocks] for name in names}
        blocks.clear()
        del first
        joined = {name: concatenated(parts.pop(name)) for name in names}
        return tuple(joined.values()) if isinstance(names, range) else joined
    return _joined(blocks)


def _joined(blocks: list[np.ndarray]) -> np.ndarray:
    if len({block.ndim for block in blocks}) > 1:
        raise InputError(
            "the outputs of two batches cannot be put into one array",
            expected="as many dims in every batch",
            found=sorted({block.shape for block in blocks})[:4],
            hint="return the same of every batch in preprocess_logits_for_metrics",
        )
    if len(blocks) == 1:
        return blocks.pop()
    shape = [max(sizes) for sizes in zip(*(block.shape for block in blocks))]
    shape[0] = sum(len(block) for block in blocks)
    # Pages of an empty array come into memory as they are written, while those of the blocks go.
    made, at = np.empty(shape, np.result_type(*{block.dtype for block in blocks})), 0
    blocks.reverse()
    while blocks:
        block = blocks.pop()
        rows = made[at : at + len(block)]
        if list(block.shape[1:]) != shape[1:]:
            rows[...] = IGNORED_LABEL
        rows[tuple(map(slice, block.shape))] = block
        at += len(block)
    return made
