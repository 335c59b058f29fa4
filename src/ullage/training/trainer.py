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
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        loss = None
        if has_labels:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        labels = inputs.get(self._label_name) if self._label_name is not None else None
        _, generated, _ = transformers.Seq2SeqTrainer.prediction_step(
            self, model, self._prompts(inputs), prediction_loss_only, ignore_keys, **gen_kwargs
        )
        settings: Any = self.model.generation_config  # pyright: ignore[reportOptionalMemberAccess]
        pad = settings.eos_token_id if settings.pad_token_id is None else settings.pad_token_id
        if isinstance(generated, Tensor):
            rows = [_without_tail(row, pad[0] if isinstance(pad, list) else pad) for row in generated]
            generated = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return loss, generated, labels

    def _prompts(self, inputs: Any) -> dict[str, Any]:
        """What ``generate`` goes on from: the batch without what is to be generated."""
        config = getattr(self._bare_model, "config", None)
        is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
        if isinstance(inputs, RaggedBatch):  # generate() continues at the right end of decoder-only prompts
            inputs = inputs.to_padded(side="right" if is_encoder_decoder else "left")
        hidden = {*self.label_names, "shift_labels"}
        if is_encoder_decoder and _same_shape(inputs, "labels", "decoder_input_ids"):
            hidden |= {"decoder_input_ids", "decoder_attention_mask", "decoder_cu_seq_lens_q"}
        return {name: value for name, value in inputs.items() if name not in hidden}

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        return tensor  # nothing here is concatenated


def _same_shape(inputs: Any, *names: str) -> bool:
    """Whether both are there and one shape: targets, and what the decoder reads where it is to predict them."""
    first, second = (inputs.get(name) for name in names)
    if first is None or second is None:
        return second is None
    return first.is_nested == second.is_nested and (first.is_nested or first.shape == second.shape)


def _without_tail(row: Tensor, pad_token_id: int | None) -> Tensor:
    """A generated row without the padding after its end; one closing token stays where it doubles as padding."""
    if pad_token_id is None:
        return row
    real = (row != pad_token_id).nonzero()
    return row[: int(real[-1]) + 1] if len(real) else row[:1]
