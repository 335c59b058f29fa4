"""Shares of the ranks in an evaluation dataset, such that each sample counts exactly once.

The dataset is cut into batches in its own order; batch *b* belongs to rank ``b mod world``. A rank that would have one
batch less than another repeats a batch whose results are thrown away, so that every rank runs the model equally often
(sharded models need that).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers.trainer_utils import has_length

from ullage.errors import InputError
from ullage.training.sharding import data_ranks


class _Share:
    """This rank's batches: ``num_real`` of its own, then repetitions whose results do not count.

    For a dataset of unknown size ``num_real`` is ``sys.maxsize`` until the last real batch has been read.
    """

    num_real: int

    def __init__(self, batch_size: int, rank: int, world: int) -> None:
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.num_real = sys.maxsize


class _ShareOfIndices(_Share, Sampler[list[int]]):
    """Lists of indices, for a dataset of known size."""

    def __init__(self, size: int, batch_size: int, rank: int, world: int) -> None:
        super().__init__(batch_size, rank, world)
        self.size = size
        self.batches = -(-size // batch_size)
        self.num_real = len(range(rank, self.batches, world))

    def __len__(self) -> int:
        return -(-self.batches // self.world)

    def __iter__(self) -> Iterator[list[int]]:
        for k in range(len(self)):
            # Batch 0 stands in where this rank has run out: it is there in every dataset, and its result is cut off.
            batch = self.rank + k * self.world if k < self.num_real else 0
            start = batch * self.batch_size
            yield list(range(start, min(start + self.batch_size, self.size)))


class _ShareOfStream(_Share, IterableDataset):
    """Samples, for a dataset that can only be read through: each rank reads all of it and keeps its batches."""

    def __init__(self, dataset: Any, batch_size: int, rank: int, world: int) -> None:
        super().__init__(batch_size, rank, world)
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        # The length is unknown until the end, so the samples of batch 0 are kept in case this rank has to repeat them.
        first: list[Any] = []
        count = 0
        for count, sample in enumerate(self.dataset, start=1):
            batch = (count - 1) // self.batch_size
            if batch == 0:
                first.append(sample)
            if batch % self.world == self.rank:
                yield sample
        # Only the last batch of all can be short, and it is in the last round; so the rank that has it repeats nothing,
        # and DataLoader, which cuts the samples into batches again, mixes no repeated samples into it.
        batches = -(-count // self.batch_size)
        self.num_real = len(range(self.rank, batches, self.world))
        if self.num_real < -(-batches // self.world):
            yield from first


class EvaluationLoader(DataLoader):
    """A dataloader over this rank's share of an evaluation dataset, in the order of the dataset."""

    share: _Share

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks read at once, under the name that accelerate gives it."""
        return self.share.batch_size * self.share.world

    @classmethod
    def over(
        cls, dataset: Dataset, batch_size: int, rank: int, world: int, num_workers: int, **options: Any
    ) -> EvaluationLoader:
        """Make the loader of one rank.

        A dataset without indices is read in this process: worker processes would each read all of it.

        Args:
            dataset: the whole evaluation dataset, the same on every rank.
            batch_size: samples per batch of a rank.
            rank: of this process.
            world: number of ranks.
            num_workers: worker processes, for a dataset with indices.
            options: further keywords of ``DataLoader``.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            # Options that need worker processes.
            for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order"):
                options.pop(name, None)
            share = _ShareOfStream(dataset, batch_size, rank, world)
            loader = cls(share, batch_size=batch_size, **options)
        else:
            share = _ShareOfIndices(len(dataset), batch_size, rank, world)  # pyright: ignore[reportArgumentType]
            if num_workers == 0:
                options.pop("persistent_workers", None)
            loader = cls(dataset, batch_sampler=share, num_workers=num_workers, **options)
        loader.share = share
        return loader


def evaluation_loader(trainer: Any, dataset: Any, description: str, batch_size: int) -> EvaluationLoader:
    """This rank's evaluation batches of a trainer's data set, collated and loaded as its arguments say.

    ``description``: "Evaluation" or "Prediction". Raises ``InputError`` for a data set that is known to be empty, and
    on several ranks for one that ``split_dataset_by_node`` has divided.
    """
    if has_length(dataset) and len(dataset) == 0:
        raise InputError("the dataset is empty", where=description.lower(), expected="at least one sample")
    args, collator = trainer.args, trainer.data_collator
    if args.world_size > 1 and getattr(dataset, "_distributed", None) is not None:
        raise InputError(
            "an evaluation data set that is divided already would be divided once more, and most of it never read",
            where=description.lower(),
            expected="the whole data set on every rank",
            found="a part that split_dataset_by_node has made",
            hint="give it undivided: each sample is evaluated once, on one rank",
        )
    if isinstance(dataset, datasets.Dataset):
        dataset = trainer._remove_unused_columns(dataset, description=description)
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description=description)
    return EvaluationLoader.over(
        dataset,  # pyright: ignore[reportArgumentType]
        batch_size,
        *data_ranks(trainer),
        args.dataloader_num_workers,
        collate_fn=collator,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        persistent_workers=args.dataloader_persistent_workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
