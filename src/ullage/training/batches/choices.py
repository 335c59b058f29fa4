"""Samples of multiple choice: several sequences each, that stay together as one item of a batch.

The choices of a question lie end to end, as one sequence with the field ``ullage_choice``, the number of its choice at
each token. So a plan and an exchange move questions whole, whatever their numbers of choices; ``keywords`` takes them
apart where the model is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Int64, Layout
from ullage.mixers.whole import CU_CHOICES

#: The field of a batch with the number of each token's choice among those of its question.
CHOICE = "ullage_choice"


def has_choices(batch: Any) -> bool:
    """Whether the items of a batch are questions with several choices."""
    return isinstance(batch, RaggedBatch) and CHOICE in batch


def choices_of(sample: Mapping[str, Any], main_input: str = "input_ids") -> list[dict[str, Any]] | None:
    """The fields of each choice of a sample that holds a list of them; None for any other sample.

    A sample has choices if its mask is a list of masks, or its main input one of sequences of unequal length.
    """
    rows: Any = sample.get(main_input)
    masks = sample.get("attention_mask")
    if not _is_nested(rows) or not (_is_nested(masks) or len({len(row) for row in rows}) > 1):
        return None
    nested = [name for name, value in sample.items() if _is_nested(value) and len(value) == len(rows)]
    return [{name: sample[name][k] for name in nested} for k in range(len(rows))]


def _is_nested(value: Any) -> bool:
    if isinstance(value, (np.ndarray, Tensor)):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(hasattr(row, "__len__") for row in value)


def as_one(sample: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A question as one sequence: ``choices``, of which padding was cut, end to end; the sample's other fields."""
    rest = {name: value for name, value in sample.items() if name not in choices[0] and name != "attention_mask"}
    laid = {name: np.concatenate([np.asarray(choice[name]) for choice in choices]) for name in choices[0]}
    lengths = [len(next(iter(choice.values()))) for choice in choices]
    return {**laid, CHOICE: np.repeat(np.arange(len(choices)), lengths), **rest}


def joined(batch: RaggedBatch, questions: Mapping[str, Tensor], num_choices: int) -> RaggedBatch:
    """A batch of choices as one of questions.

    Args:
        batch: of choices, those of a question one after the other, without fields by sequence.
        questions: fields with one entry per question.
        num_choices: of each question.
    """
    lengths = batch.layout.lengths
    number = np.repeat(np.arange(len(lengths)) % num_choices, lengths)
    values = {name: batch[name] for name in batch.names} | {CHOICE: torch.from_numpy(number)}
    return RaggedBatch({**values, **questions}, Layout(lengths.reshape(-1, num_choices).sum(1)), list(questions))


def apart(batch: RaggedBatch) -> tuple[RaggedBatch, Int64, dict[str, Tensor]]:
    """The choices of a batch of questions, the number of each question's, and the fields by question.

    Waits for the device.
    """
    fields = {name: batch[name] for name in batch.per_sequence}
    tokens = [name for name in batch.names if name not in fields and name != CHOICE]
    if not batch.numel():  # a placeholder: its padding is the one choice of each
        return batch.select(tokens), np.ones(len(batch), np.int64), fields
    places = batch.layout.token_index()
    question = np.repeat(np.arange(len(batch)), batch.layout.lengths)
    choice = batch[CHOICE].cpu().numpy()[places]
    # A choice begins where the question or the number changes.
    begins = np.flatnonzero(np.append(True, (np.diff(question) != 0) | (np.diff(choice) != 0)))
    index = torch.from_numpy(places).to(batch.device)
    values = {name: batch[name].index_select(0, index) for name in tokens}
    lengths = np.diff(np.append(begins, len(choice)))
    return RaggedBatch(values, Layout(lengths)), np.bincount(question[begins], minlength=len(batch)), fields


def last_choice(batch: RaggedBatch) -> RaggedBatch:
    """The last choice of a batch of questions, without the fields by question. Waits for the device."""
    return RaggedBatch.from_samples(apart(batch)[0].samples()[-1:])


def flattened(batch: RaggedBatch) -> dict[str, Any]:
    """The keywords of a packed call on questions (:mod:`ullage.mixers.whole`)."""
    choices, numbers, fields = apart(batch)
    bounds = torch.from_numpy(np.append(0, numbers.cumsum()).astype(np.int32)).to(batch.device)
    return {**choices.to_flattened(), CU_CHOICES: bounds, **fields}


def padded(batch: RaggedBatch, ids: Mapping[str, int]) -> dict[str, Any]:
    """Padded rows [questions, choices, L], as transformers' heads of multiple choice take them.

    Raises ``InputError`` for questions with unequal numbers of choices, which such rows cannot hold.
    """
    choices, numbers, fields = apart(batch)
    if len(set(numbers.tolist())) > 1:
        raise InputError(
            "questions of one padded batch have as many choices each",
            expected="one number of choices",
            found=sorted(set(numbers.tolist())),
            hint="pack them (packing_capacity=...), or batch questions by their number of choices",
        )
    rows = choices.to_padded(ids)
    return {name: tensor.unflatten(0, (len(batch), int(numbers[0]))) for name, tensor in rows.items()} | fields


def refuse_choices(batch: RaggedBatch, where: str) -> None:
    """Raise ``InputError`` for questions with several choices."""
    if CHOICE in batch:
        raise InputError(
            "this form of a batch has one sequence per sample",
            where=where,
            found="a list of choices in each",
            hint="RaggedCollator() takes them",
        )
