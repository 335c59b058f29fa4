"""Record of a run (``ullage_run.json``): the settings that decide its numbers, and its summary once it has ended.

A call that resumes takes them over, so that continuing on other machines is one flag; what the call itself says wins.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ullage.cli.train.settings import TrainCommand
from ullage.errors import UsageError

RECORD = "ullage_run.json"

#: Trainer's arguments that decide a run's numbers.
_DECIDING = (
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "optim_args",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "fp16",
    "seed",
    "data_seed",
    "full_determinism",
    "dataloader_drop_last",
    "train_sampling_strategy",
    "packing_capacity",
    "packing_plan_strategy",
    "packing_oversize",
    "packing_loss_weighting",
    "world_size",
)
#: Not numbers, but what a person who continues a run expects to stay as it was.
_KEPT = (
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "eval_strategy",
    "per_device_eval_batch_size",
    "empty_step",
)
_ALLOWED = ("allow_missing_weights", "allow_pickle_weights", "trust_remote_code")


def settings_of(command: TrainCommand) -> dict[str, Any]:
    """The settings that decide the numbers of a run, as they are written to JSON."""
    training = {name: getattr(command.training, name) for name in _DECIDING}
    # Ranks that read different sequences, not processes: those of cp and tp add nothing to the batch.
    training["world_size"] = command.parallel.data_ranks(command.training.world_size)
    settings = {**asdict(command.data), **asdict(command.model), **training}
    # What a call allows, it allows for itself: it decides no numbers, and a record is no place to grant it from.
    for name in _ALLOWED:
        del settings[name]
    # As they come back from JSON (tuples as lists, enums as text), so that records compare equal.
    return json.loads(json.dumps(settings, default=str))


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record that the run in ``folder`` wrote; None if none can be read."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("settings"), dict) else None


def write_record(folder: Path, command: TrainCommand, summary: dict[str, Any] | None) -> None:
    """Write down the settings, and the summary of a finished run; the file is replaced whole or stays as it was."""
    kept = {name: getattr(command.training, name) for name in _KEPT}
    record = {
        "settings": settings_of(command),
        "kept": json.loads(json.dumps(kept, default=str)),
        "revisions": command.revisions,
        "summary": summary,
    }
    beside = folder / f"{RECORD}.partial"
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, folder / RECORD)


def taken_over(folder: Path, given: set[str], world_size: int) -> dict[str, Any]:
    """The settings of the run in ``folder`` for a call that resumes it and gave ``given`` itself.

    ``world_size``: ranks that read different sequences. The global batch stays what it was: on another number of them
    each takes another part of it. Raises ``UsageError`` where it cannot be shared evenly.
    """
    record = read_record(folder)
    if record is None:
        return {}
    settings = {**record.get("kept", {}), **record["settings"]}
    there = settings.pop("world_size", world_size)
    batch = settings.get("per_device_train_batch_size")
    if batch is not None and there != world_size and "per_device_train_batch_size" not in given:
        if batch * there % world_size:
            raise UsageError(
                f"the run's global batch of {batch * there} does not divide over {world_size} processes",
                where=str(folder / RECORD),
                hint="give --per_device_train_batch_size, and expect other losses; or take another number of processes",
            )
        # The product of the two stays: the global batch, on which the losses depend.
        settings["per_device_train_batch_size"] = batch * there // world_size
    return {name: value for name, value in settings.items() if name not in given and value is not None}
