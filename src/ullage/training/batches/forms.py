"""Forms in which a batch reaches a model.

A model takes sequences of unequal length in one of four forms: *flattened* (one row and ``cu_seq_lens_q``),
*lengths* (padded rows and ``input_lengths``, longest first), *mask* (padded rows and ``attention_mask``), or *rows*
(padded rows alone, for a causal language model without a mask). A :class:`RaggedBatch` is put into the form that the
model's ``forward`` names. Batches of a user's own collator are left as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

import ullage.attention as packed_attention
from ullage.attention.heads import loss_shifts, package_of, spans_sequences
from ullage.attention.support import PADDING_FREE
from ullage.core.batch import RaggedBatch
from ullage.core.columns import LABEL_NAMES, LENGTHS_NAMES, fill_value, holding_ignored
from ullage.core.errors import InputError
from ullage.core.layout import Layout, ranges
from ullage.core.rows import on_device
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
    # pack_padded_sequence wants the longest first; an evaluation undoes it in the outputs.
    order = longest_first(batch.layout)
    del padded["attention_mask"]
    index = on_device(order, batch.device)
    keywords: dict[str, Any] = {}
    for name, tensor in padded.items():
        rows = batch.items.get(name)
        # Rows of items go with their sequences.
        moved = index if rows is None else on_device(ranges(rows.starts[order], rows.lengths[order]), batch.device)
        keywords[name] = tensor.index_select(0, moved)
    keywords[form] = torch.from_numpy(batch.layout.lengths[order])  # on the host, where packing wants it
    return keywords


def _with_padded_targets(fields: dict[str, Tensor], ids: Mapping[str, int]) -> dict[str, Tensor]:
    """Padded fields in which targets, sequences of lengths of their own, are padded too."""
    return {name: _padded(tensor, name, ids) if tensor.is_nested else tensor for name, tensor in fields.items()}


def _padded(rows: Tensor, name: str, ids: Mapping[str, int]) -> Tensor:
    if name in LABEL_NAMES:
        rows = holding_ignored(rows)
    return torch.nested.to_padded_tensor(rows, ids.get(name, fill_value(name, rows.dtype)))


def longest_first(layout: Layout) -> np.ndarray:
    """The sequences of a layout, longest first."""
    return np.argsort(-layout.lengths, kind="stable")
