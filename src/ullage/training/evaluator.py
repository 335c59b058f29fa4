"""Evaluation and prediction of a Trainer on sequences of unequal length.

Each sample counts exactly once: the dataset is cut into batches in its own order, and batch *b* belongs to rank
``b mod world``. A rank that would have one batch less than another repeats a batch whose results are thrown away, so
that every rank runs the model equally often (sharded models need that). Losses are weighed by the labels that count and
reduced once, after the loop, and outputs come back in the order of the dataset (``predicting``). Before that the ranks
meet, so that a problem on one of them is raised by all; where they also meet after each batch
(``batch_eval_metrics``), it ends the loop there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from ullage.attention.heads import package_of
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.ranks import Axis
from ullage.ranks.wire import gather_objects
from ullage.ranks.world import agreement, gather
from ullage.training.batches import counting, forms
from ullage.training.batches.reading import BatchReader
from ullage.training.predicting import (
    BySample,
    Frame,
    Predictor,
    Record,
    as_tensors,
    concatenate_blocks,
    each_part,
    missing_labels,
)
from ullage.training.setup import fsdp
from ullage.training.setup.releases import worker_start
from ullage.training.setup.sharding import data_ranks, sharding_of
from ullage.training.step.packing import Packer

if TYPE_CHECKING:
    import transformers

#: What is kept sample by sample, by the names of ``EvalPrediction``.
_KINDS = ("predictions", "labels", "inputs", "losses")


class Evaluator:
    """Evaluation of a trainer's model. ``is_running``: whether it goes through batches at the moment.

    ``predictor``: of one batch.

    Args:
        trainer: whose arguments, model, state and callbacks count.
        reader: of its batches.
        packer: cuts a large batch into microbatches.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self.predictor = Predictor(trainer, reader)
        self.is_running = self._is_reporting = False

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

        Predictions and labels are those of transformers, arrays [N, L, ...] with -100 up to the longest, in the order
        of the dataset; with ``ragged_predictions`` lists with one array per sample (an array [N, ...] where there is
        one per sequence). Tuples and dicts where the model gives such. Each batch's go to the host at once. Reduces
        after the loop, and after each batch with ``batch_eval_metrics``; waits for the device. Raises ``InputError``
        for a dataset that turns out to be empty.

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
        sharding = sharding_of(trainer.model)
        if sharding is not None and sharding.topology.cp.size > 1 and not loss_only:
            raise InputError(
                "compute_metrics needs whole sequences, and cp shares them",
                where="compute_metrics",
                expected="cp 1",
                found=f"cp {sharding.topology.cp.size}",
            )
        model = self._prepared(prepare, description)
        share = dataloader.share if isinstance(dataloader, EvaluationLoader) else None
        batchwise = trainer.args.batch_eval_metrics and trainer.compute_metrics is not None and not loss_only
        trainer.callback_handler.eval_dataloader = dataloader  # pyright: ignore[reportAttributeAccessIssue]

        def evaluate(inputs: Any) -> None:
            for microbatch, frame in self._microbatches(model, inputs):
                with self.predictor.framed(frame):
                    self._evaluate_batch(model, microbatch, record, description, loss_only, ignore_keys)
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)

        record, metrics, problem = Record(), None, None
        self.is_running = True
        try:
            if batchwise:
                metrics, problem = self._batch_by_batch(dataloader, evaluate, record, keep=description == "Prediction")
            else:
                for inputs, _ in _with_last(dataloader):
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
        totals = self._totals(record, problem)
        if totals[2] == 0:
            raise InputError("the dataset is empty", where=description.lower(), expected="at least one sample")
        self._packer.metrics.merge(record.metrics(), "eval")
        return self._output(record, totals, metric_key_prefix, metrics)

    def _microbatches(self, model: nn.Module, inputs: Any) -> Iterator[tuple[Any, Frame | None]]:
        """A collated batch as the model takes it, and the padded rows that packing takes its samples out of."""
        frame = None
        if self._packer.options is not None:
            with contextlib.suppress(InputError):  # what does not tell its sequences is evaluated as it is
                batch = self._reader.as_ragged(inputs)
                frame, inputs = Frame.of(inputs, self._reader.main_input), batch
        if not isinstance(inputs, RaggedBatch):
            yield inputs, None
            return
        self._packer.proof.before_evaluation(model, inputs)
        microbatches, first = self._packer.within_capacity(inputs), 0
        if frame is None and len(microbatches) > 1 and not self.predictor.by_sample:
            frame = Frame.of_ragged(inputs, self.predictor.labels_in(inputs))
        for microbatch in microbatches:
            last = first + len(microbatch)
            yield microbatch, None if frame is None or self.predictor.by_sample else frame.part(first, last)
            first = last

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
            is_real = share is None or len(record.batches) <= share.num_real
            mine = record.batches[-1].entries if is_real else {}
            # One gather per batch, on every rank: equally many batches each, and a failed rank still comes to this one.
            ranks = gather(mine if problem is None else None)
            if any(held is None for held in ranks):
                break
            try:
                metrics = self._metrics_of_step(ranks, last) or metrics
            except Exception as error:
                problem = error
            if not keep:
                record.batches[-1].entries.clear()
        return metrics, problem

    def _prepared(self, prepare: Callable[..., Any], description: str) -> nn.Module:
        """The model as transformers prepares it for evaluation: its own loop, over nothing."""
        trainer = self._trainer
        # Nothing was prepared yet: evaluation without training. That is what transformers times too.
        first = len(trainer.accelerator._models) == 0
        start = time.time()
        fsdp.shard_for_evaluation(trainer)
        prepare([], description, True)  # a DataLoader would draw a seed, and the batches other numbers than theirs
        model: Any = trainer.model_wrapped if first else trainer.model
        if not first:
            model = trainer._wrap_model(model, training=False)
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
        reader = self._reader
        reader.require_ids(inputs)
        rows = self.predictor.rows_of(inputs)
        weights = reader.weights(inputs, rows.num) if self._packer.metrics.are_kept else {}
        with self._packer.metrics.collect(record.batches[-1].metrics, "eval", weights):
            predicted = self._trainer.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        loss = predicted[0]
        if loss is None and description == "Evaluation" and self._asks_for_loss(prediction_loss_only):
            fields = list(inputs) if isinstance(inputs, (RaggedBatch, Mapping)) else [reader.main_input]
            raise missing_labels(self._trainer.label_names, reader.forward_parameters, fields, reader.main_input)
        # A mean is weighed by the labels that it is over; without labels to count, by samples (Record.add).
        elements = reader.label_elements(inputs)
        record.add(rows.num, loss, None if elements is None else counting.count_labels(elements))
        if prediction_loss_only:
            return
        if "loss" in self._trainer.args.include_for_metrics and loss is not None:
            record.keep("losses", loss.repeat(rows.num))
        keep = self._keep_by_sample if self.predictor.by_sample else self._keep_in_rows
        keep(inputs, record, rows, *predicted[1:])

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Within it, what is evaluated is reported by transformers' own ``evaluate``, which needs a loss for it."""
        return replaced(self, "_is_reporting", True)

    def _asks_for_loss(self, loss_only: bool) -> bool:
        """Whether a batch without a loss leaves unreported what was asked for.

        Metrics need labels as the loss does. A trainer's own ``evaluate`` knows what it reads of the outputs.
        """
        trainer, reader = self._trainer, self._reader
        if reader.overridden("prediction_step"):
            return False
        if trainer.is_in_train and str(trainer.args.metric_for_best_model).removeprefix("eval_") == "loss":
            return True
        own = reader.overridden("evaluate")
        if not self._is_reporting or (own is not None and package_of(own) != "trl"):
            return False
        return loss_only or trainer.compute_metrics is not None

    def _keep_in_rows(self, inputs: Any, record: Record, rows: forms.SampleRows, outputs: Any, labels: Any) -> None:
        """Keep rows of what transformers keeps of a batch."""
        trainer, predictor, wanted = self._trainer, self.predictor, self._trainer.args.include_for_metrics
        if "inputs" in wanted and trainer.args.batch_eval_metrics:  # transformers gives the batch
            record.keep("inputs", {name: predictor.field_rows(inputs, name) for name in _fields_of(inputs)})
        elif "inputs" in wanted and self._reader.main_input in inputs:
            record.keep("inputs", predictor.field_rows(inputs, self._reader.main_input))
        if labels is not None:
            labels = predictor.labels_as_collated(labels, inputs)
            record.keep("labels", labels)
        if outputs is not None:
            outputs = predictor.in_rows(outputs, inputs)
            if trainer.preprocess_logits_for_metrics is not None:
                outputs = trainer.preprocess_logits_for_metrics(outputs, labels)  # pyright: ignore[reportArgumentType]
            record.keep("predictions", outputs)

    def _keep_by_sample(self, inputs: Any, record: Record, rows: forms.SampleRows, outputs: Any, labels: Any) -> None:
        """Keep an array per sample, without padding."""
        if "inputs" in self._trainer.args.include_for_metrics and self._reader.main_input in inputs:
            record.keep("inputs", BySample(*forms.by_sample(inputs, self._reader.main_input, rows)))
        per_row = self.predictor.gives_rows
        names = self.predictor.labels_in(inputs)
        if names:
            each = [BySample(*forms.by_sample(inputs, name, rows, per_row=bool(per_row))) for name in names]
            record.keep("labels", each[0] if len(each) == 1 else tuple(each))
            if per_row is None:
                per_row = not any(samples.ragged for samples in each)
        if outputs is not None:
            if self._trainer.preprocess_logits_for_metrics is not None:
                outputs = self._trainer.preprocess_logits_for_metrics(outputs, labels)
            record.keep("predictions", each_part(lambda it: BySample(*rows.split(it, per_row=bool(per_row))), outputs))

    def _metrics_of_step(self, ranks: list[dict[str, list[Any]]], last: bool) -> dict[str, Any] | None:
        """What ``compute_metrics`` makes of a step. ``ranks``: what each has kept of it, if not repeated."""
        compute: Any = self._trainer.compute_metrics
        steps = {name: [block for held in ranks for block in held.get(name, [])] for name in _KINDS}
        found = {name: concatenate_blocks(blocks) if blocks else None for name, blocks in steps.items()}
        if found["predictions"] is None or found["labels"] is None:
            return None
        device = None if self.predictor.by_sample else self._trainer.args.device
        tensors = {name: as_tensors(entries, device) for name, entries in found.items()}
        return compute(self._prediction(**tensors), compute_result=last)

    def _prediction(self, predictions: Any, labels: Any, inputs: Any, losses: Any) -> EvalPrediction:
        wanted = self._trainer.args.include_for_metrics
        return EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            inputs=inputs if "inputs" in wanted else None,
            losses=losses if "loss" in wanted else None,
        )

    def _totals(self, record: Record, problem: Exception | None) -> Tensor:
        """Σ loss · n, Σ n and samples over all ranks, float64 [3]; raises on every rank if one has a problem."""
        with agreement("evaluating its batches"):
            if problem is not None:
                raise problem
        totals, args = record.totals(), self._trainer.args
        if args.world_size > 1:
            totals = self._trainer.accelerator.reduce(totals.to(args.device), "sum")
            assert isinstance(totals, Tensor)
            # Ranks that evaluate the same samples: of 4 ranks that draw 2 batches, every sample was added up twice.
            totals /= args.world_size // data_ranks(self._trainer.model, args)[1]
        return totals

    def _gather(self, mine: list[Any]) -> list[Any]:
        """The entries of all ranks that evaluate different samples, end to end."""
        sharding = sharding_of(self._trainer.model)
        axis = Axis.world() if sharding is None else sharding.topology.dp
        return [entry for rank in gather_objects(mine, axis) for entry in rank]

    def _output(self, record: Record, totals: Tensor, prefix: str, metrics: Mapping[str, Any] | None) -> EvalLoopOutput:
        """``metrics``: those computed batch by batch, if they were."""
        loss, count, num_samples = totals.tolist()
        args = self._trainer.args
        world, concatenate = data_ranks(self._trainer.model, args)[1], args.eval_do_concat_batches
        found = {name: record.gathered(name, self._gather, world, concatenate=concatenate) for name in _KINDS}
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
    """Each batch, and whether none comes after it; reads one ahead, as accelerate does, which orders what is drawn."""
    ahead: list[Any] = []
    for batch in batches:
        if ahead:
            yield ahead.pop(), False
        ahead.append(batch)
    if ahead:
        yield ahead.pop(), True


def _fields_of(inputs: Any) -> list[str]:
    """The fields of a batch that are tensors with one row per sample, or that are told apart by sample."""
    if isinstance(inputs, RaggedBatch):
        return list(inputs.names)
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim]


@dataclass
class _Share:
    """This rank's batches: ``num_real`` of its own, then repetitions whose results do not count.

    For a dataset of unknown size ``num_real`` is ``sys.maxsize`` until the last real batch has been read.
    """

    batch_size: int
    rank: int
    world: int
    num_real: int = sys.maxsize

    def count(self, size: int) -> int:
        """Settle ``num_real`` for a dataset of ``size`` samples; returns how many batches each rank runs."""
        # 10 samples in batches of 2 are 5 batches: of two ranks rank 0 has 0, 2 and 4, rank 1 has 1 and 3 and runs one
        # again.
        batches = -(-size // self.batch_size)
        self.num_real = len(range(self.rank, batches, self.world))
        return -(-batches // self.world)

    def indices(self, size: int) -> list[list[int]]:
        """The batches of a dataset of known size."""
        batches = [list(range(at, min(at + self.batch_size, size))) for at in range(0, size, self.batch_size)]
        # Batch 0 stands in where this rank has run out: it is there in every dataset, and its result is cut off.
        repeated = self.count(size) - self.num_real
        return batches[self.rank :: self.world] + batches[:1] * repeated


class _Stream(IterableDataset):
    """The share of a dataset that can only be read through: each rank reads all of it and keeps its batches."""

    def __init__(self, dataset: Any, share: _Share) -> None:
        self.dataset, self.share = dataset, share

    def __iter__(self) -> Iterator[Any]:
        # The length is unknown until the end, so the samples of batch 0 are kept in case this rank has to repeat them.
        first: list[Any] = []
        count = 0
        for count, sample in enumerate(self.dataset, start=1):
            batch = (count - 1) // self.share.batch_size
            if batch == 0:
                first.append(sample)
            if batch % self.share.world == self.share.rank:
                yield sample
        # Only the last batch of all can be short, and it is in the last round; so the rank that has it repeats nothing,
        # and DataLoader, which cuts the samples into batches again, mixes no repeated samples into it.
        if self.share.count(count) > self.share.num_real:
            yield from first


class EvaluationLoader(DataLoader):
    """A dataloader over this rank's share of an evaluation dataset, in the order of the dataset."""

    share: _Share

    @property
    def total_batch_size(self) -> int:
        """BySample that all ranks read at once, under the name that accelerate gives it."""
        return self.share.batch_size * self.share.world


def evaluation_loader(
    trainer: transformers.Trainer, dataset: Any, description: str, batch_size: int
) -> EvaluationLoader:
    """This rank's evaluation batches of a trainer's data set, collated and loaded as its arguments say.

    ``description``: "Evaluation" or "Prediction". Raises ``InputError`` for a data set that is known to be empty, and
    on several ranks for one that ``split_dataset_by_node`` has divided.
    """
    if has_length(dataset) and len(dataset) == 0:
        raise InputError("the dataset is empty", where=description.lower(), expected="at least one sample")
    args, collator = trainer.args, trainer.data_collator
    if args.world_size > 1 and getattr(dataset, "_distributed", None) is not None:
        raise InputError(
            "an evaluation data set that is divided already would be divided once more, and most of it never read",
            where=description.lower(),
            expected="the whole data set on every rank",
            found="a part that split_dataset_by_node has made",
            hint="give it undivided: each sample is evaluated once, on one rank",
        )
    if type(dataset).__module__ == "datasets.arrow_dataset":
        dataset = trainer._remove_unused_columns(cast(Any, dataset), description=description)
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description=description)
    share = _Share(batch_size, *data_ranks(trainer.model, args))
    options = {"collate_fn": collator, "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available()}
    # A dataset without indices is read in this process: worker processes would each read all of it.
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        loader = EvaluationLoader(_Stream(dataset, share), batch_size=batch_size, **options)
    else:
        workers = args.dataloader_num_workers
        loader = EvaluationLoader(
            dataset,  # pyright: ignore[reportArgumentType]
            batch_sampler=share.indices(len(dataset)),
            num_workers=workers,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            multiprocessing_context=worker_start(args),
            prefetch_factor=args.dataloader_prefetch_factor,
            **options,
        )
    loader.share = share
    return loader
