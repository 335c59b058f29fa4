"""What a model's loss is a mean over, and how a microbatch's part of the step's loss is made of it.

==============  ================================  ===========================  =====================================
objective       models                            runs                         a microbatch's part of the loss
==============  ================================  ===========================  =====================================
``next_token``  causal language models            as one packed row            sum ÷ labels of the whole step
``token``       token classes, masked tokens      as one packed row            mean × its share of the labels
``sequence``    sequence classes, regression      padded, in one forward       mean × its share of the sequences
==============  ================================  ===========================  =====================================

A sequence classifier of transformers' runs padded within its microbatch: its head looks for a row's last token, and by
lengths ranks would gather sharded weights unequally often.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ullage.attention.heads import loss_name, works_by_sequence
from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Layout
from ullage.schema import IGNORED_LABEL
from ullage.training.forms import keywords_of

NEXT_TOKEN, TOKEN, SEQUENCE = "next_token", "token", "sequence"
#: The objective of transformers' losses beside the next token's.
_OBJECTIVES = {"ForTokenClassification": TOKEN, "ForMaskedLM": TOKEN, "ForSequenceClassification": SEQUENCE}


def objective_of(model: Any) -> str:
    """The objective of a model without its adapters. Raises ``InputError`` for one that this engine does not train."""
    loss = model.loss_function
    if "labels" in inspect.signature(model.forward).parameters:
        # A loss that transformers does not list is the model's own, and is taken for a next-token loss.
        if loss is ForCausalLMLoss or loss not in LOSS_MAPPING.values():
            return NEXT_TOKEN
        found = SEQUENCE if works_by_sequence(model) else _OBJECTIVES.get(loss_name(model) or "")
        if found is not None and not getattr(model.config, "is_encoder_decoder", False):
            return found
    raise InputError(
        "only causal language models, and classifiers of tokens or sequences, are trained by this engine",
        expected="a model whose loss predicts the next token, or one class per token or sequence",
        found=type(model).__name__,
        hint="ullage.training.Trainer trains the others",
    )


def takes_row(model: Any, objective: str) -> bool:
    """Whether a microbatch runs as one packed row, and not padded."""
    return objective != SEQUENCE or "cu_seq_lens_q" in inspect.signature(model.forward).parameters


def runnable(batch: RaggedBatch, objective: str) -> RaggedBatch:
    """What a model is given of a microbatch; for an empty one a stand-in of the same fields that counts nowhere."""
    if len(batch):
        return batch
    if objective != SEQUENCE:
        return batch.placeholder()
    # A classifier looks for a last token: zeros are a valid id and a valid class.
    sizes = {name: 1 if name in batch.per_sequence else 2 for name in batch.names}
    values = {name: batch[name].new_zeros((size, *batch[name].shape[1:])) for name, size in sizes.items()}
    return RaggedBatch(values, Layout([2]), batch.per_sequence)


def with_labels(batch: RaggedBatch, objective: str) -> RaggedBatch:
    """The microbatch with labels: for the next token its ``input_ids``, where it has none."""
    if "labels" in batch:
        return batch
    if "input_ids" not in batch or objective != NEXT_TOKEN:
        needed = "labels or input_ids" if objective == NEXT_TOKEN else "labels"
        raise InputError("a microbatch has no labels", expected=needed, found=list(batch.names))
    ids = batch["input_ids"]
    # Padding keeps -100. A sequence's first label, which nothing predicts, falls out when labels are shifted.
    tokens = torch.from_numpy(batch.layout.token_index()).to(ids.device)
    labels = torch.full_like(ids, IGNORED_LABEL).index_copy(0, tokens, ids.index_select(0, tokens))
    values = {name: batch[name] for name in batch.names}
    return RaggedBatch({**values, "labels": labels}, batch.layout, batch.per_sequence)


def count_labels(batch: RaggedBatch, objective: str) -> int:
    """What the microbatch's loss is a mean over: labels that count, or sequences that have one."""
    labels, layout = batch["labels"], batch.layout
    if objective == SEQUENCE and (labels.is_floating_point() or labels.dim() > 1):
        return len(batch)  # values to come near to, or several classes each
    if objective == SEQUENCE and "labels" not in batch.per_sequence:
        raise InputError(
            "a classifier of sequences needs one label per sequence", where="labels", found="one per token"
        )
    counted = labels != IGNORED_LABEL
    if objective != NEXT_TOKEN:
        return int(counted.sum())
    # Labels that some token predicts: not the first of a sequence.
    firsts = torch.from_numpy(np.asarray(layout.starts[layout.lengths > 0])).to(labels.device)
    return int(counted.sum()) - int(counted[firsts].sum())


def keywords(model: Any, batch: RaggedBatch, objective: str) -> dict[str, Any]:
    """The microbatch as the model takes it."""
    if objective == NEXT_TOKEN:
        return batch.to_flattened()
    form = "flattened" if takes_row(model, objective) else "mask"
    pad_token_id = getattr(model.config, "pad_token_id", None) or 0
    return keywords_of(batch, form, shifts=False, pad_token_id=pad_token_id)


def part_of_loss(outputs: Any, objective: str, count: int, divisor: Tensor) -> Tensor:
    """A microbatch's part of the step's loss: the parts of all ranks and microbatches add up to it.

    ``count``: of its labels. ``divisor``: of the labels of the whole step, over dp.
    """
    if objective == NEXT_TOKEN:
        return outputs.loss
    # A mean over nothing is nan, and nan times zero too; the output keeps the ranks' backward passes alike.
    return outputs.loss * (count / divisor) if count else outputs.logits.sum() * 0.0
