"""``ullage train --dry_run``: the model, the data, the first steps, and what they take.

The trainer of the run trains its first steps, with the optimizer and the exchange between ranks, whatever it is spread
over; the weights are thrown away. Nothing is written: it gets a temporary folder in the place of the output folder,
saves nothing, and no tracker hears of it.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ullage.cli.train.folder import outlook
from ullage.cli.train.process import CANNOT_BEGIN, REFUSALS, one_line_of
from ullage.cli.train.progress import device_line
from ullage.cli.train.settings import TrainCommand
from ullage.cli.train.summary import Voice
from ullage.core.display import duration, memory_size
from ullage.core.errors import InputError
from ullage.datasets.text import TokenDataset
from ullage.planning import Plan
from ullage.ranks.world import gather
from ullage.training.setup.device_memory import DeviceMemory
from ullage.training.step.metering import TokenMeter, num_parameters

if TYPE_CHECKING:
    from ullage.training import Trainer

#: Steps that are trained, at most.
_STEPS = 4


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
        command: the arguments of the call; those of the Trainer are changed, so that no run can follow.
        model, tokenizer: as the run would have them.
        training, held_out: the data.
        make_trainer: makes the trainer of the run, and its progress bar.
    """
    args = command.training
    told: dict[str, Any] = {
        "dry_run": True,
        "output_dir": str(args.output_dir),
        "model": _of_model(model),
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "vocabulary": len(tokenizer),
            "chat_template": getattr(tokenizer, "chat_template", None) is not None,
        },
        "data": {"train": _of_data(training), "eval": None if held_out is None else _of_data(held_out)},
        "device": device_line(command).removeprefix("device: "),
        "processes": args.world_size,
        "notes": [note for note in (outlook(command),) if note is not None],
    }
    args.save_strategy, args.load_best_model_at_end = SaveStrategy.NO, False
    args.eval_strategy, args.push_to_hub = IntervalStrategy.NO, False
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1  # the meter counts from log to log
    with tempfile.TemporaryDirectory(prefix="ullage-") as folder:
        args.output_dir = folder
        trainer, _ = make_trainer()
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback).__module__.startswith("transformers.integrations"):  # a tracker
                trainer.remove_callback(callback)
        steps = _FirstSteps(trainer.meter)
        trainer.add_callback(steps)
        try:
            memory = DeviceMemory(args.device)
            memory.begin()
        except InputError:
            memory = None
            told["notes"].append("the memory of a step cannot be measured on this system")
        with one_line_of(CANNOT_BEGIN, kinds=REFUSALS):
            trainer.train()
        told["plan"] = _of_steps(command, trainer, steps)
    several = args.world_size > 1
    told["memory"] = None if memory is None else max(gather(memory.peak(), several))
    # Compilers and caches are waited for in the first step, which also makes the state of the optimizer.
    seconds = max(gather(float(np.mean(steps.seconds[1:] or steps.seconds)), several))
    rate = told["plan"]["tokens_per_step"] / seconds
    told["time"] = {
        "seconds_per_step": seconds,
        "seconds": seconds * told["plan"]["steps"],
        "tokens_per_second": rate,
    }
    return told


class _FirstSteps(TrainerCallback):
    """Callback that ends the run after its first steps. ``plans``: of packed ones. ``seconds``: of each."""

    def __init__(self, meter: TokenMeter) -> None:
        self.plans: list[Plan] = []
        self.seconds: list[float] = []
        self._meter, self._since = meter, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now
        if self._meter.plan is not None:
            self.plans.append(self._meter.plan)
        control.should_training_stop |= state.global_step >= _STEPS


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


def _of_steps(command: TrainCommand, trainer: Trainer, steps: _FirstSteps) -> dict[str, Any]:
    """The steps of the run, and the mean of the first: samples over all ranks, and how they are packed or padded."""
    args, meter = trainer.args, trainer.meter
    number = trainer.state.max_steps
    plan: dict[str, Any] = {"steps": number}
    if not command.data.streaming:
        per_epoch = max(math.ceil(len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps), 1)
        plan |= {"steps_per_epoch": per_epoch, "epochs": number / per_epoch}
    plan |= {"planned": len(steps.seconds), "packed": bool(steps.plans)}
    plan["tokens_per_step"] = meter.num_tokens / len(steps.seconds)
    if not steps.plans:
        batch = trainer.get_total_train_batch_size(args)
        return {**plan, "sequences_per_step": batch, "padding_avoided": meter.padding_avoided}
    stats = [each.statistics() for each in steps.plans]
    means = {
        "sequences_per_step": [each.num_sequences for each in stats],
        "rows_per_rank": [each.num_microbatches for each in stats],
        "capacity_unused": [each.ullage for each in stats],
        "imbalance": [each.rank_imbalance for each in stats],
    }
    plan |= {name: float(np.mean(values)) for name, values in means.items()}
    return {**plan, "capacity": steps.plans[0].capacity, "ranks_per_row": command.parallel.cp or 1}


def tell(told: dict[str, Any], say: Voice, as_json: bool) -> None:
    """Print what :func:`rehearse` found, as lines for people, or on the first rank as one line of JSON."""
    if as_json:
        print(json.dumps(told), flush=True)
        return
    model, tokenizer, plan, taken = told["model"], told["tokenizer"], told["plan"], told["time"]
    template = ", with a chat template" if tokenizer["chat_template"] else ""
    rows = {
        "device": told["device"],
        "model": f"{model['class']}, {model['parameters']:,} parameters, {model['trainable']:,} trained, "
        f"{model['dtype']}",
        "tokenizer": f"{tokenizer['class']}, {tokenizer['vocabulary']:,} tokens{template}",
    }
    for use, data in told["data"].items():
        rows[f"data, {use}"] = "none" if data is None else _data_line(data)
    rows["steps"] = f"{plan['steps']:,}"
    if "steps_per_epoch" in plan:
        rows["steps"] += f", {plan['steps_per_epoch']:,} per epoch"
    rows["a step"] = (
        f"{plan['sequences_per_step']:,.0f} sequences, {plan['tokens_per_step']:,.0f} tokens on {told['processes']} "
        f"process{'es' if told['processes'] > 1 else ''} (mean of the first {plan['planned']})"
    )
    if plan["packed"]:
        sharing = "rank" if plan["ranks_per_row"] == 1 else f"{plan['ranks_per_row']} ranks, which share them"
        rows["packed"] = (
            f"{plan['rows_per_rank']:.1f} rows of {plan['capacity']:,} tokens per {sharing}, "
            f"{plan['capacity_unused']:.1%} of the capacity unused, imbalance {plan['imbalance']:.2f}"
        )
    else:
        rows["padding"] = f"{plan['padding_avoided']:.1%} of a padded step avoided"
    if told["memory"] is not None:
        rows["memory"] = f"{memory_size(told['memory'])} per process at the peak of these steps"
    rows["time, about"] = (
        f"{duration(taken['seconds'])}, {taken['seconds_per_step']:.2g} s a step, "
        f"{taken['tokens_per_second']:,.0f} tokens per second; without evaluations and saves"
    )
    rows["output folder"] = f"{told['output_dir']}, not touched"
    lines = [f"  {name:<16}{value}" for name, value in rows.items()]
    say("\n".join(["", "dry run: nothing is written, and what was trained is thrown away", "", *lines]))
    for note in told["notes"]:
        say(f"  {note}")


def _data_line(data: dict[str, Any]) -> str:
    line = (
        f"{data['sequences']:,} sequences, {data['tokens']:,} tokens, {data['shortest']:,} to {data['longest']:,} "
        f"long, median {data['median']:,.0f}"
    )
    return line if data["labels"] == data["tokens"] else f"{line}; {data['labels']:,} tokens have a label"
