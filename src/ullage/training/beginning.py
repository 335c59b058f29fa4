"""Checks before the first step: data that can be trained on, and the same arguments and data on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers

from ullage.batch import RaggedBatch
from ullage.datasets.stored import stored_lengths
from ullage.errors import InputError, require_one_of
from ullage.training import counting
from ullage.training.agreement import agreement, gather
from ullage.training.background import is_asked_for
from ullage.training.comparing import compare_ranks, describe_arguments, describe_data, random_states_kept
from ullage.training.packing import Packer
from ullage.training.reading import BatchReader
from ullage.training.saving import WholeCheckpointMixin


class RunCheck:
    """Checks before a run of ``trainer``: its data, and its arguments on all ranks."""

    def __init__(self, trainer: Any, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer

    def require_agreement(self) -> None:
        """Refuse data that cannot be trained on, and ranks whose arguments or data differ. Collective.

        Raises ``InputError`` for an empty data set, and under packing for a sequence that is known to be over the
        capacity; ``DistributedError`` on every rank where one failed, and where arguments or data differ.
        """
        trainer, args = self._trainer, self._trainer.args
        several = args.world_size > 1
        # A dataloader of a trainer's own may hold other data on every rank, and other samples than the data set.
        standard = type(trainer).get_train_dataloader is transformers.Trainer.get_train_dataloader
        described: dict[str, Any] = {}
        with agreement(several, "looking at its training data"):
            empty_step_of(args)
            _require_whole_checkpoints(trainer)
            dataset = trainer.train_dataset
            if dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:
                raise InputError("the training dataset is empty", where="train_dataset", expected="at least one sample")
            if standard and dataset is not None:
                self._require_capacity(dataset)
                described = describe_data(dataset, self._reader.main_input) if several else {}
        if several:
            ranks = gather((describe_arguments(args), described), several)
            compare_ranks([arguments for arguments, _ in ranks], [data for _, data in ranks])

    def _require_capacity(self, dataset: Any) -> None:
        """Raise ``InputError`` for a sequence over the capacity, where lengths are known without reading samples."""
        options = self._packer.options
        if options is None or options.oversize != "error":
            return
        length_column = getattr(self._trainer.args, "length_column_name", "length")
        lengths = stored_lengths(dataset, self._reader.main_input, length_column)
        large = np.zeros(0, np.int64) if lengths is None else np.flatnonzero(lengths > options.capacity)
        if lengths is None or not len(large):
            return
        # A stored sequence may be longer than what is trained on, so ask the collator about the first one before
        # refusing.
        first = int(large[0])
        if self._collated_length(dataset, first) <= options.capacity:
            return  # what is stored is padded, or cut by the collator: the steps will tell
        more = f" and {len(large) - 1:,} more" if len(large) > 1 else ""
        truncates = self._packer.truncates
        error = counting.over_capacity(first, options.capacity, int(lengths[first]), truncates=truncates)
        raise error.at(f"train_dataset[{first}]{more}")

    def _collated_length(self, dataset: Any, index: int) -> int:
        """Tokens of a sample as the collator gives it; 0 if that is not known."""
        batch = collated(self._trainer, self._reader, dataset, [index])
        return 0 if batch is None else batch.max_seqlen


def collated(trainer: Any, reader: BatchReader, dataset: Any, indices: list[int]) -> RaggedBatch | None:
    """Samples of a training data set as the collator gives them; None if that is not known."""
    # Reading a sample may draw random numbers; the run is to draw the same as without this look.
    with random_states_kept():
        try:
            if type(dataset).__module__.startswith("datasets."):
                dataset = trainer._remove_unused_columns(dataset)
                collate: Any = trainer.data_collator
            else:
                collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
            return reader.as_ragged(collate([dataset[index] for index in indices]))
        except Exception:  # it is said when the sample's turn comes
            return None


def empty_step_of(arguments: Any) -> str:
    """Treatment of a step in which no label counts: ``"warn"`` or ``"error"``."""
    return require_one_of(getattr(arguments, "empty_step", "warn"), ("warn", "error"), "empty_step")


def _require_whole_checkpoints(trainer: object) -> None:
    """Raise ``InputError`` where saves in the background are asked of a trainer that saves as transformers does."""
    if is_asked_for(getattr(trainer, "args", None)) and not isinstance(trainer, WholeCheckpointMixin):
        raise InputError(
            "this trainer's checkpoints are written by transformers itself",
            where="TrainingArguments.async_save",
            expected="WholeCheckpointMixin among the bases",
            found=type(trainer).__name__,
            hint="take a Trainer of ullage.training, or leave async_save out",
        )


def refuse_dispatching(accelerator: Any) -> None:
    """Raise ``InputError`` where one process would read the batches of all, and cut them by rows."""
    if accelerator.dispatch_batches:
        raise InputError(
            "dispatch_batches would cut packed batches apart",
            where="TrainingArguments.accelerator_config",
            expected="None or False",
            found=True,
            hint="leave it out: each process reads its own batches",
        )
