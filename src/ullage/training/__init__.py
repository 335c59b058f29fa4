"""Training with the Hugging Face Trainer on sequences of unequal length.

Swap one import: ``from ullage.training import Trainer`` in place of ``from transformers import Trainer``. Loaded name
by name, so that a collator does not wait for transformers' trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.core.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.training.setup.arguments import (
        Seq2SeqTrainingArguments as Seq2SeqTrainingArguments,
        TrainingArguments as TrainingArguments,
    )
    from ullage.training.batches.collators import (
        PackedSequenceCollator as PackedSequenceCollator,
        RaggedCollator as RaggedCollator,
        Seq2SeqCollator as Seq2SeqCollator,
    )
    from ullage.training.loss.sequence_logps import SequenceLogps as SequenceLogps, sequence_logps as sequence_logps
    from ullage.training.mixin import RaggedTrainerMixin as RaggedTrainerMixin
    from ullage.training.step.stopping import StopOnSignal as StopOnSignal
    from ullage.training.trainer import Seq2SeqTrainer as Seq2SeqTrainer, Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "setup.arguments": ["Seq2SeqTrainingArguments", "TrainingArguments"],
            "batches.collators": ["PackedSequenceCollator", "RaggedCollator", "Seq2SeqCollator"],
            "loss.sequence_logps": ["SequenceLogps", "sequence_logps"],
            "mixin": ["RaggedTrainerMixin"],
            "step.stopping": ["StopOnSignal"],
            "trainer": ["Seq2SeqTrainer", "Trainer"],
        },
    )
