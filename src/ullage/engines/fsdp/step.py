"""One optimizer step over the microbatches of a :class:`PackedStep`, exact over every axis.

Each rank runs as many forwards as every other, since FSDP gathers weights in each: an empty microbatch is run as one
element that counts nowhere. The loss is the sum over labels that count, divided by their number in the whole step over
dp, so it does not depend on how the step was packed. Gradients are kept until the last microbatch and meet once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import ullage.attention as packed_attention
from ullage.batch import RaggedBatch
from ullage.engines.fsdp.clipping import clip_grad_norm
from ullage.engines.fsdp.objective import NEXT_TOKEN, count_labels, keywords, part_of_loss, runnable, with_labels
from ullage.engines.fsdp.optimizer import require_optimizer, reshard
from ullage.engines.fsdp.parallel import parallel_of
from ullage.exchange import PackedStep
from ullage.mixers.wrappers import bare


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank: tensors of dim 0 on the device, so that nothing waits for it.

    Attributes:
        loss: the mean over the labels that count in the whole step, or over its sequences for a classifier of them.
        num_labels: the number of those labels or sequences.
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


def evaluate_step(model: Any, step: PackedStep) -> StepResult:
    """The loss of a step in evaluation mode, without gradients. Collective, like :func:`train_step`."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            loss, num_labels = _run(model, step)
    finally:
        model.train(training)
        reshard(model)
    return StepResult(loss, num_labels)


def _run(model: Any, step: PackedStep, reduce_every_microbatch: bool = False) -> tuple[Tensor, Tensor]:
    parallel = parallel_of(model)
    batches = [with_labels(batch, parallel.objective) for batch in step.microbatches]
    counts = [count_labels(batch, parallel.objective) for batch in batches]
    num_labels = torch.tensor(sum(counts), device=parallel.device)
    if parallel.mesh is not None:
        # Over dp alone: the ranks of cp and tp hold the same microbatches and have counted the same labels.
        dist.all_reduce(num_labels, group=parallel.dp_group)
    divisor = num_labels.clamp(min=1)
    total = torch.zeros((), device=parallel.device)
    for k, (batch, count) in enumerate(zip(batches, counts)):
        last = k == len(batches) - 1
        if isinstance(model, FSDPModule):
            # By default gradients add up on each rank, unsharded, until the last backward; then FSDP reduces them
            # once and waits for it.
            model.set_requires_gradient_sync(last or reduce_every_microbatch)
            model.set_is_last_backward(last)
        loss = _loss(model, batch, step, count, divisor)
        if torch.is_grad_enabled():
            # The loss is divided by the labels of the whole step, so gradients are to be summed; FSDP averages them.
            (loss * parallel.averaged_over).backward()
        total += loss.detach()
    if parallel.mesh is not None:
        # Over dp·cp alone: the ranks of tp have computed the same loss.
        dist.all_reduce(total, group=parallel.loss_group)
    return total, num_labels


def _loss(model: Any, batch: RaggedBatch, step: PackedStep, count: int, divisor: Tensor) -> Tensor:
    """This rank's part of the step's loss: all parts add up to it.

    Args:
        model: the model, which runs one forward even for an empty microbatch.
        batch: the microbatch, a whole row on every rank of cp.
        step: the step that it belongs to.
        count: its labels that count.
        divisor: labels that count in the whole step, over dp.
    """
    parallel = parallel_of(model)
    cp = parallel.topology.cp.size
    filled = runnable(batch, parallel.objective).to(parallel.device, non_blocking=True)
    fixed: dict[str, Any] = {}
    if parallel.objective == NEXT_TOKEN:
        fixed = {"num_items_in_batch": divisor, "use_cache": False}
    with warnings.catch_warnings(), parallel.context():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of changes in place to its outputs: we make none
        if parallel.mesh is not None and cp > 1:
            row = packed_attention.shard_batch(filled, parallel.cp, num_items=divisor)
            outputs = model(**fixed | row)
        else:
            outputs = model(**fixed, **keywords(bare(model), filled, parallel.objective))
    # The share of the step's real tokens that this call stands for; the cp ranks of a row divide it among themselves.
    share = batch.layout.num_tokens / max(step.num_tokens, 1) / cp
    if parallel.objective != NEXT_TOKEN:
        return part_of_loss(outputs, parallel.objective, count, divisor)
    return _weigh_auxiliary(model, outputs, share)


def _weigh_auxiliary(model: Any, outputs: Any, share: float) -> Tensor:
    """The loss, with the mean that a model adds to it per microbatch (experts' balance) weighted by ``share``."""
    auxiliary = outputs.get("aux_loss")
    factor = getattr(model.config, "router_aux_loss_coef", None)
    if auxiliary is None or factor is None:
        return outputs.loss
    # The model has added factor · auxiliary already: take back all of it but the share.
    return outputs.loss - (1 - share) * factor * auxiliary.to(outputs.loss.device)
