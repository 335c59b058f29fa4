"""Steps of a run: the samples of each, on however many ranks there are, and this rank's part of them.

A step has the next samples of a sampler that all ranks draw alike, or of a stream that all of them read, as one process
would have them. What a rank reads of it is one of two things:

* where the step can be planned before anything is read, as the lengths of its sequences are known and all fit, the
  samples of this rank's microbatches: they are collated, and lie in their microbatches, before the step is drawn, in
  the workers of the data loader if it has some, and nothing is exchanged;
* otherwise an even part, which the ranks exchange if they pack: of a step's 13 samples three ranks take 4, 4 and 5; of
  a last step of 2, they take 0, 1 and 1. Without packing it is cut into microbatches where it is collated.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Int64
from ullage.exchange import materialize
from ullage.exchange.source import read_from
from ullage.mixers.at_rest import random_states_kept
from ullage.planning import Plan

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
        step: a checksum of what says which step it is, the same on every rank; None where nothing does.
        spare: a sample of a stream's step, which every rank has read.
    """

    plan: Plan | None = None
    indices: list[int] | None = None
    step: int | None = None
    spare: Any = None


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

    def __getitems__(self, indices: list[int]) -> StepSamples:
        plan = None if self.lengths is None or self.plan_of is None else self.plan_of(self.lengths[indices])
        chosen = [indices[place] for place in _places(plan, len(indices), self.rank, self.ranks)]
        read = getattr(self.dataset, "__getitems__", None) if chosen else None
        samples = StepSamples([self.dataset[i] for i in chosen] if read is None else read(chosen))
        samples.plan, samples.indices, samples.step = plan, chosen, zlib.crc32(str(list(indices)).encode())
        return samples


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
            plan = self._plan(step)
            part = StepSamples(step[place] for place in _places(plan, len(step), self._rank, self._ranks))
            part.plan, part.spare = plan, step[0]
            yield part

    def _plan(self, step: list[Any]) -> Plan | None:
        with contextlib.suppress(KeyError, TypeError, IndexError):  # samples that do not tell their lengths
            return self.plan_of and self.plan_of(np.array([len(each[self._column]) for each in step], np.int64))
        return None


def seed_generator(dataset: Any, epoch: int) -> None:
    """Seed a data set's own generator as accelerate does, for one that does not listen to ``set_epoch``."""
    generator = getattr(dataset, "generator", None)
    if generator is not None and not hasattr(dataset, "set_epoch"):
        generator.manual_seed(epoch)


@dataclass(frozen=True)
class SharedPart:
    """One rank's part of a step: what ``training_step`` is given without packing.

    Attributes:
        batches: its microbatches, as the collator makes them; none where it has no samples.
        sizes: samples of each.
        number: microbatches that every rank runs.
        num_samples: of the step, over all ranks.
        stand_in: what runs in the place of microbatches that this rank lacks, and counts for nothing.
        plan: by which the microbatches were made; None where the step is still to be planned.
        indices: of the samples in the data set, in the order of the batches, where they are known.
        told: what the ranks compare: of the step or its plan, 0 where there is nothing to compare.
    """

    batches: Sequence[Any]
    sizes: Sequence[int]
    number: int = 0
    num_samples: int = 0
    stand_in: Any = None
    plan: Plan | None = None
    indices: Sequence[int] | None = None
    told: int = 0

    def pin_memory(self) -> SharedPart:
        """The same in pinned memory, as dataloaders ask for it."""
        return replace(self, batches=[pin_memory(batch) for batch in self.batches])


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

    @property
    def most_batches(self) -> int:
        """Microbatches of a part at most."""
        return self.number(self._usual)

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
        if spare is None or self._most is None or number >= self.most_batches:
            return collated
        # A stream cannot be asked for a sample again, so one comes with the part.
        with random_states_kept(holders=[self.collate]):  # the run is to draw the same as ranks that collate none
            return replace(collated, stand_in=self.collate([spare]))

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
        return SharedPart(batches, list(map(len, batches)), plan=plan, indices=indices, told=told + 3)
