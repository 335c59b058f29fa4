"""What a Trainer needs to train on sequences of unequal length, as a mixin over transformers' own.

The Trainer takes batches apart in a dozen places, each by a rule of its own. The mixin replaces the rules, not the
loop: how a batch is moved (``to_device``, once), in which form it reaches the model (``forms``), what is counted
(``counting``: real tokens, labels that a loss counts), and how evaluation puts samples back together
(``evaluation``). A rank that finds a problem in its batch tells the others in the reduction of the label counts, which
every rank enters anyway, so all of them raise.

Source: transformers 5.23 ``trainer.py``, whose method names these are.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction
from transformers.utils.generic import find_labels

from ullage.batch import RaggedBatch
from ullage.errors import DistributedError, InputError, TrainingError, UllageError
from ullage.movement import to_device
from ullage.training import counting, forms
from ullage.training.evaluation import EvaluationLoader, Record, missing_labels

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class RaggedTrainerMixin(_Base):
    """Put before a transformers Trainer in the bases of a class: ``class MyTrainer(RaggedTrainerMixin, TheirTrainer)``.

    Batches may be a :class:`RaggedBatch`, a dict with ``PackedSequence`` or nested tensors, or padded tensors.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = forms.bare(self.model)  # pyright: ignore[reportArgumentType]
        if self.args.label_names is None:  # a compiled model's own forward has no names; shifted labels are extra
            self.label_names = [name for name in find_labels(type(model)) if name != "shift_labels"]
        self._form: str | None = None
        self._divides_by_count: bool | None = None
        self._evaluating = False
        self._tokens = _TokenMeter()
        if self.args.batch_eval_metrics:
            raise InputError(
                "batch_eval_metrics is not supported: predictions are kept sample by sample",
                hint="leave it off; compute_metrics gets all samples, each in its true length",
            )
        if self.accelerator.dispatch_batches:
            raise InputError(
                "dispatch_batches would cut packed batches apart",
                where="TrainingArguments.accelerator_config",
                expected="None or False",
                found=True,
                hint="leave it out: each process reads its own batches",
            )

    # The model, as far as batches are concerned.

    @property
    def _main_input(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    @property
    def _forward_parameters(self) -> list[str]:
        return list(inspect.signature(forms.bare(self.model).forward).parameters)  # pyright: ignore[reportArgumentType]

    @property
    def _label_name(self) -> str | None:
        names = self.label_names
        return "labels" if "labels" in names else (names[0] if names else None)

    @property
    def _shifts(self) -> bool | None:
        """Whether the model's loss shifts labels; None if its class does not tell."""
        loss = LOSS_MAPPING.get(getattr(forms.bare(self.model), "loss_type", None))  # pyright: ignore[reportArgumentType]
        if loss is None:
            return None
        config = getattr(forms.bare(self.model), "config", None)  # pyright: ignore[reportArgumentType]
        return loss is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False)

    def _form_of_model(self) -> str:
        if self._form is None:
            self._form = forms.form_of(self.model)  # pyright: ignore[reportArgumentType]
        return self._form

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and forms.bare(self.model) is not self.model:  # pyright: ignore[reportArgumentType]
            self._signature_columns = [*self._forward_parameters, "label", "label_ids", *self.label_names]
        super()._set_signature_columns_if_needed()

    # Batches on their way to the model.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        dataset = self.train_dataset
        if dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:  # pyright: ignore[reportArgumentType]
            raise InputError("the training dataset is empty", where="train_dataset", expected="at least one sample")
        return super().train(*args, **kwargs)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Training batches as transformers makes them, but left on the host; evaluation batches each sample once."""
        if is_training:
            placement, self.accelerator.device_placement = self.accelerator.device_placement, False
            try:
                return super()._get_dataloader(dataset, description, batch_size, sampler_fn, True, dataloader_key)
            finally:
                self.accelerator.device_placement = placement
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise InputError("the dataset is empty", where=description.lower(), expected="at least one sample")
        collator = self.data_collator
        if type(dataset).__module__.startswith("datasets."):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
        loader = EvaluationLoader.over(
            dataset,
            batch_size,
            self.args.process_index,
            self.args.world_size,
            self.args.dataloader_num_workers,
            collate_fn=collator,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def _prepare_input(self, data: Any) -> Any:
        plugin = self.accelerator.state.deepspeed_plugin
        dtype = None if plugin is None else plugin.hf_ds_config.dtype()
        return to_device(data, self.args.device, non_blocking=self.accelerator.non_blocking, float_dtype=dtype)

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """The batch on the device, as keywords of the model."""
        if isinstance(inputs, RaggedBatch):
            return forms.keywords_of(self._prepare_input(inputs), self._form_of_model(), shifts=self._shifts)
        if isinstance(inputs, PackedSequence):
            inputs = {self._main_input: inputs}
        if len(inputs) == 0:
            raise InputError(
                "the batch is empty",
                expected=f"at least one of {self._forward_parameters}",
                hint="set remove_unused_columns=False if the collator needs columns that forward does not name",
            )
        lengths = inputs.get("input_lengths")
        prepared = self._prepare_input(inputs)
        if isinstance(lengths, Tensor):  # packing wants lengths on the host
            prepared["input_lengths"] = lengths
        return prepared

    # Counting.

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        batches: list[Any] = []
        problem: Exception | None = None
        try:
            batches.extend(itertools.islice(epoch_iterator, num_batches))
        except Exception as error:
            problem = error
        return batches, self._count_or_raise(batches, device, problem)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        return None if self._evaluating else self._count_or_raise(batch_samples, device, None)

    def _count_or_raise(self, batches: list, device: torch.device, problem: Exception | None) -> Tensor | None:
        """Label elements that count in this step, over all ranks; raises on every rank if one has a problem.

        One reduction of three integers. Waits for the device.
        """
        if problem is None:
            try:
                self._check(batches)
            except UllageError as error:
                problem = error
        counts: list[Tensor] = []
        if problem is None:
            found = [self._label_elements(batch) for batch in batches]
            counts = [counting.count_labels(elements) for elements in found if elements is not None]
        complete = len(counts) == len(batches) > 0
        total = sum(int(count) for count in counts)
        summary = torch.tensor([total, int(complete), int(problem is not None)], device=device)
        ranks = summary[None]
        if self.args.world_size > 1:
            ranks = self.accelerator.gather(summary[None])
            assert isinstance(ranks, Tensor)
        if bool(ranks[:, 2].any()):
            if problem is not None:
                raise problem
            failed = ranks[:, 2].nonzero().flatten().tolist()
            raise DistributedError("another rank could not use its batch", where=f"rank {failed}", hint="see its error")
        if not bool(ranks[:, 1].all()):
            return None
        if int(ranks[:, 0].sum()) == 0:
            raise TrainingError(
                "no label counts in this step",
                where=f"step {self.state.global_step}, field {self._label_name!r}",
                expected="at least one label that is not -100",
            )
        mine = ranks[:, 0].sum() if self.args.average_tokens_across_devices else summary[0]
        return mine // max(self.args.n_gpu, 1) if self.args.world_size == 1 else mine

    def _label_elements(self, inputs: Any) -> Tensor | None:
        if self._label_name is None:
            return None
        flattened = isinstance(inputs, RaggedBatch) and self._form_of_model() == "flattened"
        return counting.label_elements(inputs, self._label_name, shifts=self._shifts, flattened=flattened)

    def _check(self, batches: list) -> None:
        embedding = _embedding_of(forms.bare(self.model))  # pyright: ignore[reportArgumentType]
        for batch in batches:
            if embedding is not None and self._main_input == "input_ids":
                counting.check_vocabulary(batch, self._main_input, embedding)
            self._tokens.add(batch, self._main_input)

    def floating_point_ops(self, inputs: Any) -> int:
        """Six times real tokens times parameters, as transformers estimates it, without padding."""
        if not hasattr(self.model, "num_parameters"):
            return 0
        parameters = self.model.num_parameters(exclude_embeddings=True)  # pyright: ignore
        return 6 * counting.num_tokens(inputs, self._main_input) * parameters

    def _track_num_input_tokens(self, inputs: Any) -> None:
        kind = self.args.include_num_input_tokens_seen
        if kind == "no":
            return
        count = counting.num_padded_tokens if kind == "all" and not _is_ragged(inputs) else counting.num_tokens
        tokens = torch.tensor(count(inputs, self._main_input), device=self.args.device)
        gathered = self.accelerator.gather(tokens)
        assert isinstance(gathered, Tensor)
        self.state.num_input_tokens_seen += int(gathered.sum())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds real tokens per second over all ranks, and the part of a padded batch that would be padding."""
        if "loss" in logs:
            logs.update(self._tokens.rates(self.accelerator, self.args.device))
        super().log(logs, start_time)

    # The loss.

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The model's loss; a mean of its own is weighed by its share of the step's labels."""
        own = self.compute_loss_func is not None or self.label_smoother is not None
        if num_items_in_batch is None or own or self._model_divides(model, inputs, num_items_in_batch):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        elements = self._label_elements(inputs)
        assert elements is not None
        count = counting.count_labels(elements)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=None)
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        weight = count / num_items_in_batch * ranks
        self.loss_is_scaled_for_ga = True
        loss = torch.where(count > 0, loss, torch.zeros_like(loss)) * weight.to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def _model_divides(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> bool:
        """Whether the model's loss is a sum divided by ``num_items_in_batch``, found out once by asking the model.

        Any ``**kwargs`` in forward makes transformers believe it. A model that ignores the number gives the same loss
        for another one; models of transformers and of ours are known to use it.
        """
        if self._divides_by_count is None:
            source = type(forms.bare(model)).__module__.split(".")[0]
            if not self.model_accepts_loss_kwargs or (self._shifts is None and source != "ullage"):
                self._divides_by_count = False
            elif source in ("transformers", "ullage"):
                self._divides_by_count = True
            else:
                devices = [self.args.device] if self.args.device.type == "cuda" else []
                model.eval()
                with torch.no_grad(), torch.random.fork_rng(devices):
                    losses = [
                        super(RaggedTrainerMixin, self).compute_loss(model, dict(inputs), False, num_items * k)
                        for k in (1, 2)
                    ]
                model.train()
                self._divides_by_count = not torch.allclose(*losses)  # pyright: ignore[reportArgumentType]
        return self._divides_by_count

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm, which is the same on every rank: where it is no number, all of them stop here."""
        norm = super()._get_grad_norm(model, grad_norm)
        scaled = self.accelerator.scaler is not None or self.args.fp16  # overflow is part of loss scaling
        if norm is not None and not scaled and not torch.isfinite(torch.as_tensor(norm)):
            raise TrainingError(
                "the loss or its gradient is not a number",
                where=f"step {self.state.global_step + 1}",
                expected="a finite gradient norm",
                found=float(norm),
                hint="lower learning_rate or max_grad_norm, and look for infinities in the data; "
                "the weights are those before this step",
            )
        return norm

    # Evaluation.

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
                self._evaluate_batch(model, inputs, record, description, prediction_loss_only, ignore_keys)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        except Exception as error:
            problem = error
        finally:
            self._evaluating = False
        if problem is None:
            record.cut(dataloader.share.num_real if isinstance(dataloader, EvaluationLoader) else len(record.samples))
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
        if loss is None and description == "Evaluation" and not record.samples:
            fields = list(inputs) if hasattr(inputs, "__iter__") else [self._main_input]
            raise missing_labels(self.label_names, self._forward_parameters, fields, self._main_input)
        rows = self._rows_of(inputs)
        record.samples.append(rows.num)
        if loss is not None:
            elements = self._label_elements(inputs)
            count = torch.tensor(rows.num) if elements is None else counting.count_labels(elements)
            record.losses.append((loss.detach(), count))
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
        if getattr(self.model.config, "is_encoder_decoder", False) and isinstance(labels, Tensor):  # pyright: ignore
            return forms.target_rows(labels)
        form = self._form_of_model() if isinstance(inputs, RaggedBatch) else None
        return forms.rows_of(inputs, form, self._main_input)

    def _check_ids(self, inputs: Any) -> None:
        size = _embedding_of(forms.bare(self.model))  # pyright: ignore[reportArgumentType]
        if size is not None and self._main_input == "input_ids":
            counting.check_vocabulary(inputs, self._main_input, size)

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
            totals[:3] = record.loss_and_count(torch.device("cpu"))
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


class _TokenMeter:
    """Real tokens and what they would be padded, since the last log."""

    def __init__(self) -> None:
        self.real = self.padded = 0
        self.since = time.perf_counter()

    def add(self, batch: Any, main_input: str) -> None:
        self.real += counting.num_tokens(batch, main_input)
        self.padded += counting.num_padded_tokens(batch, main_input)

    def rates(self, accelerator: Any, device: torch.device) -> dict[str, float]:
        sums = torch.tensor([self.real, self.padded], device=device)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, "sum")
        real, padded = sums.tolist()
        now = time.perf_counter()
        seconds, self.since, self.real, self.padded = now - self.since, now, 0, 0
        if real == 0:
            return {}
        return {"tokens_per_second": round(real / seconds, 1), "ullage": round(1 - real / padded, 4)}


class _Nothing:
    """A dataloader without batches."""

    dataset = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _is_ragged(inputs: Any) -> bool:
    """Whether the batch itself says how long its sequences are, other than by a mask."""
    if isinstance(inputs, Mapping):
        return "input_lengths" in inputs or any(isinstance(value, PackedSequence) for value in inputs.values())
    return isinstance(inputs, (RaggedBatch, PackedSequence))


def _embedding_of(model: nn.Module) -> int | None:
    """How many ids the model's input embedding knows; None if it has none."""
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embedding, "num_embeddings", None)


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
