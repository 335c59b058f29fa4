"""Weights of the sequences in a step: what a sequence counts for, and so each of its labels.

With a weight w_i for sequence *i*, the loss of a step is ``Σ w_i · mean_i / Σ w_i`` over all ranks and microbatches,
where mean_i is the mean over the n_i labels of the sequence that count; a sequence without any is in neither sum. A
label therefore weighs ``w_i / (n_i · Σ w)``, which is known once the ranks have agreed on ``Σ w``. Everything here is
host arithmetic in float64: weights are rounded to the precision of the losses only where they meet them.

A model's own loss divides all labels by one number. Where sequences weigh otherwise, the model is called without labels
and the loss is computed here, from its logits, as its head would: a cross-entropy of tokens or of classes, a square of
numbers, or a binary cross-entropy of several labels. Which losses are such, the source of the model tells; all others
are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers.loss import loss_utils

from ullage.attention.heads import (
    KNOWN_AUTHORS,
    loss_author,
    loss_shifts,
    package_of,
    works_by_sequence,
    works_by_token,
)
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.core.layout import Int64
from ullage.models import causal_lm, classification
from ullage.training.batches.counting import SampleError
from ullage.training.batches.reading import BatchReader
from ullage.training.loss.divisions import OwnLoss
from ullage.training.loss.lazy_logits import LazyLogits
from ullage.training.setup.arguments import WEIGHTINGS, weight_field

if TYPE_CHECKING:
    import transformers

#: What a ``forward`` may name of losses, for its loss to be a cross-entropy of the logits that it returns, and a
#: balance of experts by ``router_aux_loss_coef`` beside it.
_PLAIN = {"loss_function", "CrossEntropyLoss", "cross_entropy", "mlm_loss_fct", "loss_fn", "lm_loss"}
_EXPERTS = {"load_balancing_loss_func", "router_aux_loss_coef"}
_BY_SEQUENCE = {"loss_function", "CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss"}
#: Language models whose names do not say so.
_BY_TOKEN = {"BertGenerationDecoder", "MarianMTModel", "RecurrentEncoderDecoder"}
#: The functions that a model may call as its ``loss_function``.
_FUNCTIONS = (
    loss_utils.ForCausalLMLoss,
    loss_utils.ForMaskedLMLoss,
    loss_utils.ForTokenClassification,
    loss_utils.ForSequenceClassificationLoss,
    causal_lm.next_token_loss,
    classification.token_loss,
    classification.sequence_loss,
)

Kind = Literal["token", "sequence"]


def kind_of_loss(model: nn.Module) -> Kind | None:
    """Whether the model's loss is over the labels of tokens or of sequences; None if it is not known to be plain.

    A plain loss is the cross-entropy of the logits that the model returns (for sequences also the square of a
    difference, or a binary cross-entropy), and whatever the experts' balance adds to it.
    """
    author, words = loss_author(model)
    named = {word for word in words if "loss" in word.lower() or "entropy" in word.lower()}
    if package_of(author) not in KNOWN_AUTHORS or not named & (_PLAIN | _BY_SEQUENCE):
        return None
    if "loss_function" in named and getattr(model, "loss_function", None) not in _FUNCTIONS:
        return None
    if works_by_sequence(model):
        is_classifier = any("ForSequenceClassification" in each.__name__ for each in type(model).__mro__)
        return "sequence" if is_classifier and named <= _BY_SEQUENCE else None
    # The experts of an encoder-decoder have several balances.
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    known = named <= (_PLAIN if is_pair else _PLAIN | _EXPERTS)
    by_token = works_by_token(model) or any(each.__name__ in _BY_TOKEN for each in type(model).__mro__)
    return "token" if known and by_token and loss_shifts(model) is not None else None


def require_weighable(trainer: transformers.Trainer, model: nn.Module, word: str) -> None:
    """Raise ``InputError`` where the loss of ``trainer`` is not one in which sequences can be weighed by ``word``."""
    own = OwnLoss.of(trainer)
    if own is not None:
        raise _refusal(word, own.name, "a loss of its own, which decides how sequences weigh", "weigh them in it")
    if trainer.label_smoother is not None:
        raise _refusal(
            word,
            "label_smoothing_factor",
            "smoothed labels are averaged by transformers, over tokens",
            "leave label_smoothing_factor at 0",
        )
    if getattr(trainer, "packing_loss", None) is not None:
        name = f"{type(trainer).__name__}.packing_loss"
        raise _refusal(word, name, "a declared loss is divided as it says", "leave one of the two out")
    if kind_of_loss(model) is None:
        raise _refusal(
            word,
            type(model).__name__,
            "its loss is not known to be a cross-entropy of the logits that it returns",
            "compute the loss in compute_loss_func, and weigh sequences there",
        )


def _refusal(word: str, where: str, found: str, hint: str) -> InputError:
    return InputError(
        f"packing_loss_weighting={word!r} cannot be used here", where=where, expected="'token'", found=found, hint=hint
    )


class SequenceWeigher:
    """How the sequences of a trainer's packed steps weigh, by its ``packing_loss_weighting``.

    ``trainer``: whose arguments and model count. ``reader``: of its batches. ``labels``: the weight of each label
    element of the microbatch that is running, float64 on the host; None where the model's own loss weighs them alike.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader) -> None:
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
            elements: its label elements (:meth:`ullage.training.batches.reading.BatchReader.label_elements`).
            name: of the field of labels.
            field: the per-sequence field of weights; None weighs every sequence alike.
        """
        sizes = _elements_each(batch, name)
        assert int(sizes.sum()) == elements.numel(), "labels and sequences disagree"
        # One running sum serves all sequences, those without elements too. Of labels [-100, 5, 6, -100, 7] it is
        # [0, 0, 1, 2, 2, 3]; sequences of 3 and 2 end where it is 2 and 3, so they have two labels and one.
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
        # Of a step whose weights sum up to 4, sequences that weigh 1 and have two labels and one: each label weighs 1/8
        # in the first, 1/4 in the second. Where nothing counts in the whole step the total is zero, and so are all
        # weights.
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


def weighted_cross_entropy(logits: Tensor | LazyLogits, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum over t of ``weights[t]`` times the cross-entropy of ``logits[t]`` and ``labels[t]``.

    Computed in float32, or float64 where the logits are. A label of -100, and one whose weight is zero, adds nothing to
    the loss or to any gradient, not even where its own loss is infinite. Zero, with a gradient of zeros, where no label
    is left. Does not wait for the device.

    Args:
        logits: [T, V]; those that are not computed run in chunks with their loss
        labels: [T] int64, aligned with the logits
        weights: [T], aligned with the labels
    """
    logits = precise(logits)
    labels = labels.to(logits.device)
    weights = weights.to(logits.device, logits.dtype)
    # Zero times an infinite loss is nan. An ignored label has no loss.
    counted = labels.long().masked_fill(weights == 0, IGNORED_LABEL)
    if isinstance(logits, LazyLogits):
        return logits.loss(counted, weights)
    losses = cross_entropy(logits, counted, reduction="none", ignore_index=IGNORED_LABEL)
    return (losses * weights).sum()


def weighted_token_loss(logits: Tensor, labels: Tensor, weights: Tensor, *, shifts: bool) -> Tensor:
    """Weighted cross-entropy of a head by token.

    Args:
        logits: [1, T, V], or of targets in padded rows [N, L, V]
        labels: [1, T], or nested, one row per target
        weights: one per label element, in their order
        shifts: whether the output at a token is compared with the label of the next
    """
    if labels.is_nested:
        rows = labels.unbind()
        # Rows of outputs begin with their target's; what a row has beyond its target is padding: of outputs [2, 5, V]
        # for targets of 5 and 3 there remain [8, V].
        logits = logits if logits.shape[0] == len(rows) else logits[0].split([len(row) for row in rows])  # pyright: ignore
        logits = torch.cat([output[: len(row)] for output, row in zip(logits, rows, strict=True)])
        labels = torch.cat(list(rows))
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if shifts:
        # The first label of each sequence is -100, so no pair crosses a boundary.
        logits, labels, weights = logits[:-1], labels[1:], weights[1:]
    return weighted_cross_entropy(logits, labels, weights)


def weighted_sequence_loss(logits: Tensor, labels: Tensor, weights: Tensor, config: Any) -> Tensor:
    """Weighted loss of a head by sequence, of the kind that ``config.problem_type`` names, or labels and sizes tell.

    Source: ``transformers.loss.loss_utils.ForSequenceClassificationLoss``.

    Args:
        logits: [N, num_labels]
        labels: classes [N], numbers [N] or [N, num_labels], or several labels [N, num_labels]
        weights: one per label element, in their order
        config: of the model
    """
    kind = config.problem_type
    if kind is None:
        is_class = config.num_labels > 1 and not labels.is_floating_point()
        several = "regression" if config.num_labels == 1 else "multi_label_classification"
        kind = "single_label_classification" if is_class else several
    if kind == "single_label_classification":
        return weighted_cross_entropy(logits, labels.reshape(-1), weights)
    logits = precise(logits).reshape(-1)
    targets = labels.to(logits.device, logits.dtype).reshape(-1)
    each = mse_loss if kind == "regression" else binary_cross_entropy_with_logits
    losses = each(logits, targets, reduction="none")
    weights = weights.to(logits.device, logits.dtype)
    return (losses * weights).masked_fill(weights == 0, 0.0).sum()


def precise(logits: Any) -> Any:
    """The logits in float32, or in float64 as they are."""
    return logits if logits.dtype == torch.float64 else logits.float()
