"""Reduction of gradients once a step, after the last of its microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ullage.training.setup.sharding import sharding_of

if TYPE_CHECKING:
    import transformers


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
