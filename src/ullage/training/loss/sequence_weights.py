"""Weights of the sequences in a step: what a sequence counts for, and so each of its labels.

With a weight w_i for sequence *i*, the loss of a step is ``Σ w_i · mean_i / Σ w_i`` over all ranks and microbatches,
where mean_i is the mean over the n_i labels of the sequence that count; a sequence without any is in neither sum. A
label therefore weighs ``w_i / (n_i · Σ w)``, which is known once the ranks have agreed on ``Σ w``. Everything here is
host arithmetic in float64: weights are rounded to the precision of the losses only where they meet them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Int64
from ullage.schema import IGNORED_LABEL
from ullage.training.arguments import WEIGHTINGS, weight_field
from ullage.training.counting import SampleError
from ullage.training.loss.weighable import kind_of_loss, require_weighable
from ullage.training.reading import BatchReader


class SequenceWeigher:
    """How the sequences of a trainer's packed steps weigh, by its ``packing_loss_weighting``.

    ``trainer``: whose arguments and model count. ``reader``: of its batches. ``labels``: the weight of each label
    element of the microbatch that is running, float64 on the host; None where the model's own loss weighs them alike.
    """

    def __init__(self, trainer: Any, reader: BatchReader) -> None:
        self._trainer, self._reader = trainer, reader
        self.labels: Tensor | None = None

    @property
    def _word(self) -> str:
        return getattr(self._trainer.args, "packing_loss_weighting", "token")

    @property
    def is_on(self) -> bool:
        """Whether the labels of a step weigh otherwise than alike: by their sequences, or by a field of weights."""
        if self._word == "token":
            return False
        # Where a sequence has one label, that is the mean over its labels.
        return self._word != "sequence" or kind_of_loss(self._reader.model) != "sequence"

    def require_weighable(self) -> None:
        """Raise ``InputError`` where sequences are to be weighed in a loss in which they cannot be."""
        if self.is_on:
            require_weighable(self._trainer, self._reader.model, self._word)

    def require_weights(self, batch: RaggedBatch) -> None:
        """Raise ``InputError`` for a batch whose sequences cannot be weighed as the arguments ask."""
        if self.is_on:
            _require_weights(batch, self._reader.label_name, self._word, weight_field(self._trainer.args))

    def weigh(self, batch: RaggedBatch) -> Weighed:
        """The weights of a batch's sequences. Host values only."""
        elements, name = self._reader.label_elements(batch), self._reader.label_name
        assert elements is not None
        assert name is not None
        return Weighed.of(batch, elements, name, weight_field(self._trainer.args))

    def begin(self, microbatch: RaggedBatch, total: float) -> None:
        """Take the weights of a microbatch that runs next. ``total``: the weights of the step, over all ranks."""
        self.labels = self.weigh(microbatch).by_label(total) if self.is_on else None

    def end(self) -> None:
        """No microbatch of a step is running any more."""
        self.labels = None


@dataclass(frozen=True)
class Weighed:
    """What the sequences of a batch have to count.

    Attributes:
        weights: [N] float64, of each sequence; 0 where it has no label that counts.
        labels: [N], labels of each sequence that count.
        elements: [N], label elements of each sequence, those that do not count included.
    """

    weights: np.ndarray
    labels: Int64
    elements: Int64

    @classmethod
    def of(cls, batch: RaggedBatch, elements: Tensor, name: str, field: str | None) -> Weighed:
        """The weights of a batch's sequences. Host values only.

        Args:
            batch: packed or drawn, on the host.
            elements: its label elements (:meth:`ullage.training.reading.BatchReader.label_elements`).
            name: of the field of labels.
            field: the per-sequence field of weights; None weighs every sequence alike.
        """
        sizes = _elements_each(batch, name)
        assert int(sizes.sum()) == elements.numel(), "labels and sequences disagree"
        # One running sum serves all sequences, those without elements too.
        running = np.append(0, np.cumsum((elements != IGNORED_LABEL).cpu().numpy()))
        labels = np.diff(running[np.append(0, np.cumsum(sizes))])
        given = np.ones(len(batch)) if field is None else batch[field].cpu().to(torch.float64).numpy()
        return cls(np.where(labels > 0, given, 0.0), labels, sizes)

    @property
    def num_labels(self) -> int:
        """Labels of the sequences that weigh anything."""
        return int(self.labels[self.weights > 0].sum())

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    def by_label(self, total: float) -> Tensor:
        """The weight of every label element, float64 [elements], in a step whose weights sum up to ``total``."""
        # Where nothing counts in the whole step the total is zero, and so are all weights.
        share = self.weights / np.maximum(self.labels, 1) / (total if total > 0 else 1.0)
        return torch.from_numpy(np.repeat(share, self.elements))


def _elements_each(batch: RaggedBatch, name: str) -> Int64:
    """Label elements of each sequence, int64 [N]."""
    labels = batch[name]
    if labels.is_nested:  # targets, in lengths of their own
        return np.array([row.numel() for row in labels.unbind()], np.int64)
    if name in batch.per_sequence:
        return np.full(len(batch), labels.numel() // max(len(batch), 1), np.int64)
    return batch.layout.slots


def _require_weights(batch: RaggedBatch, name: str | None, word: str, field: str | None) -> None:
    """Raise ``InputError`` for a batch without labels, or without a field of weights that are finite and not negative.

    Raises ``SampleError`` for a single bad weight. ``name`` and ``field``: of labels and of weights.
    """
    where = f"packing_loss_weighting={word!r}"
    if name is None or name not in batch:
        raise InputError(
            "sequences are weighed by the mean over their labels, and the batch has none",
            where=where,
            expected=f"a field {name or 'labels'!r}",
            found=list(batch.names),
        )
    if field is None:
        return
    words = " or ".join(map(repr, WEIGHTINGS))
    if field not in batch:
        raise InputError(
            "the samples have no such field of weights",
            where=where,
            expected=f"{words}, or a field of the samples with one number per sequence",
            found=f"fields {list(batch.names)}",
        )
    weights = batch[field]
    if field not in batch.per_sequence or weights.is_nested or weights.ndim != 1:
        raise InputError(
            "the field of weights does not hold one number per sequence",
            where=where,
            expected=f"a number in each sample, {words}",
            found="one entry per token" if field not in batch.per_sequence else f"shape {list(weights.shape)}",
        )
    weights = weights.cpu().to(torch.float64)
    bad = (~torch.isfinite(weights) | (weights < 0)).nonzero().flatten()
    if len(bad):
        raise SampleError(
            "a sequence cannot have this weight",
            sample=int(bad[0]),
            detail=f"field {field!r}",
            expected="a finite number, 0 or more",
            found=float(weights[bad[0]]),
        )
