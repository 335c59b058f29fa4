"""A batch sampler for a plain Trainer: transformers' ``batch_rebalance`` with our balance, and within a capacity.

A step holds the same samples as with transformers' :class:`BatchRebalanceSampler`, in as many groups: one per rank and
accumulated batch. They are balanced by :mod:`ullage.training.grouping`; where transformers' own groups are as cheap,
and fit, its are taken.

Source: transformers 5.23 ``trainer_pt_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import has_length

from ullage.datasets.stored import stored_lengths
from ullage.errors import InputError, require_int
from ullage.layout import Int64
from ullage.planning.cost import Cost
from ullage.training.arguments import PackingOptions
from ullage.training.grouping import Groups, Measure, fewest_groups, grouped, most_expensive


class _Sets(BatchRebalanceSampler):
    """The samples of each step."""

    def _yield_global_batch(self, batch_indices: list[int]) -> Generator[list[int], Any, None]:
        yield batch_indices


class BalancedSampler(BatchRebalanceSampler):
    """transformers' ``BatchRebalanceSampler`` with groups balanced by cost, none above a capacity.

    Args:
        lengths, effective_batch_size, dp_size, grad_accum, shuffle, seed, rank, drop_last: as there.
        capacity: tokens that a group may hold, its padding included if ``cost`` is ``"padded"``; None is no limit.
        cost: ``"padded"``: a group's rows times the cost of its longest; ``"tokens"``: the sum over its rows, for
            collators that do not pad. The cost of a row is transformers' own, ``length + 0.001·length²``. Or a cost
            of lengths, as of :func:`ullage.plan`, without padding.
        epochs: whose steps are checked against the capacity before the first one.

    Raises ``InputError`` for a sample above the capacity, and for a step that ``dp_size * grad_accum`` groups cannot
    hold, with the ``gradient_accumulation_steps`` that would do.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        drop_last: bool = True,
        capacity: int | None = None,
        cost: str | Cost = "padded",
        epochs: int = 1,
    ) -> None:
        super().__init__(list(lengths), effective_batch_size, dp_size, grad_accum, shuffle, seed, rank, drop_last)
        self.capacity = None if capacity is None else require_int(capacity, "capacity", least=1)
        self.measure = Measure.of(cost, self.QUADRATIC_COST_COEF)
        self._lengths: Int64 = np.maximum(np.asarray(self.lengths, np.int64), 1)
        if self.capacity is not None:
            self._require_room(self.capacity, epochs)

    def _require_room(self, capacity: int, epochs: int) -> None:
        """Raise ``InputError`` unless the groups can hold each step of these epochs."""
        large = np.flatnonzero(self._lengths > capacity)
        if len(large):
            i = int(large[0])
            raise InputError(
                "a sample is longer than the capacity",
                where=f"train_dataset[{i}]" + (f" and {len(large) - 1:,} more" if len(large) > 1 else ""),
                expected=f"at most {capacity} tokens",
                found=int(self._lengths[i]),
            )
        sets = _Sets(
            self.lengths, self.effective_batch_size, self.dp_size, self.grad_accum, self.shuffle, self.seed,
            drop_last=self.drop_last,
        )  # fmt: skip
        most, where = 0, ""
        for epoch in range(epochs):
            sets.set_epoch(epoch)
            for step, ids in enumerate(sets):
                needed = fewest_groups(self._lengths[ids], capacity, padded=self.measure.padded)
                if needed > most:
                    most, where = needed, f"step {step} of epoch {epoch}"
        if most > self.dp_size * self.grad_accum:
            raise InputError(
                "a step does not fit into its groups: one per rank and accumulated batch",
                where=where,
                expected=f"at most {self.dp_size} x {self.grad_accum} groups of {capacity} tokens",
                found=f"{most} groups",
                hint=self._remedy(most),
            )

    def _remedy(self, needed: int) -> str:
        """The accumulation with which the same steps have ``needed`` groups."""
        size, ranks = self.effective_batch_size, self.dp_size
        for steps in range(math.ceil(needed / ranks), size // ranks + 1):
            if size % (steps * ranks) == 0:
                each = size // (steps * ranks)
                return (
                    f"set gradient_accumulation_steps={steps} and per_device_train_batch_size={each}: "
                    f"the same {size} samples per step in {steps * ranks} groups"
                )
        return "raise the capacity"

    def _assign(self, indices: list[int], lengths: list[int]) -> list[list[list[int]]]:
        """Ids by rank and accumulated batch: in place of transformers' own assignment."""
        ids, sizes = np.asarray(indices, np.int64), np.maximum(np.asarray(lengths, np.int64), 1)
        ours = grouped(sizes, self.dp_size, self.grad_accum, self.measure, self.capacity)
        theirs: Groups = [
            [np.array(group, np.int64) for group in mine]
            for mine in super()._assign(list(range(len(ids))), sizes.tolist())
        ]
        if self._fits(theirs, sizes):
            ours = min((ours, theirs), key=lambda groups: most_expensive(groups, sizes, self.measure))
        return [[ids[group].tolist() for group in mine] for mine in ours]

    def _fits(self, groups: Groups, lengths: Int64) -> bool:
        sizes = [self.measure.size_of(lengths[group]) for mine in groups for group in mine]
        return self.capacity is None or max(sizes) <= self.capacity


def balanced_sampling(trainer: Any, capacity: int | None = None, cost: str | Cost = "padded") -> BalancedSampler:
    """Make a transformers Trainer train on batches of a :class:`BalancedSampler`.

    Call it before ``trainer.train()``. The arguments of the Trainer give the size of a step, ranks and accumulation, as
    for ``train_sampling_strategy="batch_rebalance"``, which it replaces.

    Args:
        trainer: a ``transformers.Trainer`` with a data set that has a length, without packing.
        capacity, cost: as of :class:`BalancedSampler`.

    Returns the sampler that this rank begins with. Raises ``InputError`` as the sampler does, and for a trainer that
    takes no batch sampler.
    """
    dataset, args = trainer.train_dataset, trainer.args
    if dataset is None or not has_length(dataset):
        raise InputError("balanced sampling needs the lengths of all samples", where="train_dataset",
                         expected="a data set with a length", found=type(dataset).__name__)  # fmt: skip
    if PackingOptions.of(args) is not None:
        raise InputError("packing balances steps by itself", hint="leave out packing_capacity or balanced_sampling")
    if trainer.accelerator.split_batches:
        raise InputError("balanced sampling makes each rank's batches", where="accelerator_config",
                         expected="split_batches=False", found=True)  # fmt: skip
    lengths = _lengths_of(trainer, dataset)

    def sampler(dataset: Any = None) -> BalancedSampler:
        return _sampler(args, lengths, capacity, cost)

    first = sampler()
    trainer._get_train_sampler = sampler
    trainer.add_callback(_SamplerInUse())
    return first


def _sampler(args: Any, lengths: list[int], capacity: int | None, cost: str | Cost) -> BalancedSampler:
    ranks, accumulated = max(1, args.world_size), args.gradient_accumulation_steps
    size = args.train_batch_size * accumulated * ranks
    steps = max(1, len(lengths) // size if args.dataloader_drop_last else math.ceil(len(lengths) / size))
    return BalancedSampler(
        lengths,
        size,
        ranks,
        accumulated,
        rank=args.process_index if ranks > 1 else 0,
        drop_last=args.dataloader_drop_last,
        capacity=capacity,
        cost=cost,
        epochs=math.ceil(args.max_steps / steps if args.max_steps > 0 else args.num_train_epochs),
    )


def _lengths_of(trainer: Any, dataset: Any) -> list[int]:
    """Tokens of each sample: as they are stored, or else as the samples are read."""
    names = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
    known = stored_lengths(dataset, names[0], trainer.args.length_column_name)
    if known is not None:
        return known.tolist()
    try:
        return [len(dataset[i][names[0]]) for i in range(len(dataset))]
    except (KeyError, TypeError) as error:
        raise InputError("samples do not tell their lengths", where="train_dataset",
                         expected=f"mappings with a field {names[0]!r}", found=repr(error)) from None  # fmt: skip


class _SamplerInUse(TrainerCallback):
    """A look at the dataloader that is trained on: its batches are the sampler's, and its epochs reach the sampler."""

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        outer = getattr(train_dataloader, "batch_sampler", None)
        inner = getattr(outer, "batch_sampler", outer)
        if not isinstance(inner, BalancedSampler):
            raise InputError(
                "the trainer does not train on balanced batches",
                where="get_train_dataloader",
                expected="transformers' own dataloader",
                found=type(inner).__name__,
                hint="call balanced_sampling before train(), on a trainer that leaves get_train_dataloader as it is",
            )
        # transformers tells the sampler of an epoch through one wrapper. After a checkpoint there are two, of which
        # accelerate's knows no epochs: the sampler would give the batches of the first epoch again.
        if outer is not inner:
            assert outer is not None
            outer.set_epoch = inner.set_epoch
