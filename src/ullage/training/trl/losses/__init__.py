"""The losses of TRL's trainers that take padded rows, on packed sequences. Nothing of TRL is imported."""

from __future__ import annotations

from typing import Any

from ullage.training.loss.divisions import nearest_in
from ullage.training.step.padded_loss import PaddedLoss
from ullage.training.trl.losses.preferences import PairLoss, UnpairedLoss
from ullage.training.trl.losses.rollouts import RolloutLoss

_KINDS: dict[str, type[PaddedLoss]] = {
    "trl.trainer.dpo_trainer.DPOTrainer": PairLoss,
    "trl.trainer.grpo_trainer.GRPOTrainer": RolloutLoss,
    "trl.trainer.kto_trainer.KTOTrainer": UnpairedLoss,
    "trl.trainer.reward_trainer.RewardTrainer": PairLoss,
}


def padded_loss_of(trainer: Any) -> PaddedLoss | None:
    """What packs a trainer whose loss takes padded rows; None for any other trainer."""
    kind = nearest_in(_KINDS, type(trainer))
    return None if kind is None else kind(trainer)
