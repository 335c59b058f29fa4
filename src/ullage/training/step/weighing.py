"""The one multiplication: a loss times the share of the step that its batch is.

Every loss is a mean over the labels, or the sequences, of its own microbatch, whoever computes it. Times the
microbatch's part of all that the step has, over all ranks, these means add up to the mean over the step, and so does
whatever else a loss adds, a penalty or the balance of experts: it counts once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ullage.core.replacing import replaced

#: transformers' ``training_step``, for one microbatch.
Run = Callable[[nn.Module, Any, Any], Tensor]


def run_weighed(
    trainer: transformers.Trainer, run: Run, model: nn.Module, batch: Any, share: float, count: Any = None
) -> Tensor:
    """Run one microbatch forward and backward, its loss times ``share``. Returns that loss.

    Args:
        trainer: whose accelerator runs the backward pass.
        run: computes the loss, and gives it to the accelerator.
        model: as the training loop calls it.
        batch: the microbatch.
        share: of the step, times the ranks that average their gradients; 0 runs it for nothing, as every rank runs
            equally many: loss and gradients are zero.
        count: ``num_items_in_batch`` of a loss that divides by it; None makes the loss a mean of its own.
    """
    accelerator = trainer.accelerator
    backward = accelerator.backward

    def weighed(loss: Tensor) -> Tensor:
        if share:
            return loss * share
        return torch.where(torch.isfinite(loss), loss, 0.0) * 0.0  # a mean over no labels is nan, and so is nan · 0

    def backward_weighed(loss: Tensor, **options: Any) -> None:
        backward(weighed(loss), **options)

    # transformers is not to divide once more, by a number that only its loop sets.
    with replaced(accelerator, "backward", backward_weighed), replaced(trainer, "loss_is_scaled_for_ga", True):
        return weighed(run(model, batch, count))
