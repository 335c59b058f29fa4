"""Evaluation and prediction of a Trainer on sequences of unequal length, as a mixin.

Each sample counts exactly once (``shares``), losses are weighed by the labels that count and reduced once, after the
loop (``records``), and outputs come back sample by sample in the order of the dataset (``forms``). A problem on one
rank travels with that reduction, so every rank raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from ullage.batch import RaggedBatch
from ullage.errors import DistributedError
from ullage.training import counting, forms
from ullage.training.packing import PackingMixin
from ullage.training.records import Record, missing_labels
from ullage.training.shares import EvaluationLoader


class EvaluationMixin(PackingMixin):
    """The part of :class:`RaggedTrainerMixin` that evaluates."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Each sample once; ``eval_loss`` = Σ loss · n / Σ n over the label elements that count.

        Predictions and labels are lists with one array a sample in the order of the dataset (an array [N, ...] where
        they are one a sequence). Reduces once, after the loop; waits for the device.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        model = self._prepare_for_evaluation(description)
        record, problem = Record(), None
        self._evaluating = True
        try:
            self.callback_handler.eval_dataloader = dataloader
            for inputs in dataloader:
                record.begin()
                for microbatch in self._within_capacity(inputs) if isinstance(inputs, RaggedBatch) else [inputs]:
                    self._evaluate_batch(model, microbatch, record, description, prediction_loss_only, ignore_keys)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        except Exception as error:
            problem = error
        finally:
            self._evaluating = False
        if problem is None and isinstance(dataloader, EvaluationLoader):
            record.cut(dataloader.share.num_real)
        totals = self._reduce_or_raise(record, problem)
        return self._output(record, totals, metric_key_prefix)

    def _prepare_for_evaluation(self, description: str) -> nn.Module:
        """The model as transformers prepares it for evaluation: its own loop, over nothing."""
        first = len(self.accelerator._models) == 0
        start = time.time()
        super().evaluation_loop(_Nothing(), description, True)  # pyright: ignore[reportArgumentType]
        model = self.model_wrapped if first else self._wrap_model(self.model, training=False)  # pyright: ignore
        self.model_preparation_time = round(time.time() - start, 4) if first else 0.0
        return model  # pyright: ignore[reportReturnType]

    def _evaluate_batch(
        self,
        model: nn.Module,
        inputs: Any,
        record: Record,
        description: str,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None,
    ) -> None:
        self._check_ids(inputs)
        loss, outputs, labels = self.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is None and description == "Evaluation":
            fields = list(inputs) if hasattr(inputs, "__iter__") else [self._main_input]
            raise missing_labels(self.label_names, self._forward_parameters, fields, self._main_input)
        rows = self._rows_of(inputs)
        elements = self._label_elements(inputs)
        record.add(rows.num, loss, None if elements is None else counting.count_labels(elements))
        if prediction_loss_only:
            return
        if "inputs" in self.args.include_for_metrics and self._main_input in inputs:
            record.keep("inputs", *forms.by_sample(inputs, self._main_input, rows))
        per_row = False
        if self._label_name is not None and self._label_name in inputs:
            entries, ragged = forms.by_sample(inputs, self._label_name, rows)
            record.keep("labels", entries, ragged)
            per_row = not ragged
        if outputs is not None:
            if self.preprocess_logits_for_metrics is not None:
                outputs = self.preprocess_logits_for_metrics(outputs, labels)  # pyright: ignore[reportArgumentType]
            record.keep("predictions", *rows.split(outputs, per_row=per_row))

    def _rows_of(self, inputs: Any) -> forms.Rows:
        labels = inputs.get(self._label_name) if self._label_name is not None else None
        config = getattr(self._bare_model, "config", None)
        if getattr(config, "is_encoder_decoder", False) and isinstance(labels, Tensor):
            return forms.target_rows(labels)
        form = self._form_of_model() if isinstance(inputs, RaggedBatch) else None
        return forms.rows_of(inputs, form, self._main_input)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss (a mean over the batch), outputs and labels of one batch, in the form that the model gave them."""
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        keywords = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(forms.bare(model), "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
        labels = keywords.get(self._label_name) if self._label_name is not None else None
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_labels or (not self.label_names and self.can_return_loss):
                loss, outputs = self.compute_loss(model, dict(keywords), return_outputs=True)
                loss = loss.detach().mean()
            else:
                outputs = model(**keywords)
        if prediction_loss_only:
            return loss, None, None
        return loss, _predictions(outputs, ignore_keys, loss is not None), labels

    def _reduce_or_raise(self, record: Record, problem: Exception | None) -> Tensor:
        """Σ loss · n, Σ n and samples over all ranks, by one reduction; raises on every rank if one has a problem."""
        totals = torch.zeros(4, dtype=torch.float64)
        if problem is None:
            totals[:3] = record.totals()
        totals[3] = float(problem is not None)
        reduced = self.accelerator.reduce(totals.to(self.args.device), "sum") if self.args.world_size > 1 else totals
        assert isinstance(reduced, Tensor)
        if problem is not None:
            raise problem
        if float(reduced[3]) > 0:
            raise DistributedError("another rank could not evaluate its batches", hint="see its error")
        return reduced

    def _output(self, record: Record, totals: Tensor, prefix: str) -> EvalLoopOutput:
        loss, count, num_samples, _ = totals.tolist()
        world = self.args.world_size
        predictions, labels, inputs = (
            record.gathered(name, gather_object, world) for name in ("predictions", "labels", "inputs")
        )
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            extra = {"inputs": inputs} if "inputs" in self.args.include_for_metrics else {}
            metrics = dict(self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **extra)))
        metrics = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        if record.has_loss:
            metrics["loss"] = loss / count if count else float("nan")
        if self.model_preparation_time:
            metrics["model_preparation_time"] = self.model_preparation_time
        metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        return EvalLoopOutput(predictions, labels, metrics, int(num_samples))  # pyright: ignore[reportArgumentType]


class _Nothing:
    """A dataloader without batches."""

    dataset = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _predictions(outputs: Any, ignore_keys: list[str], has_loss: bool) -> Any:
    """The outputs that are predictions, detached; one of them, or a tuple."""
    if isinstance(outputs, dict):
        kept = [value for name, value in outputs.items() if name not in (*ignore_keys, "loss")]
    elif isinstance(outputs, (Tensor, PackedSequence)):
        kept = [outputs]
    else:
        kept = list(outputs[1:] if has_loss else outputs)
    kept = [value for value in kept if isinstance(value, (Tensor, PackedSequence, tuple, list))]
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else tuple(kept)
