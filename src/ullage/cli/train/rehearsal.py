"""``ullage train --dry_run``: the model, the data, the first steps, and what they take, without training.

The first steps are drawn and planned as the run draws and plans them. Forward and backward of one batch are run and
timed; what the optimizer, the exchange, evaluations and saves take is not in the time. Over ``--dp``, ``--cp`` and
``--tp`` whole steps are run. Nothing is written: the trainer gets a temporary folder in the place of the output folder.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ullage.batch import RaggedBatch
from ullage.cli.train.folder import outlook
from ullage.cli.train.settings import TrainCommand
from ullage.cli.train.summary import Voice
from ullage.datasets.text import TokenDataset
from ullage.errors import InputError
from ullage.ranks.world import agreement, gather
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.run.capacity import state_bytes
from ullage.training.setup.device_memory import DeviceMemory
from ullage.training.step.metering import num_parameters
from ullage.units import duration, memory_size

#: Steps that are planned, and steps or batches that are run, at most.
_STEPS, _RUN = 4, 3
_UNMEASURED = "the memory of a step cannot be measured on this system"


def rehearse(
    command: TrainCommand,
    model: Any,
    tokenizer: Any,
    training: TokenDataset,
    held_out: TokenDataset | None,
    make_trainer: Callable[[], tuple[Any, Any]],
) -> dict[str, Any]:
    """What a run would be, as JSON holds it. Collective.

    Args:
        command: the arguments of the call.
        model, tokenizer: as the run would have them.
        training, held_out: the data.
        make_trainer: makes the trainer of the run, and its progress bar.
    """
    told: dict[str, Any] = {
        "dry_run": True,
        "output_dir": str(command.training.output_dir),
        "model": _of_model(model),
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "vocabulary": len(tokenizer),
            "chat_template": getattr(tokenizer, "chat_template", None) is not None,
        },
        "data": {"train": _of_data(training), "eval": None if held_out is None else _of_data(held_out)},
        "processes": command.training.world_size,
        "notes": [note for note in (outlook(command),) if note is not None],
    }
    arguments = command.training
    written, pushes = arguments.output_dir, arguments.push_to_hub
    with tempfile.TemporaryDirectory(prefix="ullage-") as folder:
        # The trainer makes its folder, and a repository on the hub.
        arguments.output_dir, arguments.push_to_hub = folder, False
        try:
            trainer, progress = make_trainer()
            progress.close()
            _of_steps(told, trainer, model, command.parallel.asked)
        finally:
            arguments.output_dir, arguments.push_to_hub = written, pushes
    return told


def _of_model(model: Any) -> dict[str, Any]:
    trained = [each for each in model.parameters() if each.requires_grad]
    return {
        "class": type(model).__name__,
        "parameters": num_parameters(model),
        "trainable": sum(getattr(each, "ds_numel", each.numel()) for each in trained),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def _of_data(dataset: TokenDataset) -> dict[str, Any]:
    lengths = dataset.layout.lengths
    return {
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "labels": dataset.num_labels,
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "truncated": dataset.num_truncated,
        "truncated_tokens": dataset.truncated_tokens,
        "dropped": dataset.num_dropped,
    }


def _of_steps(told: dict[str, Any], trainer: Any, model: Any, sharded: bool) -> None:
    """Plan the first steps, run a part of them, and put both into ``told``."""
    args, notes = trainer.args, told["notes"]
    options = trainer._packer.options
    if options is not None and options.is_open and not _is_cut(model):
        trainer._capacity.begin_run()  # raises where none can be found
        trainer._capacity.settle(model)
        options = trainer._packer.options
        notes.append(f"packing_capacity='auto' finds {options.capacity:,} tokens here, and anew when training begins")
    loader = trainer.get_train_dataloader()
    a_step = args.gradient_accumulation_steps
    per_epoch = max(math.ceil(len(loader) / a_step), 1)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(per_epoch * args.num_train_epochs)
    told["plan"] = {"steps": steps, "steps_per_epoch": per_epoch, "epochs": steps / per_epoch}
    if options is not None and options.is_open:
        notes.append("packing_capacity='auto' is found when training begins under ZeRO 3: no steps are planned")
        return
    if sharded:
        trainer._prepare_for_training(steps, loader, None)
    batches = iter(loader)
    found = (trainer.get_batch_samples(batches, a_step, args.device) for _ in range(min(_STEPS, steps)))
    drawn: list[tuple[list[Any], Any]] = list(itertools.takewhile(lambda one: one[0], found))
    told["plan"] |= _of_drawn([samples for samples, _ in drawn], args.world_size > 1)
    if sharded:
        if trainer.get_cp_size() > 1:
            told["plan"]["ranks_per_row"] = trainer.get_cp_size()
        _run_steps(told, trainer, drawn, steps)
    else:
        _run_batches(told, trainer, model, [samples for samples, _ in drawn], steps)


def _of_drawn(drawn: list[list[Any]], several: bool) -> dict[str, Any]:
    """The mean of the first steps: the samples of each, over all ranks, and how they are packed or padded."""
    plans = [samples[0].plan for samples in drawn if isinstance(samples[0], PackedBatch)]
    plan: dict[str, Any] = {"planned": len(drawn), "packed": bool(plans)}
    if plans:
        found = [each.statistics() for each in plans]
        means = {
            "tokens_per_step": [each.num_tokens for each in found],
            "sequences_per_step": [each.num_sequences for each in found],
            "rows_per_rank": [each.num_microbatches for each in plans],
            "capacity_unused": [each.ullage for each in found],
            "imbalance": [each.rank_imbalance for each in found],
        }
        plan |= {name: float(np.mean(values)) for name, values in means.items()}
        return {**plan, "capacity": plans[0].capacity}
    rows = [row for samples in drawn for row in _rows(samples)]
    longest = max((int(row.max_seqlen) for row in rows), default=0)
    padded, tokens = sum(len(row) * int(row.max_seqlen) for row in rows), sum(row.numel() for row in rows)
    plan["tokens_per_step"] = sum(gather(tokens, several)) / len(drawn)
    plan["sequences_per_step"] = sum(gather(sum(map(len, rows)), several)) / len(drawn)
    return {**plan, "padding_avoided": 1 - tokens / padded if padded else 0.0, "longest": max(gather(longest, several))}


def _is_cut(model: Any) -> bool:
    """Whether ZeRO 3 holds a part of the weights on each rank, so that the bare model cannot run."""
    return any(hasattr(each, "ds_numel") for each in model.parameters())


def _rows(samples: list[Any]) -> list[RaggedBatch]:
    rows = [row for each in samples for row in (each.microbatches if isinstance(each, PackedBatch) else [each])]
    return [row for row in rows if len(row)]


def _run_batches(told: dict[str, Any], trainer: Any, model: Any, drawn: list[list[Any]], steps: int) -> None:
    """Run the largest batch of the first steps, then time a few; extrapolate to the run."""
    args, notes = trainer.args, told["notes"]
    told["memory"] = _held(trainer, model)
    if _is_cut(model):
        notes.append("under ZeRO 3 no step is run: memory is without activations, and there is no estimate of time")
        return
    rows = [row for samples in drawn for row in _rows(samples)]
    peak, largest, seconds, timed = 0, 0, 0.0, 0
    several = args.world_size > 1
    # One rank may fail, or have no sequence; all say so.
    with agreement(several, "running the first batches"):
        if rows:
            row = max(rows, key=lambda each: each.numel())
            largest = row.numel()
            try:
                peak = trainer._capacity.peak_of(model, row, DeviceMemory(args.device))
            except InputError:  # a system that does not tell
                trainer._capacity.seconds_of(model, row)
                notes.append(_UNMEASURED)
            for each in rows[:_RUN]:
                seconds += trainer._capacity.seconds_of(model, each)
                timed += each.numel()
    told["memory"] |= {"step": max(gather(peak, several)), "step_tokens": largest}
    own = [sum(row.numel() for row in _rows(samples)) for samples in drawn]
    # The rank with most tokens ends last.
    tokens = float(np.asarray(gather(own, several)).reshape(-1, len(drawn)).max(0).mean())
    rate = max(gather(seconds / timed if timed else 0.0, several))
    _extrapolate(told, rate * tokens, steps)


def _run_steps(told: dict[str, Any], trainer: Any, drawn: list[tuple[list[Any], Any]], steps: int) -> None:
    """Run whole steps of a sharded model, with the optimizer, on weights that are thrown away. Collective.

    The ranks share weights and rows, so that no batch runs on one of them alone.
    """
    args, several = trainer.args, trainer.args.world_size > 1
    memory: DeviceMemory | None = None
    try:
        memory = DeviceMemory(args.device)
        memory.settle()
        memory.begin()
    except InputError:  # a system that does not tell
        told["notes"].append(_UNMEASURED)
    seconds: list[float] = []
    for samples, count in drawn[:_RUN]:
        begun = time.perf_counter()
        trainer.training_step(trainer.model, samples[0], count)
        trainer._clip_grad_norm(trainer.model)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(gather(time.perf_counter() - begun, several)))
    held = _held(trainer, trainer.model)
    told["memory"] = {name: max(gather(size, several)) for name, size in held.items()}
    if memory is not None:
        beside = memory.taken() - held["gradients"] - held["optimizer"]
        largest = max((row.numel() for samples, _ in drawn for row in _rows(samples)), default=0)
        told["memory"] |= {"step": max(0, *gather(beside, several)), "step_tokens": max(gather(largest, several))}
    # The first step compiles, and makes the state of the optimizer.
    usual = seconds[1:] or seconds
    _extrapolate(told, sum(usual) / len(usual), steps)
    told["time"]["whole_steps"] = True
    told["notes"].append("steps were run with the optimizer and the exchange between ranks, on weights thrown away")


def _extrapolate(told: dict[str, Any], seconds: float, steps: int) -> None:
    """Put the sum of the memory, and the time of the run at ``seconds`` a step, into ``told``."""
    memory = told["memory"]
    if "step" in memory:
        memory["total"] = sum(memory[name] for name in ("weights", "gradients", "optimizer", "step"))
    rate = told["plan"]["tokens_per_step"] / seconds if seconds else None
    told["time"] = {"seconds_per_step": seconds, "seconds": seconds * steps, "tokens_per_second": rate}


def _held(trainer: Any, model: Any) -> dict[str, int]:
    """Bytes per rank that a run holds between steps, by what its arguments say."""
    args = trainer.args
    plugin = trainer.accelerator.state.deepspeed_plugin
    stage = 0 if plugin is None else int(plugin.zero_stage)
    sharded = any(hasattr(each, "to_local") for each in model.parameters())
    sizes = [(_numel(each), each) for each in model.parameters()]
    trained = sum(size for size, each in sizes if each.requires_grad)
    # DeepSpeed trains in half precision with weights in full beside it.
    half = plugin is not None and (args.bf16 or args.fp16)
    weights = sum(size * (2 if half else each.element_size()) for size, each in sizes)
    gradients = sum(size * (2 if half else each.element_size()) for size, each in sizes if each.requires_grad)
    try:
        optimizer: Any = trainer.optimizer or trainer.create_optimizer()
        while hasattr(optimizer, "optimizer"):  # what accelerate puts around it
            optimizer = optimizer.optimizer
        state = state_bytes(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else 8.0
    except Exception:  # one that DeepSpeed makes, or that is not installed: as Adam
        state = 8.0
    if plugin is None and args.world_size > 1 and not sharded:
        gradients *= 2  # the buckets of DDP
    shares = [args.world_size if stage >= least else 1 for least in (3, 2, 1)]
    parts = (weights, gradients, int((state + 4 * half) * trained))
    sizes_here = [-(-part // share) for part, share in zip(parts, shares, strict=True)]
    return dict(zip(("weights", "gradients", "optimizer"), sizes_here, strict=True))


def _numel(parameter: Any) -> int:
    """Elements of the shard of this rank, or of the whole where ZeRO 3 has cut it, which is counted by its stage."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local().numel()
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def tell(told: dict[str, Any], say: Voice, as_json: bool) -> None:
    """Print what :func:`rehearse` found, as lines for people, or on the first rank as one line of JSON."""
    if as_json:
        print(json.dumps(told), flush=True)
        return
    model, tokenizer = told["model"], told["tokenizer"]
    template = ", with a chat template" if tokenizer["chat_template"] else ""
    rows = {
        "model": f"{model['class']}, {model['parameters']:,} parameters, {model['trainable']:,} trained, "
        f"{model['dtype']}",
        "tokenizer": f"{tokenizer['class']}, {tokenizer['vocabulary']:,} tokens{template}",
    }
    for use, data in told["data"].items():
        rows[f"data, {use}"] = "none" if data is None else _data_line(data)
    rows |= _plan_lines(told)
    rows["output folder"] = f"{told['output_dir']}, not touched"
    lines = [f"  {name:<16}{value}" for name, value in rows.items()]
    say("\n".join(["", "dry run: nothing is trained, nothing is written", "", *lines]))
    for note in told["notes"]:
        say(f"  {note}")


def _data_line(data: dict[str, Any]) -> str:
    line = (
        f"{data['sequences']:,} sequences, {data['tokens']:,} tokens, {data['shortest']:,} to {data['longest']:,} "
        f"long, median {data['median']:,.0f}"
    )
    return line if data["labels"] == data["tokens"] else f"{line}; {data['labels']:,} tokens have a label"


def _plan_lines(told: dict[str, Any]) -> dict[str, str]:
    plan, memory, time = told.get("plan"), told.get("memory"), told.get("time")
    lines: dict[str, str] = {}
    if plan is not None:
        lines["steps"] = f"{plan['steps']:,}, {plan['steps_per_epoch']:,} per epoch"
    if plan is not None and "planned" in plan:
        lines["a step"] = (
            f"{plan['sequences_per_step']:,.0f} sequences, {plan['tokens_per_step']:,.0f} tokens on "
            f"{told['processes']} process{'es' if told['processes'] > 1 else ''} (mean of the first {plan['planned']})"
        )
        if plan["packed"]:
            lines["packed"] = (
                f"{plan['rows_per_rank']:.1f} rows of {plan['capacity']:,} tokens per {_sharing(plan)}, "
                f"{plan['capacity_unused']:.1%} of the capacity unused, imbalance {plan['imbalance']:.2f}"
            )
        else:
            lines["padding"] = f"{plan['padding_avoided']:.1%} of a padded step avoided"
    if memory is not None:
        parts = [f"{name} {memory_size(memory[name])}" for name in ("weights", "gradients", "optimizer")]
        if "step" in memory:
            parts.append(f"a batch of {memory['step_tokens']:,} tokens {memory_size(memory['step'])}, measured")
        total = f"{memory_size(memory['total'])} per process: " if "total" in memory else ""
        lines["memory, about"] = total + ", ".join(parts)
    if time is not None and time["tokens_per_second"]:
        what = "" if time.get("whole_steps") else " for forward and backward"
        lines["time, about"] = (
            f"{duration(time['seconds'])}{what}, {time['seconds_per_step']:.2g} s a step, "
            f"{time['tokens_per_second']:,.0f} tokens per second"
        )
    return lines


def _sharing(plan: dict[str, Any]) -> str:
    ranks = plan.get("ranks_per_row", 1)
    return "rank" if ranks == 1 else f"{ranks} ranks, which share them"
