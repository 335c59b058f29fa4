"""A step of several microbatches: each loss is multiplied once, and gradients are reduced once, after the last.

Every loss is a mean over the labels, or the sequences, of its own microbatch, whoever computes it. Times the
microbatch's part of all that the step has, over all ranks, these means add up to the mean over the step, and so does
whatever else a loss adds, a penalty or the balance of experts: it counts once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ullage.core.replacing import replaced
from ullage.training.setup.sharding import sharding_of

#: transformers' ``training_step``, for one microbatch.
Run = Callable[[nn.Module, Any, Any], Tensor]


class GradientReduction:
    """Steps of a trainer that run as several microbatches, the same number on every rank.

    ``trainer``: whose accelerator reduces, and whose arguments may say ``packing_coalesce_gradients=False``.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO; 0 without DeepSpeed."""
        return int(getattr(self._trainer.accelerator.state.deepspeed_plugin, "zero_stage", 0))

    @property
    def _coalesces(self) -> bool:
        return getattr(self._trainer.args, "packing_coalesce_gradients", True)

    def run(self, model: nn.Module, number: int, run: Callable[[int], Tensor]) -> Tensor:
        """Run microbatches, each forward and backward; gradients meet once. Returns the sum of what they return.

        ``number``: of microbatches. ``run``: one of them, by its place in the step.
        """
        # What Trainer sets once per batch is set here once per microbatch. With sync_gradients, accelerate's backward
        # ends with DeepSpeed's engine.step(), which raises while reductions are coalesced: then the flag stays off, and
        # _coalesced_reduction steps. DDP reduces at the last microbatch, the only one outside no_sync.
        state, losses = self._trainer.accelerator.gradient_state, []
        with self._coalesced_reduction() as coalesced:
            for k in range(number):
                is_last = k == number - 1
                state._set_sync_gradients(is_last and not coalesced)
                with self._no_sync(model, not is_last):
                    losses.append(run(k))
        # accelerate's wrappers of optimizer and scheduler look at the flag next; coalescing has left it False.
        state._set_sync_gradients(True)
        return torch.stack(losses).sum()

    def _no_sync(self, model: nn.Module, more_to_come: bool) -> Any:
        """No reduction of gradients before the last microbatch, where DDP would make one, and FSDP2 if asked."""
        sharding = sharding_of(self._trainer.model)
        if more_to_come and self._coalesces and sharding is not None:
            return sharding.deferred(model)
        is_sharded = self._coalesces and isinstance(model, FSDPModule)
        if more_to_come and (is_sharded or isinstance(model, nn.parallel.DistributedDataParallel)):
            return self._trainer.accelerator.no_sync(model)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _coalesced_reduction(self) -> Iterator[bool]:
        """Make ZeRO reduce and step once for all microbatches, after the block, where its engine can; gives whether.

        Source: DeepSpeed's ``engine.coalesce_grad_reduction`` (stages 1 to 3, since 0.19).
        """
        engine: Any = getattr(getattr(self._trainer.accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        asked = self._coalesces and self.zero_stage in (1, 2, 3)
        # BF16_Optimizer and FP16_Optimizer lack the optimizer's attribute; the engine raises NotImplementedError for
        # them, as it does at stage 0.
        can = hasattr(engine, "coalesce_grad_reduction")
        if not asked or not can or not hasattr(engine.optimizer, "_coalesce_grad_reduction"):
            yield False
            return
        # Leaving the block reduces, and sets the boundary back to what it was before. The step that accelerate would
        # have made after the last backward is made here. The engine updates weights only at a boundary, hence the flag.
        with engine.coalesce_grad_reduction():
            yield True
        engine.set_gradient_accumulation_boundary(is_boundary=True)
        engine.step()


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
