"""What is settled before the first step: data that can be trained on, and ranks that mean the same run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
import transformers

from ullage.datasets.stored import stored_lengths
from ullage.errors import InputError, require_one_of
from ullage.training import counting
from ullage.training.agreement import agreement
from ullage.training.comparing import compare_ranks, describe_arguments, describe_data, random_states_kept
from ullage.training.metering import TokenMeter
from ullage.training.packing import PackingMixin


class BeginningMixin(PackingMixin):
    """The part of :class:`RaggedTrainerMixin` that looks at arguments and data before a run begins."""

    meter: TokenMeter
    _told_of_unused = False

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', once the ranks have agreed. Here a trial of a search has set its arguments."""
        self._agree_before_training()
        return super()._inner_training_loop(*args, **kwargs)

    def _agree_before_training(self) -> None:
        """Refuses data that cannot be trained on, and ranks that mean different things. Collective.

        Raises ``InputError`` for an empty data set, and under packing for a sequence that is known to be over the
        capacity; ``DistributedError`` on every rank where one failed, and where arguments or data differ.
        """
        options, several = self._packing, self.args.world_size > 1
        if options is None:
            self.meter.begin_run()
        else:
            self.meter.begin_run(options.oversize, options.peak_flops)
        self._told_of_unused = False
        # A dataloader of a trainer's own may hold other data on every rank, and other samples than the data set.
        standard = type(self).get_train_dataloader is transformers.Trainer.get_train_dataloader
        described: dict[str, Any] = {}
        with agreement(several, "looking at its training data"):
            self._empty_step  # noqa: B018  refuses what it does not know
            dataset = self.train_dataset
            if dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:  # pyright: ignore
                raise InputError("the training dataset is empty", where="train_dataset", expected="at least one sample")
            if standard and dataset is not None:
                self._refuse_oversize(dataset)
                described = describe_data(dataset, self._main_input) if several else {}
        if several:
            ranks: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(ranks, (describe_arguments(self.args), described))
            compare_ranks([arguments for arguments, _ in ranks], [data for _, data in ranks])

    def _refuse_oversize(self, dataset: Any) -> None:
        """Raises ``InputError`` for a sequence over the capacity, where lengths are known without reading samples."""
        options = self._packing
        if options is None or options.oversize != "error":
            return
        lengths = stored_lengths(dataset, self._main_input, getattr(self.args, "length_column_name", "length"))
        large = np.zeros(0, np.int64) if lengths is None else np.flatnonzero(lengths > options.capacity)
        if lengths is None or not len(large):
            return
        first = int(large[0])
        if self._collated_length(dataset, first) <= options.capacity:
            return  # what is stored is padded, or cut by the collator: the steps will tell
        more = f" and {len(large) - 1:,} more" if len(large) > 1 else ""
        error = counting.over_capacity(first, options.capacity, int(lengths[first]))
        raise error.at(f"train_dataset[{first}]{more}")

    def _collated_length(self, dataset: Any, index: int) -> int:
        """Tokens of a sample as the collator gives it; 0 if that cannot be told."""
        with random_states_kept():
            try:
                if type(dataset).__module__.startswith("datasets."):
                    dataset = self._remove_unused_columns(dataset)
                    collate: Any = self.data_collator
                else:
                    collate = self._get_collator_with_removed_columns(self.data_collator)
                return int(collate([dataset[index]]).max_seqlen)
            except Exception:  # it is said when the sample's turn comes
                return 0

    @property
    def _empty_step(self) -> str:
        """What becomes of a step in which no label counts: ``"warn"`` or ``"error"``."""
        return require_one_of(getattr(self.args, "empty_step", "warn"), ("warn", "error"), "empty_step")
