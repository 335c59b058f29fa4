"""What older releases of transformers' Trainer lack: the one place that knows versions.

=====  ==============================================================================================================
since  what came
=====  ==============================================================================================================
5.5.4  accumulated gradients are divided by their number once
5.10   a causal model's labels are counted without the first of each sequence; ours always were
5.15   ``LabelSmoother`` takes ``num_items_in_batch``
5.19   ``Trainer.loss_is_scaled_for_ga``; the mean loss of a resumed run is over the steps of this call
5.23   ``TrainingArguments.activation_checkpointing``, which was ``gradient_checkpointing``
=====  ==============================================================================================================

Source: ``trainer.py``, ``trainer_pt_utils.py`` and ``training_args.py`` of each of these and of the release before it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from ullage.core.replacing import replaced

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object

_SCALES = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
_SMOOTHS_BY_COUNT = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters


class TrainerOfAnyRelease(_Base):
    """The newest Trainer's way with a loss, for the mixin before it. Newer releases get no method from here."""

    if not _SCALES and not TYPE_CHECKING:
        loss_is_scaled_for_ga: bool | None = None

        def create_accelerator_and_postprocess(self):
            """Make the accelerator; it leaves the division by the number of accumulated batches to the Trainer."""
            super().create_accelerator_and_postprocess()
            self.accelerator.gradient_accumulation_steps = 1

        def training_step(self, model, inputs, num_items_in_batch=None):
            """Train on one batch; ``loss_is_scaled_for_ga`` says whether the number of batches divides its loss."""
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            divides = not counted and self.compute_loss_func is None  # the rule of these releases
            theirs, factor = self.accelerator.backward, 1.0

            def backward(loss: Tensor, **options: Any) -> None:
                nonlocal factor
                if self.loss_is_scaled_for_ga is divides:  # None leaves it to the rule
                    steps = self.current_gradient_accumulation_steps
                    factor = steps if divides else 1 / steps
                theirs(loss * factor, **options)

            with replaced(self.accelerator, "backward", backward):
                return super().training_step(model, inputs, num_items_in_batch) * factor

    if not _SMOOTHS_BY_COUNT and not TYPE_CHECKING:

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            """The loss of one batch; that of smoothed labels is divided by ``num_items_in_batch``, too."""
            smoother = self.label_smoother
            given = contextlib.nullcontext() if smoother is None else replaced(smoother, "count", num_items_in_batch)
            with given:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)


def smoothed_loss(
    smooth: Callable[..., Tensor], smoother: LabelSmoother, logits: Tensor, labels: Tensor, shifts: bool, count: Any
) -> Tensor:
    """The loss of smoothed labels, divided by ``count``, or by their own number where that is None.

    Args:
        smooth: ``LabelSmoother.__call__``, bound.
        smoother: its settings.
        logits: of the model, [N, L, V].
        labels: [N, L].
        shifts: whether each position predicts the label after it.
        count: labels of the step.
    """
    if _SMOOTHS_BY_COUNT:
        return smooth((logits,), labels, shifts, count)
    if count is None:
        return smooth((logits,), labels, shifts)
    if shifts:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = nn.functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=smoother.ignore_index,
        label_smoothing=smoother.epsilon,
        reduction="sum",
    )
    return total / count


def settle_loss(trainer: transformers.Trainer, begun_at: int) -> None:
    """Set the training loss that a run reports which had no step left after ``begun_at``: the mean over its log."""
    state = trainer.state
    if not state.global_step == begun_at > 0:
        return
    total, before = 0.0, 0
    for row in state.log_history:
        if "loss" in row:
            # A logged loss is the mean over the steps since the last log, so it counts as often as there were steps.
            total += float(row["loss"]) * (int(row["step"]) - before)
            before = int(row["step"])
    # The sum is divided by the steps of this call since 5.19, by 0.001 where there were none, and by all before.
    trainer._total_loss_scalar = (0.001 if _SCALES else state.global_step) * (total / before if before else math.nan)


def recomputed(arguments: transformers.TrainingArguments) -> dict[str, Any] | None:
    """Keywords of the checkpointing of activations; None where these are kept, not computed again."""
    name = "activation_checkpointing" if hasattr(arguments, "activation_checkpointing") else "gradient_checkpointing"
    return (getattr(arguments, f"{name}_kwargs") or {}) if getattr(arguments, name) else None
