"""transformers' trainers for sequences of unequal length."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ullage.batch import RaggedBatch
from ullage.training.mixin import RaggedTrainerMixin
from ullage.training.saving import WholeCheckpointMixin


class Trainer(RaggedTrainerMixin, WholeCheckpointMixin, transformers.Trainer):
    """``transformers.Trainer`` that trains, evaluates and predicts on sequences of unequal length.

    Everything that transformers documents holds. What differs is said in :class:`RaggedTrainerMixin`.
    """


class Seq2SeqTrainer(RaggedTrainerMixin, WholeCheckpointMixin, transformers.Seq2SeqTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """``transformers.Seq2SeqTrainer`` for sequences of unequal length.

    With ``predict_with_generate``, generated sequences and labels come back in their true length, without padding.
    """

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        generates = getattr(self.args, "predict_with_generate", False)
        if not generates or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        config = self.model.config  # pyright: ignore[reportOptionalMemberAccess]
        if isinstance(inputs, RaggedBatch):  # generate() continues at the right end of decoder-only prompts
            inputs = inputs.to_padded(side="right" if getattr(config, "is_encoder_decoder", False) else "left")
        loss, generated, labels = transformers.Seq2SeqTrainer.prediction_step(
            self, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
        )
        if isinstance(generated, Tensor):
            pad: Any = self.model.generation_config.pad_token_id  # pyright: ignore
            generated = torch.nested.nested_tensor([_without_tail(row, pad) for row in generated], layout=torch.jagged)
        return loss, generated, labels


def _without_tail(row: Tensor, pad_token_id: int | None) -> Tensor:
    """A generated row without the padding after its end; one closing token stays where it doubles as padding."""
    if pad_token_id is None:
        return row
    real = (row != pad_token_id).nonzero()
    return row[: int(real[-1]) + 1] if len(real) else row[:1]
