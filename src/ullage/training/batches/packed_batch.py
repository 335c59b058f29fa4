"""A step: this rank's part of a global batch, as it is drawn, and as it is planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.items import join_items, split_items
from ullage.core.layout import Layout
from ullage.planning import Plan
from ullage.training.batches import forms, targets


@dataclass(frozen=True)
class PackedBatch(Mapping[str, Any]):
    """This rank's part of a global batch: what ``training_step`` is given under packing.

    As a mapping it is the flattened batch of this rank's whole step, read-only and on the host: a field by token is one
    row [1, T] of the sequences of all microbatches, in order and without padding, a field by sequence [N], beside
    ``position_ids`` and ``cu_seq_lens_q``. So ``inputs["input_ids"].numel()`` are the tokens of this rank's step.

    Attributes:
        microbatches: as many as the plan has, the same number on every rank; some may be empty. Those of an
            encoder-decoder have each target behind its source (:mod:`ullage.training.batches.targets`).
        plan: of the global batch, the same on every rank.
        weight: sum of the weights of the global batch's sequences (:mod:`ullage.training.loss.sequence_weights`); 0
            where none are weighed.
        beside: sequences that the step's loss needs and that nothing is trained on, planned by themselves.
        shifts: whether the model's loss shifts labels, so that the first of a sequence is -100 in the row.
    """

    microbatches: tuple[RaggedBatch, ...]
    plan: Plan
    weight: float = 0.0
    beside: PackedBatch | None = None
    shifts: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Real tokens of the global batch, without what the plan drops or truncates."""
        return int(self.plan.lengths.sum())

    @property
    def is_whole(self) -> bool:
        """Whether the plan drops and truncates nothing."""
        return self.num_tokens == int(self.plan.original_lengths.sum())

    def numel(self) -> int:
        """Real tokens of this rank's microbatches."""
        return sum(microbatch.numel() for microbatch in self.microbatches)

    # The mapping. Made when it is first asked for: the Trainer itself reads the microbatches only.

    @functools.cached_property
    def _fields(self) -> dict[str, Any]:
        return _row(self.microbatches, self.shifts)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __setitem__(self, name: str, value: Any = None) -> NoReturn:
        raise _read_only(name)

    __delitem__ = pop = __setitem__


@dataclass(frozen=True)
class SharedPart:
    """One rank's part of a step, as the training dataloader gives it, and ``training_step`` gets it without packing.

    ``part["input_ids"]`` reads the part as one batch: of sequences, the row of all of them, as in :class:`PackedBatch`.

    Attributes:
        batches: its microbatches, as the collator makes them; none where it has no samples.
        sizes: samples of each.
        number: microbatches that every rank runs.
        num_samples: of the step, over all ranks.
        stand_in: what runs in the place of microbatches that this rank lacks, and counts for nothing.
        plan: by which the microbatches were made; None where the step is still to be planned.
        plan_seconds: that planning took.
        indices: of the samples in the data set, in the order of the batches, where they are known.
        told: what the ranks compare. Twice a checksum of the plan, and 3 more, or 2 where the collator has made other
            lengths; below zero one of an even part's step; 0 of a stream's.
    """

    batches: Sequence[Any]
    sizes: Sequence[int]
    number: int = 0
    num_samples: int = 0
    stand_in: Any = None
    plan: Plan | None = None
    plan_seconds: float = 0.0
    indices: Sequence[int] | None = None
    told: int = 0

    # As batches of the collator would be read: by who draws them from the dataloader by hand.

    @functools.cached_property
    def _fields(self) -> Mapping[str, Any]:
        if len(self.batches) == 1 and isinstance(self.batches[0], Mapping):
            return self.batches[0]
        ragged = tuple(each for each in self.batches if isinstance(each, RaggedBatch) and len(each))
        return _row(ragged, None) if ragged else {}

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def keys(self) -> Iterable[str]:
        """Names of the fields: those of the one batch that there is, or of the row of all sequences."""
        return self._fields.keys()

    def pin_memory(self) -> SharedPart:
        """The same in pinned memory, as dataloaders ask for it."""
        return replace(self, batches=[pin_memory(batch) for batch in self.batches])


def _row(microbatches: tuple[RaggedBatch, ...], shifts: bool | None) -> dict[str, Any]:
    """The flattened batch of the sequences of all microbatches."""
    return forms.keywords_of(targets.split_targets(_end_to_end(microbatches)), "flattened", shifts=shifts)


def _end_to_end(microbatches: tuple[RaggedBatch, ...]) -> RaggedBatch:
    """One batch of the sequences of all microbatches, without padding."""
    first = microbatches[0]
    parts, items = {}, {}
    for name in dict.fromkeys(name for each in microbatches for name in each.items):
        # A microbatch without the field has no rows of it.
        rows = [
            split_items(each[name], each.items[name]) if name in each.items else [torch.empty(0)] * len(each)
            for each in microbatches
        ]
        if joined := join_items([value for each in rows for value in each]):
            parts[name], items[name] = joined
    for name in first.names:
        if name in items:
            continue
        by_sequence = name in first.per_sequence
        parts[name] = torch.cat([
            each[name] if by_sequence else each[name][torch.from_numpy(each.layout.token_index())]
            for each in microbatches
        ])  # fmt: skip
    lengths = [length for each in microbatches for length in each.layout.lengths.tolist()]
    return RaggedBatch(parts, Layout(lengths), first.per_sequence, items)


def _read_only(name: str) -> InputError:
    return InputError(
        "a packed step cannot be changed: it runs as microbatches, and what is read here is a copy",
        where=f"training_step, inputs[{name!r}]",
        expected="reading",
        found="a field that is set or taken out",
        hint="change samples in the data collator, and keywords of the model in compute_loss",
    )


def stand_in(
    microbatches: Sequence[RaggedBatch],
    empty: RaggedBatch,
    per_sample: int = 1,
    counts: Callable[[RaggedBatch], object] = len,
) -> RaggedBatch:
    """The shortest sample of a rank's step that counts, or zeros: what runs for a microbatch in which nothing does.

    It is computed in full and counts for nothing. Where a loss is a mean, no placeholder will do: a mean over no labels
    is nan, and nan times a weight of zero is still nan.

    Args:
        microbatches: of this rank in the step.
        empty: one of them, which knows their fields.
        per_sample: sequences of a sample, which lie one after the other.
        counts: whether the loss of a sample is a number.
    """
    found = []
    for microbatch in microbatches:
        samples = microbatch.samples() if len(microbatch) else []
        for first in range(0, len(samples), per_sample):
            sample = samples[first : first + per_sample]
            whole, items = microbatch.per_sequence, microbatch.per_item
            found.append(RaggedBatch.from_samples(sample, per_sequence=whole, per_item=items))
    # Two tokens of each sequence that is made up, so that a loss that shifts still has one label to take the mean over.
    made_up = targets.placeholder(empty, [2] * per_sample, counts=True)
    return min(filter(counts, found), key=lambda each: each.numel(), default=made_up)


def refuse_as_one(inputs: Any) -> None:
    """Raise ``InputError`` where a whole packed or shared step is about to go through the model at once."""
    if isinstance(inputs, (PackedBatch, SharedPart)):
        number = inputs.number if isinstance(inputs, SharedPart) else len(inputs.microbatches)
        raise InputError(
            "a step is more than the model takes at once: it runs as microbatches",
            where="_prepare_inputs, in a training_step of your own",
            expected="super().training_step(model, inputs, num_items_in_batch), which runs them",
            found=f"a step of {number} microbatch{'es' if number != 1 else ''}",
            hint="put what changes the loss into compute_loss, which is called for each microbatch",
        )
