"""Training with the Hugging Face Trainer on sequences of unequal length.

Swap one import: ``from ullage.training import Trainer`` in place of ``from transformers import Trainer``. Loaded name
by name, so that a collator does not wait for transformers' trainer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.training.arguments import TrainingArguments
    from ullage.training.collators import PackedSequenceCollator, RaggedCollator, Seq2SeqCollator
    from ullage.training.mixin import RaggedTrainerMixin
    from ullage.training.stopping import StopOnSignal
    from ullage.training.trainer import Seq2SeqTrainer, Trainer

_HOME = {
    "PackedSequenceCollator": "collators",
    "RaggedCollator": "collators",
    "RaggedTrainerMixin": "mixin",
    "Seq2SeqCollator": "collators",
    "Seq2SeqTrainer": "trainer",
    "StopOnSignal": "stopping",
    "Trainer": "trainer",
    "TrainingArguments": "arguments",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ullage.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ullage.training.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


__all__ = [
    "PackedSequenceCollator",
    "RaggedCollator",
    "RaggedTrainerMixin",
    "Seq2SeqCollator",
    "Seq2SeqTrainer",
    "StopOnSignal",
    "Trainer",
    "TrainingArguments",
]
