"""Steps of one global batch, shared over the ranks there are: how they are dealt out, and run without packing.

Ranks have unequal numbers of samples where theirs does not divide the global batch, some perhaps none. All run equally
many microbatches: for one that a rank lacks, a sample runs whose loss and gradients are times zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ullage.core.errors import DistributedError, InputError
from ullage.mixers.at_rest import random_states_kept
from ullage.training.batches.reading import BatchReader
from ullage.training.batches.sampling import StreamParts
from ullage.training.batches.shared import CollatedParts, SharedBatches, SharedPart, part_of
from ullage.training.loss.divisions import Division, OwnLoss, declared_division
from ullage.training.setup.arguments import global_batch_of
from ullage.training.setup.sharding import data_ranks
from ullage.training.step.weighing import run_weighed

if TYPE_CHECKING:
    from ullage.training.step.packing import Packer


class StepSharing:
    """Sharing of a trainer's steps over its ranks. Off unless the arguments say ``packing_global_batch_size=...``.

    ``trainer``: whose arguments and accelerator count. ``reader``: of its batches. ``packer``: of its steps.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self._loader: Any = None
        self._collate: CollatedParts | None = None
        self._stand_in: Any = None
        self._stream: StreamParts | None = None

    @property
    def size(self) -> int | None:
        """Samples of a step over all ranks; None where each rank has batches of its own."""
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

    def size_for(self, dataset: Any) -> int | None:
        """:attr:`size`, for a training data set. Raises ``InputError`` for one that is divided among the ranks."""
        self._loader = self._collate = self._stand_in = self._stream = None
        size = self.size
        if size is not None and getattr(dataset, "_distributed", None) is not None:
            raise InputError(
                "a stream that is divided already cannot be shared by the samples of a step",
                where="train_dataset, packing_global_batch_size",
                expected="the whole stream on every rank",
                found="a part that split_dataset_by_node has made",
                hint="give it undivided: each sample is trained on once, on one rank",
            )
        return size

    def share(self, loader: Any, most: int) -> None:
        """Make a dataloader of global batches give this rank's parts of them, in microbatches of ``most`` samples."""
        args, packs = self._trainer.args, self._packer.options is not None
        rank, ranks = data_ranks(self._trainer.model, args)
        inner = getattr(loader, "base_dataloader", loader)
        size, drops = inner.batch_size, inner.drop_last
        # A DataLoader's own setter refuses these after construction.
        if isinstance(inner.dataset, IterableDataset):
            self._stream = StreamParts(inner.dataset, size, rank, ranks, drops)
            vars(inner).update(dataset=self._stream, batch_sampler=None, batch_size=None, drop_last=False)
        else:
            seed = args.seed if args.data_seed is None else args.data_seed
            vars(inner)["batch_sampler"] = batches = SharedBatches(inner.batch_sampler, rank, ranks, seed)
            size = batches.batch_size
        usual = -(-size // ranks)
        self._collate = CollatedParts(inner.collate_fn, None if packs else most, usual)
        inner.collate_fn, self._loader = self._collate, inner

    def resume(self, steps: int) -> None:
        """Pass over the samples of so many steps of a stream when it is next read; 0 begins it."""
        if self._stream is not None:
            self._stream.trained = steps

    def require_same_stream(self, sizes: Sequence[int]) -> None:
        """Raise ``DistributedError``, on every rank, where parts of these sizes are not those of one step."""
        total, ranks = sum(sizes), len(sizes)
        parts = [part_of(total, rank, ranks) for rank in range(ranks)]
        if self._stream is not None and list(sizes) != [part.stop - part.start for part in parts]:
            raise DistributedError(
                "the ranks have read different streams",
                where=f"step {self._trainer.state.global_step + 1}",
                expected="the same samples in the same order on every rank, of which each trains on its part",
                found=f"parts of {list(sizes)} samples, by rank",
                hint="with packing_global_batch_size give every rank the whole stream, undivided and shuffled alike",
            )

    def complete(self, part: SharedPart) -> SharedPart:
        """A part with what may have to run in the place of a microbatch that it lacks."""
        assert self._collate is not None
        packs, comes_with_it = self._packer.options is not None, self._stream is not None
        if packs or comes_with_it or len(part.batches) >= self._collate.most_batches:
            return part
        if self._stand_in is None:
            dataset, collate = self._loader.dataset, self._loader.collate_fn
            with random_states_kept(holders=[dataset, collate]):  # the run is to draw the same as ranks that read none
                (self._stand_in,) = collate([dataset[0]]).batches
        return replace(part, stand_in=self._stand_in)

    def number(self, sizes: Any) -> int:
        """Microbatches that every rank runs, where the parts of the ranks are of these sizes."""
        assert self._collate is not None
        return max(self._collate.number(int(size)) for size in sizes)

    def train_step(
        self, run: Callable[[nn.Module, Any, Any], Tensor], model: nn.Module, step: SharedPart, count: Any
    ) -> Tensor:
        """Train on all microbatches of a part; gradients meet once. Returns the loss of the part, times the ranks.

        ``run``: transformers' ``training_step``, for one microbatch. ``count``: labels of the step over all ranks.
        """
        packer, division = self._packer, self._division(count)
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

    def _division(self, count: Any) -> Division:
        """The division of the loss, in parts of a step. ``count``: labels of the step; None where none were counted."""
        own = OwnLoss.of(self._trainer)
        declared = None if own is None else declared_division(self._trainer, own)
        if declared is not None:
            return declared
        if count is None:
            return "sequence_mean"
        # One that takes the count divides by it, unless the trainer says otherwise; any other is a mean.
        is_sum = own is not None and own.takes_count and self._trainer.loss_is_scaled_for_ga is not False
        return "sum" if is_sum else "token_mean"
