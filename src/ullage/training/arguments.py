"""The arguments of a training run: transformers' own, with defaults that suit sequences of unequal length."""

from __future__ import annotations

from dataclasses import dataclass

import transformers


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments``; plain ones work with our Trainer too."""
