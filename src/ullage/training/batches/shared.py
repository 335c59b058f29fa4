"""A global batch that belongs to the run: the same samples in the same steps, on however many ranks there are.

The sampler deals samples out in batches of the global size, as one process would read them, and each rank takes its
part of every one: of a step's 13 samples three ranks take 4, 4 and 5; of a last step of 2, they take 0, 1 and 1. A part
is cut into microbatches where it is collated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data._utils.pin_memory import pin_memory

from ullage.mixers.at_rest import random_states_kept


def part_of(number: int, rank: int, ranks: int) -> slice:
    """A rank's part of so many samples; parts differ by one at most.

    >>> [part_of(13, rank, 3) for rank in range(3)]
    [slice(0, 4, None), slice(4, 8, None), slice(8, 13, None)]
    """
    return slice(number * rank // ranks, number * (rank + 1) // ranks)


class SharedBatches(BatchSampler):
    """One rank's part of each batch of a sampler of all ranks; a part may be empty.

    Args:
        batches: the sampler of global batches, the same on every rank.
        rank: this rank's place.
        ranks: their number.
        seed: of a sampler without a generator of its own, which begins each epoch from it.
    """

    def __init__(self, batches: BatchSampler, rank: int, ranks: int, seed: int) -> None:
        self._batches, self._rank, self._ranks, self._seed = batches, rank, ranks, seed
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
        for indices in self._batches:
            yield indices[part_of(len(indices), self._rank, self._ranks)]

    def __len__(self) -> int:
        return len(self._batches)


@dataclass(frozen=True)
class SharedPart:
    """One rank's part of a step that ranks share: what ``training_step`` is given without packing.

    Attributes:
        batches: its microbatches, as the collator makes them; none where it has no samples.
        sizes: samples of each.
        number: microbatches that every rank runs.
        num_samples: of the step, over all ranks.
        stand_in: what runs in the place of microbatches that this rank lacks, and counts for nothing.
    """

    batches: Sequence[Any]
    sizes: Sequence[int]
    number: int = 0
    num_samples: int = 0
    stand_in: Any = None

    def pin_memory(self) -> SharedPart:
        """The same in pinned memory, as dataloaders ask for it."""
        return replace(self, batches=[pin_memory(batch) for batch in self.batches])


class CollatedParts:
    """A collator of a rank's part of a step, in microbatches.

    Args:
        collate: of one microbatch.
        most: samples of a microbatch at most; None for one that holds the whole part.
        usual: samples of a part of a step that is not the last of an epoch, at most.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], most: int | None, usual: int) -> None:
        self.collate, self._most, self._usual = collate, most, usual

    @property
    def most_batches(self) -> int:
        """Microbatches of a part at most."""
        return self.number(self._usual)

    def number(self, size: int) -> int:
        """Microbatches of a part of so many samples: as many on the ranks of a full step, whose parts differ by one."""
        if self._most is None:
            return min(size, 1)
        return min(size, -(-(self._usual if size >= self._usual - 1 else size) // self._most))

    def __call__(self, samples: Sequence[Any]) -> SharedPart:
        number, spare = self.number(len(samples)), getattr(samples, "spare", None)
        parts = [list(samples[part_of(len(samples), place, number)]) for place in range(number)]
        collated = SharedPart([self.collate(part) for part in parts], [len(part) for part in parts])
        if spare is None or self._most is None or number >= self.most_batches:
            return collated
        # A stream cannot be asked for a sample again, so one comes with the part.
        with random_states_kept(holders=[self.collate]):  # the run is to draw the same as ranks that collate none
            return replace(collated, stand_in=self.collate([spare]))
