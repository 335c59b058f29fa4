"""Labels by sequence beside labels by token, in batches of a packed step (:mod:`ullage.mixers.whole`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ullage.attention.heads import second_label
from ullage.batch import RaggedBatch
from ullage.mixers.whole import has_two_losses, require_one_loss
from ullage.schema import IGNORED_LABEL
from ullage.training.counting import SampleError
from ullage.training.loss.divisions import OwnLoss
from ullage.training.reading import BatchReader


def adds_two_losses(trainer: Any, reader: BatchReader, fields: Any) -> bool:
    """Whether the loss of a trainer is its model's own, the sum of one per token and one per sequence.

    ``fields``: of a batch, or keywords of the model.
    """
    own = OwnLoss.of(trainer) is None and trainer.label_smoother is None
    return own and has_two_losses(reader.model, fields)


def require_losses(trainer: Any, reader: BatchReader, batch: RaggedBatch) -> None:
    """Raise ``InputError`` for labels by sequence beside those by token, where the model's loss cannot be packed."""
    labels = reader.label_name
    if OwnLoss.of(trainer) is not None or labels not in batch or labels in batch.per_sequence:
        return
    require_one_loss(reader.model, batch.per_sequence)
    _require_counted(reader.model, batch)


def _require_counted(model: nn.Module, batch: RaggedBatch) -> None:
    """Raise ``SampleError`` for a sequence whose label by sequence is -100: the step divides by all its sequences."""
    name = (second_label(model) or ("",))[0]
    if name in batch and bool((batch[name] == IGNORED_LABEL).any()):
        raise SampleError(
            "a sequence without a label cannot be packed beside labels by token",
            sample=int((batch[name].flatten() == IGNORED_LABEL).nonzero()[0]),
            detail=name,
            expected="a class",
            found=IGNORED_LABEL,
            hint=f"give every sample a {name}, or leave the field out of all",
        )


def uncounted(model: nn.Module, placeholder: RaggedBatch) -> RaggedBatch:
    """A placeholder that counts nowhere, in the labels by sequence of a head with two losses either."""
    name = (second_label(model) or ("",))[0]
    if name not in placeholder:
        return placeholder
    values = {each: placeholder[each] for each in placeholder.names}
    values[name] = torch.full_like(values[name], IGNORED_LABEL)
    return RaggedBatch(values, placeholder.layout, placeholder.per_sequence)
