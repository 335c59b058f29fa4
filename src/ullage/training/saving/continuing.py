"""A checkpoint of DeepSpeed's, continued on another layout than the one that wrote it.

What DeepSpeed writes is cut for one number of ranks and one ZeRO stage. Continued on the same, it is loaded as it is.
On another:

=====================================  ===============================================================================
here                                   what is done
=====================================  ===============================================================================
DeepSpeed, another size or stage       each rank reads the elements that it needs
no DeepSpeed: one process, or DDP      every process reads weights and optimizer state by name
=====================================  ===============================================================================

Nothing is written (:mod:`ullage.training.deepspeed`).

A universal checkpoint that lies there, of the same step or a later one, is taken instead.
The rest of a Trainer's checkpoint (its state, scheduler, random states) is the same for every layout. The global batch
must be the same too if the losses are to go on as they were; ``ullage train`` sees to that.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ullage.checkpoint import Inventory, read
from ullage.core.errors import CheckpointError
from ullage.ranks.world import agreement, gather, rank_here, several_ranks
from ullage.training.deepspeed import checkpoints_loaded_by
from ullage.training.deepspeed.content import Content, prefers_universal, shared_content
from ullage.training.deepspeed.loading import load_optimizer, load_ranges, load_weights
from ullage.training.saving.checkpoints import put_back
from ullage.training.saving.resuming import newest_whole, noise_note, require_whole, state_notes
from ullage.training.saving.staging import require_shared
from ullage.training.setup import fsdp
from ullage.training.setup.releases import counts_own_steps
from ullage.training.setup.sharding import sharding_of

if TYPE_CHECKING:
    import transformers

#: The word for the newest whole checkpoint, or a beginning where there is none.
AUTO = "auto"
_LATEST = "latest"
#: The optimizer's state in a Trainer's checkpoint without DeepSpeed.
_PLAIN = "optimizer.pt"
#: What Trainer divides a sum of losses by where no step was taken.
_NO_STEPS = 0.001
_LOG = logging.getLogger(__name__)


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
    is_native = (folder / _LATEST).is_file()
    is_plain = not is_native and (folder / _PLAIN).is_file()
    if not is_native and not (here.stage and is_plain):
        return None
    try:
        inventory = read(folder)
    except CheckpointError:
        if here.stage and not is_plain:
            return None
        if not is_plain:
            raise
        inventory = None
    if is_plain:
        return _from_plain(folder, inventory, here)
    assert inventory is not None
    # Same layout: load as it is. Stage 0 never is the same, because Trainer cannot load DeepSpeed's files without it.
    written = ZeroConfig(inventory.written_by.stage or 0, inventory.written_by.dp)
    if here.stage and written == here:
        return None
    return Conversion(folder / inventory.folder.name, written, here)


def _from_plain(folder: Path, inventory: Inventory | None, here: ZeroConfig) -> Conversion:
    """A checkpoint without DeepSpeed under ZeRO: read by ranges where its optimizer state has names."""
    if inventory is None or len(inventory.keys) < 2:
        raise CheckpointError(
            "what was trained without DeepSpeed cannot be continued under ZeRO",
            where=str(folder / _PLAIN),
            expected="a checkpoint of DeepSpeed's, at any stage, of any size",
            hint="continue without DeepSpeed, on one process or several, or begin a new run from its weights",
        )
    return Conversion(folder, ZeroConfig(0, inventory.written_by.dp), here)


class Continuation:
    """Choice and loading of the checkpoint that ``trainer`` continues from."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._conversion: Conversion | None = None
        self._content: Content | None = None
        self._begun_at = 0

    def whole_checkpoint(self, asked: Any, allow_changed: bool) -> Any:
        """The checkpoint to resume from, known to be whole; ``asked`` is as for ``train``, or None. Collective.

        Says on rank 0 what a checkpoint lacks, and which damaged ones are passed over.
        """
        chosen = self._chosen(asked, allow_changed)
        if several_ranks() and self._trainer.args.save_strategy != "no":
            require_shared(Path(self._trainer.args.output_dir or "."))
        return chosen

    def _chosen(self, asked: Any, allow_changed: bool) -> Any:
        if not isinstance(asked, (str, Path)) and asked is not True:
            return asked
        args, begins = self._trainer.args, str(asked).lower() == AUTO
        # A save that was killed between its two renames may have moved the only good checkpoint aside.
        with agreement("looking for a checkpoint"):
            if rank_here() == 0:
                put_back(Path(args.output_dir or ".") if begins or asked is True else Path(asked).parent)
        if begins or asked is True:  # the last one, which transformers would look for by itself
            folder = Path(args.output_dir or ".")
            checkpoint, notes = newest_whole(folder, allow_changed=allow_changed, optimizer=False)
        else:
            checkpoint = Path(asked)
            if not any(gather(checkpoint.is_dir())):
                return str(checkpoint)
            notes = require_whole(checkpoint, allow_changed=allow_changed)
        if checkpoint is None:
            return None if begins else asked
        notes += state_notes(checkpoint)
        if (noise := noise_note(checkpoint, self._trainer.model)) is not None:
            notes.append(noise)
        if args.process_index == 0:
            for note in notes:
                _LOG.warning(note)
        return str(checkpoint)

    def conversion_for(self, checkpoint: str | Path) -> Conversion | None:
        """What is done with ``checkpoint`` on the layout of this run; None if it loads as it is.

        Collective; reads no tensor data, changes nothing.
        """
        if sharding_of(self._trainer.model) is not None:  # it takes any layout
            return None
        plugin = self._trainer.accelerator.state.deepspeed_plugin
        here = ZeroConfig(0 if plugin is None else int(plugin.zero_stage), self._trainer.args.world_size)
        if self._trainer.is_deepspeed_enabled and not here.stage:  # without ZeRO every rank has everything
            return None
        conversion = None
        with agreement("reading the checkpoint"):
            if rank_here() == 0:
                conversion = conversion_for(checkpoint, here)
        conversion = gather(conversion)[0]
        if conversion is not None and not conversion.here.stage and self._trainer.is_fsdp_enabled:
            raise CheckpointError(
                "a checkpoint of DeepSpeed's cannot be continued under accelerate's FSDP",
                where=str(checkpoint),
                hint="continue with DeepSpeed, or on DDP or one process",
            )
        fsdp.require_readable(Path(checkpoint), self._trainer.is_fsdp_enabled)
        return conversion

    @contextlib.contextmanager
    def converted(self, checkpoint: str | None) -> Iterator[None]:
        """Within it the Trainer's loaders take ``checkpoint`` whatever layout wrote it."""
        self._conversion = None if checkpoint is None else self.conversion_for(checkpoint)
        state = Path(checkpoint or "") / TRAINER_STATE_NAME
        self._begun_at = TrainerState.load_from_json(str(state)).global_step if checkpoint and state.is_file() else 0
        try:
            if self._trainer.is_deepspeed_enabled:
                with checkpoints_loaded_by(partial(self._loads_ranges, checkpoint)):
                    yield
            else:
                if self._conversion is not None:
                    self._content = shared_content(self._conversion.source)
                yield
        finally:
            self._conversion = self._content = None

    def _loads_ranges(self, resumed: str | None, engine: Any, path: str, strict: bool) -> bool:
        """Load the checkpoint at ``path`` by ranges if it is of another layout. Returns whether it was."""
        # transformers loads the best checkpoint too, which may be older than the layout of this run.
        is_resumed = resumed is not None and Path(path) == Path(resumed)
        if (self._conversion if is_resumed else self.conversion_for(path)) is None:
            return False
        # The resumed one was compared with its manifest as a whole, before the run began.
        load_ranges(engine, path, strict=strict, manifest=not is_resumed)
        return True

    def loads_weights(self, model: torch.nn.Module | None) -> bool:
        """Load weights of another layout into ``model`` (None: the trainer's). Returns whether there were any."""
        if self._content is None:
            return False
        whole: Any = self._trainer.model if model is None else model
        load_weights(whole, self._content)
        return True

    def loads_optimizer(self, checkpoint: str | None) -> bool:
        """Load the optimizer's state of another layout, if any, and the schedule. Returns whether there was any.

        Of a sharded model everything is loaded here, its weights too.
        """
        sharding = sharding_of(self._trainer.model)
        if sharding is not None and checkpoint is not None:
            sharding.load(Path(checkpoint), self._trainer.model, self._trainer.optimizer, self._trainer.lr_scheduler)
            return True
        if self._content is None:
            return False
        assert checkpoint is not None
        model: Any = self._trainer.model
        optimizer: Any = self._trainer.optimizer
        scheduler: Any = self._trainer.lr_scheduler
        load_optimizer(optimizer, model, self._content)
        schedule = Path(checkpoint) / "scheduler.pt"
        if not schedule.is_file():
            raise CheckpointError(
                "the checkpoint lacks the learning rate's schedule",
                where=str(schedule),
                hint="let the Trainer make the scheduler: leave it out of DeepSpeed's config",
            )
        scheduler.load_state_dict(torch.load(schedule, weights_only=True))
        # A schedule sets the rate when it steps; until then the optimizer has the one it began with.
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return True

    def settle_loss(self) -> None:
        """Set the training loss that a run with no step left reports: the mean over the logged steps of its state."""
        trainer = self._trainer
        if trainer.state.global_step == self._begun_at > 0:
            # _finalize_training divides this sum by the steps of this call, none, or 0.001, so that the mean is left.
            steps = _NO_STEPS if counts_own_steps() else trainer.state.global_step
            trainer._total_loss_scalar = steps * mean_loss(trainer.state)


def mean_loss(state: TrainerState) -> float:
    """The mean training loss of all steps up to the last one that was logged; nan if none was."""
    total, before = 0.0, 0
    for row in state.log_history:
        if "loss" in row:
            # A logged loss is the mean over the steps since the last log, so it counts as often as there were steps.
            total += float(row["loss"]) * (int(row["step"]) - before)
            before = int(row["step"])
    return total / before if before else math.nan
