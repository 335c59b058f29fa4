"""Reader of a Trainer's batches: what the model expects of them, where their labels are, their way to the device.

What a model takes is read off the parameters of its ``forward``, through whatever wraps it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ullage.attention.heads import KNOWN_AUTHORS, loss_divides_by_count, loss_shifts, package_of
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, LENGTHS_NAMES, is_media, is_target
from ullage.core.errors import InputError
from ullage.core.items import ITEM_LENGTHS, rows_of_one
from ullage.core.layout import Layout
from ullage.core.movement import to_cuda_at_once, to_device
from ullage.core.rows import beginnings, host_integers, read_row
from ullage.datasets.picture_chats import PICTURE_COLUMNS
from ullage.mixers.packed_model import is_packed
from ullage.mixers.wrappers import bare
from ullage.models.modeling import RecurrentPreTrainedModel
from ullage.training.batches import counting, forms
from ullage.training.batches.collators import (
    SEQ_LENGTHS,
    AloneCollator,
    EitherCollator,
    PackedSequenceCollator,
    RaggedCollator,
    Seq2SeqCollator,
    require_tokenized,
)
from ullage.training.batches.packed_batch import refuse_as_one
from ullage.training.setup.arguments import weight_field
from ullage.training.setup.sharding import sharding_of

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class FoundLoss:
    """How the losses of microbatches make up that of a step, as it was found (:mod:`ullage.training.loss.finding`).

    Attributes:
        division: one of those of :mod:`ullage.training.loss.divisions`.
        shifts: whether the first label of a sequence counts nowhere; None where labels are by sequence.
        apart: whether it is computed for sequences of one length at a time, in rows of a batch: a packed row would be
            one sequence to it.
    """

    division: Any
    shifts: bool | None
    apart: bool = False

    def __str__(self) -> str:
        labels = "shifted labels" if self.shifts else "labels"
        means = {"token_mean": f"a mean over {labels}", "sequence_mean": "a mean over sequences"}
        return means.get(self.division, "a sum")


class BatchReader:
    """A trainer's expectations of a batch, looked up again where the trainer may have changed them.

    ``trainer``: whose model, arguments and label names count. ``mixin``: the class of ours that stands before the
    trainer's own classes. Nothing of the trainer is read before it is asked for, so a reader may be made first.
    """

    def __init__(self, trainer: transformers.Trainer, mixin: type) -> None:
        self._trainer, self._mixin = trainer, mixin
        self._form: str | None = None
        #: The rule of a loss that its source does not tell, once it was found.
        self.found_loss: FoundLoss | None = None

    def forget_model(self) -> None:
        """Forget what was known of the model: the trainer has another."""
        self._form = self.found_loss = None

    @property
    def model(self) -> nn.Module:
        """The model without what wraps it."""
        model: Any = self._trainer.model
        return bare(model)

    @property
    def main_input(self) -> str:
        return getattr(self._trainer.model, "main_input_name", "input_ids")

    @property
    def pad_token_id(self) -> int:
        """The id of padding that the model's config names, by which heads find a row's last token; 0 without one."""
        found = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        size = _embedding_of(self.model)
        return found if isinstance(found, int) and found >= 0 and (size is None or found < size) else 0

    @property
    def forward_parameters(self) -> list[str]:
        return list(inspect.signature(self.model.forward).parameters)

    @property
    def label_name(self) -> str | None:
        """The field of labels that the loss counts, if there is one."""
        names = self._trainer.label_names
        return "labels" if "labels" in names else (names[0] if names else None)

    @property
    def shifts(self) -> bool | None:
        """Whether the loss shifts labels; None if that is not known."""
        return loss_shifts(self.model) if self.found_loss is None else self.found_loss.shifts

    def overridden(self, name: str) -> type | None:
        """The class under the mixin that has a method of its own in place of transformers' Trainer's, if one has."""
        return defining_class(type(self._trainer), name, below=self._mixin)

    @functools.cached_property
    def evaluates_itself(self) -> bool:
        """Whether the trainer under the mixin has an evaluation of its own, which the mixin then leaves to it.

        So does one with a loop or a sampler of its own, and one with a loss or a ``prediction_step`` of its own that
        keeps no column of labels, so that there are none to count (preference pairs, rewards).
        """
        if self.overridden("evaluation_loop") or self.overridden("_get_eval_sampler"):
            return True
        if not self.overridden("prediction_step") and not self.overridden("compute_loss"):
            return False
        # A loss of its own over columns without labels: there is nothing for our evaluation to count.
        self._trainer._set_signature_columns_if_needed()
        return not set(self._trainer.label_names) & set(self._trainer._signature_columns or ())

    @property
    def divides_by_count(self) -> bool:
        """Whether what transformers' ``compute_loss`` gives is a sum divided by ``num_items_in_batch``.

        transformers assumes so of every model whose forward takes ``**kwargs``; here the source of the loss decides. A
        trainer under the mixin with a loss of its own, and a ``compute_loss_func``, are taken at their word: True.
        """
        if self._trainer.compute_loss_func is not None or self.overridden("compute_loss"):
            return True
        return bool(self._trainer.model_accepts_loss_kwargs) and loss_divides_by_count(self.model)

    @property
    def takes_pairs(self) -> bool:
        """Whether the model is an encoder-decoder, whose samples are a source and a target."""
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    def default_collator(self, *, packs: bool) -> Any:
        """The collator of a trainer that was given none.

        Under packing it is ours, and labels are the ids only where the loss shifts them. Without packing it is the one
        that the trainer has made; where that is transformers' own, sequences of unequal length go to ours.
        """
        ours = Seq2SeqCollator() if self.takes_pairs else RaggedCollator()
        if packs:
            labels_from = None if self.takes_pairs or self.shifts is False else "input_ids"
            return ours if labels_from is None else RaggedCollator(labels_from=labels_from)
        theirs: Any = self._trainer.data_collator
        if theirs is transformers.default_data_collator:
            return EitherCollator(theirs, ours)
        if type(theirs) is transformers.DataCollatorWithPadding:
            return EitherCollator(theirs, ours, pads=tuple(theirs.tokenizer.model_input_names))
        return theirs

    def refuse_texts(self) -> None:
        """Raise ``InputError`` for a data set of texts under a collator of ours, which takes token ids.

        Looks at the first row of a list, and at the names and types of a ``datasets.Dataset`` whose rows are as they
        are stored: a column of texts would be removed later, because no model takes it, and what is left would not say
        why nothing is there.
        """
        collator = self._trainer.data_collator
        ours = (RaggedCollator, Seq2SeqCollator, PackedSequenceCollator, EitherCollator)
        if not isinstance(collator, ours) or getattr(collator, "processor", None) is not None:
            return
        evaluated = self._trainer.eval_dataset
        several = evaluated.items() if isinstance(evaluated, dict) else [(None, evaluated)]
        named = {"eval_dataset" if name is None else f"eval_dataset[{name!r}]": each for name, each in several}
        for where, dataset in {"train_dataset": self._trainer.train_dataset, **named}.items():
            if isinstance(dataset, (list, tuple)):
                require_tokenized(dataset[:1], where)
            elif type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] != "custom":
                kinds = {name: getattr(kind, "dtype", None) for name, kind in dataset.features.items()}
                blank = {"string": "...", "large_string": "...", None: [0]}  # None: lists, of whatever
                require_tokenized([{name: blank.get(kind, 0) for name, kind in kinds.items()}], where)

    def as_ragged(self, batch: Any) -> RaggedBatch:
        """A batch of any collator that knows its sequences (:func:`as_ragged`)."""
        return as_ragged(batch, self.main_input, pairs=self.takes_pairs)

    @property
    def form(self) -> str:
        """The form in which the model takes a ragged batch (:func:`ullage.training.batches.forms.form_of`)."""
        if self.found_loss is not None and self.found_loss.apart:
            return forms.padded_form(self.model)
        if self._form is None:
            model: Any = self._trainer.model
            self._form = forms.form_of(model)
        return self._form

    def columns(self, chosen: list[str]) -> list[str]:
        """The columns that the trainer chose, and those that our collator and the model behind a wrapper take.

        A field of weights is kept too, and conversations with images are where the collator has a processor.
        """
        columns = self._columns_of_model(chosen)
        ours = isinstance(self._trainer.data_collator, (RaggedCollator, EitherCollator))
        more = [weight_field(self._trainer.args), SEQ_LENGTHS if ours and self.main_input in columns else None]
        if getattr(self._trainer.data_collator, "processor", None) is not None and ours:
            more += PICTURE_COLUMNS
        if isinstance(self._trainer.data_collator, AloneCollator) and self._trainer.data_collator.finish is None:
            more.append("labels")  # which it makes
        return [*columns, *(name for name in more if name is not None and name not in columns)]

    def _columns_of_model(self, chosen: list[str]) -> list[str]:
        inspected = unwrap_peft_model(self._trainer.model)
        if self.model in (self._trainer.model, inspected):
            return chosen
        # transformers reads the columns off forward; of a compiled or other wrapper that is (*args, **kwargs).
        wrapper = inspect.signature(inspected.forward).parameters
        if not set(wrapper) <= set(chosen):  # not chosen by transformers' own method
            return chosen
        return [*self.forward_parameters, *(name for name in chosen if name not in wrapper)]

    def move(self, data: Any) -> Any:
        """``data`` on the trainer's device, in DeepSpeed's dtype under DeepSpeed."""
        accelerator = self._trainer.accelerator
        plugin = accelerator.state.deepspeed_plugin
        dtype = None if plugin is None else plugin.hf_ds_config.dtype()
        return to_device(data, self._trainer.args.device, non_blocking=accelerator.non_blocking, float_dtype=dtype)

    def prepare(self, inputs: Any) -> Any:
        """A batch on the device, as keywords of the model, in a dict of its own; anything else is moved alone.

        A field of weights is ours: no model sees it. Raises ``InputError`` for a whole packed step, and an empty batch.
        """
        refuse_as_one(inputs)
        if isinstance(inputs, RaggedBatch):
            field = weight_field(self._trainer.args)
            seen = inputs.select(name for name in inputs.names if name != field)
            sharding = sharding_of(self._trainer.model)
            keywords = None if sharding is None else sharding.keywords(self.move(seen))
            if keywords is not None:
                return keywords
            if seen.items and self.form == "flattened":
                self._require_packed()
            keywords = forms.keywords_of(seen, self.form, shifts=self.shifts, pad_token_id=self.pad_token_id)
            stay = {name: keywords.pop(name) for name in (ITEM_LENGTHS, *LENGTHS_NAMES) if name in keywords}
            return {**self.move(to_cuda_at_once(keywords, self._trainer.args.device)), **stay}
        if isinstance(inputs, PackedSequence):
            return {self.main_input: self.move(inputs)}
        if not isinstance(inputs, Mapping):
            return self.move(inputs)
        if len(inputs) == 0:
            raise InputError(
                "the batch is empty",
                expected=f"at least one of {self.forward_parameters}",
                hint="set remove_unused_columns=False if the collator needs columns that forward does not name",
            )
        lengths = counting.value_of(inputs, "input_lengths")
        prepared = self.move(inputs)
        if prepared is inputs:  # nothing moved; whoever takes a field out takes it out of a copy
            prepared = copy.copy(prepared)
        if isinstance(lengths, Tensor):  # packing wants lengths on the host
            prepared["input_lengths"] = lengths
        return prepared

    def _require_packed(self) -> None:
        """Raise ``InputError`` for a model that would let the sequences of a row see each other's images."""
        if not is_packed(self.model) and ITEM_LENGTHS not in self.forward_parameters:
            raise InputError(
                "this model cannot tell the images of a row's sequences apart",
                where=type(self.model).__name__,
                expected=f"a packed model, or a forward that names {ITEM_LENGTHS}",
                found="a batch with items",
                hint="set packing_capacity, or call ullage.pack_model(model) first",
            )

    def num_tokens(self, inputs: Any) -> int:
        """Real tokens of a batch on its way to the model; without a mask, what is not the tokenizer's padding."""
        pad_token_id = getattr(self._trainer.processing_class, "pad_token_id", None)
        return counting.num_tokens(inputs, self.main_input, pad_token_id)

    def knows_padding(self, inputs: Any) -> bool:
        """Whether padding can be told from tokens; where it cannot, :meth:`num_tokens` counts it too."""
        pad_token_id = getattr(self._trainer.processing_class, "pad_token_id", None)
        return counting.knows_padding(inputs, self.main_input, pad_token_id)

    def num_tokens_seen(self, inputs: Any) -> int:
        """Tokens of a batch as ``include_num_input_tokens_seen`` asks for them: the real ones, or all in memory."""
        trainer = self._trainer
        # True, given after the arguments were made, is all.
        if trainer.args.include_num_input_tokens_seen != "non_padding" and not counting.is_ragged(inputs):
            return counting.num_elements(inputs, self.main_input)
        if not self.knows_padding(inputs) and trainer.is_world_process_zero():
            logger.warning_once(
                "padding cannot be told from tokens, so all count as tokens: the batch has no attention_mask, and the "
                "Trainer no processing_class with a pad_token_id"
            )
        return self.num_tokens(inputs)

    def label_elements(self, inputs: Any) -> Tensor | None:
        """The label elements of a batch that the loss can count (:func:`.counting.label_elements`)."""
        if self.label_name is None:
            return None
        labels = counting.value_of(inputs, self.label_name)
        # The data of a PackedSequence begin with the first element of every sequence, batch_sizes[0] of them. Our
        # models shift within sequences, so those labels have no output before them.
        ours = isinstance(self.model, RecurrentPreTrainedModel)  # others' own losses count as they please
        if ours and self.shifts and isinstance(labels, PackedSequence):
            return labels.data[int(labels.batch_sizes[0]) :].flatten()  # first labels come first, and count nowhere
        flattened = isinstance(inputs, RaggedBatch) and self.form == "flattened"
        return counting.label_elements(inputs, self.label_name, shifts=self.shifts, flattened=flattened)

    def num_labels(self, inputs: Any) -> int:
        """Labels of a batch that count; 0 without labels. Waits for their device."""
        elements = self.label_elements(inputs)
        return 0 if elements is None else int(counting.count_labels(elements))

    def weights(self, inputs: Any, num_sequences: int | None = None) -> dict[str, float]:
        """What a metric over a batch may be weighed by: "tokens", "labels" and "sequences". Waits for the labels.

        ``num_sequences``: where the batch does not know it.
        """
        number = len(inputs) if num_sequences is None else num_sequences
        return {"tokens": self.num_tokens(inputs), "labels": self.num_labels(inputs), "sequences": number}

    def require_ids(self, inputs: Any) -> None:
        """Raise ``SampleError`` for an id that the model's embedding does not have."""
        size = _embedding_of(self.model)
        if size is not None and self.main_input == "input_ids":
            counting.require_vocabulary(inputs, self.main_input, size)


def defining_class(kind: type, name: str, *, below: type | None = None) -> type | None:
    """The first class in the method resolution order that defines ``name`` and is neither ours nor transformers'.

    ``below``: look only at the classes after this one in the order, that is, under a mixin of ours.
    """
    order = kind.__mro__
    if below is not None:
        order = order[order.index(below) + 1 :]
    return next((each for each in order if name in vars(each) and package_of(each) not in KNOWN_AUTHORS), None)


def _embedding_of(model: nn.Module) -> int | None:
    """Number of ids in the model's input embedding; None without one."""
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embedding, "num_embeddings", None)


# Batches of others' collators, as the sequences that they hold.
#
# ===================================================  ==========================================================
# batch                                                its sequences are told by
# ===================================================  ==========================================================
# one row [1, T] with ``cu_seq_lens_q``                those bounds: transformers' ``DataCollatorWithFlattening``
#                                                      with ``return_flash_attn_kwargs``, TRL's padding-free collator
# padded rows [N, L] with ``attention_mask``           the mask, one sequence per row: ``DataCollatorWithPadding``,
#                                                      ``DataCollatorForLanguageModeling``, ``DataCollatorForSeq2Seq``
# rows with ``position_ids`` or ``seq_idx``, no mask   positions that begin anew: ``DataCollatorWithFlattening``
# ===================================================  ==========================================================
#
# Labels of all of them are aligned with their tokens and not shifted, as ours are. Bounds, masks and positions that
# only count on are used up: a batch of ours says the same by its layout.


_BOUNDS = "cu_seq_lens_q"
#: What says where sequences lie, and nothing else.
_PLACES = ("attention_mask", "position_ids", "seq_idx", "seq_lengths", _BOUNDS, "cu_seq_lens_k")
_NUMBERS = ("max_length_q", "max_length_k")


def as_ragged(batch: Any, main_input: str = "input_ids", *, pairs: bool = False) -> RaggedBatch:
    """The sequences of a batch; a :class:`RaggedBatch` is returned as it is.

    Args:
        batch: what a collator gave: a :class:`RaggedBatch`, or a dict of tensors or arrays on the host.
        main_input: the field of the tokens, [1, T, ...] or [N, L, ...].
        pairs: padded ``labels`` and ``decoder_`` fields are targets of an encoder-decoder, of lengths of their own.

    Raises ``InputError`` for a batch that does not tell its sequences, or tells them in two ways that disagree.

    >>> row = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": torch.tensor([[0, 1, 2, 0]])}
    >>> as_ragged(row).layout.lengths.tolist()
    [3, 1]
    """
    if isinstance(batch, RaggedBatch):
        return batch
    fields = _tensors(batch)
    main = fields.get(main_input)
    if main is None or main.is_nested or main.ndim < 2:
        raise _unknown(batch)
    shape = tuple(main.shape[:2])
    counted = next((name for name in ("position_ids", "seq_idx") if _fits(fields.get(name), shape)), None)
    if _BOUNDS in fields or ("attention_mask" not in fields and counted is not None):
        bounds = {name: host_integers(rows, name) for name, rows in batch.get(ITEM_LENGTHS, {}).items()}
        return _flat(fields, shape, counted, {name: Layout(np.diff(rows)) for name, rows in bounds.items()})
    if "attention_mask" not in fields:
        raise _unknown(batch)
    return _padded(fields, shape, pairs)


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The fields of a batch that are tensors; none of one without names."""
    if not isinstance(batch, Mapping):
        return {}
    arrays = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()
    }
    return {name: value for name, value in arrays.items() if isinstance(value, Tensor) and name not in _NUMBERS}


def _unknown(batch: Any) -> InputError:
    fields = f" of {', '.join(batch)}" if isinstance(batch, Mapping) else ""
    return InputError(
        "packing needs batches that know their sequences",
        expected="a collator that gives a RaggedBatch, or tensors with attention_mask, cu_seq_lens_q or position_ids",
        found=f"{type(batch).__name__}{fields}",
        hint="leave data_collator out, or use RaggedCollator(labels_from='input_ids') for texts without labels",
    )


def _fits(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tuple(tensor.shape) == shape


def _flat(
    fields: dict[str, Tensor], shape: tuple[int, ...], counted: str | None, items: dict[str, Layout]
) -> RaggedBatch:
    """Sequences that lie end to end, bounded by ``cu_seq_lens_q`` or where the field ``counted`` begins anew."""
    size = shape[0] * shape[1]
    # Indices repeat within a sequence.
    begins = None if counted is None else beginnings(fields[counted].numpy(), int(counted == "position_ids"))
    if _BOUNDS in fields:
        positions = fields["position_ids"].reshape(1, size) if counted == "position_ids" else None
        layout = read_row(fields[_BOUNDS], size, positions)
        # Each element of padding is at 0, as if a sequence began there.
        filled = layout.slots > 0
        expected = np.sort(np.append(layout.starts[filled], np.flatnonzero(layout.padding_mask())))
        if begins is not None and not np.array_equal(begins, expected):
            raise InputError(
                f"{counted} and cu_seq_lens_q disagree about where sequences begin",
                expected=expected.tolist()[:8],
                found=begins.tolist()[:8],
                hint="leave positions of your own out",
            )
    else:
        assert begins is not None
        layout = Layout(np.diff(np.append(begins, size)))
    if "attention_mask" in fields and not bool(fields["attention_mask"].all()):
        raise InputError("a row with cu_seq_lens_q has padding too", where="attention_mask", hint="leave padding out")
    values, whole = {}, []
    for name, tensor in fields.items():
        if name in _PLACES:
            continue
        if name not in items and is_media(name):
            items[name] = rows_of_one(name, tensor, layout.num_items)
        if name in items:
            values[name] = tensor
        elif tuple(tensor.shape[:2]) == shape:
            values[name] = tensor.flatten(0, 1)
        else:  # one entry per sequence, or RaggedBatch says what is wrong with it
            values[name] = tensor
            whole.append(name)
    return RaggedBatch(values, layout, whole, items)


def _padded(fields: dict[str, Tensor], shape: tuple[int, ...], pairs: bool) -> RaggedBatch:
    """Sequences of padded rows, one per row, told by the mask."""
    mask = fields["attention_mask"]
    positions = fields.get("position_ids")
    if positions is not None:
        _require_running(positions, mask)
    values = {name: tensor for name, tensor in fields.items() if name not in _PLACES}
    targets = {name: values.pop(name) for name in list(values) if pairs and is_target(name) and values[name].ndim > 1}
    whole = [name for name, tensor in values.items() if tuple(tensor.shape[:2]) != shape and not is_media(name)]
    batch = RaggedBatch.from_padded(values, mask, whole)
    if not targets:
        return batch
    nested = _nested(targets)
    fields = {name: batch[name] for name in batch.names} | nested
    return RaggedBatch(fields, batch.layout, (*batch.per_sequence, *nested))


def _require_running(positions: Tensor, mask: Tensor) -> None:
    """Raise ``InputError`` for positions that begin anew within a row."""
    both = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if positions.shape != mask.shape or bool((both & (positions.diff(dim=1) != 1)).any()):
        raise InputError(
            "position_ids do not count on within a row of attention_mask",
            expected="one sequence per row",
            found=f"position_ids {list(positions.shape)}",
            hint="give rows of several sequences with position_ids and without attention_mask",
        )


def _nested(targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padded targets [N, L] as nested fields, cut behind the last label that counts, or as the decoder's mask says."""
    mask = targets.pop("decoder_attention_mask", None)
    counts = targets["labels"] != IGNORED_LABEL if mask is None else mask != 0
    # What lies behind the last label has no loss, and a decoder looks back only. At least one token each.
    last = torch.arange(1, counts.shape[1] + 1) * counts
    lengths = last.amax(1).clamp(min=1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    kept = torch.arange(counts.shape[1]) < lengths[:, None]
    return {name: torch.nested.nested_tensor_from_jagged(tensor[kept], offsets) for name, tensor in targets.items()}
