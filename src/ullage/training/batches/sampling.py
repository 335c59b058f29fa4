"""Samples of the training data by rank: each on one rank, once, and their indices in the data set.

accelerate divides iterable data in one of two ways. One of ``datasets`` with at least as many shards as there are
ranks is divided by shards, which is exact, and stays. Any other is read by every rank, each keeping every n-th batch;
its last batches are filled up with the first samples of all, so these are trained on twice. And a data set that
``split_dataset_by_node`` has divided already would be divided once more, and most of it never read: it is left as it
is. Both ways depend on the number of ranks, so such a run goes on with as many.

Packed steps, and those of ``packing_global_batch_size``, are made of what all ranks read (``batches.steps``); of the
above they keep the streams that are divided.

Source: accelerate 1.15 ``data_loader.py``, ``prepare_data_loader`` and ``IterableDatasetShard``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import IterableDataset

from ullage.core.batch import RaggedBatch
from ullage.exchange.source import hub_stream
from ullage.training.batches import counting
from ullage.training.batches.steps import PartCollator


class RecordedBatches:
    """A batch sampler, and the indices of its batches that were not drawn yet. In all else it is the sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._waiting: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        # A new queue per epoch. The generator keeps its own, so that one left half read cannot add to the next epoch's.
        self._waiting = waiting = deque()

        def batches() -> Iterator[Any]:
            for indices in self._sampler:
                waiting.append(list(indices))
                yield indices

        return batches()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._sampler, name)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the sampler, as accelerate's own wrappers of dataloaders do it."""
        return type(self._sampler)

    def next_batch(self) -> list[int] | None:
        """The indices of the batch drawn now; ``None`` where they are not known."""
        return self._waiting.popleft() if self._waiting else None


class SampleIndices:
    """Data set indices of the samples of training batches. Made for one dataloader, whose batch sampler it wraps.

    A collator sees samples, not indices. The batch sampler is therefore wrapped: it remembers the indices that it gave
    out until the Trainer draws the batch that was made of them. Batches come in the sampler's order, also from worker
    processes that read ahead. A dataloader over an iterable, and one whose sampler gives batches itself, have no
    indices to record.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: RecordedBatches | None = None
        inner = getattr(loader, "base_dataloader", loader)
        sampler = getattr(inner, "batch_sampler", None)
        if sampler is not None and not isinstance(getattr(inner, "dataset", None), IterableDataset):
            self._batches = RecordedBatches(sampler)
            vars(inner)["batch_sampler"] = self._batches  # a DataLoader's own setter refuses it after construction

    def next_batch(self) -> list[int] | None:
        """The indices of the batch drawn now; ``None`` where they are not known."""
        return None if self._batches is None else self._batches.next_batch()

    @property
    def drawn_by(self) -> str:
        """The class of the sampler that orders the samples."""
        found = getattr(self._batches, "_sampler", None)
        while (inner := getattr(found, "batch_sampler", getattr(found, "sampler", None))) is not None:
            found = inner
        return type(found).__name__

    def index_of(
        self,
        indices: list[int] | None,
        batch: Any,
        position: int,
        main_input: str,
        ragged: Callable[[Any], RaggedBatch] | None = None,
        per_sample: int = 1,
    ) -> int | None:
        """The index of the sample at ``position`` in ``batch``; ``None`` unless reading it again gives that sample.

        Args:
            indices: those of the samples that the batch was collated of, where they are known.
            batch: as it was drawn.
            position: of the sample in it.
            main_input: the field that is compared.
            ragged: what made ``batch`` of collated rows, where they were.
            per_sample: sequences of a sample, which lie one after the other in ``batch``.
        """
        if indices is None or position >= len(indices):
            return None
        try:
            # A collator may drop or reorder samples, and a data set may be random. So the sample is read again and
            # compared; what the batch padded is cut off.
            collate = self._loader.collate_fn
            collate = collate.collate if isinstance(collate, PartCollator) else collate
            again = collate([self._loader.dataset[indices[position]]])
            parts = counting.field_by_sample(again if ragged is None else ragged(again), main_input)
            there = counting.field_by_sample(batch, main_input)[position * per_sample : (position + 1) * per_sample]
            same = len(parts) == len(there) == per_sample
            same = same and all(torch.equal(part, other[: len(part)]) for part, other in zip(parts, there))
        except Exception:  # whatever it is, there is an error to report already
            return None
        return indices[position] if same else None


class EveryBatch(BatchSamplerShard):
    """One rank's batches of a data set with indices, without samples that fill up an epoch's last step."""

    @property
    def sampler(self) -> Any:
        """The sampler of all ranks, which whoever begins an epoch tells its number, also behind skipped batches."""
        return self.batch_sampler.sampler

    def __iter__(self) -> Generator[Any, None, None]:
        yield from itertools.islice(iter(self.batch_sampler), self.process_index, None, self.num_processes)


def divide_exactly(loader: Any, dataset: Any, *, sharded: bool = False) -> None:
    """Make a prepared dataloader read each sample on one rank.

    Args:
        loader: the dataloader that accelerate has prepared.
        dataset: that of the dataloader before. A stream that is divided already is left as it is.
        sharded: whether the last step of a data set with indices stays short too, so that it is that of one process.
    """
    inner = getattr(loader, "base_dataloader", loader)
    batches = getattr(inner, "batch_sampler", None)
    # A DataLoader's own setter refuses these after construction.
    if sharded and isinstance(batches, BatchSamplerShard) and not (batches.split_batches or batches.drop_last):
        vars(inner)["batch_sampler"] = EveryBatch(batches.batch_sampler, batches.num_processes, batches.process_index)
    if is_divided(dataset):
        vars(inner)["dataset"] = dataset


def is_divided(dataset: Any, ranks: int = 1) -> bool:
    """Whether ranks read streams of their own: ``split_dataset_by_node`` has divided it, or accelerate is going to."""
    if getattr(dataset, "_distributed", None) is not None:
        return True
    return hub_stream(dataset) and 1 < ranks <= dataset.n_shards
