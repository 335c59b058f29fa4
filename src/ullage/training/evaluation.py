"""Evaluation in which each sample counts exactly once, on any number of processes and at any batch size.

The dataset is cut into batches in its own order; batch *b* belongs to rank ``b mod world``. A rank that would have one
batch less than another repeats a batch whose results are thrown away, so that every rank runs the model equally often
(sharded models need that). Losses are means over the label elements that count: each is kept with its count, summed in
float64, and reduced over ranks once, after the loop. Predictions are kept sample by sample and put back in the order of
the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ullage.errors import InputError


class _Share:
    """This rank's batches of a stream of batches: ``num_real`` of them, after which come repetitions."""

    num_real: int

    def __init__(self, batch_size: int, rank: int, world: int) -> None:
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.num_real = 0


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
            batch = self.rank + k * self.world if k < self.num_real else 0
            start = batch * self.batch_size
            yield list(range(start, min(start + self.batch_size, self.size)))


class _ShareOfStream(_Share, IterableDataset):
    """Samples, for a dataset that can only be read through: each rank reads all of it and keeps its batches."""

    def __init__(self, dataset: Any, batch_size: int, rank: int, world: int) -> None:
        super().__init__(batch_size, rank, world)
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        count = 0
        for count, sample in enumerate(self.dataset, start=1):
            batch = (count - 1) // self.batch_size
            if batch == 0:
                first.append(sample)
            if batch % self.world == self.rank:
                yield sample
        batches = -(-count // self.batch_size)
        self.num_real = len(range(self.rank, batches, self.world))
        if self.num_real < -(-batches // self.world):
            yield from first


class EvaluationLoader(DataLoader):
    """A dataloader over this rank's share of an evaluation dataset, in the order of the dataset."""

    share: _Share

    @classmethod
    def over(
        cls, dataset: Dataset, batch_size: int, rank: int, world: int, num_workers: int, **options: Any
    ) -> EvaluationLoader:
        """Batches of ``batch_size`` samples for one rank.

        A dataset without indices is read in this process: worker processes would each read all of it.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
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


@dataclass
class Record:
    """What this rank has seen: a mean loss with its count, and predictions, labels and inputs by sample."""

    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    has_loss: bool = False
    samples: list[int] = field(default_factory=list)
    predictions: list[list[Any]] = field(default_factory=list)
    labels: list[list[Any]] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)
    ragged: set[str] = field(default_factory=set)

    def keep(self, name: str, entries: list[Any], ragged: bool) -> None:
        """Adds a batch's entries to ``predictions``, ``labels`` or ``inputs``, as arrays on the host."""
        getattr(self, name).append([_as_array(entry) for entry in entries])
        if ragged:
            self.ragged.add(name)

    def cut(self, num_real: int) -> None:
        """Forgets the batches that were repetitions; whether the model gives a loss they have told all the same."""
        self.has_loss = bool(self.losses)
        for kept in (self.losses, self.samples, self.predictions, self.labels, self.inputs):
            del kept[num_real:]

    def loss_and_count(self, device: torch.device) -> Tensor:
        """Σ loss · n, Σ n and the number of samples, float64 [3] on ``device``; n = 0 counts nothing."""
        totals = torch.zeros(3, dtype=torch.float64)
        for loss, count in self.losses:
            n = float(count)
            if n > 0:
                totals += torch.tensor([float(loss) * n, n, 0.0], dtype=torch.float64)
        totals[2] = sum(self.samples)
        return totals.to(device)

    def gathered(self, name: str, gather: Callable[[list[Any]], list[Any]], world: int) -> Any:
        """All entries of a kind in the order of the dataset; None if there are none.

        One array [N, ...] if every entry is one a sequence and of one shape, else a list of N arrays.
        """
        by_rank = gather([(getattr(self, name), name in self.ragged)]) if world > 1 else None
        ranks = by_rank if by_rank is not None else [(getattr(self, name), name in self.ragged)]
        entries: list[Any] = []
        for k in range(max(len(batches) for batches, _ in ranks)):
            for batches, _ in ranks:
                entries.extend(batches[k] if k < len(batches) else [])
        if not entries:
            return None
        ragged = any(flag for _, flag in ranks)
        if isinstance(entries[0], tuple):
            return tuple(_combined([entry[k] for entry in entries], ragged) for k in range(len(entries[0])))
        return _combined(entries, ragged)


def _as_array(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(_as_array(part) for part in entry)
    if isinstance(entry, Tensor):
        entry = entry.detach().cpu()
        return (entry.float() if entry.dtype == torch.bfloat16 else entry).numpy()
    return np.asarray(entry)


def _combined(entries: list[np.ndarray], ragged: bool) -> Any:
    return entries if ragged or any(entry.shape != entries[0].shape for entry in entries) else np.stack(entries)


def missing_labels(label_names: list[str], parameters: list[str], fields: list[str], main_input: str) -> InputError:
    """Why ``evaluate()`` can compute no loss: which parameter is at fault, and which ``label_names`` to set."""
    absent = [name for name in label_names if name not in fields]
    present = [name for name in label_names if name in fields]
    if label_names and absent:
        return InputError(
            "evaluate() would report no loss: a parameter of forward is taken for labels and is not in the batch",
            where=", ".join(absent),
            expected=f"all of {label_names}, because their names contain 'label'",
            found=f"a batch of {fields}",
            hint=f"set label_names={present or ['<your labels>']} in TrainingArguments",
        )
    known = {main_input, "attention_mask", "input_lengths", "lengths", "position_ids", "token_type_ids"}
    named = [name for name in parameters[1:] if name in fields and name not in known]
    candidates = named or [name for name in fields if name not in known and name != next(iter(parameters), None)]
    return InputError(
        "evaluate() would report no loss: no parameter of forward is recognised as labels",
        where=f"forward({', '.join(parameters)})",
        expected="a parameter whose name contains 'label'",
        found=f"a batch of {fields}",
        hint=f"set label_names={candidates[:1] or ['<your labels>']} in TrainingArguments",
    )
