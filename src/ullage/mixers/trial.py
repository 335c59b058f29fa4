"""The calls of a proof: a few sequences, each by itself and all in one packed row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ullage.attention.heads import (
    KNOWN_AUTHORS,
    is_multiple_choice,
    loss_author,
    loss_shifts,
    package_of,
    spans_sequences,
    works_by_sequence,
)
from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.mixers.two_losses import has_two_losses
from ullage.schema import IGNORED_LABEL, is_target

#: Fields of labels with one entry per sequence, beside ``labels`` of a head by sequence.
_BY_SEQUENCE = ("start_positions", "end_positions", "next_sentence_label", "mc_labels")


@dataclass(frozen=True)
class Trial:
    """Keywords of the calls that a proof compares.

    Attributes:
        alone: of each sequence in a call of its own: tensors [1, L, ...], or [1, ...] by sequence, without lengths.
        packed: of one packed row of the same sequences, in this order.
        sizes: tokens of each sequence.
        target_sizes: tokens of each target of an encoder-decoder; None for others.
        counts: by what the loss of each sequence is weighed in that of the row; None where the loss is not compared.
        is_strict: whether a loss that differs is a failure, where outputs do not differ: the loss is known to be a
            mean over labels, or over sequences.
    """

    alone: Sequence[Mapping[str, Any]]
    packed: Mapping[str, Any]
    sizes: Sequence[int]
    target_sizes: Sequence[int] | None = None
    counts: Sequence[float] | None = None
    is_strict: bool = False


def trial_of(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    *,
    device: torch.device | None = None,
    per_sequence: Iterable[str] = (),
) -> Trial:
    """The trial of samples as ``RaggedBatch.from_samples`` takes them.

    Args:
        model: bare; its class tells how it counts labels.
        samples: the sequences.
        device: of the calls; the model's if None.
        per_sequence: fields of arrays with one entry per sequence.

    Raises ``InputError`` for no sample, and for one without tokens.
    """
    if not len(samples):
        raise InputError("a proof needs sequences to run", where="verify", expected="a few samples", found="none")
    if device is None:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    samples = [{name: torch.as_tensor(value) for name, value in sample.items()} for sample in samples]
    targets = [name for name in samples[0] if is_pair and is_target(name) and samples[0][name].ndim]
    fields = [{name: value for name, value in sample.items() if name not in targets} for sample in samples]
    batch = RaggedBatch.from_samples(fields, per_sequence=[name for name in per_sequence if name not in targets])
    packed = batch.to_flattened() | {name: batch[name] for name in batch.per_sequence}
    if "labels" in batch and "labels" not in batch.per_sequence and loss_shifts(model) is False:
        packed["labels"] = batch["labels"][None]  # no shift: the first label of a sequence counts too
    for name in targets:
        packed[name] = torch.nested.nested_tensor([sample[name] for sample in samples], layout=torch.jagged)
    alone = [{name: value[None] for name, value in sample.items()} for sample in samples]
    if targets and package_of(loss_author(model)[0]) == "ullage":
        # Ours takes -100 in padded targets for padding, and not in ragged ones.
        alone = [each | {name: _as_nested(each[name]) for name in targets} for each in alone]
    if is_multiple_choice(model):  # each choice as a question of one
        alone = [{name: value[None] for name, value in choice.items()} for choice in alone]
    sizes = [int(length) for length in batch.layout.lengths]
    counts, is_strict = counts_of(model, alone)
    return Trial(
        [_moved(each, device) for each in alone],
        _moved(packed, device),
        sizes,
        [len(sample[targets[0]]) for sample in samples] if targets else None,
        counts,
        is_strict,
    )


def counts_of(model: nn.Module, alone: Sequence[Mapping[str, Any]]) -> tuple[list[float] | None, bool]:
    """By what the loss of each sequence is weighed, and whether that is known for certain.

    None without labels, and where labels by token and by sequence meet in one call: their losses are added up.
    """
    per_sequence = [name for name in _BY_SEQUENCE if name in alone[0]]
    is_known = package_of(loss_author(model)[0]) in KNOWN_AUTHORS
    labels = [each.get("labels") for each in alone]
    if not all(isinstance(each, Tensor) for each in labels):
        # An answer behind its sequence counts for nothing, and the mean of starts may be over others than that of ends.
        of_spans = spans_sequences(model) and bool(per_sequence) and all(map(_holds_its_answer, alone))
        return ([1.0] * len(alone), is_known) if of_spans else (None, False)
    if per_sequence or has_two_losses(model, alone[0]):
        return None, False
    shifts = loss_shifts(model)
    counts = []
    for value in labels:
        assert isinstance(value, Tensor)
        if works_by_sequence(model):
            counts.append(float(value.is_floating_point() or bool((value != IGNORED_LABEL).any())))
        else:
            counts.append(float((value[:, 1:] if shifts else value).ne(IGNORED_LABEL).sum()))
    return counts, is_known and shifts is not None


def _as_nested(rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def _holds_its_answer(sequence: Mapping[str, Any]) -> bool:
    """Whether the places of a sequence's answer lie in it."""
    length = sequence["input_ids"].shape[1] if "input_ids" in sequence else 0
    places = [sequence[name] for name in ("start_positions", "end_positions") if name in sequence]
    return all(int(place.max()) < length for place in places)


def _moved(keywords: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in keywords.items()}
