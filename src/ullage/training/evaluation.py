"""Evaluation and prediction of a Trainer on sequences of unequal length.

Each sample counts exactly once (``shares``), losses are weighed by the labels that count and reduced once, after the
loop (``records``), and outputs come back sample by sample in the order of the dataset (``forms``). A problem on one
rank travels with that reduction, so every rank raises; where ranks also meet after each batch
(``batch_eval_metrics``), it travels with that.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.mixers.wrappers import bare
from ullage.ranks import Axis, agree
from ullage.training import counting, forms, fsdp
from ullage.training.packing import Packer
from ullage.training.reading import BatchReader
from ullage.training.records import Record, as_tensors, combined, missing_labels
from ullage.training.shares import EvaluationLoader

#: What is kept sample by sample, by the names of ``EvalPrediction``.
_KINDS = ("predictions", "labels", "inputs", "losses")
#: Outputs of an encoder-decoder that are no predictions.
_OF_ENCODERS = ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions")
#: Losses of models that give one output per sequence, and of those that give one per token, by transformers' names.
_ROW_LOSSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification")
_TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")


class Evaluator:
    """Evaluation of a trainer's model. ``is_running``: whether it goes through batches at the moment.

    Args:
        trainer: whose arguments, model, state and callbacks count.
        reader: of its batches.
        packer: cuts a large batch into microbatches.
    """

    def __init__(self, trainer: Any, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self.is_running = False

    def run(
        self,
        prepare: Callable[..., Any],
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None,
        ignore_keys: list[str] | None,
        metric_key_prefix: str,
    ) -> EvalLoopOutput:
        """Evaluate each sample once; ``eval_loss`` = Σ loss · n / Σ n over the label elements that count.

        Predictions and labels are lists with one array per sample in the order of the dataset (an array [N, ...] where
        there is one per sequence), tuples and dicts of such where the model gives tuples and dicts. Each batch's go to
        the host at once. Reduces once, after the loop, and after each batch with ``batch_eval_metrics``; waits for
        the device. Raises ``InputError`` for a dataset that turns out to be empty.

        Args:
            prepare: transformers' own loop, called over no batches because it prepares the model.
            dataloader: batches of this rank; those of an :class:`EvaluationLoader` may end in repetitions.
            description: ``"Evaluation"`` or ``"Prediction"``; only the former requires a loss.
            prediction_loss_only: leave predictions and labels out; None takes the trainer's argument.
            ignore_keys: outputs of the model that are no predictions.
            metric_key_prefix: prefix of the metrics' names.
        """
        trainer = self._trainer
        loss_only: bool = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._prepared(prepare, description)
        share = dataloader.share if isinstance(dataloader, EvaluationLoader) else None
        batchwise = trainer.args.batch_eval_metrics and trainer.compute_metrics is not None and not loss_only
        trainer.callback_handler.eval_dataloader = dataloader

        def evaluate(inputs: Any) -> None:
            if self._packer.options is not None:
                with contextlib.suppress(InputError):  # what does not tell its sequences is evaluated as it is
                    inputs = self._reader.as_ragged(inputs)
                if isinstance(inputs, RaggedBatch):
                    self._packer.proof.before_evaluation(model, inputs)
            for microbatch in self._packer.within_capacity(inputs) if isinstance(inputs, RaggedBatch) else [inputs]:
                self._evaluate_batch(model, microbatch, record, description, loss_only, ignore_keys)
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)

        record, metrics, problem = Record(), None, None
        self.is_running = True
        try:
            if batchwise:
                metrics, problem = self._batch_by_batch(dataloader, evaluate, record, keep=description == "Prediction")
            else:
                for inputs in dataloader:
                    record.begin()
                    evaluate(inputs)
        except Exception as error:
            problem = error
        finally:
            self.is_running = False
            fsdp.reshard(model)
        # Only now is num_real certain: a stream tells it after its last batch.
        if problem is None and share is not None:
            record.cut(share.num_real)
        totals = self._reduce_or_raise(record, problem)
        if totals[2] == 0:
            raise InputError("the dataset is empty", where=description.lower(), expected="at least one sample")
        self._packer.metrics.merge(record.metrics(), "eval")
        return self._output(record, totals, metric_key_prefix, metrics)

    def _batch_by_batch(
        self, dataloader: Any, evaluate: Callable[[Any], None], record: Record, *, keep: bool
    ) -> tuple[dict[str, Any], Exception | None]:
        """The metrics that ``compute_metrics`` gives after the last batch, and what went wrong on this rank.

        All ranks meet after each batch; one that has a problem comes to the next meeting, and to no further one.
        """
        share = dataloader.share if isinstance(dataloader, EvaluationLoader) else None
        batches, last, metrics, problem = _with_last(dataloader), False, {}, None
        while not last:
            record.begin()
            try:
                if problem is None:
                    inputs, last = next(batches)
                    evaluate(inputs)
            except StopIteration:  # an empty dataset
                return metrics, None
            except Exception as error:
                problem = error
            # A repeated batch is evaluated, as sharded models need all ranks, but contributes nothing.
            real = share is None or len(record.batches) <= share.num_real
            ranks = self._meet(record, real, problem)
            # One gather per batch, on every rank: equally many batches each, and a failed rank still comes to this one.
            if ranks is None:
                break
            try:
                metrics = self._metrics_of_step(ranks, last) or metrics
            except Exception as error:
                problem = error
            if not keep:
                record.forget_batch()
        return metrics, problem

    def _prepared(self, prepare: Callable[..., Any], description: str) -> nn.Module:
        """The model as transformers prepares it for evaluation: its own loop, over nothing."""
        trainer = self._trainer
        # Nothing was prepared yet: evaluation without training. That is what transformers times too.
        first = len(trainer.accelerator._models) == 0
        start = time.time()
        fsdp.shard_for_evaluation(trainer)
        prepare(_Nothing(), description, True)
        model = trainer.model_wrapped if first else trainer._wrap_model(trainer.model, training=False)
        trainer.model_preparation_time = round(time.time() - start, 4) if first else 0.0
        return model

    def _evaluate_batch(
        self,
        model: nn.Module,
        inputs: Any,
        record: Record,
        description: str,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None,
    ) -> None:
        # One batch, on the host: record its loss and, unless only the loss is wanted, the results of its samples.
        reader, args = self._reader, self._trainer.args
        reader.require_ids(inputs)
        rows = self._rows_of(inputs)
        weights = reader.weights(inputs, rows.num) if self._packer.metrics.are_kept else {}
        with self._packer.metrics.taken(record.batches[-1].metrics, "eval", weights):
            predicted = self._trainer.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        loss, outputs, labels = predicted
        if loss is None and description == "Evaluation" and not reader.overridden("prediction_step"):
            fields = list(inputs) if isinstance(inputs, (RaggedBatch, Mapping)) else [reader.main_input]
            raise missing_labels(self._trainer.label_names, reader.forward_parameters, fields, reader.main_input)
        # A mean is weighed by the labels that it is over; without labels to count, by samples (Record.add).
        elements = reader.label_elements(inputs)
        record.add(rows.num, loss, None if elements is None else counting.count_labels(elements))
        if prediction_loss_only:
            return
        if "loss" in args.include_for_metrics and loss is not None:
            record.keep("losses", [loss] * rows.num, False)
        if "inputs" in args.include_for_metrics and self._reader.main_input in inputs:
            record.keep("inputs", *forms.by_sample(inputs, self._reader.main_input, rows))
        per_row = self._gives_rows
        names = self._labels_in(inputs)
        if names:
            each = [forms.by_sample(inputs, name, rows, per_row=bool(per_row)) for name in names]
            ragged = tuple(flag for _, flag in each)
            if len(names) == 1:
                record.keep("labels", each[0][0], ragged[0])
            else:
                record.keep("labels", list(zip(*(entries for entries, _ in each))), ragged)
            if per_row is None:
                per_row = not any(ragged)
        if outputs is not None:
            if self._trainer.preprocess_logits_for_metrics is not None:
                outputs = self._trainer.preprocess_logits_for_metrics(outputs, labels)
            record.keep("predictions", *rows.split(outputs, per_row=bool(per_row)))

    def _labels_in(self, inputs: Any) -> list[str]:
        """The fields that ``compute_metrics`` gets as labels: all that the model names if they are there."""
        names, first = self._trainer.label_names, self._reader.label_name
        if len(names) > 1 and all(name in inputs for name in names):
            return list(names)
        return [first] if first is not None and first in inputs else []

    @property
    def _gives_rows(self) -> bool | None:
        """Whether the model gives one output per sequence, as transformers reads it from its class; None: not known."""
        kind = str(getattr(self._reader.model, "loss_type", None))
        return True if kind in _ROW_LOSSES else (False if kind in _TOKEN_LOSSES else None)

    def _meet(self, record: Record, real: bool, problem: Exception | None) -> list[dict[str, Any]] | None:
        """Entries of this step from all ranks, without repeated batches; None if one of them has a problem."""
        mine = {name: record.of_batch(name) for name in _KINDS} if problem is None and real else {}
        ranks = [(problem is not None, mine)]
        if self._trainer.args.world_size > 1:
            ranks = gather_object(ranks)
        return None if any(failed for failed, _ in ranks) else [held for _, held in ranks if held]

    def _metrics_of_step(self, ranks: list[dict[str, Any]], last: bool) -> dict[str, Any] | None:
        assert self._trainer.compute_metrics is not None
        found = {name: combined([held[name] for held in ranks]) for name in _KINDS}
        if found["predictions"] is None or found["labels"] is None:
            return None
        compute: Any = self._trainer.compute_metrics
        tensors = {name: as_tensors(entries) for name, entries in found.items()}
        return compute(self._prediction(**tensors), compute_result=last)

    def _prediction(self, predictions: Any, labels: Any, inputs: Any, losses: Any) -> EvalPrediction:
        wanted = self._trainer.args.include_for_metrics
        return EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            inputs=inputs if "inputs" in wanted else None,
            losses=losses if "loss" in wanted else None,
        )

    def _rows_of(self, inputs: Any) -> forms.SampleRows:
        labels = counting.value_of(inputs, self._reader.label_name) if self._reader.label_name is not None else None
        config = getattr(self._reader.model, "config", None)
        if getattr(config, "is_encoder_decoder", False) and isinstance(labels, Tensor):
            return forms.target_rows(labels)
        form = self._reader.form if isinstance(inputs, RaggedBatch) else None
        return forms.sample_rows(inputs, form, self._reader.main_input)

    def predict_batch(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Any, Any, Any]:
        """Loss (a mean over the batch), outputs and labels of one batch, in the form that the model gave them."""
        trainer, label_name = self._trainer, self._reader.label_name
        names = trainer.label_names
        has_labels = bool(names) and all(counting.value_of(inputs, name) is not None for name in names)
        keywords = trainer._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(bare(model), "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
            if isinstance(inputs, RaggedBatch):  # as long as the sources, where predictions are as long as the targets
                ignore_keys += _OF_ENCODERS
        labels = keywords.get(label_name) if label_name is not None else None
        if not names and trainer.can_return_loss:
            labels = ()  # as transformers says that there is a loss without labels, and metrics to compute
        loss = None
        with torch.no_grad(), trainer.compute_loss_context_manager():
            if has_labels or (not names and trainer.can_return_loss):
                # compute_loss pops the labels, of a copy here: the caller has them in the same dict.
                loss, outputs = trainer.compute_loss(
                    model, copy.copy(keywords), return_outputs=True, num_items_in_batch=self._divisor_of(inputs)
                )
                loss = loss.detach().mean()
            else:
                outputs = model(**keywords)
        if prediction_loss_only:
            return loss, None, None
        return loss, _predictions(outputs, ignore_keys, loss is not None), labels

    def _divisor_of(self, inputs: Any) -> Tensor | None:
        """The divisor for the user's ``compute_loss_func`` in evaluation: the labels of this batch on this rank.

        Multiplied by the processes where ``compute_loss`` multiplies the loss by them, so that a mean is left. None
        without such a function or without labels.
        """
        elements = self._reader.label_elements(inputs) if self._trainer.compute_loss_func is not None else None
        if elements is None:
            return None
        shared = self._trainer.accelerator.num_processes if self._trainer.args.average_tokens_across_devices else 1
        return counting.count_labels(elements).clamp(min=1) * shared

    def _reduce_or_raise(self, record: Record, problem: Exception | None) -> Tensor:
        """Σ loss · n, Σ n and samples over all ranks, by one reduction; raises on every rank if one has a problem."""
        totals = torch.zeros(4, dtype=torch.float64)
        if problem is None:
            totals[:3] = record.totals()
        # The fourth number tells of a failure: a rank that failed comes to the reduction like the others, with zeros.
        totals[3] = float(problem is not None)
        args, reduced = self._trainer.args, totals
        if args.world_size > 1:
            reduced = self._trainer.accelerator.reduce(totals.to(args.device), "sum")
        assert isinstance(reduced, Tensor)
        if float(reduced[3]) > 0:  # only then do the ranks meet again, to hear of the error
            agree(problem, Axis.world(), "evaluating its batches")
        return reduced

    def _output(self, record: Record, totals: Tensor, prefix: str, metrics: Mapping[str, Any] | None) -> EvalLoopOutput:
        """``metrics``: those computed batch by batch, if they were."""
        loss, count, num_samples, _ = totals.tolist()
        world, concatenate = self._trainer.args.world_size, self._trainer.args.eval_do_concat_batches
        found = {name: record.gathered(name, gather_object, world, concatenate=concatenate) for name in _KINDS}
        predictions, labels = found["predictions"], found["labels"]
        compute = self._trainer.compute_metrics
        if metrics is None and compute is not None and predictions is not None and labels is not None:
            metrics = compute(self._prediction(**found))
        numbers: Any = denumpify_detensorize(dict(metrics or {}))
        if record.has_loss:
            numbers["loss"] = loss / count if count else float("nan")
        if self._trainer.model_preparation_time:
            numbers["model_preparation_time"] = self._trainer.model_preparation_time
        numbers = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in numbers.items()}
        return EvalLoopOutput(predictions, labels, numbers, int(num_samples))  # pyright: ignore[reportArgumentType]


def _with_last(batches: Any) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether none comes after it; reads one ahead."""
    ahead: list[Any] = []
    for batch in batches:
        if ahead:
            yield ahead.pop(), False
        ahead.append(batch)
    if ahead:
        yield ahead.pop(), True


class _Nothing:
    """A dataloader without batches."""

    dataset = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _predictions(outputs: Any, ignore_keys: list[str], has_loss: bool) -> Any:
    """The outputs that are predictions; one of them, or a tuple."""
    if isinstance(outputs, Mapping):
        kept = [value for name, value in outputs.items() if name not in (*ignore_keys, "loss")]
    elif isinstance(outputs, (Tensor, PackedSequence)):
        kept = [outputs]
    else:
        kept = list(outputs[1:] if has_loss else outputs)
    kept = [tensors for tensors in map(_tensors_of, kept) if tensors is not None]
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else tuple(kept)


def _tensors_of(value: Any) -> Any:
    """``value`` without what is no tensor, in tuples and dicts of tuples and dicts too; None if nothing is left."""
    if isinstance(value, (Tensor, PackedSequence)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(part for part in map(_tensors_of, value) if part is not None) or None
    if isinstance(value, Mapping):
        return {name: part for name, each in value.items() if (part := _tensors_of(each)) is not None} or None
    return None
