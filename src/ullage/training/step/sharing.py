"""Steps that belong to the run and not to its ranks: how they are dealt out, and run without packing.

Ranks have unequal numbers of samples where theirs does not divide the global batch, some perhaps none. All run equally
many microbatches: for one that a rank lacks, a sample runs whose loss and gradients are times zero.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ullage.core.errors import DistributedError, InputError
from ullage.datasets.stored import stored_lengths
from ullage.training.batches.packed_batch import SharedPart
from ullage.training.batches.reading import BatchReader, as_ragged
from ullage.training.batches.steps import GlobalBatches, IndexedSteps, PartCollator, StreamSteps, divided, part_of
from ullage.training.loss.divisions import division_of
from ullage.training.setup.arguments import global_batch_of
from ullage.training.setup.sharding import data_ranks
from ullage.training.step.reduction import Run, run_weighed

if TYPE_CHECKING:
    from ullage.training.step.packing import Packer


class StepSharing:
    """Sharing of a trainer's steps over its ranks: of those that are packed, and with ``packing_global_batch_size``.

    ``trainer``: whose arguments and accelerator count. ``reader``: of its batches. ``packer``: of its steps.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self._loader: Any = None
        self._collate: PartCollator | None = None

    @property
    def size(self) -> int | None:
        """Samples of a step over all ranks, where the arguments say it; None where it follows from the ranks."""
        return global_batch_of(self._trainer.args)

    @property
    def is_on(self) -> bool:
        """Whether what the training dataloader gives are parts of steps."""
        return self._collate is not None

    def require_possible(self) -> None:
        """Raise ``InputError`` for a trainer that draws its batches otherwise."""
        if self.size is None:
            return
        padded, own = self._packer.padded_loss, type(self._trainer).get_train_dataloader
        if own is not transformers.Trainer.get_train_dataloader or (padded is not None and padded.makes_batches):
            raise InputError(
                "this trainer makes its batches itself, and would not keep to a global batch",
                where="TrainingArguments.packing_global_batch_size",
                found=type(self._trainer).__name__,
                hint="leave it out: per_device_train_batch_size × ranks is then a step",
            )

    def size_for(self, dataset: Any, batch_size: int) -> int | None:
        """Samples of a step of a training data set over all ranks; None where each rank has batches of its own.

        ``batch_size``: of a rank. Raises ``InputError`` for a stream that is divided, where the arguments say a size.
        """
        self._loader = self._collate = None
        size, ranks = self.size, data_ranks(self._trainer.model, self._trainer.args)[1]
        if size is not None and divided(dataset):
            raise InputError(
                "a stream that is divided already cannot be shared by the samples of a step",
                where="train_dataset, packing_global_batch_size",
                expected="the whole stream on every rank",
                found="a part that split_dataset_by_node has made",
                hint="give it undivided: each sample is trained on once, on one rank",
            )
        # A sampler of transformers' own makes batches for the ranks.
        ranks_own = divided(dataset, ranks) or self._trainer.args.train_sampling_strategy == "batch_rebalance"
        return batch_size * ranks if size is None and self._packer.packs_drawn and not ranks_own else size

    def share(self, loader: Any, most: int) -> None:
        """Make a dataloader of global batches give this rank's parts of them, in microbatches of ``most`` samples."""
        args, packs, column = self._trainer.args, self._packer.packs_drawn, self._reader.main_input
        rank, ranks = data_ranks(self._trainer.model, args)
        inner = getattr(loader, "base_dataloader", loader)
        size, dataset = inner.batch_size, inner.dataset
        # A DataLoader's own setter refuses these after construction.
        if isinstance(dataset, IterableDataset):
            steps: Any = StreamSteps(dataset, size, rank, ranks, inner.drop_last, column)
            vars(inner).update(batch_sampler=None, batch_size=None, drop_last=False)
        else:
            seed = args.seed if args.data_seed is None else args.data_seed
            vars(inner)["batch_sampler"] = batches = GlobalBatches(inner.batch_sampler, seed)
            size = batches.batch_size
            lengths = stored_lengths(dataset, column, getattr(args, "length_column_name", "length")) if packs else None
            steps = IndexedSteps(dataset, rank, ranks, lengths)
        ragged = functools.partial(as_ragged, main_input=column)
        self._collate = PartCollator(inner.collate_fn, None if packs else most, -(-size // ranks), rank, ragged)
        vars(inner)["dataset"] = steps
        inner.collate_fn, self._loader = self._collate, inner

    def begin_epoch(self, trained: int) -> None:
        """An epoch begins behind so many steps: those of a stream are passed over when it is next read."""
        if self._collate is None:
            return
        steps = self._loader.dataset
        steps.plan_of = self._packer.plan_of
        if isinstance(steps, StreamSteps):
            steps.trained = trained

    def require_same_step(self, told: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether all ranks have read the microbatches of one plan.

        ``told``: the step of each, as :class:`SharedPart` has it. ``sizes``: samples of each one's part. Raises
        ``DistributedError``, on every rank, where they have read different steps.
        """
        # A plan's checksum is twice itself, and one more where the collator kept the lengths that were planned.
        planned = [number // 2 if number > 0 else number for number in told]
        parts = [part_of(sum(sizes), rank, len(sizes)) for rank in range(len(sizes))]
        is_part = any(planned) or list(sizes) == [part.stop - part.start for part in parts]
        if len(set(planned)) > 1 or not is_part:
            raise DistributedError(
                "the ranks have read different steps",
                where=f"step {self._trainer.state.global_step + 1}",
                expected="the same samples on every rank, in the same order and of the same lengths",
                found=f"parts of {list(sizes)} samples, of steps with the checksums {planned}, by rank",
                hint="give every rank the same data, a stream whole and shuffled alike; a sampler of your own has to "
                "draw the same on every rank",
            )
        return all(number > 0 and number % 2 for number in told)

    def number(self, sizes: Any) -> int:
        """Microbatches that every rank runs, where the parts of the ranks are of these sizes."""
        assert self._collate is not None
        return max(self._collate.number(int(size)) for size in sizes)

    def train_step(self, run: Run, model: nn.Module, step: SharedPart, count: Any) -> Tensor:
        """Train on all microbatches of a part; gradients meet once. Returns the loss of the part, times the ranks.

        ``run``: transformers' ``training_step``, for one microbatch. ``count``: labels of the step over all ranks.
        """
        packer, division = self._packer, division_of(self._trainer, counted=count is not None, packed=False)
        shares = [size / step.num_samples for size in step.sizes]
        if division == "token_mean":
            shares = [self._reader.num_labels(batch) / int(count) for batch in step.batches]
        given = count if division == "sum" else None

        def run_microbatch(k: int) -> Tensor:
            batch, share = (step.batches[k], shares[k]) if k < len(step.batches) else (step.stand_in, 0.0)
            # A sum over the step's labels adds up by itself, and has the ranks in it.
            factor = 0.0 if not share else share * packer.averaged_over if given is None else 1.0
            return run_weighed(self._trainer, run, model, batch, factor, given)

        return packer.reduction.run(model, step.number, run_microbatch)
