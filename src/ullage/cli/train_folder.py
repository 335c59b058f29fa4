"""What the output folder holds before a run, and what that means for it: start, continue, or leave alone.

A run writes down the settings that decide its numbers (``ullage_run.json``). A second call with the same settings
continues an unfinished run and reports a finished one; a call with others is refused. Nothing is overwritten unless
``--overwrite_output_dir`` says so.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ullage.cli.train_arguments import TrainCommand
from ullage.errors import CheckpointError, InputError
from ullage.training.saving import PARTIAL, WEIGHT_FILES, check_checkpoint, checkpoints_in

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
    "world_size",
)
_LAST = ("true", "last")


@dataclass(frozen=True)
class Situation:
    """``checkpoint``: where to continue from. ``summary``: of a run that is finished already. ``notes``: to be said."""

    checkpoint: Path | None = None
    summary: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def settings_of(command: TrainCommand) -> dict[str, Any]:
    """The settings that decide the numbers of a run, as they are written to JSON."""
    training = {name: getattr(command.training, name) for name in _DECIDING}
    settings = {**asdict(command.data), **asdict(command.model), **training}
    return json.loads(json.dumps(settings, default=str))


def look_at(command: TrainCommand) -> Situation:
    """Decides what to do; changes nothing.

    Raises ``CheckpointError`` for a checkpoint that is none, and ``InputError`` for a folder that holds something else.
    """
    folder = Path(command.training.output_dir or ".")
    if folder.exists() and not folder.is_dir():
        raise InputError("the output folder cannot be used", where=str(folder), expected="a folder", found="a file")
    record = _read_record(folder)
    checkpoints = checkpoints_in(folder)
    resume = command.training.resume_from_checkpoint
    if resume is not None and resume.lower() != "false":
        checkpoint = _to_resume(resume, folder, checkpoints)
        changed = _changed(_read_record(checkpoint.parent), command)
        notes = (f"continues with changed settings: {', '.join(changed)}",) if changed else ()
        return Situation(checkpoint, notes=(f"continues from {checkpoint}", *notes))
    if command.output.overwrite_output_dir:
        return Situation()
    if record is None:
        _refuse_others(folder, checkpoints)
        return Situation()
    changed = _changed(record, command)
    if changed:
        raise InputError(
            "the output folder holds a run with other settings",
            where=str(folder),
            found=", ".join(changed),
            hint="continue it with --resume_from_checkpoint, start over with --overwrite_output_dir, or give another "
            "--output_dir",
        )
    if record.get("summary") is not None and any((folder / name).is_file() for name in WEIGHT_FILES):
        return Situation(summary=record["summary"])
    if checkpoints:
        checkpoint = check_checkpoint(checkpoints[-1])
        return Situation(checkpoint, notes=(f"{folder} holds this run, unfinished: continues from {checkpoint}",))
    return Situation()


def begin(command: TrainCommand, situation: Situation) -> None:
    """Makes the folder ready and writes the settings down; one rank calls it, after all checks."""
    folder = Path(command.training.output_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    if command.output.overwrite_output_dir and situation.checkpoint is None:
        for path in (*checkpoints_in(folder), folder / PARTIAL):
            shutil.rmtree(path, ignore_errors=True)
    _write_record(folder, {"settings": settings_of(command), "summary": None})


def finish(command: TrainCommand, summary: dict[str, Any]) -> None:
    """Writes down that the run is finished; one rank calls it."""
    folder = Path(command.training.output_dir or ".")
    _write_record(folder, {"settings": settings_of(command), "summary": summary})


def _to_resume(resume: str, folder: Path, checkpoints: list[Path]) -> Path:
    if resume.lower() not in _LAST:
        return check_checkpoint(resume)
    if not checkpoints:
        raise CheckpointError(
            "there is no checkpoint to continue from",
            where=str(folder),
            expected="a folder checkpoint-N",
            found="none" if folder.is_dir() else "no such folder",
            hint="start without --resume_from_checkpoint, or give the checkpoint's folder",
        )
    return check_checkpoint(checkpoints[-1])


def _changed(record: dict[str, Any] | None, command: TrainCommand) -> list[str]:
    if record is None:
        return []
    before, now = record["settings"], settings_of(command)
    return [f"{name} {before.get(name)} there, {now[name]} here" for name in now if before.get(name) != now[name]]


def _refuse_others(folder: Path, checkpoints: list[Path]) -> None:
    """A folder that some other program trained into is not ours to write over."""
    names = [path.name for path in checkpoints]
    names += [name for name in ("config.json", *WEIGHT_FILES) if (folder / name).exists()]
    if names:
        raise InputError(
            "the output folder holds a model or checkpoints already",
            where=str(folder),
            found=", ".join(names),
            hint="continue with --resume_from_checkpoint, start over with --overwrite_output_dir, or give another "
            "--output_dir",
        )


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("settings"), dict) else None


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    beside = folder / f"{RECORD}.partial"
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, folder / RECORD)
