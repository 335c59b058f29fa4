"""Losses with a weight for every label: where the logits of a packed microbatch become one number.

A model's own loss divides all labels by one number. Where sequences weigh otherwise, the model is called without labels
and the loss is computed here, from its logits, as its head would: a cross-entropy of tokens or of classes, a square of
numbers, or a binary cross-entropy of several labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from ullage.schema import IGNORED_LABEL
from ullage.training.loss.lazy_logits import LazyLogits


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
        return logits.call.loss(logits, counted, weights)
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
        # Rows of outputs begin with their target's; what a row has beyond its target is padding.
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
