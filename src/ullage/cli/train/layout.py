"""Training over ``--dp --cp --tp``: the engine's trainer, and which kind of run wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ullage.cli.train.progress import Meter
from ullage.cli.train.settings import TrainCommand
from ullage.engines import fsdp
from ullage.engines.fsdp.trainer import WEIGHTS
from ullage.errors import CheckpointError
from ullage.exchange import PackedStep
from ullage.training.arguments import form_process_group
from ullage.training.packing import PackedBatch


class MeasuredTrainer(fsdp.Trainer):
    """The engine's trainer of a command; counts what it trains on.

    command: the call, whose ``parallel`` gives the sizes of the axes.
    meter: counts tokens, and is a callback.
    Others as for :class:`ullage.engines.fsdp.Trainer`.
    """

    def __init__(self, command: TrainCommand, meter: Meter, **others: Any) -> None:
        sizes, self._meter = command.parallel, meter
        form_process_group(command.training)  # before the axes are made of its ranks
        super().__init__(
            args=command.training,
            callbacks=[meter],
            topology=fsdp.make_topology(dp=sizes.dp, cp=sizes.cp or 1, tp=sizes.tp or 1),
            cp_method=sizes.cp_method,
            **others,
        )

    def training_step(self, step: PackedStep) -> fsdp.StepResult:
        if self.topology.cp.rank == self.topology.tp.rank == 0:  # the others have the same sequences
            self._meter.count(PackedBatch(tuple(step.microbatches), step.plan))
        return super().training_step(step)


def require_layout_of(checkpoint: Path | None, asked: bool) -> None:
    """Raises ``CheckpointError`` for a checkpoint of the other kind of run."""
    if checkpoint is None or (checkpoint / WEIGHTS).is_dir() == asked:
        return
    written, hint = "with", "give them again, in any layout: --dp 1 for one process"
    if asked:
        written = "without"
        hint = f"continue it without them, or begin another run from its weights: --model {checkpoint} --output_dir ..."
    raise CheckpointError(f"this checkpoint was written {written} --dp, --cp or --tp", where=str(checkpoint), hint=hint)
