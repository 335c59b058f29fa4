"""A model of this engine under ``ullage.training.Trainer``: what the Trainer leaves to FSDP2, DTensor and cp."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import ullage.attention as packed_attention
from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.engines.fsdp.checkpoint import load, save, whole_weights
from ullage.engines.fsdp.optimizer import clip_grad_norm, require_optimizer
from ullage.engines.fsdp.parallel import Parallel
from ullage.ranks import Axis
from ullage.training.setup.arguments import AUTO

#: Arguments that are not honoured for such a model, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "deepspeed": (None,),
    "fsdp": (None, "", [], False),
    "fp16": (False,),
    "torch_compile": (False,),
    "label_smoothing_factor": (0, 0.0),
    "push_to_hub": (False,),
    "enable_jit_checkpoint": (False,),
    "batch_eval_metrics": (False,),
    "neftune_noise_alpha": (None,),
    "auto_find_batch_size": (False,),
    "async_save": (False,),
    "packing_loss_weighting": ("token",),
}


class TrainedParallel(Parallel):
    """:class:`ullage.training.setup.sharding.Sharding` of a model that ``parallelize`` has spread."""

    @property
    def averaged_over(self) -> int:
        return self.topology.dp.size * self.topology.cp.size

    @cached_property
    def ranks_of_batch(self) -> list[list[int]]:
        mesh = self.mesh
        return [[0]] if mesh is None else mesh.mesh.reshape(mesh.shape[0], -1).tolist()

    def require_trainable(self, arguments: Any) -> None:
        require_supported(arguments)
        if arguments.bf16 and self.dtype is None:
            raise InputError(
                "bf16 is asked of a model whose layers compute in another type",
                where="TrainingArguments.bf16",
                expected="parallelize(model, dtype=torch.bfloat16)",
                found="parallelize without dtype",
            )

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        inner: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.mesh is None and self.dtype is not None:  # no FSDP to cast its weights
            inner = torch.autocast(self.device.type, self.dtype)
        elif self.topology.cp.size > 1:
            inner = packed_attention.context_parallel(self.cp)
        with warnings.catch_warnings(), inner:
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of changes in place to its outputs: none here
            yield

    def keywords(self, batch: RaggedBatch) -> dict[str, Any] | None:
        if self.topology.cp.size == 1:
            return None
        return packed_attention.shard_batch(batch, self.cp)

    def whole_loss(self, loss: Tensor) -> Tensor:
        if self.topology.cp.size > 1:
            dist.all_reduce(loss, group=self.cp.require_group())
        return loss

    @contextlib.contextmanager
    def deferred(self, model: Any) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)

    def clip(self, model: Any, max_norm: float | None) -> Tensor:
        return clip_grad_norm(model.parameters(), max_norm)

    def require_optimizer(self, model: Any, optimizer: Any) -> None:
        require_optimizer(model, optimizer)

    def whole_weights(self, model: Any) -> dict[str, Tensor]:
        return whole_weights(model)

    def save(self, checkpoint: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        states = {} if scheduler is None else {"scheduler": scheduler}
        save(checkpoint / MODEL_AND_OPTIMIZER, model, _bare(optimizer), **states)
        if Axis.world().rank == 0:
            model.config.save_pretrained(checkpoint)

    def load(self, checkpoint: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        states = {} if scheduler is None else {"scheduler": scheduler}
        own = checkpoint / MODEL_AND_OPTIMIZER
        load(own if own.is_dir() else checkpoint, model, _bare(optimizer), allow_changed=True, **states)


def require_supported(arguments: Any) -> None:
    """Raise ``InputError`` for an argument that is not honoured for a model over several axes."""
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(arguments, name, harmless[0])
        if value not in harmless:
            raise InputError(
                f"{name} is not supported over ullage.engines.fsdp, which --dp, --cp and --tp use",
                expected=harmless[0],
                found=value,
                hint="leave it out",
            )
    if getattr(arguments, "packing_capacity", None) == AUTO:
        raise InputError(
            "a capacity is not found by itself over ullage.engines.fsdp, which --dp, --cp and --tp use",
            where="packing_capacity",
            expected="a number",
            found=AUTO,
        )


def _bare(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
