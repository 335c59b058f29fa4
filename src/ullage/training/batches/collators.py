"""Collators: from a list of samples to a batch without padding.

``RaggedCollator`` is the better way: it gives a :class:`RaggedBatch`, and the Trainer hands it to the model in the
form that the model takes. ``Seq2SeqCollator`` does so for samples that have a source and a target, each of its own
length. ``PackedSequenceCollator`` is for a model that wants ``PackedSequence`` inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.columns import POSITION_NAMES, behind_padding, is_media
from ullage.core.errors import InputError
from ullage.datasets.picture_chats import PictureEncoder, is_picture_chat
from ullage.datasets.pictures import PictureReader

_TARGETS = ("labels", "decoder_input_ids")
#: The column of a packed row with the lengths of its sequences; the name is TRL's.
SEQ_LENGTHS = "seq_lengths"
_TOKENIZE = (
    "tokenize first: ullage.datasets.tokenize(texts, tokenizer), or dataset.map(lambda row: tokenizer(row['text'])); "
    "`ullage train --data` takes files of texts and chats, RaggedCollator(processor=...) conversations with images"
)


@dataclass(frozen=True)
class RaggedCollator:
    """Collator of samples (dicts of lists, arrays, numbers) to a :class:`RaggedBatch`.

    A sample's ``attention_mask`` is used up: what it masks is cut away from every field of its length, so samples
    that a tokenizer padded come out without padding; places of answers (``start_positions``, ``end_positions``) are
    then counted from the first token. ``label`` and ``label_ids`` become ``labels``.

    A row that was packed ahead (:func:`ullage.datasets.pack_dataset`) is told by its ``seq_lengths``, and taken apart.

    With a ``processor`` a sample may be a conversation, with images or without
    (:mod:`ullage.datasets.picture_chats` says in which forms): its labels are what the assistant says. Each image is
    decoded once, here, so in the workers of a data loader that has some.

    Raises ``InputError`` that names sample and field.

    Attributes:
        flattened: give a plain dict of keywords for padding-free models instead, for any other trainer.
        labels_from: the field to copy as ``labels`` where no sample of the batch has any, ``"input_ids"`` for a causal
            language model.
        pad_to_multiple_of: each sequence's slot is rounded up to a multiple of this many tokens.
        per_sequence: names of array fields with one entry per sequence.
        processor: of transformers, for conversations with images.
        image_folder: that the names of images are looked up in.
    """

    flattened: bool = False
    labels_from: str | None = None
    pad_to_multiple_of: int = 1
    per_sequence: tuple[str, ...] = ()
    processor: Any = None
    image_folder: str | os.PathLike[str] | None = None

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Any:  # a ``DataCollator`` for type checkers
        if self.processor is not None:
            encoder = PictureEncoder(self.processor, PictureReader(self.image_folder))
            samples = [
                encoder.encode(sample, f"sample {i} of the batch") if is_picture_chat(sample) else sample
                for i, sample in enumerate(samples)
            ]
        require_tokenized(samples)
        apart = [sequence for i, sample in enumerate(samples) for sequence in _sequences(sample, i)]
        labelled = any({"labels", "label", "label_ids"} & {*sample} for sample in apart)
        source = None if labelled else self.labels_from
        prepared = [_without_mask(_with_labels(sample, source), i) for i, sample in enumerate(apart)]
        batch = RaggedBatch.from_samples(prepared, self.pad_to_multiple_of, self.per_sequence)
        return _flattened(batch) if self.flattened else batch


@dataclass(frozen=True)
class Seq2SeqCollator:
    """Collator of samples with a source and a target to a :class:`RaggedBatch` of sources that carries the targets.

    A sample's ``labels``, and ``decoder_input_ids`` if it has any, are the target; its other arrays are the source.
    A batch has one layout, that of the sources; targets have another, so they are jagged nested tensors [n, j], one
    row per sequence. The Trainer hands both to a recurrent encoder-decoder as they are, and pads them for a model that
    takes padded rows. ``attention_mask`` and ``decoder_attention_mask`` are used up.

    Raises ``InputError`` that names sample and field.

    Attributes:
        flattened: give a plain dict of keywords of :class:`RecurrentEncoderDecoder` instead, for any other trainer.
        per_sequence: names of array fields with one entry per sequence.
    """

    flattened: bool = False
    per_sequence: tuple[str, ...] = ()

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Any:  # a ``DataCollator`` for type checkers
        require_tokenized(samples)
        sources, targets = [], []
        for i, sample in enumerate(samples):
            fields = _with_labels(sample, None)
            target = {name: fields.pop(name) for name in _TARGETS if name in fields}
            if "decoder_attention_mask" in fields:
                target["attention_mask"] = fields.pop("decoder_attention_mask")
            if not target:
                raise InputError("a sample has no target", where=f"sample {i}", expected="labels", found=list(fields))
            sources.append(_without_mask(fields, i))
            targets.append(_without_mask(target, i))
        source = RaggedBatch.from_samples(sources, per_sequence=self.per_sequence)
        target = RaggedBatch.from_samples(targets)
        if self.flattened:
            rows = {name: target[name][None] for name in target.names}
            return {**_flattened(source), **rows, "decoder_cu_seq_lens_q": target.cu_seqlens}
        # A RaggedBatch has one layout, here the sources'. Targets have other lengths, so they are per-sequence fields.
        values = {name: source[name] for name in source.names} | {name: target.to_nested(name) for name in target.names}
        return RaggedBatch(values, source.layout, (*source.per_sequence, *target.names), source.items)


@dataclass(frozen=True)
class PackedSequenceCollator:
    """Collator of samples to a dict: a ``PackedSequence`` per token-aligned field, tensors [N] for the others.

    ``labels_from`` and ``per_sequence`` as in :class:`RaggedCollator`. Sequences keep the order of the samples
    (``sorted_indices`` are set). Raises ``InputError`` that names sample and field.
    """

    labels_from: str | None = None
    per_sequence: tuple[str, ...] = ()

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = RaggedCollator(labels_from=self.labels_from, per_sequence=self.per_sequence)(samples)
        assert isinstance(batch, RaggedBatch)
        return {
            name: batch[name] if name in batch.per_sequence else batch.to_packed_sequence(name) for name in batch.names
        }


@dataclass(frozen=True)
class AloneCollator:
    """Collator that has another one collate each sample by itself, and takes its padding away.

    So it is known which rows of images belong to which sequence, which a batch of padded rows does not say.

    Attributes:
        collate: TRL's for data with images, which gives padded rows, n of them for a sample, and all images end to end.
        processor: of ``collate``.
        per_sample: sequences of a sample, n, each with the same images.
        finish: what is made of the batch.
    """

    collate: Callable[[Any], Mapping[str, Any]]
    processor: Any
    per_sample: int = 1
    finish: Callable[[RaggedBatch], Any] | None = None

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Any:
        encoder = PictureEncoder(self.processor)
        apart = [each for i, sample in enumerate(samples) for each in self._sequences(encoder, sample, i)]
        batch = RaggedBatch.from_samples(apart)
        return batch if self.finish is None else self.finish(batch)

    def _sequences(self, encoder: PictureEncoder, sample: Mapping[str, Any], i: int) -> Iterator[dict[str, Tensor]]:
        made = dict(self.collate([dict(sample)]))  # a copy: TRL's writes into what it is given
        self._require_whole(made, sample, i)
        masks = made.pop("attention_mask") != 0
        halves = {name: value.chunk(self.per_sample) for name, value in made.items()}
        for i, mask in enumerate(masks):
            one = {name: encoder.of_one(name, parts[i], halves["input_ids"][i][0]) for name, parts in halves.items()}
            yield {name: value if is_media(name) else value[mask] for name, value in one.items()}

    def _require_whole(self, made: Mapping[str, Tensor], sample: Mapping[str, Any], i: int) -> None:
        """Raise ``InputError`` for a sample of which ``max_length`` has cut an image."""
        collate: Any = self.collate
        most = getattr(collate, "max_length", None)
        if most is None or made["input_ids"].shape[1] < most or not any(map(is_media, made)):
            return
        whole, mark = replace(collate, max_length=None)([dict(sample)]), getattr(self.processor, "image_token_id", None)
        if mark is not None and int((made["input_ids"] == mark).sum()) < int((whole["input_ids"] == mark).sum()):
            raise InputError(
                "max_length cuts an image",
                where=f"sample {i} of the batch",
                expected=f"{whole['attention_mask'].sum(1).max()} tokens or more, for the whole sample",
                found=f"max_length={most}",
                hint="raise max_length, make images smaller, or set max_length=None",
            )


@dataclass(frozen=True)
class EitherCollator:
    """The collator of a Trainer that was given none: transformers' own for rows of one length, ours for the rest.

    Attributes:
        stacking: transformers' collator, which stacks the values of a field.
        ragged: ours, for samples that it cannot stack.
        pads: fields that ``stacking`` pads first.
    """

    stacking: Callable[[Any], Any]
    ragged: RaggedCollator | Seq2SeqCollator
    pads: tuple[str, ...] = ()

    def __call__(self, samples: Sequence[Any]) -> Any:
        collate = self.ragged if _are_unequal(samples, self.pads) else self.stacking
        return collate(samples)


def require_tokenized(samples: Sequence[Any], where: str | None = None) -> None:
    """Raise ``InputError`` for samples that are texts, or rows of texts without any array, or anything but dicts.

    ``where``: what to call the samples in the error.
    """
    for i, sample in enumerate(samples):
        named = f"sample {i}" if where is None else f"{where}[{i}]"
        if not isinstance(sample, Mapping):
            is_text = isinstance(sample, str)
            raise InputError(
                "a sample is a text, not token ids" if is_text else "a sample is not a dict of fields",
                where=named,
                expected="a dict such as {'input_ids': [5, 6, 7]}",
                found=f"{type(sample).__name__} {str(sample)[:40]!r}",
                hint=_TOKENIZE if is_text else "name its fields; a list of token ids is the field input_ids",
            )
        texts = [name for name, value in sample.items() if _is_text(value)]
        if texts and not any(hasattr(value, "__len__") for name, value in sample.items() if name not in texts):
            raise InputError(
                "a sample has no token ids, only text",
                where=named,
                expected="a field input_ids",
                found=f"{', '.join(texts)}: {str(sample[texts[0]])[:40]!r}",
                hint=_TOKENIZE,
            )


def _is_text(value: Any) -> bool:
    """Whether a value is a text, or a chat."""
    is_chat = isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)
    return isinstance(value, str) or is_chat


def _are_unequal(samples: Sequence[Any], pads: Sequence[str]) -> bool:
    """Whether a field has values of unequal length, not counting those that are padded, or rows were packed ahead."""
    if not all(isinstance(sample, Mapping) for sample in samples):
        return False
    lengths: dict[str, int] = {}
    for sample in samples:
        for name, value in sample.items():
            counts = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 and not isinstance(value, str)
            if counts and name not in pads and lengths.setdefault(name, len(value)) != len(value):
                return True
    return any(SEQ_LENGTHS in sample for sample in samples)


def _sequences(sample: Mapping[str, Any], i: int) -> list[Mapping[str, Any]]:
    """The sequences of a packed row by its ``seq_lengths``; any other sample as it is."""
    if SEQ_LENGTHS not in sample:
        return [sample]
    fields = {name: value for name, value in sample.items() if name != SEQ_LENGTHS}
    ends = np.cumsum(np.asarray(sample[SEQ_LENGTHS], np.int64)).tolist()
    for name, value in fields.items():
        if not hasattr(value, "__len__") or not ends or len(value) != ends[-1]:
            raise InputError(
                "a field of a packed row does not hold its sequences",
                where=f"sample {i}, field {name!r}",
                expected=f"{ends[-1] if ends else 0} tokens, the sum of seq_lengths",
                found=len(value) if hasattr(value, "__len__") else value,
            )
    return [{name: value[a:b] for name, value in fields.items()} for a, b in zip([0, *ends], ends)]


def _flattened(batch: RaggedBatch) -> dict[str, Any]:
    return {**batch.to_flattened(), **{name: batch[name] for name in batch.per_sequence}}


def _with_labels(sample: Mapping[str, Any], labels_from: str | None) -> dict[str, Any]:
    fields = dict(sample)
    for alias in ("label", "label_ids"):
        if alias in fields and "labels" not in fields:
            fields["labels"] = fields.pop(alias)
    if labels_from is not None and "labels" not in fields:
        if labels_from not in fields:
            raise InputError(
                "samples lack the field that labels are copied from", expected=labels_from, found=list(fields)
            )
        fields["labels"] = fields[labels_from]
    return fields


def _without_mask(sample: dict[str, Any], i: int) -> dict[str, Any]:
    """The sample cut to the tokens that its attention mask keeps, without the mask."""
    if "attention_mask" not in sample:
        return sample
    given = sample.pop("attention_mask")
    if given.ndim > 1 if hasattr(given, "ndim") else len(given) > 0 and hasattr(given[0], "__len__"):
        raise InputError(
            "a sample is one sequence",
            where=f"sample {i}, attention_mask",
            expected="one entry per token",
            found=f"a list of {len(given)}",
            hint="DataCollatorForMultipleChoice pads questions with several choices, without packing_capacity",
        )
    mask, ids = np.asarray(given) != 0, sample.get("input_ids", 0)
    if hasattr(ids, "__len__") and len(ids) != len(mask):
        where, expected = f"sample {i}", f"{len(ids)} entries, one a token"
        raise InputError("attention_mask and input_ids disagree", where=where, expected=expected, found=len(mask))
    if mask.all():
        return sample
    real = np.flatnonzero(mask)
    if len(real) == 0:
        raise InputError("a sequence is all padding", where=f"sample {i}", hint="drop it")
    # The mask is padding on either side, or both. A hole would shift positions if it were cut out.
    start, stop = int(real[0]), int(real[-1]) + 1
    if stop - start != len(real):
        raise InputError("attention_mask has holes", where=f"sample {i}", expected="one run of ones")
    return {name: _cut(name, value, len(mask), start, stop) for name, value in sample.items()}


def _cut(name: str, value: Any, length: int, start: int, stop: int) -> Any:
    """The part of a token-aligned value; places in the row counted from its first token; anything else as it is."""
    if is_media(name):  # its rows are no tokens, however many there are
        return value
    if name in POSITION_NAMES:
        return behind_padding(value, start) if start else value
    aligned = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 and len(value) == length
    return value[start:stop] if aligned else value
