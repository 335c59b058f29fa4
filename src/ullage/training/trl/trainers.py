"""TRL's trainers and configurations, each with ullage's mixin and arguments before it.

A configuration has TRL's defaults and, beside them, the arguments of packing; ``use_cpu`` is on where there is no
accelerator. Importing this module needs TRL.
"""

# TRL's own overrides differ from transformers' signatures, and its names are loaded lazily.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ullage.core.extras import needed_by
from ullage.training.batches.collators import RaggedCollator
from ullage.training.mixin import RaggedTrainerMixin
from ullage.training.saving.checkpoints import WholeCheckpointMixin
from ullage.training.setup.arguments import TrainingArguments

with needed_by("ullage.training.trl", ["trl"]):
    import trl
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


@dataclass
class SFTConfig(trl.SFTConfig, TrainingArguments):
    """``trl.SFTConfig`` and packing."""


@dataclass
class DPOConfig(trl.DPOConfig, TrainingArguments):
    """``trl.DPOConfig`` and packing."""


@dataclass
class KTOConfig(trl.KTOConfig, TrainingArguments):
    """``trl.KTOConfig`` and packing."""


@dataclass
class RewardConfig(trl.RewardConfig, TrainingArguments):
    """``trl.RewardConfig`` and packing."""


@dataclass
class GRPOConfig(trl.GRPOConfig, TrainingArguments):
    """``trl.GRPOConfig`` and packing."""


class SFTTrainer(RaggedTrainerMixin, WholeCheckpointMixin, trl.SFTTrainer):
    """``trl.SFTTrainer`` for sequences of unequal length: TRL prepares the data, ullage packs, trains and evaluates."""

    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        """Refuse masks that nothing has made labels of. TRL asks only beside its own collator, which ours replaces."""
        if isinstance(data_collator, RaggedCollator):
            data_collator = DataCollatorForLanguageModeling(pad_token_id=0)
        super()._reject_skip_prepare_without_labels(datasets, data_collator)


class DPOTrainer(RaggedTrainerMixin, WholeCheckpointMixin, trl.DPOTrainer):
    """``trl.DPOTrainer`` for sequences of unequal length."""


class KTOTrainer(RaggedTrainerMixin, WholeCheckpointMixin, trl.KTOTrainer):
    """``trl.KTOTrainer`` for sequences of unequal length."""


class RewardTrainer(RaggedTrainerMixin, WholeCheckpointMixin, trl.RewardTrainer):
    """``trl.RewardTrainer`` for sequences of unequal length."""


class GRPOTrainer(RaggedTrainerMixin, WholeCheckpointMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer`` for sequences of unequal length."""
