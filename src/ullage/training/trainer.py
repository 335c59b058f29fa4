"""transformers' trainers for sequences of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.training.mixin import RaggedTrainerMixin
from ullage.training.saving.checkpoints import WholeCheckpointMixin

if TYPE_CHECKING:
    import datasets
    from torch.utils.data import Dataset
    from transformers import DataCollator, EvalPrediction, PreTrainedModel, TrainerCallback
    from transformers.trainer_utils import PredictionOutput

    Samples = Dataset[Any] | datasets.Dataset | datasets.IterableDataset | Sequence[Mapping[str, Any]]


class Trainer(RaggedTrainerMixin, WholeCheckpointMixin, transformers.Trainer):
    """``transformers.Trainer`` that trains, evaluates and predicts on sequences of unequal length.

    Everything that transformers documents holds. What differs is said in :class:`RaggedTrainerMixin`.
    """

    if TYPE_CHECKING:
        # transformers' parameters; its annotations refuse a list of dicts, which it takes.
        def __init__(
            self,
            model: PreTrainedModel | nn.Module | None = None,
            args: transformers.TrainingArguments | None = None,
            data_collator: DataCollator | None = None,
            train_dataset: Samples | None = None,
            eval_dataset: Samples | Mapping[str, Samples] | None = None,
            processing_class: Any = None,
            model_init: Callable[..., PreTrainedModel] | None = None,
            compute_loss_func: Callable[..., Any] | None = None,
            compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
            callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
            optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
            optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
            preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        ) -> None: ...

        def evaluate(
            self,
            eval_dataset: Samples | Mapping[str, Samples] | None = None,
            ignore_keys: list[str] | None = None,
            metric_key_prefix: str = "eval",
        ) -> dict[str, float]: ...

        def predict(
            self, test_dataset: Samples, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
        ) -> PredictionOutput: ...


class Seq2SeqTrainer(RaggedTrainerMixin, WholeCheckpointMixin, transformers.Seq2SeqTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """``transformers.Seq2SeqTrainer`` for sequences of unequal length.

    With ``predict_with_generate``, generated sequences and labels are padded as transformers pads them; with
    ``ragged_predictions`` they come back in their true length.
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
        # The loss is computed by forward, on the whole batch; generation below sees the prompts only.
        if has_labels:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        ragged = self._evaluator.predictor.by_sample
        prompts = self._prompts(inputs)
        _, generated, _ = transformers.Seq2SeqTrainer.prediction_step(
            self, model, prompts, prediction_loss_only, ignore_keys, **gen_kwargs
        )
        if not ragged:
            return loss, generated, self._padded_as_generated(inputs) if has_labels else None
        labels = inputs.get(self._reader.label_name) if self._reader.label_name is not None else None
        if isinstance(generated, Tensor):
            generated = torch.nested.nested_tensor(self._without_padding(generated, prompts), layout=torch.jagged)
        return loss, generated, labels

    def _prompts(self, inputs: Any) -> dict[str, Any]:
        """The prompts that ``generate`` goes on from: the batch without what is to be generated."""
        config = getattr(self._reader.model, "config", None)
        is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
        if isinstance(inputs, RaggedBatch):  # generate() continues at the right end of decoder-only prompts
            ids = {"input_ids": self._reader.pad_token_id}
            inputs = inputs.to_padded(ids, side="right" if is_encoder_decoder else "left")
        hidden = {*self.label_names, "shift_labels"}
        if is_encoder_decoder and _same_shape(inputs, "labels", "decoder_input_ids"):
            hidden |= {"decoder_input_ids", "decoder_attention_mask", "decoder_cu_seq_lens_q"}
        return {name: value for name, value in inputs.items() if name not in hidden}

    def _without_padding(self, rows: Tensor, prompts: dict[str, Any]) -> list[Tensor]:
        """Generated rows without what lies before their prompt and after their end."""
        settings: Any = self.model.generation_config  # pyright: ignore[reportOptionalMemberAccess]
        end, pad = settings.eos_token_id, settings.pad_token_id
        ends = [] if end is None else list(end) if isinstance(end, (list, tuple)) else [end]
        main, mask = prompts.get(self._reader.main_input), prompts.get("attention_mask")
        # width: tokens before the first generated one. An encoder-decoder's rows begin with its start token, which may
        # be the padding or end id; decoder-only rows begin with their prompt, padded on the left up to `starts`.
        width, starts = 1, [0] * len(rows)
        if not getattr(getattr(self._reader.model, "config", None), "is_encoder_decoder", False):
            width = main.shape[1] if isinstance(main, Tensor) else 0
            if isinstance(mask, Tensor) and mask.shape == (len(rows), width):
                starts = (mask != 0).int().argmax(1).tolist()
        return [row[start : _length(row, width, ends, pad)] for row, start in zip(rows, starts, strict=True)]

    def _padded_as_generated(self, inputs: Any) -> Tensor:
        """Labels [N, L], behind which transformers lays as much padding as it allows a generated sequence."""
        labels = self._evaluator.predictor.field_rows(inputs, str(self._reader.label_name))
        settings: Any = self.model.generation_config  # pyright: ignore[reportOptionalMemberAccess]
        if labels.shape[-1] < settings.max_length:
            return self._pad_tensors_to_max_len(labels, settings.max_length)
        if settings.max_new_tokens is not None and labels.shape[-1] < settings.max_new_tokens + 1:
            return self._pad_tensors_to_max_len(labels, settings.max_new_tokens + 1)
        return labels

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Any:
        ids = (getattr(self.processing_class, "pad_token_id", None), getattr(self._reader.model, "config", None))
        if self._evaluator.predictor.by_sample or (ids[0] is None and getattr(ids[1], "pad_token_id", None) is None):
            return tensor  # without an id of padding, it is padded with -100 beside longer ones
        return super()._pad_tensors_to_max_len(tensor, max_length)


def _same_shape(inputs: Any, *names: str) -> bool:
    """Whether the second field is absent or has the shape of the first.

    Decoder inputs of the labels' shape were made from them, so they give away the answer; others are a prompt.
    """
    first, second = (inputs.get(name) for name in names)
    if first is None or second is None:
        return second is None
    return first.is_nested == second.is_nested and (first.is_nested or first.shape == second.shape)


def _length(row: Tensor, width: int, ends: list[int], pad: int | None) -> int:
    """The end of a generated row: after the first end behind its prompt of ``width``, else before its padding."""
    new = row[width:]
    ended = torch.isin(new, torch.tensor(ends, device=row.device)).nonzero() if ends else []
    if len(ended):
        return width + int(ended[0]) + 1
    real = [] if pad is None else (new != pad).nonzero()
    return len(row) if pad is None else width + (int(real[-1]) + 1 if len(real) else 0)
