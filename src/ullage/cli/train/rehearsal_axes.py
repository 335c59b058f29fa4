"""The first steps of a run over ``--dp``, ``--cp`` and ``--tp``, planned and run in memory for ``--dry_run``.

The ranks share weights and rows, so that no batch runs on one of them alone: whole steps are run, with the optimizer,
on a model that is thrown away.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ullage.errors import InputError
from ullage.training.agreement import gather
from ullage.training.device_memory import DeviceMemory
from ullage.training.packed_batch import PackedBatch

#: Steps that are planned, and of these run, at most.
_STEPS, _RUN = 4, 3


def of_steps(told: dict[str, Any], trainer: Any) -> None:
    """Plan the first steps, run some of them, and put what they take into ``told``. Collective."""
    args, several = trainer.args, trainer.args.world_size > 1
    loader = trainer.get_train_dataloader()
    per_epoch = max(len(loader), 1)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(per_epoch * args.num_train_epochs)
    trainer._prepare_for_training(steps, loader, None)
    memory: DeviceMemory | None = None
    try:
        memory = DeviceMemory(args.device)
        memory.settle()
        memory.begin()
    except InputError:  # a system that does not tell
        told["notes"].append("the memory of a step cannot be measured on this system")
    drawn: list[PackedBatch] = []
    seconds: list[float] = []
    batches = iter(loader)
    for number in range(min(_STEPS, steps)):
        samples, count = trainer.get_batch_samples(batches, 1, args.device)
        if not samples:
            break
        drawn += samples
        if number < _RUN:
            begun = time.perf_counter()
            _train(trainer, samples[0], count)
            seconds.append(max(gather(time.perf_counter() - begun, several)))
    taken = 0 if memory is None else memory.taken()
    plans = [step.plan for step in drawn]
    found = [each.statistics() for each in plans]
    tokens = sum(step.num_tokens for step in drawn) / len(drawn)
    told["plan"] = {
        "steps": steps,
        "steps_per_epoch": per_epoch,
        "epochs": steps / per_epoch,
        "planned": len(drawn),
        "packed": True,
        "tokens_per_step": tokens,
        "sequences_per_step": sum(each.num_sequences for each in plans) / len(drawn),
        "capacity": plans[0].capacity,
        "rows_per_rank": sum(each.num_microbatches for each in plans) / len(drawn),
        "capacity_unused": sum(each.ullage for each in found) / len(drawn),
        "imbalance": sum(each.rank_imbalance for each in found) / len(drawn),
    }
    if trainer.get_cp_size() > 1:
        told["plan"]["ranks_per_row"] = trainer.get_cp_size()
    held = _held(trainer)
    largest = max((row.layout.num_tokens for step in drawn for row in step.microbatches), default=0)
    told["memory"] = {name: max(gather(size, several)) for name, size in held.items()}
    if memory is not None:
        beside = taken - held["gradients"] - held["optimizer"]
        told["memory"] |= {"step": max(0, *gather(beside, several)), "step_tokens": max(gather(largest, several))}
        told["memory"]["total"] = sum(told["memory"][name] for name in (*held, "step"))
    # The first step compiles, and makes the state of the optimizer.
    usual = seconds[1:] or seconds
    each = sum(usual) / len(usual)
    told["time"] = {
        "seconds_per_step": each,
        "seconds": each * steps,
        "tokens_per_second": tokens / each,
        "whole_steps": True,
    }
    told["notes"].append("steps were run with the optimizer and the exchange between ranks, on weights thrown away")


def _train(trainer: Any, step: PackedBatch, count: Any) -> None:
    """One whole step. Waits for the device."""
    trainer.training_step(trainer.model, step, count)
    trainer._clip_grad_norm(trainer.model)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    if trainer.args.device.type == "cuda":
        torch.cuda.synchronize()


def _held(trainer: Any) -> dict[str, int]:
    """Bytes that this rank holds between steps, once a step has been made."""
    parameters = [(_local(each), each.requires_grad) for each in trainer.model.parameters()]
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    return {
        "weights": sum(each.numel() * each.element_size() for each, _ in parameters),
        "gradients": sum(each.numel() * each.element_size() for each, trained in parameters if trained),
        "optimizer": sum(
            _local(value).numel() * value.element_size() for value in states if isinstance(value, torch.Tensor)
        ),
    }


def _local(tensor: Any) -> torch.Tensor:
    """The shard of this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
