"""Indices in the data set of the samples that a batch holds, so that an error can name them.

A collator sees samples, not indices. The batch sampler of the training dataloader is therefore wrapped: it remembers
the indices that it gave out until the Trainer draws the batch that was made of them. Batches come in the sampler's
order, also from worker processes that read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ullage.training import counting
from ullage.training.trl.padded import PaddedLoss


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

    A dataloader over an iterable, and one whose sampler gives batches itself, have no indices to record.
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

    def index_of(
        self,
        indices: list[int] | None,
        batch: Any,
        position: int,
        main_input: str,
        padded: PaddedLoss | None = None,
    ) -> int | None:
        """The index of the sample at ``position`` in ``batch``; ``None`` unless reading it again gives that sample.

        ``padded``: what made ``batch`` of collated rows, where they were.
        """
        if indices is None or position >= len(indices):
            return None
        try:
            # A collator may drop or reorder samples, and a data set may be random. So the sample is read again and
            # compared; what the batch padded is cut off.
            again = self._loader.collate_fn([self._loader.dataset[indices[position]]])
            parts = counting.samples_of(again if padded is None else padded.ragged(again), main_input)
            number = 1 if padded is None else padded.per_sample
            there = counting.samples_of(batch, main_input)[position * number : (position + 1) * number]
            same = len(parts) == len(there) == number
            same = same and all(torch.equal(part, other[: len(part)]) for part, other in zip(parts, there))
        except Exception:  # whatever it is, there is an error to report already
            return None
        return indices[position] if same else None
