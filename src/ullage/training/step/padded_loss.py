"""Losses that take padded rows: the batches of TRL's trainers as sequences to plan, and back.

TRL's trainers collate padded rows, and their losses take such rows. A packed step plans and exchanges the sequences
instead: :meth:`PaddedLoss.to_ragged` takes a collated batch apart, and :meth:`PaddedLoss.to_padded` makes of each
microbatch the rows that TRL's loss takes, which the model then runs as one packed row.

Padded rows outside, one packed row inside: TRL's losses call the model with padded rows and read per-token results [N,
L - 1]: log-probabilities, entropies and the like, one number per token, never logits. Within :func:`packed_rows` such a
call runs as one packed row [1, T] of the real tokens alone, and what it gives per token is laid out in [N, L - 1]
again: the entry at position p of a row is that of the token at p + 1, and zero where one of the two is padding. What
the model gives per sequence stays as it is. Calls of other kinds stay what they were: without a mask, with a cache
(generation), or for logits of every token, which would have to be padded.

Source: TRL 1.16, ``dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``, ``utils.py``: ``add_fused_lm_head``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.attention.heads import works_by_sequence
from ullage.attention.releases import CACHE_NAMES
from ullage.core.batch import RaggedBatch
from ullage.core.columns import is_media
from ullage.core.errors import InputError
from ullage.core.items import ITEM_LENGTHS
from ullage.core.layout import Int64, Layout, ranges
from ullage.core.replacing import replaced
from ullage.core.rows import host_integers
from ullage.mixers.wrappers import bare
from ullage.training.batches.packed_batch import PackedBatch, stand_in
from ullage.training.loss.divisions import shares
from ullage.training.step.packable import make_packable

#: Keyword by which TRL asks for per-token log-probabilities in the place of logits.
_FUSED = "fused_lm_head"


@contextlib.contextmanager
def packed_rows(*models: nn.Module | None) -> Iterator[None]:
    """Make models run padded rows as one packed row each call; none of them is changed afterwards.

    ``models``: packable ones (:func:`ullage.training.step.packable.make_packable`), within any wrapper; None is left
    out.
    """
    with contextlib.ExitStack() as stack:
        for model in {id(each): each for each in (bare(one) for one in models if one is not None)}.values():
            # In the place of the instance's own forward, outside what TRL, accelerate and pack_model have put there:
            # PEFT calls ``forward`` itself, so that a hook of the module would not be met.
            stack.enter_context(replaced(model, "forward", _RowsForward(model, model.forward)))
        yield


class _RowsForward:
    """The forward of a model within :func:`packed_rows`. ``own``: the forward in whose place it stands."""

    def __init__(self, model: nn.Module, own: Callable[..., Any]) -> None:
        self._own, self._by_sequence = own, works_by_sequence(model)
        self._names = list(inspect.signature(own).parameters)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        named = {**dict(zip(self._names, arguments)), **keywords}
        if not self._is_of_rows(named):
            if keywords.get("cu_seq_lens_q") is None:  # padded rows tell whose their images are by themselves
                keywords.pop(ITEM_LENGTHS, None)
            return self._own(*arguments, **keywords)
        mask = named.pop("attention_mask")
        items = _rows_of_items(named.pop(ITEM_LENGTHS, {}))
        fields, others = self._divide(named, mask)
        fields = {**fields, **{name: others.pop(name) for name in items}}
        batch = RaggedBatch.from_padded(fields, mask, items=items)
        if "labels" in batch:
            # Shifted within each sequence, so that the head scores the row as it is, and gives an entry for each token.
            shifted = batch.with_shift_labels()
            batch = shifted.select(name for name in shifted.names if name != "labels")
        outputs = self._own(**batch.to_flattened(), **others)
        return outputs if self._by_sequence else _lay_out(outputs, mask)

    def _is_of_rows(self, keywords: dict[str, Any]) -> bool:
        """Whether a call has padded rows, and asks for nothing that would have to be padded."""
        ids, mask = keywords.get("input_ids"), keywords.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != ids.shape:
            return False
        if any(keywords.get(name) is not None for name in (*CACHE_NAMES, "cu_seq_lens_q")):
            return False
        return bool(keywords.get(_FUSED)) or (self._by_sequence and keywords.get("labels") is None)

    def _divide(self, keywords: dict[str, Any], mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The fields with one entry per token of the rows, and the other keywords.

        A tensor of another size that ``forward`` does not name is left out: TRL's reward trainer hands margins on.
        """
        fields, others = {}, {}
        for name, value in keywords.items():
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == mask.shape:
                fields[name] = value
            elif not isinstance(value, Tensor) or value.ndim == 0 or name in self._names:
                others[name] = value
        return fields, others


def _rows_of_items(bounds: Mapping[str, Any]) -> dict[str, Layout]:
    """The rows by sequence of each field of images, of rows cumulated by sequence."""
    return {name: Layout(np.diff(host_integers(each, name))) for name, each in bounds.items()}


def _lay_out(outputs: Any, mask: Tensor) -> Any:
    """Outputs of a packed row as those of padded rows: [1, T] becomes [N, L - 1], zero where there is nothing.

    ``mask`` [N, L]: 1 on the tokens. The entry of a row's last position predicts nothing, and is left out.
    """
    places = mask.flatten().nonzero()[:, 0]

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or tuple(value.shape) != (1, len(places)):
            return value
        there = places.to(value.device)
        return value.new_zeros(mask.numel()).index_copy(0, there, value[0]).view(mask.shape)[:, :-1]

    return type(outputs)(**{name: rows(value) for name, value in outputs.items()})


def _ordered(items: Tensor, rows: Layout, order: Tensor) -> tuple[Tensor, Layout]:
    """The rows of images of the sequences in another order."""
    taken = order.numpy()
    index = ranges(rows.starts[taken], rows.lengths[taken])
    return items[torch.from_numpy(index)], Layout(rows.lengths[taken])


def _order(number: int, per_sample: int) -> Tensor:
    """The collated row of each sequence: TRL has all chosen ones first."""
    # Two pairs lie as chosen 0, chosen 1, rejected 0, rejected 1, so the rows are taken in the order [0, 2, 1, 3].
    return torch.arange(number).view(per_sample, -1).T.reshape(-1)


def _rows_of(batch: RaggedBatch, per_sample: int, pad_token_id: int) -> dict[str, Any]:
    """Sequences as the padded rows that TRL's collator gives; those of a sample lie one after the other in ``batch``.

    Beside fields of images are ``cu_seq_items``, the rows of each cumulated by sequence.
    """
    # Where in the batch each row is that TRL expects: the inverse of the order above.
    place = torch.argsort(_order(len(batch), per_sample))
    made, bounds = {}, {}
    for name, value in batch.to_padded({"input_ids": pad_token_id, "labels": -100}).items():
        if name in batch.items:
            made[name], found = _ordered(value, Layout(batch.items[name].lengths), place)
            bounds[name] = torch.from_numpy(found.cu_seqlens)
        else:
            made[name] = value[::per_sample] if name in batch.per_sequence else value[place]
    return {**made, ITEM_LENGTHS: bounds} if bounds else made


class PaddedLoss:
    """A trainer of TRL's whose loss takes padded rows, under packing.

    ``trainer``: whose models, arguments and collator count. Nothing of it is read before it is asked for.

    Attributes:
        per_sample: sequences of a sample, which stay together: 2 of a preference pair.
        makes_batches: whether what is trained on is made of a collated batch in the step.
    """

    per_sample = 1
    makes_batches = False

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

    def make_batch(self, model: nn.Module, drawn: Any) -> RaggedBatch:
        """What a step trains on, of what was drawn, where :attr:`makes_batches`. Collective."""
        raise NotImplementedError

    def to_ragged(self, batch: Any) -> RaggedBatch:
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
        order = _order(len(mask), self.per_sample)
        items = _rows_of_items(batch.get(ITEM_LENGTHS, {}))
        fields, whole = {}, []
        for name, value in batch.items():
            if name in ("attention_mask", ITEM_LENGTHS):
                continue
            if name in items:
                fields[name], items[name] = _ordered(value, items[name], order)
                continue
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise InputError(
                    "packing takes tensors with one entry per token or per sample",
                    where=f"field {name!r}",
                    found=type(value).__name__,
                )
            if value.shape[:2] == mask.shape:
                fields[name] = value[order]
            elif is_media(name):  # of which nobody has said whose they are
                fields[name] = value
            else:
                fields[name] = value.repeat_interleave(self.per_sample, 0)
                whole.append(name)
        return RaggedBatch.from_padded(fields, mask[order], whole, items)

    def to_padded(self, microbatch: RaggedBatch) -> dict[str, Any]:
        """The rows of a microbatch as TRL's collator gives them. The host's, as the microbatch is.

        Beside images it is said whose they are, for the model within :meth:`packed_rows`.
        """
        return self.rows(microbatch)

    def stand_in(self, microbatches: Sequence[RaggedBatch], empty: RaggedBatch) -> RaggedBatch:
        """What runs in the place of an empty microbatch, and counts for nothing: this rank's shortest sample, or zeros.

        ``microbatches``: of this rank in the step. ``empty``: one of them, which knows its fields.
        """
        return stand_in(microbatches, empty, self.per_sample)

    # Planning.

    def groups(self, number: int) -> Int64 | None:
        """``keep_together`` of a plan for the sequences of all ranks, ``number`` of them; None if each is alone."""
        return None if self.per_sample == 1 else np.arange(number) // self.per_sample

    def planned_lengths(self, lengths: Int64, capacity: int, oversize: str) -> Int64:
        """The lengths to plan: where a sample over the capacity is to be dropped, all its sequences are over it."""
        if oversize != "drop" or self.per_sample == 1:
            return lengths
        # Of the pairs (3, 4) and (6, 5) the second is over a capacity of 8, so [3, 4, 11, 11] is planned.
        sizes = lengths.reshape(-1, self.per_sample).sum(1).repeat(self.per_sample)
        return np.where(sizes > capacity, sizes, lengths)

    @property
    def rows(self) -> Callable[[RaggedBatch], dict[str, Any]]:
        """What makes rows of sequences, without the trainer: workers get it."""
        return functools.partial(_rows_of, per_sample=self.per_sample, pad_token_id=self._pad_token_id)

    @property
    def _pad_token_id(self) -> int:
        processor = self._trainer.processing_class
        found = getattr(getattr(processor, "tokenizer", processor), "pad_token_id", None)
        return found if isinstance(found, int) else 0

    # A step.

    def complete(
        self, step: PackedBatch, drawn: Sequence[RaggedBatch], pack: Callable[..., PackedBatch]
    ) -> PackedBatch:
        """A planned step with what its loss needs beside. Collective, or nothing on all ranks.

        Args:
            step: of the sequences that are trained on.
            drawn: this rank's batches, as :meth:`to_ragged` made them; none if its data have ended.
            pack: plans and exchanges the sequences of all ranks, whatever their length.
        """
        return step

    def shares(self, step: PackedBatch) -> list[float]:
        """Fraction of the step over all ranks that each microbatch makes up; of the samples, where not said else."""
        return shares(map(len, step.microbatches), len(step.plan.order))

    def step(self, model: nn.Module, step: PackedBatch) -> contextlib.AbstractContextManager[None]:
        """Around the microbatches of a step. ``model``: as the training loop calls it."""
        return contextlib.nullcontext()

    def weights(self, microbatch: RaggedBatch) -> dict[str, float]:
        """What the metrics of a microbatch are weighed by, by kind (:data:`.call_metrics.RULES`)."""
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
