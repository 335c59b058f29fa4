"""One optimizer step over the microbatches of a :class:`PackedStep`, exact over every axis.

Each rank runs as many forwards as every other, since FSDP gathers weights in each: an empty microbatch is run as one
element that counts nowhere. The loss is the sum over labels that count, divided by their number in the whole step over
dp, so it does not depend on how the step was packed. Gradients are kept until the last microbatch and meet once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import ullage.attention as packed_attention
from ullage.batch import RaggedBatch
from ullage.engines.fsdp.clipping import clip_grad_norm
from ullage.engines.fsdp.model import Parallel, parallel_of
from ullage.engines.fsdp.optimizer import require_optimizer, reshard
from ullage.errors import InputError
from ullage.exchange import PackedStep
from ullage.schema import IGNORED_LABEL


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank: tensors of dim 0 on the device, so that nothing waits for it.

    Attributes:
        loss: the mean over the labels that count in the whole step.
        num_labels: the number of those labels.
        grad_norm: of all gradients together, before clipping; ``None`` for an evaluation.
    """

    loss: Tensor
    num_labels: Tensor
    grad_norm: Tensor | None = None


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    step: PackedStep,
    *,
    max_grad_norm: float | None = None,
    scheduler: Any = None,
    reduce_every_microbatch: bool = False,
) -> StepResult:
    """Forward and backward of all microbatches, clipping, the optimizer's step and the scheduler's.

    Args:
        model: from ``parallelize``.
        optimizer: of the model's parameters, made after ``parallelize``.
        step: this rank's part of a step; samples without ``labels`` have their ``input_ids`` for labels.
        max_grad_norm: norm to which all gradients together are scaled down; None leaves them.
        scheduler: learning rate scheduler, stepped once; None for none.
        reduce_every_microbatch: reduce gradients after each microbatch, not after the last: less memory, more
            communication.

    Collective; every rank passes its part of the same step. Raises ``InputError`` for a model that was not made by
    ``parallelize``.
    """
    require_optimizer(model, optimizer)
    if not model.training:
        model.train()
    loss, num_labels = _run(model, step, reduce_every_microbatch)
    norm = clip_grad_norm(model.parameters(), max_grad_norm)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, num_labels, norm)


@torch.no_grad()
def evaluate_step(model: Any, step: PackedStep) -> StepResult:
    """The loss of a step in evaluation mode, without gradients. Collective, like :func:`train_step`."""
    training = model.training
    model.eval()
    try:
        loss, num_labels = _run(model, step)
    finally:
        model.train(training)
        reshard(model)
    return StepResult(loss, num_labels)


def _run(model: Any, step: PackedStep, reduce_every_microbatch: bool = False) -> tuple[Tensor, Tensor]:
    parallel = parallel_of(model)
    batches = [_with_labels(batch) for batch in step.microbatches]
    num_labels = torch.tensor(sum(map(_count_labels, batches)), device=parallel.device)
    if parallel.mesh is not None:
        # Over dp alone: the ranks of cp and tp hold the same microbatches and have counted the same labels.
        dist.all_reduce(num_labels, group=parallel.mesh.get_group("dp"))
    divisor = num_labels.clamp(min=1)
    total = torch.zeros((), device=parallel.device)
    for k, batch in enumerate(batches):
        last = k == len(batches) - 1
        if isinstance(model, FSDPModule):
            # By default gradients add up on each rank, unsharded, until the last backward; then FSDP reduces them
            # once and waits for it.
            model.set_requires_gradient_sync(last or reduce_every_microbatch)
            model.set_is_last_backward(last)
        loss = _loss(model, batch, step, divisor, parallel)
        if torch.is_grad_enabled():
            # The loss is divided by the labels of the whole step, so gradients are to be summed; FSDP averages them.
            (loss * parallel.averaged_over).backward()
        total += loss.detach()
    if parallel.sharded is not None:
        # Over dp·cp alone: the ranks of tp have computed the same loss.
        dist.all_reduce(total, group=parallel.sharded.get_group())
    return total, num_labels


def _loss(model: Any, batch: RaggedBatch, step: PackedStep, divisor: Tensor, parallel: Parallel) -> Tensor:
    """This rank's part of the step's loss: the parts of all ranks and microbatches add up to it.

    Args:
        model: the model, which runs one forward even for an empty microbatch.
        batch: the microbatch, a whole row on every rank of cp.
        step: the step that it belongs to.
        divisor: labels that count in the whole step, over dp.
        parallel: the model's distribution.
    """
    cp = parallel.topology.cp.size
    filled = (batch if len(batch) else batch.placeholder()).to(parallel.device, non_blocking=True)
    keywords = {"num_items_in_batch": divisor, "use_cache": False}
    with warnings.catch_warnings(), parallel.context():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of changes in place to its outputs: we make none
        if parallel.mesh is not None and cp > 1:
            row = packed_attention.shard_batch(filled, parallel.cp, num_items=divisor)
            outputs = model(**keywords | row)
        else:
            outputs = model(**keywords, **filled.to_flattened())
    # The share of the step's real tokens that this call stands for; the cp ranks of a row divide it among themselves.
    share = batch.layout.num_tokens / max(step.num_tokens, 1) / cp
    return _weigh_auxiliary(model, outputs, share)


def _with_labels(batch: RaggedBatch) -> RaggedBatch:
    if "labels" in batch:
        return batch
    if "input_ids" not in batch:
        raise InputError("a microbatch has no labels", expected="labels or input_ids", found=list(batch.names))
    ids = batch["input_ids"]
    # Padding keeps -100. A sequence's first label, which nothing predicts, falls out when labels are shifted.
    tokens = torch.from_numpy(batch.layout.token_index()).to(ids.device)
    labels = torch.full_like(ids, IGNORED_LABEL).index_copy(0, tokens, ids.index_select(0, tokens))
    values = {name: batch[name] for name in batch.names}
    return RaggedBatch({**values, "labels": labels}, batch.layout, batch.per_sequence)


def _count_labels(batch: RaggedBatch) -> int:
    """Labels that some token predicts: not -100, and not the first of a sequence."""
    labels, layout = batch["labels"], batch.layout
    firsts = torch.from_numpy(np.asarray(layout.starts[layout.lengths > 0])).to(labels.device)
    counted = labels != IGNORED_LABEL
    return int(counted.sum()) - int(counted[firsts].sum())


def _weigh_auxiliary(model: Any, outputs: Any, share: float) -> Tensor:
    """The loss, with the mean that a model adds to it per microbatch (experts' balance) weighted by ``share``."""
    auxiliary = outputs.get("aux_loss")
    factor = getattr(model.config, "router_aux_loss_coef", None)
    if auxiliary is None or factor is None:
        return outputs.loss
    # The model has added factor · auxiliary already: take back all of it but the share.
    return outputs.loss - (1 - share) * factor * auxiliary.to(outputs.loss.device)
