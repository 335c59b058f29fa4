"""Losses that take padded rows: the batches of TRL's trainers as sequences to plan, and back.

TRL's trainers collate padded rows, and their losses take such rows. A packed step plans and exchanges the sequences
instead: :meth:`PaddedLoss.ragged` takes a collated batch apart, and :meth:`PaddedLoss.padded` makes of each microbatch
the rows that TRL's loss takes, which the model then runs as one packed row (:mod:`ullage.training.trl.rows`).

Source: TRL 1.16, ``dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Int64, Layout
from ullage.mixers.wrappers import bare
from ullage.training.packable import make_packable
from ullage.training.packed_batch import PackedBatch
from ullage.training.trl.rows import packed_rows


class PaddedLoss:
    """A trainer of TRL's whose loss takes padded rows, under packing.

    ``trainer``: whose models, arguments and collator count. Nothing of it is read before it is asked for.

    Attributes:
        per_sample: sequences of a sample, which stay together: 2 of a preference pair.
        makes_batches: whether what is trained on is made of a collated batch in the step.
        divides_itself: whether its loss is divided by ``current_gradient_accumulation_steps`` where it is computed.
    """

    per_sample = 1
    makes_batches = False
    divides_itself = False

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    # Before the run.

    def require_packable(self) -> None:
        """Raise ``InputError`` for what cannot be packed, and make the reference model packable too."""
        trainer = self._trainer
        oversize = trainer.args.packing_oversize
        if oversize == "truncate":
            raise InputError(
                "packing_oversize='truncate' would cut completions",
                where=type(trainer).__name__,
                expected="'error' or 'drop'",
                found=repr(oversize),
                hint="max_length cuts a sample before it is collated",
            )
        if self._reference is not None:
            make_packable(bare(self._reference))

    @property
    def _reference(self) -> Any:
        return getattr(self._trainer, "ref_model", None)

    @contextmanager
    def packed_rows(self) -> Iterator[None]:
        """Within it, the trainer's models run padded rows as packed ones."""
        with packed_rows(self._trainer.model, self._reference):
            yield

    # From a collated batch to sequences, and back.

    def made_of(self, model: nn.Module, drawn: Any) -> RaggedBatch:
        """What a step trains on, of what was drawn, where :attr:`makes_batches`. Collective."""
        raise NotImplementedError

    def ragged(self, batch: Any) -> RaggedBatch:
        """The sequences of a collated batch: chosen and rejected of each pair one after the other. Host values.

        Fields with one entry per token stay so, those with one per sample get one per sequence. Raises ``InputError``
        for anything but padded rows.
        """
        if isinstance(batch, RaggedBatch):
            return batch
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) % self.per_sample:
            raise InputError(
                "packing needs the padded rows that TRL's collator gives",
                where=type(self._trainer).__name__,
                expected="input_ids and attention_mask [N, L]" + (", N even" if self.per_sample > 1 else ""),
                found=type(batch).__name__ if mask is None else f"attention_mask of shape {list(mask.shape)}",
            )
        order = self._order(len(mask))
        fields, whole = {}, []
        for name, value in batch.items():
            if name == "attention_mask":
                continue
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise InputError(
                    "packing takes tensors with one entry per token or per sample",
                    where=f"field {name!r}",
                    found=type(value).__name__,
                )
            if value.shape[:2] == mask.shape:
                fields[name] = value[order]
            else:
                fields[name] = value.repeat_interleave(self.per_sample, 0)
                whole.append(name)
        return RaggedBatch.from_padded(fields, mask[order], whole)

    def padded(self, microbatch: RaggedBatch) -> dict[str, Any]:
        """The rows of a microbatch as TRL's collator gives them. The host's, as the microbatch is."""
        rows = microbatch.to_padded({"input_ids": self._pad_token_id, "labels": -100})
        number = len(microbatch)
        # Where in the microbatch each row is that TRL expects: the inverse of the order above.
        place = torch.argsort(self._order(number))
        made = {}
        for name, value in rows.items():
            per_sample = name in microbatch.per_sequence
            made[name] = value[:: self.per_sample] if per_sample else value[place]
        return made

    def stand_in(self, microbatches: Sequence[RaggedBatch], empty: RaggedBatch) -> RaggedBatch:
        """What runs in the place of an empty microbatch, and counts for nothing: this rank's shortest sample, or zeros.

        ``microbatches``: of this rank in the step. ``empty``: one of them, which knows its fields.
        """
        best: list[dict[str, Tensor]] | None = None
        for microbatch in microbatches:
            samples = microbatch.samples() if len(microbatch) else []
            sizes = microbatch.layout.lengths.reshape(-1, self.per_sample).sum(1)
            if len(sizes) and (best is None or sizes.min() < sum(len(each["input_ids"]) for each in best)):
                first = int(sizes.argmin()) * self.per_sample
                best = samples[first : first + self.per_sample]
        if best is not None:
            return RaggedBatch.from_samples(best, per_sequence=empty.per_sequence)
        # Two tokens each, so that there is one to predict.
        lengths = np.full(self.per_sample, 2)
        values = {
            name: empty[name].new_zeros(
                (self.per_sample if name in empty.per_sequence else int(lengths.sum()), *empty[name].shape[1:])
            )
            for name in empty.names
        }
        return RaggedBatch(values, Layout(lengths), empty.per_sequence)

    # Planning.

    def groups(self, number: int) -> Int64 | None:
        """``keep_together`` of a plan for the sequences of all ranks, ``number`` of them; None if each is alone."""
        return None if self.per_sample == 1 else np.arange(number) // self.per_sample

    def planned_lengths(self, lengths: Int64, capacity: int, oversize: str) -> Int64:
        """The lengths to plan: where a sample over the capacity is to be dropped, all its sequences are over it."""
        if oversize != "drop" or self.per_sample == 1:
            return lengths
        sizes = lengths.reshape(-1, self.per_sample).sum(1).repeat(self.per_sample)
        return np.where(sizes > capacity, sizes, lengths)

    def _order(self, number: int) -> Tensor:
        """The collated row of each sequence: TRL has all chosen ones first."""
        return torch.arange(number).view(self.per_sample, -1).T.reshape(-1)

    @property
    def _pad_token_id(self) -> int:
        found = getattr(self._trainer.processing_class, "pad_token_id", None)
        return found if isinstance(found, int) else 0

    # A step.

    def completed(
        self, step: PackedBatch, drawn: Sequence[RaggedBatch], pack: Callable[..., PackedBatch]
    ) -> PackedBatch:
        """A planned step with what its loss needs beside. Collective, or nothing on all ranks.

        Args:
            step: of the sequences that are trained on.
            drawn: this rank's batches, as :meth:`ragged` made them; none if its data have ended.
            pack: plans and exchanges the sequences of all ranks, whatever their length.
        """
        return step

    def shares(self, step: PackedBatch) -> list[float]:
        """Fraction of the step over all ranks that each microbatch makes up; of the samples, where not said else."""
        whole = len(step.plan.order)
        return [len(microbatch) / whole if whole else 0.0 for microbatch in step.microbatches]

    def step(self, model: nn.Module, step: PackedBatch) -> contextlib.AbstractContextManager[None]:
        """Around the microbatches of a step. ``model``: as the training loop calls it."""
        return contextlib.nullcontext()

    def weights(self, microbatch: RaggedBatch) -> dict[str, float]:
        """What the metrics of a microbatch are weighed by, by kind (:data:`ullage.training.trl.metrics.RULES`)."""
        number = len(microbatch)
        return {"tokens": microbatch.numel(), "sequences": number, "pairs": number / self.per_sample}

    def _side_weights(self, microbatch: RaggedBatch, is_chosen: Tensor) -> dict[str, float]:
        """The weights of the two sides; ``is_chosen`` [N]: of each sequence."""
        found = {"chosen": float(is_chosen.sum()), "rejected": float((~is_chosen).sum())}
        if "completion_mask" not in microbatch:
            return found
        mask, layout = microbatch["completion_mask"] != 0, microbatch.layout
        # A token is predicted from the one before it, so the first of a sequence is not.
        starts = torch.from_numpy(layout.starts[layout.lengths > 0])
        counted = mask.index_fill(0, starts.to(mask.device), False)
        labels = torch.stack([part.sum() for part in counted.split(layout.slots.tolist())])
        chosen, rejected = float(labels[is_chosen].sum()), float(labels[~is_chosen].sum())
        return {**found, "labels": chosen + rejected, "chosen_tokens": chosen, "rejected_tokens": rejected}
