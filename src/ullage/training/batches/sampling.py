"""Samples of the training data by rank: each on one rank, once, and their indices in the data set.

accelerate divides iterable data in one of two ways. One of ``datasets`` with at least as many shards as there are
ranks is divided by shards, which is exact, and stays. Any other is read by every rank, each keeping every n-th batch;
its last batches are filled up with the first samples of all, so these are trained on twice. Under packing, where ranks
may end unequally, they stay short here. And a data set that ``split_dataset_by_node`` has divided already would be
divided once more, and most of it never read: it is left as it is.

Both ways depend on the number of ranks, so such a run goes on with as many. Where steps are shared over whatever ranks
there are, every rank reads the whole stream, and its place is a number of steps: :class:`StreamParts`.

Source: accelerate 1.15 ``data_loader.py``, ``prepare_data_loader`` and ``IterableDatasetShard``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import IterableDataset

from ullage.core.batch import RaggedBatch
from ullage.exchange.source import read_from
from ullage.training.batches import counting
from ullage.training.batches.shared import CollatedParts, part_of


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
            collate = collate.collate if isinstance(collate, CollatedParts) else collate
            again = collate([self._loader.dataset[indices[position]]])
            parts = counting.field_by_sample(again if ragged is None else ragged(again), main_input)
            there = counting.field_by_sample(batch, main_input)[position * per_sample : (position + 1) * per_sample]
            same = len(parts) == len(there) == per_sample
            same = same and all(torch.equal(part, other[: len(part)]) for part, other in zip(parts, there))
        except Exception:  # whatever it is, there is an error to report already
            return None
        return indices[position] if same else None


class EverySample(IterableDatasetShard):
    """One rank's part of an iterable data set that every rank reads, without samples that fill up the last batches.

    Made of accelerate's part, whose batches it gives: only the last one of each rank may be shorter, or missing.
    """

    def __init__(self, part: IterableDatasetShard) -> None:
        super().__init__(**{name: value for name, value in vars(part).items() if name != "epoch"})
        if hasattr(part, "epoch"):
            self.epoch = part.epoch

    def __iter__(self) -> Generator[Any, None, None]:
        _seed_generator(self.dataset, getattr(self, "epoch", 0))
        # In batches of 2 over three ranks, samples 0 1, 2 3, 4 5, 6 go to ranks 0, 1, 2, 0: the last batch stays short.
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        for i, sample in enumerate(self.dataset):
            if i // size % self.num_processes == self.process_index:
                yield sample


class StepPart(list[Any]):
    """One rank's samples of a step. ``spare``: one of the step's, which every rank has read."""

    spare: Any = None


class StreamParts(IterableDataset):
    """One rank's part of every global batch of a stream that all ranks read: a :class:`StepPart`, which may be empty.

    Step *k* of an epoch has the samples from *k*·``size`` on in the order of the stream, whatever number of ranks there
    is, and every rank gives one part for it. So the number of steps is the place of a run, for any number of ranks. Of
    several worker processes each gives the steps of what it reads.

    Args:
        dataset: the same on every rank, undivided.
        size: samples of a step over all ranks; of the last one of an epoch fewer, or none with ``drop_last``.
        rank: this rank's place.
        ranks: their number.
    """

    def __init__(self, dataset: Any, size: int, rank: int, ranks: int, drop_last: bool = False) -> None:
        self.dataset, self._size, self._rank, self._ranks, self._drop_last = dataset, size, rank, ranks, drop_last
        self._epoch = 0
        #: Steps of the epoch that were trained on: empty parts stand for them, and whoever resumes drops these.
        self.trained = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch of the stream."""
        self._epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        number = len(self.dataset)  # TypeError for most streams
        return number // self._size if self._drop_last else -(-number // self._size)

    def __iter__(self) -> Iterator[StepPart]:
        _seed_generator(self.dataset, self._epoch)
        worker = torch.utils.data.get_worker_info()
        # Which of several workers gave how many steps is not known before they are read.
        trained = self.trained if worker is None or worker.num_workers == 1 else 0
        yield from (StepPart() for _ in range(trained))
        samples, _ = read_from(self.dataset, trained * self._size)
        while step := list(itertools.islice(samples, self._size)):
            if len(step) < self._size and self._drop_last:
                return
            part = StepPart(step[part_of(len(step), self._rank, self._ranks)])
            part.spare = step[0]
            yield part


def _seed_generator(dataset: Any, epoch: int) -> None:
    """Seed a data set's own generator as accelerate does, for one that does not listen to ``set_epoch``."""
    generator = getattr(dataset, "generator", None)
    if generator is not None and not hasattr(dataset, "set_epoch"):
        generator.manual_seed(epoch)


class EveryBatch(BatchSamplerShard):
    """One rank's batches of a data set with indices, without samples that fill up an epoch's last step."""

    @property
    def sampler(self) -> Any:
        """The sampler of all ranks, which whoever begins an epoch tells its number, also behind skipped batches."""
        return self.batch_sampler.sampler

    def __iter__(self) -> Generator[Any, None, None]:
        yield from itertools.islice(iter(self.batch_sampler), self.process_index, None, self.num_processes)


def divide_exactly(loader: Any, dataset: Any, *, packed: bool, sharded: bool = False) -> None:
    """Make a prepared dataloader over an iterable data set read each sample on one rank.

    Args:
        loader: the dataloader that accelerate has prepared.
        dataset: that of the dataloader before.
        packed: whether ranks may end unequally. Without packing the last batches are filled up, as accelerate does.
        sharded: whether the last step of a data set with indices stays short too, so that it is that of one process.
    """
    inner = getattr(loader, "base_dataloader", loader)
    part, batches = getattr(inner, "dataset", None), getattr(inner, "batch_sampler", None)
    if sharded and isinstance(batches, BatchSamplerShard) and not (batches.split_batches or batches.drop_last):
        vars(inner)["batch_sampler"] = EveryBatch(batches.batch_sampler, batches.num_processes, batches.process_index)
    if part is dataset or not isinstance(part, IterableDataset):
        return
    # A DataLoader's own setter refuses another data set after construction.
    if getattr(dataset, "_distributed", None) is not None:
        vars(inner)["dataset"] = dataset
    elif packed and isinstance(part, IterableDatasetShard) and not part.drop_last:
        vars(inner)["dataset"] = EverySample(part)
