"""Training over ``--dp --cp --tp``: the engine's trainer, and which kind of run wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ullage.cli.train.settings import TrainCommand
from ullage.engines import fsdp
from ullage.engines.fsdp.trainer import WEIGHTS
from ullage.errors import CheckpointError
from ullage.training.arguments import form_process_group


def parallel_trainer(command: TrainCommand, **others: Any) -> fsdp.Trainer:
    """The engine's trainer with the axes that the call asks for; ``others`` as for the trainer."""
    sizes = command.parallel
    form_process_group(command.training)  # before the axes are made of its ranks
    topology = fsdp.make_topology(dp=sizes.dp, cp=sizes.cp or 1, tp=sizes.tp or 1)
    options = {"cp_method": sizes.cp_method, "dp_replicate": sizes.dp_replicate}
    return fsdp.Trainer(args=command.training, topology=topology, **options, **others)


def require_layout_of(checkpoint: Path | None, asked: bool) -> None:
    """Raise ``CheckpointError`` for a checkpoint that this kind of run, with an axis flag or without, cannot continue.

    The engine takes a plain Trainer's as well as its own; the Trainer takes the engine's only converted. ``asked``: the
    run has such a flag.
    """
    if checkpoint is None:
        return
    # Only the engine saves a folder of this name; the Trainer saves weights and optimizer in files of their own.
    is_engines = (checkpoint / WEIGHTS).is_dir()
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
