"""A checkpoint of DeepSpeed's, continued on another layout than the one that wrote it.

What DeepSpeed writes is cut for one number of ranks and one ZeRO stage. Continued on the same, it is loaded as it is.
On another:

=====================================  ===============================================================================
here                                   what is done
=====================================  ===============================================================================
DeepSpeed, another size or stage       each rank reads the elements that it needs
no DeepSpeed: one process, or DDP      every process reads weights and optimizer state by name
=====================================  ===============================================================================

Nothing is written. A universal checkpoint that lies there, of the same step or a later one, is taken instead.
The rest of a Trainer's checkpoint (its state, scheduler, random states) is the same for every layout. The global batch
must be the same too if the losses are to go on as they were; ``ullage train`` sees to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ullage.checkpoint import read
from ullage.core.errors import CheckpointError
from ullage.core.replacing import replaced
from ullage.ranks.world import agreement, gather, rank_here
from ullage.training.deepspeed import checkpoints_loaded_by
from ullage.training.deepspeed.content import Content, prefers_universal, shared_content
from ullage.training.deepspeed.loading import load_optimizer, load_ranges, load_weights

if TYPE_CHECKING:
    import transformers

#: The optimizer's state in a Trainer's checkpoint without DeepSpeed.
_PLAIN = "optimizer.pt"


@dataclass(frozen=True)
class ZeroConfig:
    """Layout of a run, as far as it decides how DeepSpeed cuts a checkpoint.

    Attributes:
        stage: of ZeRO; 0 without DeepSpeed.
        ranks: data-parallel ranks.
    """

    stage: int
    ranks: int

    def __str__(self) -> str:
        plural = "process" if self.ranks == 1 else "processes"
        return f"{self.ranks} {plural}, {f'ZeRO {self.stage}' if self.stage else 'without DeepSpeed'}"


@dataclass(frozen=True)
class Conversion:
    """What is done with a checkpoint of another layout so that this run can continue from it, in one line: ``str()``.

    Attributes:
        source: DeepSpeed's folder ``global_stepN`` in the Trainer's checkpoint, or that checkpoint.
        written: ranks and stage that wrote the source.
        here: ranks and stage of this run.
    """

    source: Path
    written: ZeroConfig
    here: ZeroConfig

    def __str__(self) -> str:
        what = "each rank reads its part of it" if self.here.stage else "every process reads it whole"
        return f"{self.source} was written by {self.written}; for {self.here} {what}"


def conversion_for(checkpoint: str | Path, here: ZeroConfig) -> Conversion | None:
    """What is done with ``checkpoint``, a Trainer's folder, on the layout ``here``; None if it loads as it is.

    Reads no tensor data, changes nothing. What we cannot read, such as experts at ZeRO 3, is left to DeepSpeed's own
    loader, which takes it on the layout that wrote it; without DeepSpeed it raises ``CheckpointError``. So does what
    was written without DeepSpeed, for a run under ZeRO, if nothing says which parameter has which state.
    """
    folder = Path(checkpoint)
    if here.stage and prefers_universal(folder):
        return None
    if (folder / "latest").is_file():
        try:
            inventory = read(folder)
        except CheckpointError:
            if here.stage:
                return None
            raise
        # Same layout: load as it is. Stage 0 never is the same, because Trainer cannot load DeepSpeed's files without
        # it.
        written = ZeroConfig(inventory.written_by.stage or 0, inventory.written_by.dp)
        same = here.stage and written == here
        return None if same else Conversion(folder / inventory.folder.name, written, here)
    if not here.stage or not (folder / _PLAIN).is_file():
        return None
    with contextlib.suppress(CheckpointError):
        inventory = read(folder)
        if len(inventory.keys) > 1:
            return Conversion(folder, ZeroConfig(0, inventory.written_by.dp), here)
    raise CheckpointError(
        "what was trained without DeepSpeed cannot be continued under ZeRO",
        where=str(folder / _PLAIN),
        expected="a checkpoint of DeepSpeed's, at any stage, of any size",
        hint="continue without DeepSpeed, on one process or several, or begin a new run from its weights",
    )


class Continuation:
    """Loading of the checkpoint that ``trainer`` continues from, whatever layout wrote it."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._content: Content | None = None

    def conversion_for(self, checkpoint: str | Path) -> Conversion | None:
        """What is done with ``checkpoint`` on the layout of this run; None if it loads as it is.

        Collective; reads no tensor data, changes nothing.
        """
        plugin = self._trainer.accelerator.state.deepspeed_plugin
        here = ZeroConfig(0 if plugin is None else int(plugin.zero_stage), self._trainer.args.world_size)
        if self._trainer.is_deepspeed_enabled and not here.stage:  # without ZeRO every rank has everything
            return None
        conversion = None
        with agreement("reading the checkpoint"):
            if rank_here() == 0:
                conversion = conversion_for(checkpoint, here)
        return gather(conversion)[0]

    @contextlib.contextmanager
    def converted(self, checkpoint: str | None, conversion: Conversion | None) -> Iterator[None]:
        """Within it the Trainer's loaders take ``checkpoint`` by ``conversion``, whatever layout wrote it."""

        def loads_ranges(engine: Any, path: str, strict: bool) -> bool:
            # transformers loads the best checkpoint too, which may be older than the layout of this run.
            is_resumed = checkpoint is not None and Path(path) == Path(checkpoint)
            if (conversion if is_resumed else self.conversion_for(path)) is None:
                return False
            # The resumed one was compared with its manifest as a whole, before the run began.
            load_ranges(engine, path, strict=strict, manifest=not is_resumed)
            return True

        if self._trainer.is_deepspeed_enabled:
            with checkpoints_loaded_by(loads_ranges):
                yield
            return
        with replaced(self, "_content", None if conversion is None else shared_content(conversion.source)):
            yield

    def loads_weights(self, model: torch.nn.Module | None) -> bool:
        """Load weights of another layout into ``model`` (None: the trainer's). Returns whether there were any."""
        if self._content is None:
            return False
        whole: Any = self._trainer.model if model is None else model
        load_weights(whole, self._content)
        return True

    def loads_optimizer(self, checkpoint: str | None) -> bool:
        """Load the optimizer's state of another layout, if any, and the schedule. Returns whether there was any."""
        if self._content is None or checkpoint is None:
            return False
        trainer: Any = self._trainer
        load_optimizer(trainer.optimizer, trainer.model, self._content)
        schedule = Path(checkpoint) / "scheduler.pt"
        if not schedule.is_file():
            raise CheckpointError(
                "the checkpoint lacks the learning rate's schedule",
                where=str(schedule),
                hint="let the Trainer make the scheduler: leave it out of DeepSpeed's config",
            )
        trainer.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
        # A schedule sets the rate when it steps; until then the optimizer has the one it began with.
        for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return True
