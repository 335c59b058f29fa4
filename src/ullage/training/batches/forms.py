"""Forms in which a batch reaches a model, and the way back from its outputs to single samples.

A model takes sequences of unequal length in one of four forms: *flattened* (one row and ``cu_seq_lens_q``),
*lengths* (padded rows and ``input_lengths``, longest first), *mask* (padded rows and ``attention_mask``), or *rows*
(padded rows alone, for a causal language model without a mask). A :class:`RaggedBatch` is put into the form that the
model's ``forward`` names. Batches of a user's own collator are left as they are. For both, :class:`SampleRows`
remembers where each sample lies, so that outputs and labels can be told apart by sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers import PreTrainedModel
from transformers.utils import logging

import ullage.attention as packed_attention
from ullage.attention.heads import loss_shifts, package_of, spans_sequences
from ullage.attention.support import PADDING_FREE
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, LABEL_NAMES, LENGTHS_NAMES, fill_value, holding_ignored
from ullage.core.errors import InputError
from ullage.core.layout import Layout, ranges
from ullage.core.rows import read_row
from ullage.mixers.wrappers import bare, has_learned_prompt

logger = logging.get_logger(__name__)


def form_of(model: nn.Module) -> str:
    """The form in which a model takes a ragged batch: ``flattened``, ``mask``, ``rows``, or its parameter of lengths.

    Told by the parameters of ``forward``, never by the class. A transformers model takes the flattened form only if it
    was packed (:func:`ullage.pack_model`), or if its attention keeps sequences apart and nothing else in it mixes them.
    One whose attention does so in vain is padded, which is said once. Raises ``InputError`` for a model that takes none
    of these forms.
    """
    model = bare(model)
    parameters = inspect.signature(model.forward).parameters
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    # In order of preference: what computes no padding, then padded rows with lengths, then a mask.
    if "cu_seq_lens_q" in parameters:
        return "flattened"
    if attention in PADDING_FREE:
        problem = _packing_problem(model)
        if problem is None:
            packed_attention.require_packing(model)  # its layers remember that they were checked
            return "flattened"
        if "attention_mask" in parameters:
            way_out = "ullage.pack_model(model), or packing_capacity=..., trains it without padding."
            if has_learned_prompt(model):
                way_out = "An adapter in the layers of the model, such as LoRA, trains without padding."
            logger.warning_once(f"batches are padded although attn_implementation={attention!r}: {problem}. {way_out}")
    form = padded_form(model)
    if form != "rows":
        return form
    # Without a mask padding is told by nothing, but where no token sees a later one it is out of the way behind them.
    if package_of(type(model)) == "transformers" and loss_shifts(model):
        return "rows"
    raise InputError(
        "the model cannot tell the sequences of a RaggedBatch apart",
        where=f"{type(model).__name__}.forward",
        expected="a parameter named cu_seq_lens_q, input_lengths or attention_mask",
        found=list(parameters),
        hint="ullage.pack_model(model) makes it take packed rows"
        if isinstance(model, PreTrainedModel)
        else "name one of them in forward, or collate with PackedSequenceCollator",
    )


def padded_form(model: nn.Module) -> str:
    """The form in which a bare model takes padded rows: with lengths, with a mask, or ``rows`` alone."""
    parameters = inspect.signature(model.forward).parameters
    return next(
        (name for name in LENGTHS_NAMES if name in parameters), "mask" if "attention_mask" in parameters else "rows"
    )


def _packing_problem(model: nn.Module) -> str | None:
    """The reason why a model cannot take packed rows as it is, in one clause; None if it can."""
    if has_learned_prompt(model):
        return "prompt tuning puts a learned prompt before a whole row, not before each of its sequences"
    if spans_sequences(model):
        return f"the head of {type(model).__name__} would take a packed row for one sequence"
    return packed_attention.packing_problem(model)


def keywords_of(batch: RaggedBatch, form: str, *, shifts: bool | None, pad_token_id: int = 0) -> dict[str, Any]:
    """The batch as keywords of the model, in its form; per-sequence fields ride along.

    ``shifts``: whether the model's loss shifts labels; only where it is known not to, a sequence's first label stays.
    ``pad_token_id``: the id in padding.
    """
    ids: dict[str, int] = dict.fromkeys(("input_ids", "decoder_input_ids"), pad_token_id)
    if form == "flattened":
        keywords = batch.to_flattened()
        # to_flattened sets each sequence's first label to -100, so that a shift never crosses a boundary. Without a
        # shift that label counts: put it back.
        if shifts is False and "labels" in keywords:
            keywords["labels"] = batch["labels"][None]
        return {**keywords, **{name: batch[name] for name in batch.per_sequence}}
    padded = _with_padded_targets(batch.to_padded(ids), ids)
    if form == "mask":
        return padded
    if form == "rows":
        return {name: tensor for name, tensor in padded.items() if name != "attention_mask"}
    # pack_padded_sequence wants the longest first; SampleRows.order undoes it in the outputs.
    order = _longest_first(batch.layout)
    del padded["attention_mask"]
    index = torch.from_numpy(order).to(batch.device)
    keywords: dict[str, Any] = {}
    for name, tensor in padded.items():
        rows = batch.items.get(name)
        # Rows of items go with their sequences.
        moved = index if rows is None else torch.from_numpy(ranges(rows.starts[order], rows.lengths[order]))
        keywords[name] = tensor.index_select(0, moved.to(batch.device))
    keywords[form] = torch.from_numpy(batch.layout.lengths[order])  # on the host, where packing wants it
    return keywords


def _with_padded_targets(fields: dict[str, Tensor], ids: Mapping[str, int]) -> dict[str, Tensor]:
    """Padded fields in which targets, sequences of lengths of their own, are padded too."""
    return {name: _padded(tensor, name, ids) if tensor.is_nested else tensor for name, tensor in fields.items()}


def _padded(rows: Tensor, name: str, ids: Mapping[str, int]) -> Tensor:
    if name in LABEL_NAMES:
        rows = holding_ignored(rows)
    return torch.nested.to_padded_tensor(rows, ids.get(name, fill_value(name, rows.dtype)))


def _longest_first(layout: Layout) -> np.ndarray:
    return np.argsort(-layout.lengths, kind="stable")


@dataclass(frozen=True)
class SampleRows:
    """Places of the samples of a batch in the model's inputs, hence in its outputs.

    Attributes:
        num: number of samples.
        layout: of the one row of flat inputs, in which samples lie end to end.
        packed: a PackedSequence among the inputs, for its order.
        starts: [rows], position of the first real token in each padded row.
        lengths: [rows], real tokens of each padded row.
        width: of padded rows.
        order: [rows], the sample that each row holds; None if row *i* holds sample *i*.
    """

    num: int
    layout: Layout | None = None
    packed: PackedSequence | None = None
    starts: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    width: int | None = None
    order: tuple[int, ...] | None = None

    def split(self, value: Any, *, per_row: bool = False) -> tuple[list[Any], bool]:
        """``value`` by sample, and whether it has one entry per token.

        ``per_row`` settles what a shape of at most two dims leaves open: [N, C] where C is also the width of the rows.
        Raises ``InputError`` for a shape that fits no sample.
        """
        if isinstance(value, PackedSequence):
            batch = RaggedBatch.from_packed_sequence(value, "value")
            return [sample["value"] for sample in batch.samples()], True
        if value.is_nested:
            return list(value.unbind()), True
        # A shape may fit both readings, [N, L] per token and [N, C] per sequence. Per token is tried first, unless the
        # caller knows better.
        rows_fit = value.ndim >= 1 and value.shape[0] == self.num
        if not (per_row and rows_fit and value.ndim <= 2):
            tokens = self._tokens(value)
            if tokens is not None:
                return tokens, True
        if not rows_fit:
            raise InputError(
                "an output of the model cannot be told apart by sample",
                expected=f"{self.num} rows" + (f" or {self.layout.size} tokens" if self.layout else ""),
                found=f"shape {list(value.shape)}",
                hint="name outputs that are not predictions in the config's keys_to_ignore_at_inference",
            )
        return self._reordered(list(value.unbind(0))), False

    def _tokens(self, value: Tensor) -> list[Tensor] | None:
        if self.layout is not None:
            flat = value[0] if value.ndim >= 2 and tuple(value.shape[:2]) == (1, self.layout.size) else value
            if flat.ndim >= 1 and flat.shape[0] == self.layout.size:
                starts, lengths = self.layout.starts.tolist(), self.layout.lengths.tolist()
                return [flat[start : start + length] for start, length in zip(starts, lengths)]
        if self.starts is not None and self.lengths is not None and value.ndim >= 2 and value.shape[0] == self.num:
            spans = [slice(start, start + length) for start, length in zip(self.starts, self.lengths)]
            if value.ndim == 4 and value.shape[2] == value.shape[3] == self.width:  # attention [N, heads, L, L]
                return self._reordered([value[i, :, span, span] for i, span in enumerate(spans)])
            # pad_packed_sequence pads to the longest sequence, which may be narrower than the rows that came in; with
            # padding on the left that cannot be undone.
            whole = value.shape[1] == max(self.lengths, default=0) and not any(self.starts)
            if value.shape[1] == self.width or whole:
                return self._reordered([value[i, span] for i, span in enumerate(spans)])
        if self.packed is not None and value.ndim >= 1 and value.shape[0] == self.packed.data.shape[0]:
            return self.split(_like(self.packed, value))[0]
        return None

    def _reordered(self, rows: list[Any]) -> list[Any]:
        if self.order is None:
            return rows
        # Row 0 holds sample 2 and row 1 sample 0, where the order is [2, 0, 1].
        back = [None] * len(rows)
        for position, sample in enumerate(self.order):
            back[sample] = rows[position]
        return back


def _like(packed: PackedSequence, data: Tensor) -> PackedSequence:
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def sample_rows(inputs: Any, form: str | None, main_input: str) -> SampleRows:
    """Places of the samples of a batch once it has reached the model. Reads lengths on the host."""
    if isinstance(inputs, RaggedBatch):
        layout = inputs.layout
        if form == "flattened":
            return SampleRows(layout.num_items, layout=layout)
        order = np.arange(layout.num_items) if form in ("mask", "rows") else _longest_first(layout)
        lengths = tuple(layout.lengths[order].tolist())
        return SampleRows(
            layout.num_items,
            starts=(0,) * layout.num_items,
            lengths=lengths,
            width=layout.max_seqlen,
            order=tuple(order.tolist()),
        )
    if isinstance(inputs, PackedSequence):
        inputs = {main_input: inputs}
    if not isinstance(inputs, Mapping):  # a trainer's own: a list of samples
        return SampleRows(len(inputs))
    packed = next((value for value in inputs.values() if isinstance(value, PackedSequence)), None)
    if packed is not None:
        # Outputs may be packed alike, bare data in the same order, or padded again: all three can be told apart.
        layout = RaggedBatch.from_packed_sequence(packed).layout
        return SampleRows(
            layout.num_items,
            packed=packed,
            starts=(0,) * layout.num_items,
            lengths=tuple(layout.lengths.tolist()),
            width=layout.max_seqlen,
        )
    if "cu_seq_lens_q" in inputs:
        positions = inputs.get("position_ids")
        size = None if positions is None else positions.shape[-1]
        layout = read_row(inputs["cu_seq_lens_q"], size, positions)
        return SampleRows(layout.num_items, layout=layout)
    return _padded_rows(inputs, main_input)


def _padded_rows(inputs: Mapping[str, Any], main_input: str) -> SampleRows:
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.ndim >= 1]
    main = inputs.get(main_input)
    if not isinstance(main, Tensor) or main.ndim < 1:
        main = tensors[0] if tensors else None
    if main is None:
        raise InputError("a batch holds no tensor", expected="at least one", found=list(inputs))
    num = int(main.shape[0])
    if main.is_nested or main.ndim < 2:
        return SampleRows(num)
    width = int(main.shape[1])
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == (num, width):
        # argmax of a mask is the first real position: 0 for padding on the right.
        host = (mask != 0).cpu().numpy()
        return SampleRows(num, None, None, tuple(host.argmax(1).tolist()), tuple(host.sum(1).tolist()), width)
    for name in LENGTHS_NAMES:
        if name in inputs:
            lengths = tuple(int(length) for length in inputs[name])
            return SampleRows(num, None, None, (0,) * num, lengths, width)
    return SampleRows(num)


def target_rows(labels: Tensor) -> SampleRows:
    """The rows of an encoder-decoder's outputs, which are as long as its labels, not as its inputs.

    Labels [N, L], or a nested tensor of them, whose outputs lie end to end or in padded rows.
    """
    if labels.is_nested:
        lengths = tuple(len(row) for row in labels.unbind())
        width = max(lengths, default=0)
        return SampleRows(len(lengths), Layout(lengths), starts=(0,) * len(lengths), lengths=lengths, width=width)
    lengths = tuple((labels != IGNORED_LABEL).sum(1).tolist())
    return SampleRows(len(lengths), starts=(0,) * len(lengths), lengths=lengths, width=labels.shape[1])


def by_sample(inputs: Any, name: str, rows: SampleRows, *, per_row: bool = False) -> tuple[list[Any], bool]:
    """A field of the batch as it was collated, by sample, and whether it has one entry per token.

    ``per_row``: it is known to have one entry per sequence, whatever its shape looks like.
    """
    if isinstance(inputs, RaggedBatch):
        if inputs[name].is_nested:
            return list(inputs[name].unbind()), True
        return [sample[name] for sample in inputs.samples()], name not in inputs.per_sequence
    value = inputs[name]
    one_each = isinstance(value, Tensor) and value.ndim == 1 and value.shape[0] == rows.num
    return rows.split(value, per_row=per_row or one_each)
