"""The place of a run in its epochs, and what a checkpoint has to say so that the place is found again.

transformers finds it by the number of steps in an epoch: one batch of each rank per step. Two runs are elsewhere. Under
packing, ranks that still have data give more batches than steps; and an epoch of iterable data ends when the data do,
while transformers takes all steps of the run for one epoch. Both are kept with the trainer's state, only then.

Source: transformers 5.23 ``trainer.py``, ``_init_training_state`` and ``_run_epoch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.errors import CheckpointError
from ullage.layout import Int64
from ullage.training.sharding import data_ranks, sharding_of

#: The place in the trainer's state, under ``stateful_callbacks``: ``steps`` drawn in the epoch, batches ``given`` by
#: each rank, and the number of the ``epoch`` if it is not the one that transformers computes.
_DRAWN = "ullage_batches_drawn"


@dataclass
class Epoch:
    """Progress through the running epoch.

    Attributes:
        given: [ranks], batches drawn so far.
        live: [ranks], whether a rank's data have not ended.
        number: of the epoch, from 0.
        steps: drawn so far.
        steps_before: of the run before this epoch, as transformers counts them.
        recorded: skipped batches of this rank whose indices were recorded before those of the first one drawn.
        ahead: batches of this rank that are still to be skipped, because a step before the checkpoint took them.
        ended: whether no rank draws any further step.
    """

    given: Int64
    live: np.ndarray
    number: int = 0
    steps: int = 0
    steps_before: int = 0
    recorded: int = 0
    ahead: int = 0
    ended: bool = False

    @classmethod
    def of(cls, ranks: int, number: int = 0, steps_before: int = 0) -> Epoch:
        return cls(np.zeros(ranks, np.int64), np.ones(ranks, bool), number, steps_before=steps_before)


def continued(trainer: Any, progress: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords of transformers' ``_run_epoch``, with the place that a checkpoint tells.

    None for an epoch that was trained before the checkpoint.
    """
    if _resumes(trainer, progress):
        _require_same_steps(trainer, progress["num_update_steps_per_epoch"])
    kept: Any = trainer.state.stateful_callbacks.get(_DRAWN)
    number = progress.get("epoch", 0)
    if not _resumes(trainer, progress) or not isinstance(kept, dict) or number > kept.get("epoch", -1):
        return progress
    if number < kept["epoch"]:
        return None
    steps = kept["steps"] * trainer.args.gradient_accumulation_steps
    return {**progress, "epochs_trained": number, "steps_trained_in_current_epoch": steps}


def _require_same_steps(trainer: Any, steps_per_epoch: int) -> None:
    """Raise ``CheckpointError`` where a sharded model would go on with steps of another number of sequences."""
    state, (_, ranks) = trainer.state, data_ranks(trainer)
    if sharding_of(trainer.model) is None or not state.epoch:
        return
    before = state.global_step / state.epoch
    if abs(before - steps_per_epoch) >= 0.5:
        each = trainer.args.per_device_train_batch_size
        raise CheckpointError(
            "the run would go on with steps of another size",
            where=f"step {state.global_step}",
            expected=f"{before:.0f} steps in an epoch; here {steps_per_epoch}",
            found=f"{each * ranks} sequences: {ranks} ranks of dp with {each} each",
            hint="choose per_device_train_batch_size and dp whose product is that of the run",
        )


def begin(
    trainer: Any,
    epoch: int = 0,
    epochs_trained: int = 0,
    steps_trained_in_current_epoch: int = 0,
    num_update_steps_per_epoch: int = 0,
    **others: Any,
) -> Epoch:
    """The beginning of the epoch: at its first batch, or behind those that were trained on before a checkpoint."""
    args = trainer.args
    rank, number = data_ranks(trainer)
    begun = Epoch.of(number, epoch, epoch * num_update_steps_per_epoch)
    drawn = trainer.state.stateful_callbacks.pop(_DRAWN, None)
    if not _resumes(trainer, others) or epoch != epochs_trained or not steps_trained_in_current_epoch:
        return begun
    # transformers skips one batch per trained step (accelerate's skip_first_batches). SkipBatchSampler still draws
    # them from the recorded sampler, so their indices wait in front of those of the first real batch.
    begun.recorded = steps_trained_in_current_epoch
    begun.steps = begun.recorded // args.gradient_accumulation_steps
    begun.given[:] = begun.steps
    # Under packing a rank may have drawn more batches than steps (its peers ended first) or fewer (its own data
    # ended). Those ahead are skipped here in addition; a rank with fewer has nothing left.
    if drawn is not None and drawn["steps"] == begun.steps and len(drawn["given"]) == len(begun.given):
        begun.given = np.array(drawn["given"], np.int64)
        begun.live = begun.given >= begun.steps
        begun.ahead = max(0, int(begun.given[rank]) - begun.steps)
    return begun


def keep_place(trainer: Any, epoch: Epoch) -> None:
    """Count a step that was drawn, and keep for a checkpoint what transformers would not find again."""
    epoch.steps += 1
    elsewhere = epoch.steps_before + epoch.steps != trainer.state.global_step + 1
    # What is resumed skips one batch a step; this says which ranks are further, or have ended.
    if elsewhere or len(set(epoch.given.tolist())) > 1:
        kept: dict[str, Any] = {"steps": epoch.steps, "given": epoch.given.tolist()}
        trainer.state.stateful_callbacks[_DRAWN] = kept | ({"epoch": epoch.number} if elsewhere else {})


def _resumes(trainer: Any, progress: dict[str, Any]) -> bool:
    return progress.get("resume_from_checkpoint") is not None and not trainer.args.ignore_data_skip
