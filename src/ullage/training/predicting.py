"""One batch of an evaluation: loss, outputs and labels, in rows as transformers gives them, or sample by sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ullage.batch import RaggedBatch
from ullage.mixers.wrappers import bare
from ullage.training import counting, forms
from ullage.training.padded_rows import Frame, in_rows, padded
from ullage.training.reading import BatchReader
from ullage.training.sharding import sharding_of

#: Outputs of an encoder-decoder that are as long as its sources, where the others are as long as its targets.
_OF_ENCODERS = ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions")
#: Losses of models that give one output per sequence, and of those that give one per token, by transformers' names.
_ROW_LOSSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification")
_TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")


class Predictor:
    """Predictions of a trainer's model. ``trainer``: whose model and arguments count. ``reader``: of its batches."""

    def __init__(self, trainer: Any, reader: BatchReader) -> None:
        self._trainer, self._reader = trainer, reader
        self._frame: Frame | None = None

    @property
    def by_sample(self) -> bool:
        """Whether ``ragged_predictions`` is asked for: an array per sample, in the place of padded rows."""
        return bool(getattr(self._trainer.args, "ragged_predictions", False))

    @contextmanager
    def framed(self, frame: Frame | None) -> Iterator[None]:
        """Within it, the samples of a batch are those of the padded rows ``frame``."""
        before, self._frame = self._frame, frame
        try:
            yield
        finally:
            self._frame = before

    def predict_batch(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Any, Any, Any]:
        """Loss (a mean over the batch), outputs and labels of one batch.

        Outputs and labels are padded rows [N, L, ...], or with ``ragged_predictions`` in the form of the model.
        """
        trainer, names = self._trainer, self._trainer.label_names
        has_labels = bool(names) and all(counting.value_of(inputs, name) is not None for name in names)
        without_labels = not names and trainer.can_return_loss
        keywords = trainer._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(bare(model), "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
            if self.by_sample and isinstance(inputs, RaggedBatch):
                ignore_keys += _OF_ENCODERS
        labels: Any = () if without_labels else None  # as transformers says that there are metrics to compute
        if has_labels and not prediction_loss_only:
            labels = self._labels(inputs, keywords)
        loss = None
        with torch.no_grad(), trainer.compute_loss_context_manager():
            if has_labels or without_labels:
                # compute_loss pops the labels, of a copy here: the caller has them in the same dict.
                loss, outputs = trainer.compute_loss(
                    model, copy.copy(keywords), return_outputs=True, num_items_in_batch=self._divisor_of(inputs)
                )
                loss = loss.detach().mean()
                if (sharding := sharding_of(trainer.model)) is not None:
                    loss = sharding.whole_loss(loss)
            else:
                outputs = model(**keywords)
        if prediction_loss_only:
            return loss, None, None
        if self.by_sample:
            return loss, _predictions(outputs, ignore_keys, loss is not None), labels
        return loss, self._in_rows(outputs, inputs, ignore_keys, loss is not None), labels

    def in_rows(self, value: Any, inputs: Any) -> Any:
        """``value``, in the form of the model, as padded rows; what are rows already stays as it is."""
        rows = self.rows_of(inputs)
        if isinstance(value, Tensor) and not value.is_nested and value.shape[:1] == (rows.num,):
            return value
        if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
            return tuple(self.in_rows(part, inputs) for part in value)
        if isinstance(value, Mapping):
            return {name: self.in_rows(part, inputs) for name, part in value.items()}
        return self._padded(value, inputs, rows)

    def labels_as_collated(self, labels: Any, inputs: Any) -> Any:
        """Labels that a step gave, as padded rows. Those of a packed row have lost what their batch still has."""
        if isinstance(inputs, RaggedBatch) and isinstance(labels, Tensor) and not labels.is_nested:
            names = self.labels_in(inputs)
            if len(names) == 1 and tuple(labels.shape) == (1, inputs.layout.size):
                return self.field_rows(inputs, names[0])
        return self.in_rows(labels, inputs)

    def labels_in(self, inputs: Any) -> list[str]:
        """The fields that ``compute_metrics`` gets as labels: all that the model names if they are there."""
        names, first = self._trainer.label_names, self._reader.label_name
        if len(names) > 1 and all(name in inputs for name in names):
            return list(names)
        return [first] if first is not None and first in inputs else []

    @property
    def gives_rows(self) -> bool | None:
        """Whether the model gives one output per sequence, as transformers reads it from its class; None: not known."""
        kind = str(getattr(self._reader.model, "loss_type", None))
        return True if kind in _ROW_LOSSES else (False if kind in _TOKEN_LOSSES else None)

    def rows_of(self, inputs: Any) -> forms.SampleRows:
        """Where the samples of a batch lie in the outputs: in those of the decoder, if there is one."""
        labels = counting.value_of(inputs, self._reader.label_name) if self._reader.label_name is not None else None
        if self._reader.takes_pairs and isinstance(labels, Tensor):
            return forms.target_rows(labels)
        return self._source_rows(inputs)

    def _source_rows(self, inputs: Any) -> forms.SampleRows:
        form = self._reader.form if isinstance(inputs, RaggedBatch) else None
        return forms.sample_rows(inputs, form, self._reader.main_input)

    # Padded rows.

    def field_rows(self, inputs: Any, name: str) -> Tensor:
        """A field of the batch as rows on the trainer's device: as they were collated, or with -100 in the padding."""
        device = self._trainer.args.device
        if self._frame is not None and name in self._frame.fields:
            return self._frame.fields[name].to(device)
        if not isinstance(inputs, RaggedBatch):
            return self._padded(inputs[name], inputs, self.rows_of(inputs)).to(device)
        entries, ragged = forms.by_sample(inputs, name, self._source_rows(inputs))
        tensors = [torch.as_tensor(entry) for entry in entries]
        return (in_rows(tensors, self._frame) if ragged else torch.stack(tensors)).to(device)

    def _labels(self, inputs: Any, keywords: Mapping[str, Any]) -> Any:
        """The labels of a batch that has all of them, a tuple if there are several."""
        if self.by_sample:
            return keywords.get(self._reader.label_name) if self._reader.label_name is not None else None
        labels = tuple(self.field_rows(inputs, name) for name in self._trainer.label_names)
        return labels[0] if len(labels) == 1 else labels

    def _in_rows(self, outputs: Any, inputs: Any, ignore_keys: list[str], has_loss: bool) -> Any:
        rows = self.rows_of(inputs)
        # Told by their names, and so before they are in a tuple: the outputs that lie as the sources do.
        if self._reader.takes_pairs and isinstance(outputs, Mapping) and isinstance(inputs, RaggedBatch):
            sources = self._source_rows(inputs)
            names = [name for name in _OF_ENCODERS if outputs.get(name) is not None and name not in ignore_keys]
            encoded = {name: self._padded(_tensors_of(outputs[name]), inputs, sources) for name in names}
            frame = None  # that of the targets, whose rows begin with their first token
            if self._frame is not None and "labels" in self._frame.fields:
                labels = self._frame.fields["labels"]
                frame = Frame({}, (0,) * len(labels), labels.shape[1])
            others = {name: value for name, value in outputs.items() if name not in _OF_ENCODERS}
            with self.framed(frame):
                made = {
                    name: self._padded(_tensors_of(value), inputs, rows)
                    for name, value in others.items()
                    if name not in (*ignore_keys, "loss")
                }
            return _predictions({**made, **encoded}, ignore_keys, has_loss)
        return self._padded(_predictions(outputs, ignore_keys, has_loss), inputs, rows)

    def _padded(self, value: Any, inputs: Any, rows: forms.SampleRows) -> Any:
        lies_otherwise = isinstance(inputs, RaggedBatch) or rows.layout is not None or rows.packed is not None
        return padded(value, rows, keeps_rows=not lies_otherwise, per_row=self._per_row(inputs), frame=self._frame)

    def _per_row(self, inputs: Any) -> bool:
        if self.gives_rows is not None:
            return self.gives_rows
        names = self.labels_in(inputs)
        if not names:
            return False
        if isinstance(inputs, RaggedBatch):
            return all(name in inputs.per_sequence and not inputs[name].is_nested for name in names)
        return all(isinstance(inputs[name], Tensor) and inputs[name].ndim == 1 for name in names)

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
