"""Iterable data sets over ranks: every sample on exactly one of them.

accelerate divides an iterable data set in one of two ways. One of ``datasets`` with at least as many shards as there
are ranks is divided by shards, which is exact. Any other is read by every rank, each keeping every n-th batch; its last
batches are filled up with the first samples of all, so these are trained on twice. And a data set that
``split_dataset_by_node`` has divided already is divided once more: most of it is never read.

Here the first way stays, the third is left as it is, and in the second the last batches stay short under packing, where
ranks may end unequally.

Source: accelerate 1.15 ``data_loader.py``, ``prepare_data_loader`` and ``IterableDatasetShard``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset


class EverySample(IterableDatasetShard):
    """One rank's part of an iterable data set that every rank reads, without samples that fill up the last batches.

    Made of accelerate's part, whose batches it gives: only the last one of each rank may be shorter, or missing.
    """

    def __init__(self, part: IterableDatasetShard) -> None:
        super().__init__(**{name: value for name, value in vars(part).items() if name != "epoch"})
        if hasattr(part, "epoch"):
            self.epoch = part.epoch

    def __iter__(self) -> Generator[Any, None, None]:
        # Seed a data set's own generator as accelerate does, for one that does not listen to set_epoch.
        generator = getattr(self.dataset, "generator", None)
        if generator is not None and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(getattr(self, "epoch", 0))
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        for i, sample in enumerate(self.dataset):
            if i // size % self.num_processes == self.process_index:
                yield sample


def divide_exactly(loader: Any, dataset: Any, *, packed: bool) -> None:
    """Make a prepared dataloader over an iterable data set read each sample on one rank.

    Args:
        loader: the dataloader that accelerate has prepared.
        dataset: that of the dataloader before.
        packed: whether ranks may end unequally. Without packing the last batches are filled up, as accelerate does.
    """
    inner = getattr(loader, "base_dataloader", loader)
    part = getattr(inner, "dataset", None)
    if part is dataset or not isinstance(part, IterableDataset):
        return
    # A DataLoader's own setter refuses another data set after construction.
    if getattr(dataset, "_distributed", None) is not None:
        vars(inner)["dataset"] = dataset
    elif packed and isinstance(part, IterableDatasetShard) and not part.drop_last:
        vars(inner)["dataset"] = EverySample(part)
