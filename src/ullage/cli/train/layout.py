"""Training over ``--dp --cp --tp``: the model spread over the axes, and which kind of run wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER
from ullage.cli.train.settings import TrainCommand
from ullage.engines import fsdp
from ullage.errors import CheckpointError
from ullage.training import Trainer
from ullage.training.arguments import form_process_group

#: Slots a rank holds in a microbatch unless --packing_capacity is given: over axes every run is packed.
_CAPACITY = 8192


def parallel_trainer(command: TrainCommand, model: Any, **others: Any) -> Trainer:
    """The trainer of a model that is spread over the axes that the call asks for; ``others`` as for the trainer."""
    sizes, arguments = command.parallel, command.training
    form_process_group(arguments)  # before the axes are made of its ranks
    if arguments.packing_capacity is None:
        arguments.packing_capacity = _CAPACITY
    topology = fsdp.make_topology(dp=sizes.dp, cp=sizes.cp or 1, tp=sizes.tp or 1)
    dtype = torch.bfloat16 if arguments.bf16 else None
    options: dict[str, Any] = {"cp_method": sizes.cp_method, "dp_replicate": sizes.dp_replicate, "dtype": dtype}
    return Trainer(fsdp.parallelize(model, topology, **options), arguments, **others)


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
