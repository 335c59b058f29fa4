"""transformers' trainers for sequences of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

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

    With ``predict_with_generate``, generated sequences and labels are padded as transformers pads them.
    """

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        if not getattr(self.args, "predict_with_generate", False) or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        # The loss is computed by forward, on the whole batch; generation below sees the prompts only.
        loss = super().prediction_step(model, inputs, True, ignore_keys)[0] if has_labels else None
        prompts = self._prompts(inputs)
        _, generated, _ = super().prediction_step(model, prompts, False, ignore_keys, **gen_kwargs)
        return loss, generated, self._padded_as_generated(inputs[str(self._reader.label_name)]) if has_labels else None

    def _prompts(self, inputs: Any) -> dict[str, Any]:
        """The prompts that ``generate`` goes on from: the batch without what is to be generated."""
        is_encoder_decoder, sequences = self._reader.takes_pairs, self._evaluator.sequences
        if sequences is not None and not is_encoder_decoder:  # generate() continues at the right end of its prompts
            inputs = sequences.to_padded({"input_ids": self._reader.pad_token_id}, side="left")
        hidden = {*self.label_names, "shift_labels"}
        if is_encoder_decoder and _same_shape(inputs, "labels", "decoder_input_ids"):
            hidden |= {"decoder_input_ids", "decoder_attention_mask", "decoder_cu_seq_lens_q"}
        return {name: value for name, value in inputs.items() if name not in hidden}

    def _padded_as_generated(self, labels: Tensor) -> Tensor:
        """Labels [N, L], behind which transformers lays as much padding as it allows a generated sequence."""
        labels = self._prepare_input(labels)
        settings: Any = self.model.generation_config  # pyright: ignore[reportOptionalMemberAccess]
        if labels.shape[-1] < settings.max_length:
            return self._pad_tensors_to_max_len(labels, settings.max_length)
        if settings.max_new_tokens is not None and labels.shape[-1] < settings.max_new_tokens + 1:
            return self._pad_tensors_to_max_len(labels, settings.max_new_tokens + 1)
        return labels

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Any:
        ids = (getattr(self.processing_class, "pad_token_id", None), getattr(self._reader.model, "config", None))
        if ids[0] is None and getattr(ids[1], "pad_token_id", None) is None:
            return tensor  # without an id of padding, it is padded with -100 beside longer ones
        return super()._pad_tensors_to_max_len(tensor, max_length)


def _same_shape(inputs: Any, *names: str) -> bool:
    """Whether the second field is absent or has the shape of the first.

    Decoder inputs of the labels' shape were made from them, so they give away the answer; others are a prompt.
    """
    first, second = (inputs.get(name) for name in names)
    if first is None or second is None:
        return second is None
    return first.shape == second.shape
