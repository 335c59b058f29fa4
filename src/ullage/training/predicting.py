"""Predictions of an evaluation: loss, outputs and labels of each batch, in padded rows or sample by sample, on record.

Padded rows are as transformers gives them, whatever form a batch had. Where a batch's samples lie end to end, or
packed, each gets a row, filled with -100 behind its tokens. Rows that came padded stay as they are; where packing cut
their padding away, what the model gives is laid back into their places.

Losses on record are means over the label elements that count, so Σ loss · n / Σ n is the same at every batch size. Sums
are float64 and reduced over ranks once. Predictions are put back in the order of the dataset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from ullage.attention.releases import CACHE_NAMES
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, LENGTHS_NAMES
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.mixers.wrappers import bare
from ullage.training.batches import counting, forms
from ullage.training.batches.reading import BatchReader
from ullage.training.setup.sharding import sharding_of
from ullage.training.step.call_metrics import Taken

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class Frame:
    """The padded rows that samples came in before packing cut the padding away.

    Attributes:
        fields: of the batch, [n, ...].
        starts: [n], position of the first token of each row.
        width: of the rows.
    """

    fields: Mapping[str, Tensor]
    starts: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, batch: Any, main_input: str) -> Frame | None:
        """The rows of a collated batch on the host; None for one that is not of padded rows with a mask."""
        if not isinstance(batch, Mapping):
            return None
        fields = {name: torch.as_tensor(v) for name, v in batch.items() if isinstance(v, (Tensor, np.ndarray))}
        mask, main = fields.get("attention_mask"), fields.get(main_input)
        if mask is None or main is None or mask.ndim != 2 or main.shape[:2] != mask.shape or "cu_seq_lens_q" in fields:
            return None
        # Of the mask [[0, 0, 1], [1, 1, 1]] the rows start at 2 and 0.
        starts = (mask != 0).int().argmax(1).tolist()
        return cls({k: v for k, v in fields.items() if v.shape[:1] == mask.shape[:1]}, tuple(starts), mask.shape[1])

    @classmethod
    def of_ragged(cls, batch: RaggedBatch, names: Sequence[str]) -> Frame:
        """Rows as wide as the longest sample of a batch, from which a part of it is taken; ``names``: of labels."""
        fields = {}
        for name in names:
            if name in batch.per_sequence and not batch[name].is_nested:
                fields[name] = batch[name]
            elif name in batch:
                each = batch[name].unbind() if name in batch.per_sequence else batch.to_nested(name).unbind()
                fields[name] = in_rows(each)
        return cls(fields, (0,) * len(batch), batch.max_seqlen)

    def part(self, first: int, last: int) -> Frame:
        """The rows from ``first`` up to ``last``."""
        fields = {name: value[first:last] for name, value in self.fields.items()}
        return Frame(fields, self.starts[first:last], self.width)


def each_part(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of each part of a value, in tuples and dicts of such."""
    if isinstance(value, Mapping):
        return {name: each_part(function, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        return tuple(each_part(function, part) for part in value)
    return function(value)


def in_rows(entries: Sequence[Tensor], frame: Frame | None = None) -> Tensor:
    """Entries of samples, [n_i, ...] each, as rows [N, L, ...] with -100 where there is nothing.

    ``L`` is the longest, or the width of ``frame``, whose places the entries take.
    """
    shape = [max(sizes) for sizes in zip(*(entry.shape for entry in entries))]
    starts = [0] * len(entries)
    if frame is not None and shape and shape[0] <= frame.width:
        fits = all(start + len(entry) <= frame.width for start, entry in zip(frame.starts, entries))
        shape[0], starts = frame.width, list(frame.starts) if fits else starts
    if all(list(entry.shape) == shape for entry in entries):
        return torch.stack(list(entries))
    # [5, 6] and [7] become [[5, 6], [7, -100]]; in a frame 3 wide with starts 1 and 2, [[-100, 5, 6], [-100, -100, 7]].
    made = entries[0].new_full((len(entries), *shape), IGNORED_LABEL)
    for row, entry, start in zip(made, entries, starts):
        row[(slice(start, start + len(entry)), *map(slice, entry.shape[1:]))] = entry
    return made


@dataclass
class BySample:
    """The arrays of the samples of a batch. ``ragged``: whether they have one value per token."""

    entries: list[Any]
    ragged: bool


def concatenate_blocks(blocks: list[Any]) -> Any:
    """What is kept of batches as one; in tuples and dicts part by part.

    Arrays [n, ...] are filled with -100 up to the largest: transformers' ``nested_concat`` over all batches at once,
    and in every dim but the first. :class:`BySample` are one array where there is one value per sequence, all of one
    shape, else a list. ``blocks`` is emptied, so that at no time all of it is there twice.
    """
    first = blocks[0]
    if isinstance(first, (tuple, Mapping)):
        names = range(len(first)) if isinstance(first, tuple) else list(first)
        parts = {name: [block[name] for block in blocks] for name in names}
        blocks.clear()
        del first
        joined = {name: concatenate_blocks(parts.pop(name)) for name in names}
        return tuple(joined.values()) if isinstance(names, range) else joined
    return _join(blocks)


def _join(blocks: list[Any]) -> Any:
    if isinstance(blocks[0], BySample):
        entries = [entry for block in blocks for entry in block.entries]
        is_alike = not any(block.ragged for block in blocks) and len({entry.shape for entry in entries}) == 1
        return np.stack(entries) if is_alike else entries
    if len({block.ndim for block in blocks}) > 1:
        raise InputError(
            "the outputs of two batches cannot be put into one array",
            expected="as many dims in every batch",
            found=sorted({block.shape for block in blocks})[:4],
            hint="return the same of every batch in preprocess_logits_for_metrics",
        )
    if len(blocks) == 1:
        return blocks.pop()
    # Blocks [3, 5, V] and [2, 9, V] become [5, 9, V], the first three rows with -100 behind their five.
    shape = [max(sizes) for sizes in zip(*(block.shape for block in blocks))]
    shape[0] = sum(len(block) for block in blocks)
    # Pages of an empty array come into memory as they are written, while those of the blocks go.
    made, at = np.empty(shape, np.result_type(*{block.dtype for block in blocks})), 0
    blocks.reverse()
    while blocks:
        block = blocks.pop()
        rows = made[at : at + len(block)]
        if list(block.shape[1:]) != shape[1:]:
            rows[...] = IGNORED_LABEL
        rows[tuple(map(slice, block.shape))] = block
        at += len(block)
    return made


#: Outputs of an encoder-decoder that are as long as its sources, where the others are as long as its targets.
_OF_ENCODERS = ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions")
#: Losses of models that give one output per sequence, and of those that give one per token, by transformers' names.
_ROW_LOSSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification")
_TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")


class Predictor:
    """Predictions of a trainer's model. ``trainer``: whose model and arguments count. ``reader``: of its batches."""

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader) -> None:
        self._trainer, self._reader = trainer, reader
        self._frame: Frame | None = None

    @property
    def by_sample(self) -> bool:
        """Whether ``ragged_predictions`` is asked for: an array per sample, in the place of padded rows."""
        return bool(getattr(self._trainer.args, "ragged_predictions", False))

    def framed(self, frame: Frame | None) -> AbstractContextManager[None]:
        """Within it, the samples of a batch are those of the padded rows ``frame``."""
        return replaced(self, "_frame", frame)

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
            ignore_keys = [*getattr(config, "keys_to_ignore_at_inference", ()), *CACHE_NAMES]
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

        def one(part: Any) -> Any:
            is_there = isinstance(part, Tensor) and not part.is_nested and part.shape[:1] == (rows.num,)
            return part if is_there else self._padded(part, inputs, rows)

        return each_part(one, value)

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
            sources, targets = (self._source_rows(inputs), self._frame), (rows, None)
            if self._frame is not None and "labels" in self._frame.fields:
                labels = self._frame.fields["labels"]  # whose rows begin with their first token
                targets = (rows, Frame({}, (0,) * len(labels), labels.shape[1]))
            made = {}
            for name, value in outputs.items():
                places, frame = sources if name in _OF_ENCODERS else targets
                if name not in (*ignore_keys, "loss"):
                    with self.framed(frame):
                        made[name] = self._padded(_tensors_of(value), inputs, places)
            return _predictions(made, ignore_keys, has_loss)
        return self._padded(_predictions(outputs, ignore_keys, has_loss), inputs, rows)

    def _padded(self, value: Any, inputs: Any, rows: forms.SampleRows) -> Any:
        """Tensors in the form of the model with one row per sample [N, L, ...], in tuples and dicts part by part.

        ``rows``: where the samples lie in it. A batch that came as rows stays as it is.
        """
        keeps_rows = not isinstance(inputs, RaggedBatch) and rows.layout is None and rows.packed is None
        per_row = self._per_row(inputs)  # settles shapes that may be read in two ways

        def one(part: Any) -> Any:
            if not isinstance(part, (Tensor, PackedSequence)):
                return part
            if isinstance(part, Tensor) and not part.is_nested and (part.ndim == 0 or keeps_rows):
                return part if part.ndim else part[None]  # one for the batch, as transformers keeps it
            entries, ragged = rows.split(part, per_row=per_row)
            return in_rows(entries, self._frame) if ragged else torch.stack(entries)

        return each_part(one, value)

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
    """``value`` without what is not a tensor, in tuples and dicts of tuples and dicts too; None if nothing is left."""
    if isinstance(value, (Tensor, PackedSequence)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(part for part in map(_tensors_of, value) if part is not None) or None
    if isinstance(value, Mapping):
        return {name: part for name, each in value.items() if (part := _tensors_of(each)) is not None} or None
    return None


#: Parts in which ranks send what they kept.
_ROUNDS = 64


@dataclass
class _Batch:
    # Of one batch of the dataset: (mean, number of elements it is over) of each microbatch, samples of all of them, by
    # kind what each microbatch gave, and what the trainer's own loss appended to its metrics.
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_samples: int = 0
    entries: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[Taken] = field(default_factory=list)


@dataclass
class Record:
    """Results of this rank by batch: mean losses with their counts; predictions, labels and inputs.

    Attributes:
        batches: in the order in which they were begun.
        has_loss: whether any batch had a loss.
    """

    batches: list[_Batch] = field(default_factory=list)
    has_loss: bool = False

    def begin(self) -> None:
        """Start a batch of the dataset; what follows belongs to it."""
        self.batches.append(_Batch())

    def add(self, num_samples: int, loss: Tensor | None, count: Tensor | None) -> None:
        """Count samples, and a loss that is a mean over ``count`` label elements."""
        self.batches[-1].num_samples += num_samples
        if loss is not None:
            self.has_loss = True
            self.batches[-1].losses.append((loss, torch.tensor(num_samples) if count is None else count))

    def keep(self, name: str, block: Any) -> None:
        """Add to ``predictions``, ``labels``, ``inputs`` or ``losses`` what a microbatch gave, as arrays on the host.

        ``block``: rows [n, ...] or :class:`BySample`; tuples and dicts of such.
        """
        self.batches[-1].entries.setdefault(name, []).append(_as_arrays(block))

    def cut(self, num_real: int) -> None:
        """Drop all batches after the first ``num_real``: they repeated samples to keep the ranks in step."""
        del self.batches[num_real:]

    def totals(self) -> Tensor:
        """Σ loss · n, Σ n and the number of samples, float64 [3] on the host; n = 0 counts nothing. Waits."""
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in self.batches:
            totals[2] += batch.num_samples
            for loss, count in batch.losses:
                # nan times zero is nan, so a mean over no labels is left out, not weighed by zero.
                n = float(count)
                if n > 0:
                    totals[:2] += torch.tensor([float(loss) * n, n], dtype=torch.float64)
        return totals

    def metrics(self) -> list[Taken]:
        """What the trainer's own loss appended to its metrics, call by call."""
        return [call for batch in self.batches for call in batch.metrics]

    def gathered(
        self, name: str, gather: Callable[[list[Any]], list[Any]], world: int, *, concatenate: bool = True
    ) -> Any:
        """All that is kept of a kind, :func:`concatenate_blocks` in the order of the dataset; None if there is nothing.

        Without ``concatenate``, a list with one such result per step, each of all ranks' batches. Collective for
        ``world > 1``. What is kept is given away.
        """
        if world == 1:
            steps = [batch.entries.pop(name, []) for batch in self.batches]
        else:
            # Each rank sends what it has batch by batch, a few at a time, so that no rank holds all of it twice. Batch
            # b belongs to rank b mod world: the k-th batches of all ranks, in rank order, follow one another.
            rounds = max(gather([len(self.batches)]))
            each = max(1, rounds // _ROUNDS)
            steps = []
            for first in range(0, rounds, each):
                ranks = gather([[batch.entries.pop(name, []) for batch in self.batches[first : first + each]]])
                # Of two ranks with batches [b0, b2] and [b1] the steps are b0 + b1 and b2.
                for k in range(max(map(len, ranks))):
                    steps.append([block for held in ranks if k < len(held) for block in held[k]])
                del ranks
        if concatenate:
            steps = [[block for step in steps for block in step]]
        joined = [concatenate_blocks(step) for step in steps if step]
        return (joined[0] if concatenate else joined) if joined else None


def _as_arrays(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(_as_arrays(part) for part in entry)
    if isinstance(entry, Mapping):
        return {name: _as_arrays(part) for name, part in entry.items()}
    if isinstance(entry, BySample):
        return BySample([_as_arrays(each) for each in entry.entries], entry.ragged)
    if isinstance(entry, Tensor):
        entry = entry.detach().cpu()
        if entry.untyped_storage().nbytes() > entry.nbytes:  # a part of a larger tensor, which would be kept with it
            entry = entry.clone()
        return (entry.float() if entry.dtype == torch.bfloat16 else entry).numpy()
    return np.asarray(entry)


def as_tensors(value: Any, device: torch.device | None = None) -> Any:
    """The result of :func:`concatenate_blocks` with tensors in the place of arrays; on the host without ``device``."""
    return tree_map(lambda part: torch.from_numpy(part).to(device) if isinstance(part, np.ndarray) else part, value)


def missing_labels(label_names: list[str], parameters: list[str], fields: list[str], main_input: str) -> InputError:
    """Why ``evaluate()`` can compute no loss: which parameter is at fault, and which ``label_names`` to set."""
    absent = [name for name in label_names if name not in fields]
    present = [name for name in label_names if name in fields]
    if label_names and absent:
        return InputError(
            "evaluate() would report no loss: a parameter of forward is taken for labels and is not in the batch",
            where=", ".join(absent),
            expected=f"all of {label_names}, because their names contain 'label'",
            found=f"a batch of {fields}",
            hint=f"set label_names={present or ['<your labels>']} in TrainingArguments",
        )
    known = {main_input, "attention_mask", *LENGTHS_NAMES, "position_ids", "token_type_ids"}
    named = [name for name in parameters[1:] if name in fields and name not in known]
    candidates = named or [name for name in fields if name not in known and name != next(iter(parameters), None)]
    return InputError(
        "evaluate() would report no loss: no parameter of forward is recognised as labels",
        where=f"forward({', '.join(parameters)})",
        expected="a parameter whose name contains 'label'",
        found=f"a batch of {fields}",
        hint=f"set label_names={candidates[:1] or ['<your labels>']} in TrainingArguments",
    )
