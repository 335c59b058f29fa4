"""Decision of a run by what its output folder holds: start, continue, or leave the folder alone.

A run writes down the settings that decide its numbers (``ullage_run.json``). A second call with the same settings
continues an unfinished run and reports a finished one; a call with others is refused. Nothing is overwritten unless
``--overwrite_output_dir`` says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER
from ullage.cli.train.process import CANNOT_BEGIN, REFUSALS, one_line_of
from ullage.cli.train.settings import AdapterArguments, TrainCommand
from ullage.core.errors import CheckpointError, InputError, UllageError
from ullage.core.replacing import replacing
from ullage.ranks.world import agreement, gather, rank_here
from ullage.training.run.log_file import LOG
from ullage.training.saving.checkpoints import (
    WEIGHT_FILES,
    checkpoints_in,
    put_back,
    remove_unfinished,
    require_checkpoint,
    step_of,
)
from ullage.training.saving.continuing import AUTO
from ullage.training.saving.resuming import listed_in, newest_whole, require_whole, state_notes

if TYPE_CHECKING:
    from ullage.training import Trainer

#: The settings that decide the numbers of a run, and its summary once it has ended.
RECORD = "ullage_run.json"
#: Trainer's arguments that decide a run's numbers.
_DECIDING = (
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "packing_global_batch_size",
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
#: What the checkpoint's files decide, so that another value would mean nothing.
_OF_THE_MODEL = ("model", "dropout", *AdapterArguments.__dataclass_fields__)
_ALLOWED = ("allow_missing_weights", "allow_pickle_weights", "trust_remote_code")
#: Words for the last checkpoint in the output folder; with none there, a run begins.
LAST = ("true", "last", AUTO)
#: The settings that make up a global batch, of which the last is the batch itself.
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "packing_global_batch_size")


@dataclass(frozen=True)
class Situation:
    """Decision of what a call does with its output folder. All fields empty: a run from the beginning.

    Attributes:
        checkpoint: where to continue from.
        summary: of a run that is finished already, so that nothing is left to do.
        notes: lines to be printed.
        there: whether the step that ``--stop_at_step`` names is reached already.
        named: whether the call names this checkpoint, so that no other will do.
        reason: why a run is continued, printed before the checkpoint's name.
    """

    checkpoint: Path | None = None
    summary: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    there: bool = False
    named: bool = False
    reason: str = ""


def look_at(command: TrainCommand) -> Situation:
    """Decide what to do; changes nothing but a save that was interrupted. Collective: if one rank fails, all raise.

    Raises ``CheckpointError`` for a folder that is not a checkpoint or is damaged, and ``InputError`` for an output
    folder that holds something else.
    """
    with agreement("looking at the output folder"):
        # An ``agreement`` ends when all ranks have come to its end: nobody looks before what was moved aside is back.
        if rank_here() == 0:
            put_back(command.folder)
    checkpoints = listed_in(command.folder)[::-1]
    named = _named(command)
    elsewhere = any(gather(named is not None and named.is_dir()))
    with agreement("looking at the output folder"):
        situation = _look_at(command, checkpoints, elsewhere)
    if situation.checkpoint is None:
        return situation
    checkpoint, lines = _whole(situation, command)
    stop = command.run.stop_at_step
    there = stop is not None and step_of(checkpoint) >= stop
    return replace(situation, checkpoint=checkpoint, notes=(*lines, *situation.notes), there=there)


def outlook(command: TrainCommand) -> str | None:
    """What a run would do with its output folder as it is; None where it would begin there. Changes nothing."""
    try:
        situation = _look_at(command, checkpoints_in(command.folder))
    except UllageError as error:
        return f"a run would be refused: {error}"
    if situation.summary is not None:
        return f"{command.training.output_dir} holds this run, finished: a run would report it"
    if situation.checkpoint is not None:
        return f"a run would continue from {situation.checkpoint}"
    return None


def _whole(situation: Situation, command: TrainCommand) -> tuple[Path, list[str]]:
    """The checkpoint that is whole, the named one or the newest in the folder, and lines to be printed. Collective."""
    checkpoint, allow = situation.checkpoint, command.run.allow_changed_checkpoint
    assert checkpoint is not None
    if situation.named:
        lines = require_whole(checkpoint, allow_changed=allow)
        with agreement("looking at a checkpoint"):
            require_checkpoint(checkpoint)
    else:
        newest, lines = newest_whole(checkpoint.parent, allow_changed=allow)
        assert newest is not None  # there was one
        checkpoint = newest
    shown = checkpoint if checkpoint.parent != command.folder else f"{command.place}/{checkpoint.name}"
    lines.append(f"{situation.reason}continues from {shown}")
    return checkpoint, lines if command.parallel.asked else [*lines, *state_notes(checkpoint)]


def _named(command: TrainCommand) -> Path | None:
    """The checkpoint that a call names."""
    resume = command.training.resume_from_checkpoint
    return None if resume is None or resume.lower() in (*LAST, "false") else Path(resume)


def _look_at(command: TrainCommand, checkpoints: list[Path], elsewhere: bool = False) -> Situation:
    """``checkpoints``: of the output folder, on any host. ``elsewhere``: whether a host has the one that is named."""
    folder = command.folder
    _require_place(folder)
    record = read_record(folder)
    resume = command.training.resume_from_checkpoint
    if resume is not None and resume.lower() != "false":
        named = resume.lower() not in LAST
        # ``--resume_from_checkpoint`` of a run that has ended, with the same settings, reports it again.
        if not named and _finished(record, folder) and not _changed(record, command):
            return Situation(summary=record["summary"] if record else None)
        checkpoint = Path(resume) if named and elsewhere else _to_resume(resume, folder, checkpoints)
        if checkpoint is not None:
            return Situation(checkpoint, notes=_notes_on_settings(checkpoint, command), named=named)
        if not _finished(record, folder) and record is not None:  # it ended before its first checkpoint
            return Situation()
    if command.output.overwrite_output_dir:
        return Situation()
    if record is None:
        _refuse_models(folder, checkpoints)
        return Situation()
    changed = _changed(record, command)
    if changed:
        instead = "start over with --overwrite_output_dir, or give another --output_dir"
        raise InputError(
            "the output folder holds a run with other settings",
            where=str(folder),
            found=", ".join(changed),
            hint=f"continue it with --resume_from_checkpoint, {instead}" if checkpoints else instead,
        )
    if _finished(record, folder):
        return Situation(summary=record["summary"])
    if checkpoints:
        return Situation(checkpoints[-1], reason=f"{command.place} holds this run, unfinished: ")
    return Situation()


def _require_place(folder: Path) -> None:
    """Raise ``InputError`` for a folder that cannot be made, or not be written into; makes none."""
    if folder.exists() and not folder.is_dir():
        raise InputError("the output folder cannot be used", where=str(folder), expected="a folder", found="a file")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError("the output folder cannot be made", where=str(folder), found=f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError("the output folder cannot be written", where=str(folder), found=f"no permission in {there}")


def _finished(record: dict[str, Any] | None, folder: Path) -> bool:
    if record is None or record.get("summary") is None:
        return False
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def begin(command: TrainCommand, situation: Situation) -> None:
    """Make the folder ready and write the settings down; rank 0 calls it, after all checks."""
    folder = command.folder
    folder.mkdir(parents=True, exist_ok=True)
    # What saves of ours left takes up room that this run may need.
    remove_unfinished(folder)
    if command.output.overwrite_output_dir and situation.checkpoint is None:
        # Other files in the folder are not touched.
        for path in checkpoints_in(folder):
            shutil.rmtree(path, ignore_errors=True)
    write_record(folder, command, None)


@contextlib.contextmanager
def no_empty_folder(command: TrainCommand) -> Iterator[None]:
    """Leave no empty output folder behind where the block makes one and an error ends it: Trainer makes it first."""
    made = [path for path in (command.folder, *command.folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # of a folder that holds something
            for path in made:
                path.rmdir()
        raise


@contextlib.contextmanager
def never_begun(command: TrainCommand, checkpoint: Path | None, trainer: Trainer) -> Iterator[None]:
    """Take back the settings of a run that an error ends before its first step, so that a better call is not refused.

    What a library refuses there is said in one line. ``checkpoint``: where the run continues from; its settings stay.
    ``trainer``: asked for its state when the error has come, because training begins with a new one.
    """
    try:
        yield
        if trainer.state.max_steps < 1:
            where = "--num_train_epochs or --max_steps"
            raise InputError("the run has no step", where=where, expected="at least one", found="none")
    except Exception as error:
        state = trainer.state
        # Whatever the steps are: a checkpoint without its settings would be continued with others.
        begun = checkpoint is not None or state.global_step > 0 or checkpoints_in(command.folder)
        if not begun and state.is_world_process_zero:
            for name in (RECORD, LOG):  # the folder goes with its last file, if this call has made it
                with contextlib.suppress(OSError):
                    (command.folder / name).unlink()
        if state.global_step or "log_level" in command.given:  # which shows where an error comes from
            raise
        with one_line_of(CANNOT_BEGIN, kinds=REFUSALS):
            raise error


def _to_resume(resume: str, folder: Path, checkpoints: list[Path]) -> Path | None:
    """The checkpoint that a call names, or the last in the output folder; None if that has none."""
    if resume.lower() not in LAST:
        return Path(resume) if Path(resume).is_dir() else require_checkpoint(resume)
    return checkpoints[-1] if checkpoints else None


def _notes_on_settings(checkpoint: Path, command: TrainCommand) -> tuple[str, ...]:
    """What a call changes of the run that it continues, and what it decides where nobody knows that run's settings.

    Raises ``InputError`` where these are not known and the call names no data: it would train on the default ones.
    Raises ``CheckpointError`` where the call names another model.
    """
    record = read_record(checkpoint.parent)
    if record is not None:
        changed = _changed(record, command)
        model = [each for each in changed if each.split()[0] in _OF_THE_MODEL]
        if model:
            raise CheckpointError(
                "the checkpoint holds another model",
                where=str(checkpoint),
                found=", ".join(model),
                hint="leave out the model arguments to continue with the checkpoint's own",
            )
        return (f"continues with changed settings: {', '.join(changed)}",) if changed else ()
    missing = checkpoint.parent / RECORD
    if "data" not in command.given:
        raise InputError(
            "the settings of the run that this checkpoint belongs to are not known",
            where=str(checkpoint),
            expected=str(missing),
            found="a file that cannot be read" if missing.exists() else "no such file",
            hint="give the arguments of the first call again, at least --data, --learning_rate, --packing_capacity "
            "and the number of steps; without --data a run trains on the docstrings of Python's standard library",
        )
    return (f"the settings of the run before are not known ({missing}); this call's are taken",)


def _changed(record: dict[str, Any] | None, command: TrainCommand) -> list[str]:
    if record is None:
        return []
    before, now = record["settings"], deciding_settings(command)
    batches = [global_batch(each) for each in (before, now)]
    # Only the global batch decides numbers: on other processes, or in other microbatches, it is the same run.
    if None in batches or batches[0] == batches[1]:
        now = {name: value for name, value in now.items() if name not in _BATCH}
    else:
        now.pop("world_size")
        before = {**before, _BATCH[-1]: batches[0]}
    changed = [name for name in now if name in before and before[name] != now[name]]
    return [f"{name} {before[name]} there, {now[name]} here" for name in changed]


def global_batch(settings: Mapping[str, Any]) -> int | None:
    """Sequences of a step, by the settings of a run; None where they do not tell."""
    *factors, whole = (settings.get(name) for name in _BATCH)
    if whole is None and None not in factors:
        whole = math.prod(int(factor or 0) for factor in factors)
    return whole


def kept_global_batch(folder: Path, batch: int, accumulation: int, ranks: int) -> int:
    """Sequences of a step: those of the run in ``folder``, unless the call has other batches than that.

    ``batch``, ``accumulation``, ``ranks``: of the call, whose product is a step otherwise.
    """
    record = read_record(folder)
    if record is not None and tuple(record["settings"].get(name) for name in _BATCH[:2]) == (batch, accumulation):
        return global_batch(record["settings"]) or batch * accumulation * ranks
    return batch * accumulation * ranks


def _refuse_models(folder: Path, checkpoints: list[Path]) -> None:
    """Raise ``InputError`` for a folder that some other program trained into: it is not ours to write over."""
    names = [path.name for path in checkpoints]
    names += [name for name in ("config.json", *WEIGHT_FILES) if (folder / name).exists()]
    if names:
        raise InputError(
            "the output folder holds a model or checkpoints already",
            where=str(folder),
            found=", ".join(names),
            hint="continue with --resume_from_checkpoint and the arguments of that run, start over with "
            "--overwrite_output_dir, or give another --output_dir",
        )


def require_layout_of(checkpoint: Path | None, asked: bool) -> None:
    """Raise ``CheckpointError`` for a checkpoint that this kind of run, with an axis flag or without, cannot continue.

    The engine takes a plain Trainer's as well as its own; the Trainer takes the engine's only converted. ``asked``: the
    run has such a flag.
    """
    if checkpoint is None:
        return
    # Only the engine saves a folder of this name; the Trainer saves weights and optimizer in files of their own.
    is_engines = (checkpoint / MODEL_AND_OPTIMIZER).is_dir()
    if asked and not is_engines and (checkpoint / "latest").is_file():
        raise CheckpointError(
            "a checkpoint of DeepSpeed's is not continued with --dp, --cp or --tp",
            where=str(checkpoint),
            hint="continue it without them on one process, whose checkpoints they take, or convert it for fsdp.load "
            "with ullage convert --to dcp",
        )
    if is_engines and not asked:
        raise CheckpointError(
            "this checkpoint was written with --dp, --cp or --tp",
            where=str(checkpoint),
            hint="give them again, in any layout (--dp 1 for one process), or make one that goes on without them: "
            f"ullage convert {checkpoint} OTHER/{checkpoint.name} --to trainer",
        )


# The record


def deciding_settings(command: TrainCommand) -> dict[str, Any]:
    """The settings that decide the numbers of a run, as they are written to JSON."""
    training = {name: getattr(command.training, name) for name in _DECIDING}
    training["gradient_accumulation_steps"] = command.accumulation
    # Ranks that read different sequences, not processes: those of cp and tp add nothing to the batch.
    training["world_size"] = command.parallel.data_ranks(command.training.world_size)
    settings = {**asdict(command.data), **asdict(command.model), **training}
    if command.adapter.use_peft:
        settings |= asdict(command.adapter)
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
    kept["sample_prompts"] = command.output.sample_prompts
    record = {
        "settings": deciding_settings(command),
        "kept": json.loads(json.dumps(kept, default=str)),
        "revisions": command.revisions,
        "summary": summary,
    }
    with replacing(folder / RECORD) as file:
        file.write(json.dumps(record, indent=1) + "\n")


def taken_over(folder: Path, given: set[str]) -> dict[str, Any]:
    """The settings of the run in ``folder`` for a call that resumes it and gave ``given`` itself."""
    record = read_record(folder)
    if record is None:
        return {}
    settings = {**record.get("kept", {}), **record["settings"]}
    for name in _BATCH[2:]:  # kept_global_batch
        settings.pop(name, None)
    return {name: value for name, value in settings.items() if name not in given and value is not None}


def revisions_before(command: TrainCommand, checkpoint: Path | None) -> dict[str, str]:
    """By argument, what the run in the output folder, or of the checkpoint, took from the cache or the hub."""
    if checkpoint is None and command.output.overwrite_output_dir:
        return {}
    folder = command.folder if checkpoint is None else checkpoint.parent
    return (read_record(folder) or {}).get("revisions") or {}
