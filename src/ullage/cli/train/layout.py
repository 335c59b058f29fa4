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
    return fsdp.Trainer(args=command.training, topology=topology, cp_method=sizes.cp_method, **others)


def require_layout_of(checkpoint: Path | None, asked: bool) -> None:
    """Raise ``CheckpointError`` for a checkpoint of the other kind of run. ``asked``: this one has an axis flag."""
    # Only the engine saves a folder of this name; the Trainer saves weights and optimizer in files of their own.
    if checkpoint is None or (checkpoint / WEIGHTS).is_dir() == asked:
        return
    written, hint = "with", "give them again, in any layout: --dp 1 for one process"
    if asked:
        written = "without"
        hint = f"continue it without them, or begin another run from its weights: --model {checkpoint} --output_dir ..."
    raise CheckpointError(f"this checkpoint was written {written} --dp, --cp or --tp", where=str(checkpoint), hint=hint)
