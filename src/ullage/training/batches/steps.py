"""Steps of a run: the samples of each, on however many ranks there are, and this rank's part of them.

A step has the next samples of a sampler that all ranks draw alike, or of a stream that all of them read, as one process
would have them. What a rank reads of it is one of two things:

* where the step can be planned before anything is read, as the lengths of its sequences are known and all fit, the
  samples of this rank's microbatches: they are collated, and lie in their microbatches, before the step is drawn, in
  the workers of the data loader if it has some, and nothing is exchanged;
* otherwise an even part, which the ranks exchange if they pack: of a step's 13 samples three ranks take 4, 4 and 5; of
  a last step of 2, they take 0, 1 and 1. Without packing it is cut into microbatches where it is collated.

Streams that are divided among the ranks stay as they are, and steps that are not packed as transformers draws them,
unless ``packing_global_batch_size`` says what a step has.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Int64
from ullage.exchange import materialize
from ullage.exchange.source import hub_stream, read_from
from ullage.mixers.at_rest import random_states_kept
from ullage.planning import Plan
from ullage.training.batches import counting
from ullage.training.batches.packed_batch import SharedPart

#: The plan of a step over all ranks by the lengths of its sequences; None where they have to be read first.
PlanOf = Callable[[Int64], Plan | None]


def part_of(number: int, rank: int, ranks: int) -> slice:
    """A rank's part of so many samples; parts differ by one at most.

    >>> [part_of(13, rank, 3) for rank in range(3)]
    [slice(0, 4, None), slice(4, 8, None), slice(8, 13, None)]
    """
    return slice(number * rank // ranks, number * (rank + 1) // ranks)


class GlobalBatches(BatchSampler):
    """The indices of each step's samples, the same on every rank. ``set_epoch`` begins an epoch.

    ``batches``: the sampler of steps. ``seed``: of one without a generator of its own, which begins each epoch from it.
    """

    def __init__(self, batches: BatchSampler, seed: int) -> None:
        self._batches, self._seed = batches, seed
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last
        self._has_seed = getattr(self.sampler, "generator", seed) is None and not hasattr(self.sampler, "set_epoch")

    @property
    def sampler(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sampler of all ranks, which whoever begins an epoch tells its number, also behind skipped batches."""
        return self._batches.sampler

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: the order of samples depends on the seed and its number alone."""
        if self._has_seed:
            self.sampler.generator = torch.Generator().manual_seed(self._seed + epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class StepSamples(list[Any]):
    """One rank's samples of a step.

    Attributes:
        plan: of the step, by which the rank was given them, in the order of the step; None for an even part.
        indices: theirs in the data set; None in a stream.
        plan_seconds: that planning took.
        step: a checksum of what says which step it is, the same on every rank; None where nothing does.
        spare: reads a sample of the step, for a rank that has fewer microbatches than others.
    """

    plan: Plan | None = None
    plan_seconds: float = 0.0
    indices: list[int] | None = None
    step: int | None = None
    spare: partial[Any] | None = None


@dataclass
class IndexedSteps(Dataset):
    """A data set that is read by steps: the indices of one give this rank's :class:`StepSamples`.

    ``lengths``: tokens of each sample, where they are stored. ``plan_of`` plans a step; None for even parts.
    """

    dataset: Any
    rank: int
    ranks: int
    lengths: Int64 | None
    plan_of: PlanOf | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[int]) -> StepSamples:
        plan, seconds = _timed(self.plan_of, None if self.lengths is None else self.lengths[indices])
        chosen = [indices[place] for place in _places(plan, len(indices), self.rank, self.ranks)]
        read = getattr(self.dataset, "__getitems__", None) if chosen else None
        samples = StepSamples([self.dataset[i] for i in chosen] if read is None else read(chosen))
        samples.plan, samples.plan_seconds, samples.indices = plan, seconds, chosen
        samples.spare = partial(self.__getitem__, indices[0])
        samples.step = zlib.crc32(str(list(indices)).encode())
        return samples


def _timed(plan_of: PlanOf | None, lengths: Int64 | None) -> tuple[Plan | None, float]:
    """The plan of a step, if it can be made before the step is read, and the seconds that it took."""
    began = time.perf_counter()
    plan = None if plan_of is None or lengths is None else plan_of(lengths)
    return plan, time.perf_counter() - began


def _places(plan: Plan | None, number: int, rank: int, ranks: int) -> list[int]:
    """The places of a rank's samples in a step of so many, in their order."""
    return list(range(number))[part_of(number, rank, ranks)] if plan is None else sorted(plan.all_members(rank))


class StreamSteps(IterableDataset):
    """One rank's samples of every step of a stream that all ranks read: :class:`StepSamples`, which may be empty.

    Step *k* of an epoch has the samples from *k*·``size`` on in the order of the stream, whatever number of ranks there
    is, and every rank gives one part for it. So the number of steps is the place of a run, for any number of ranks. Of
    several worker processes each gives the steps of what it reads.

    Args:
        dataset: the same on every rank, undivided.
        size: samples of a step over all ranks; of the last one of an epoch fewer, or none with ``drop_last``.
        rank: this rank's place.
        ranks: their number.
        column: the tokens of a sample.
    """

    def __init__(
        self, dataset: Any, size: int, rank: int, ranks: int, drop_last: bool = False, column: str = "input_ids"
    ) -> None:
        self.dataset, self._size, self._rank, self._ranks, self._drop_last = dataset, size, rank, ranks, drop_last
        self._epoch, self._column = 0, column
        #: Plans a step; None for even parts.
        self.plan_of: PlanOf | None = None
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

    def __iter__(self) -> Iterator[StepSamples]:
        seed_generator(self.dataset, self._epoch)
        worker = torch.utils.data.get_worker_info()
        # Which of several workers gave how many steps is not known before they are read.
        trained = self.trained if worker is None or worker.num_workers == 1 else 0
        yield from (StepSamples() for _ in range(trained))
        samples, _ = read_from(self.dataset, trained * self._size)
        while step := list(itertools.islice(samples, self._size)):
            if len(step) < self._size and self._drop_last:
                return
            plan, seconds = _timed(self.plan_of, self._lengths(step))
            part = StepSamples(step[place] for place in _places(plan, len(step), self._rank, self._ranks))
            part.plan, part.plan_seconds, part.spare = plan, seconds, partial(step.__getitem__, 0)
            yield part

    def _lengths(self, step: list[Any]) -> Int64 | None:
        with contextlib.suppress(KeyError, TypeError, IndexError):  # samples that do not tell them
            return np.array([len(each[self._column]) for each in step], np.int64)
        return None


def seed_generator(dataset: Any, epoch: int) -> None:
    """Seed a data set's own generator as accelerate does, for one that does not listen to ``set_epoch``."""
    generator = getattr(dataset, "generator", None)
    if generator is not None and not hasattr(dataset, "set_epoch"):
        generator.manual_seed(epoch)


class PartCollator:
    """A collator of a rank's part of a step, in microbatches.

    Args:
        collate: of one microbatch.
        most: samples of a microbatch at most; None for one that holds the whole part.
        usual: samples of a part of a step that is not the last of an epoch, at most.
        rank: this rank's place.
        ragged: gives the sequences of a collated batch, for steps that are planned before they are read.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        most: int | None,
        usual: int,
        rank: int = 0,
        ragged: Callable[[Any], RaggedBatch] | None = None,
    ) -> None:
        self.collate, self._most, self._usual = collate, most, usual
        self._rank, self._ragged = rank, ragged

    def number(self, size: int) -> int:
        """Microbatches of a part of so many samples: as many on the ranks of a full step, whose parts differ by one."""
        if self._most is None:
            return min(size, 1)
        return min(size, -(-(self._usual if size >= self._usual - 1 else size) // self._most))

    def __call__(self, samples: StepSamples) -> SharedPart:
        if samples.plan is not None:
            return self._planned(samples, samples.plan)
        number, spare = self.number(len(samples)), samples.spare
        parts = [list(samples[part_of(len(samples), place, number)]) for place in range(number)]
        collated = SharedPart(
            [self.collate(part) for part in parts],
            [len(part) for part in parts],
            indices=samples.indices,
            told=0 if samples.step is None else -1 - samples.step,
        )
        if spare is None or self._most is None or number >= self.number(self._usual):
            return collated
        # The run is to draw the same as ranks that read and collate none.
        with random_states_kept(holders=[self.collate, spare.func]):
            return replace(collated, stand_in=self.collate([spare()]))

    def _planned(self, samples: StepSamples, plan: Plan) -> SharedPart:
        """The microbatches of the plan; one batch where the collator has made sequences of other lengths."""
        assert self._ragged is not None
        collated, indices, told = self.collate(list(samples)), samples.indices, 2 * zlib.crc32(plan.digest.encode())
        try:
            batches = materialize(plan, self._ragged(collated), self._rank)
        except InputError:  # who draws the batch looks at it once more, and says what is wrong
            return SharedPart([collated], [len(samples)], indices=indices, told=told + 2)
        if indices is not None:
            place_of = dict(zip(sorted(plan.all_members(self._rank)), indices))
            indices = [place_of[place] for place in plan.all_members(self._rank)]
        sizes, seconds = list(map(len, batches)), samples.plan_seconds
        return SharedPart(batches, sizes, plan=plan, plan_seconds=seconds, indices=indices, told=told + 3)


class RecordedBatches:
    """A batch sampler that remembers the indices of its batches until they are drawn. In all else it is the sampler.

    A collator sees samples, not indices. Batches come in the sampler's order, also from workers that read ahead.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._waiting: deque[list[int]] = deque()

    @classmethod
    def put_in(cls, loader: Any) -> RecordedBatches | None:
        """Wrap the batch sampler of a dataloader; None where an iterable, or another sampler, gives the batches."""
        inner = getattr(loader, "base_dataloader", loader)
        sampler = getattr(inner, "batch_sampler", None)
        if sampler is None or isinstance(getattr(inner, "dataset", None), IterableDataset):
            return None
        vars(inner)["batch_sampler"] = recorded = cls(sampler)  # a DataLoader's own setter refuses it by now
        return recorded

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
        """The indices of the batch drawn now; None where they are not known."""
        return self._waiting.popleft() if self._waiting else None

    @property
    def drawn_by(self) -> str:
        """The class of the sampler that orders the samples."""
        found = self._sampler
        while (inner := getattr(found, "batch_sampler", getattr(found, "sampler", None))) is not None:
            found = inner
        return type(found).__name__


def index_read_again(
    loader: Any,
    indices: Sequence[int] | None,
    batch: Any,
    position: int,
    main_input: str,
    ragged: Callable[[Any], RaggedBatch] | None = None,
    per_sample: int = 1,
) -> int | None:
    """The index of the sample at ``position`` of a drawn ``batch``; None unless reading it again gives that sample.

    ``indices``: of the samples that the batch was collated of, where they are known. ``ragged``: what made it of
    collated rows, where they were. ``per_sample``: sequences of a sample, which lie one after the other.
    """
    if indices is None or position >= len(indices):
        return None
    try:
        # A collator may drop or reorder samples, and a data set may be random. So the sample is read again and
        # compared; what the batch padded is cut off.
        collate = loader.collate_fn
        collate = collate.collate if isinstance(collate, PartCollator) else collate
        again = collate([loader.dataset[indices[position]]])
        parts = counting.field_by_sample(again if ragged is None else ragged(again), main_input)
        there = counting.field_by_sample(batch, main_input)[position * per_sample : (position + 1) * per_sample]
        same = len(parts) == len(there) == per_sample
        same = same and all(torch.equal(part, other[: len(part)]) for part, other in zip(parts, there))
    except Exception:  # whatever it is, there is an error to report already
        return None
    return indices[position] if same else None


def divided(dataset: Any, ranks: int = 1) -> bool:
    """Whether ranks read parts of a stream: ``split_dataset_by_node`` has divided it, or accelerate will, by shards.

    accelerate shards a stream of ``datasets`` that has a shard for each rank. Source: accelerate 1.15, data_loader.py.
    """
    if getattr(dataset, "_distributed", None) is not None:
        return True
    return hub_stream(dataset) and 1 < ranks <= dataset.n_shards
