"""Counts of real elements in a batch: tokens of the input, labels that a loss counts, ids in the vocabulary.

Everything here looks at a batch as the dataloader gave it, on the host, before it moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, LENGTHS_NAMES, POSITION_NAMES
from ullage.core.errors import InputError
from ullage.training.batches.amounts import amounts_of
from ullage.training.batches.targets import num_tokens_each


def value_of(inputs: Any, name: str) -> Any:
    """A field of a batch by name; None if it is absent, and for a batch that has no named fields."""
    return inputs.get(name) if isinstance(inputs, (RaggedBatch, Mapping)) else None


def num_tokens(inputs: Any, main_input: str, pad_token_id: int | None = None) -> int:
    """Real tokens of a batch: what is neither padding nor masked. 0 if the main input is absent.

    ``pad_token_id``: the id of padding where the batch itself does not mark it (:func:`knows_padding`).
    """
    if isinstance(inputs, RaggedBatch):
        return inputs.numel()
    value = inputs if isinstance(inputs, (Tensor, PackedSequence)) else value_of(inputs, main_input)
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes.sum())
    if not isinstance(value, Tensor):
        return 0
    if value.is_nested:
        return value.values().shape[0] if value.layout == torch.jagged else sum(len(row) for row in value.unbind())
    # Padded rows: the batch's own marks first; the tokenizer's padding id only where there are none, as it may be a
    # real token.
    told = marked_rows(inputs, main_input)
    if told is not None:
        return told[0]
    if not knows_padding(inputs, main_input) and knows_padding(inputs, main_input, pad_token_id):
        return int((value != pad_token_id).sum())
    return value.numel()


def marked_rows(inputs: Any, main_input: str) -> tuple[int, int] | None:
    """Real tokens of padded rows, and their places, as a mask or lengths in the batch tell; None without these."""
    value, mask = value_of(inputs, main_input), value_of(inputs, "attention_mask")
    if isinstance(inputs, RaggedBatch) or not isinstance(value, Tensor) or value.is_nested:
        return None
    if isinstance(mask, Tensor) and (mask.ndim == 2 or mask.shape == value.shape):  # rows of choices [N, C, L]
        return int((mask != 0).sum()), mask.numel()
    for name in LENGTHS_NAMES:
        # Others' batches may hold anything of this name, such as parts of the longest row: that tells nothing.
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            lengths = torch.as_tensor(value_of(inputs, name))
            is_told = lengths.shape == value.shape[:1] and not lengths.is_floating_point() and value.ndim > 1
            if is_told and int(lengths.max()) <= value.shape[1]:
                return int(lengths.sum()), value.shape[0] * value.shape[1]
    return None


def knows_padding(inputs: Any, main_input: str, pad_token_id: int | None = None) -> bool:
    """Whether padding in the main input can be told from tokens: by the batch itself, or by the id of padding."""
    value = inputs if isinstance(inputs, (Tensor, RaggedBatch)) else value_of(inputs, main_input)
    if not isinstance(value, Tensor) or value.is_nested or value.ndim < 2:
        return True
    if marked_rows(inputs, main_input) is not None:
        return True
    in_one_row = len(value) == 1 and value_of(inputs, "position_ids") is not None  # several sequences end to end
    if in_one_row or value_of(inputs, "cu_seq_lens_q") is not None:
        return True
    return pad_token_id is not None and value.ndim == 2 and not value.is_floating_point()


def num_padded_tokens(inputs: Any, main_input: str) -> int:
    """Elements of the same batch when padded to its longest sequence."""
    if isinstance(inputs, RaggedBatch):
        return inputs.layout.num_items * inputs.max_seqlen
    value = inputs if isinstance(inputs, (Tensor, PackedSequence)) else value_of(inputs, main_input)
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]) * len(value.batch_sizes)
    if isinstance(value, Tensor) and value.is_nested:
        lengths = [len(row) for row in value.unbind()]
        return len(lengths) * max(lengths, default=0)
    # A flat row [1, T]: padded, it would be sequences times the longest; bounds [0, 3, 4] are two rows of 3.
    bounds = value_of(inputs, "cu_seq_lens_q")
    if isinstance(bounds, Tensor) and len(bounds) > 1:
        return (len(bounds) - 1) * int(bounds.diff().max())
    return value.numel() if isinstance(value, Tensor) else 0


def num_elements(inputs: Any, main_input: str, form: str | None = None) -> int:
    """Elements of the main input that the model is given, padding included.

    ``form``: that in which a RaggedBatch reaches the model (:func:`ullage.training.batches.forms.form_of`); all but
    ``"flattened"`` are padded rows.
    """
    if isinstance(inputs, RaggedBatch):
        return inputs.layout.size if form == "flattened" else num_padded_tokens(inputs, main_input)
    value = inputs if isinstance(inputs, (Tensor, PackedSequence)) else value_of(inputs, main_input)
    if isinstance(value, Tensor) and not value.is_nested:
        return value.numel()
    return num_tokens(inputs, main_input)


def label_elements(inputs: Any, name: str, *, shifts: bool | None, flattened: bool = True) -> Tensor | None:
    """The label elements that a loss can count, as one flat tensor, -100 still in it; None if there are no labels.

    Labels of a ``PackedSequence`` or a nested tensor are taken as they are. Padded labels lose their first column if
    the loss ``shifts`` (None: not known). Those of a :class:`RaggedBatch` lose the first of each sequence where the
    model sees them without: if the loss shifts, and in ``flattened`` form unless it is known not to.
    """
    labels = value_of(inputs, name)
    shifted = value_of(inputs, "shift_labels") if name == "labels" else None
    if isinstance(shifted, Tensor):
        return shifted.flatten()
    if isinstance(labels, PackedSequence):
        return labels.data.flatten()
    if not isinstance(labels, Tensor):
        return None
    if labels.is_nested:
        return torch.cat([row.flatten() for row in labels.unbind()])
    if name in POSITION_NAMES and flattened and isinstance(inputs, RaggedBatch):
        return _within_sequences(inputs, labels.reshape(-1))
    if isinstance(inputs, RaggedBatch):
        # In a flat row the model gets the labels of to_flattened, the first of each sequence -100, unless its loss is
        # known not to shift (forms.keywords_of). In padded rows a loss that shifts drops the first column: the same.
        if name in inputs.per_sequence or name != "labels" or not (shifts or (flattened and shifts is None)):
            return labels.flatten()
        return inputs.to_flattened()["labels"].flatten()
    return (labels[..., 1:] if shifts and labels.ndim >= 2 else labels).flatten()


def _within_sequences(batch: RaggedBatch, places: Tensor) -> Tensor:
    """Places of answers, -100 for one behind its sequence, which heads ignore."""
    # Sequences of 3 and 2 tokens with places [2, 2]: [2, -100].
    lengths = torch.tensor(batch.layout.lengths.tolist(), device=places.device)
    return places.masked_fill(places >= lengths, IGNORED_LABEL)


def count_labels(elements: Tensor) -> Tensor:
    """Number of elements that are not -100, int64 on their device. Does not wait for it."""
    return (elements != IGNORED_LABEL).sum()


class SampleError(InputError):
    """A sample of a batch cannot be used. ``sample``: its position in the batch; ``detail``: where in the sample."""

    def __init__(self, what: str, *, sample: int = 0, detail: str = "", **parts: Any) -> None:
        place = f"sample {sample} of the batch"
        super().__init__(what, where=f"{place}, {detail}" if detail else place, **parts)
        self.sample, self.detail = sample, detail

    def at(self, where: str) -> InputError:
        """The same error for one who knows the sample by another name, such as its index in the data set."""
        return super().at(f"{where}, {self.detail}" if self.detail else where)


def is_ragged(inputs: Any) -> bool:
    """Whether the batch itself says how long its sequences are, other than by a mask."""
    if isinstance(inputs, Mapping):
        return "input_lengths" in inputs or any(isinstance(value, PackedSequence) for value in inputs.values())
    return isinstance(inputs, (RaggedBatch, PackedSequence))


def field_by_sample(inputs: Any, name: str) -> list[Tensor]:
    """A field of a batch by sample: sequences in their own lengths, rows where they are padded."""
    value = inputs[name]
    if isinstance(value, PackedSequence):
        return [sample["ids"] for sample in RaggedBatch.from_packed_sequence(value, "ids").samples()]
    if isinstance(inputs, RaggedBatch):
        return [sample[name] for sample in inputs.samples()]
    return list(value)


def require_vocabulary(inputs: Any, name: str, vocab_size: int) -> None:
    """Raise ``SampleError`` for an id outside ``[0, vocab_size)``, with its sample in the batch and its position.

    Reads the ids where they lie; host tensors do not wait for a device.
    """
    value = value_of(inputs, name)
    ids = value.data if isinstance(value, PackedSequence) else value
    if not isinstance(ids, Tensor) or ids.is_nested or ids.numel() == 0:
        return
    if ids.is_floating_point():
        if name != "input_ids":  # values, such as a spectrum's
            return
        raise InputError(
            "token ids must be integers",
            where=name,
            expected="lists of int, or an array of an integer dtype",
            found=str(ids.dtype).removeprefix("torch."),
            hint="convert them where the data are read, such as [int(i) for i in ids]",
        )
    # One pass in the usual case that all ids are good; the search below runs only to name the bad one.
    low, high = ids.aminmax()
    if int(low) >= 0 and int(high) < vocab_size:
        return
    for i, sample in enumerate(field_by_sample(inputs, name)):
        bad = ((sample < 0) | (sample >= vocab_size)).flatten().nonzero()
        if len(bad):
            position = int(bad[0])
            raise SampleError(
                "a token id is outside the vocabulary",
                sample=i,
                detail=f"{name} at position {position}",
                expected=f"0 to {vocab_size - 1}",
                found=int(sample.flatten()[position]),
                hint="tokenize with the model's own tokenizer, or give the model a larger vocab_size",
            )


def require_capacity(batch: RaggedBatch, capacity: int, per_sample: int = 1, *, truncates: bool = True) -> None:
    """Raise ``SampleError`` for the first sequence of a sample of more than ``capacity`` tokens, its target's included.

    ``per_sample``: sequences of each sample, which lie one after the other. ``truncates``: as of :func:`over_capacity`.
    Host values only.
    """
    lengths = num_tokens_each(batch).reshape(-1, per_sample).sum(1)
    large = np.flatnonzero(lengths > capacity)
    if len(large):
        raise over_capacity(int(large[0]) * per_sample, capacity, int(lengths[large[0]]), truncates=truncates)


def require_limits(batch: RaggedBatch, limits: Mapping[str, int], config: Any) -> None:
    """Raise ``SampleError`` for the first sequence that takes more than a microbatch holds of something but tokens."""
    amounts = amounts_of(batch, config) if limits else {}
    for name, limit in limits.items():
        if name not in amounts:
            raise InputError(
                f"the model takes no images, of which packing_capacities limits the {name}",
                where=type(config).__name__,
                hint=f"leave {name} out",
            )
        large = np.flatnonzero(amounts[name] > limit)
        if len(large):
            raise SampleError(
                f"a sequence has more {name} than a microbatch may hold",
                sample=int(large[0]),
                expected=f"at most {limit} {name}, as packing_capacities says",
                found=int(amounts[name][large[0]]),
                hint="raise that capacity, make its images smaller, or set packing_oversize='drop'",
            )


def over_capacity(sample: int, capacity: int, length: int, *, truncates: bool) -> SampleError:
    """The error for a sequence of ``length`` tokens that no microbatch of a packed step can hold.

    ``truncates``: whether ``packing_oversize='truncate'`` may be chosen; it would cut pairs and targets.
    """
    cut = "set packing_oversize to 'truncate' or 'drop'"
    if not truncates:
        cut = "cut samples before they are collated, or set packing_oversize='drop'"
    return SampleError(
        "a sequence does not fit into a microbatch",
        sample=sample,
        expected=f"at most packing_capacity={capacity} tokens",
        found=length,
        hint=f"raise packing_capacity, {'or ' if truncates else ''}{cut}",
    )
