"""axolotl's batch sampler of packed rows, over ullage's plan, and the plug-in that puts it in place.

axolotl's sampler packs an epoch in the order in which it is drawn; accelerate then gives batch ``k`` to rank
``k % ranks``, whatever it costs. The plug-in replaces, for axolotl asks none for a sampler: a trainer class of its own
would take ours, but the number of steps is counted before, with axolotl's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from ullage.core.layout import Integers, as_lengths
from ullage.engines.replacing import Replacements, replace
from ullage.planning.lists import bins


class MultipackBatchSampler(BatchSampler):
    """axolotl's batches of packed rows: every batch is a list of ``batch_size`` rows, every row a list of ids.

    Args:
        sampler: order of the data set.
        batch_size: rows of a batch.
        batch_max_len: tokens that a row may hold.
        lengths: tokens of each sample.
        bin_size: samples that a row may hold; None or 0 for any number.
        drop_last: whether a batch with fewer rows than ``batch_size`` is left out.
        sequential: whether rows keep the sampler's order.
        packing_efficiency_estimate, num_count_samples, group_size, num_processes, safe_mode, mp_start_method: ignored:
            an epoch is one plan, and its number of batches does not depend on the order.

    Batches that ranks run side by side (``WORLD_SIZE`` of them, one after another in the list) have equal work, and
    their number is a multiple of the ranks where there are samples enough. The order of the steps is shuffled with the
    sampler's. A sample above ``batch_max_len`` has a row alone, with a warning.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        batch_max_len: int,
        lengths: Integers,
        bin_size: int | None,
        packing_efficiency_estimate: float = 1.0,
        drop_last: bool = True,
        num_count_samples: int = 4,
        sequential: bool = False,
        group_size: int = 100_000,
        num_processes: int | None = None,
        safe_mode: bool = True,
        mp_start_method: str = "fork",
        **kwargs: Any,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batch_max_len, self.bin_size, self.sequential = batch_max_len, bin_size, sequential
        self.lengths = as_lengths(lengths)
        self.set_epoch(0)
        self._length: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """The number of the epoch; batches are planned anew."""
        self.epoch = epoch
        self._batches: list[list[list[int]]] | None = None

    def generate_batches(self, set_stats: bool = False) -> list[list[list[int]]]:
        """Batches of one epoch in the sampler's order; the same until :meth:`set_epoch`."""
        if self._batches is None:
            self._batches = self._plan(np.fromiter(self.sampler, np.int64))
        return self._batches

    def _plan(self, ids: np.ndarray) -> list[list[list[int]]]:
        side_by_side = 1 if self.sequential else int(os.environ.get("WORLD_SIZE", "1")) * self.batch_size
        order = "next_fit" if self.sequential else "balanced" if side_by_side > 1 else "fewest"
        found = bins(
            self.lengths[ids], self.batch_max_len, ranks=side_by_side, order=order, oversize="alone",
            max_sequences=self.bin_size or None, fill=False,
        )  # fmt: skip
        steps = [found[begin : begin + side_by_side] for begin in range(0, len(found), side_by_side)]
        if not self.sequential:
            # A plan lists what costs alike together: shuffled, by the sampler's own order, with a short step last.
            drawn = np.random.default_rng([self.epoch, *ids[:8].tolist()]).permutation(len(steps))
            steps = sorted((steps[k] for k in drawn), key=lambda step: not all(step))
        rows = [ids[row].tolist() for step in steps for row in step if row]
        batches = [rows[begin : begin + self.batch_size] for begin in range(0, len(rows), self.batch_size)]
        if self.drop_last and batches and len(batches[-1]) < self.batch_size:
            batches.pop()
        return batches

    def __iter__(self) -> Iterator[list[Any]]:
        yield from self.generate_batches()[: len(self)]

    def __len__(self) -> int:
        if self._length is None:
            self._length = len(self.generate_batches())
        return self._length

    def efficiency(self) -> float:
        """Tokens ÷ room of the rows of the current epoch; 0.0 without rows."""
        rows = [row for batch in self.generate_batches() for row in batch]
        tokens = sum(int(self.lengths[row].sum()) for row in rows)
        return tokens / (len(rows) * self.batch_max_len) if rows else 0.0


#: What stands in the place of axolotl's.
REPLACED = {"axolotl.utils.samplers.multipack.MultipackBatchSampler": MultipackBatchSampler}


def install() -> Replacements:
    """Replace the sampler, wherever it was imported."""
    return replace(REPLACED)


def __getattr__(name: str) -> Any:
    """``AxolotlPlugin``, made when it is asked for: its base class is axolotl's."""
    if name != "AxolotlPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base: type = import_module("axolotl.integrations.base").BasePlugin

    class AxolotlPlugin(base):
        """Our sampler in the place of axolotl's from the moment when a configuration that names this is read."""

        def register(self, cfg: Any) -> None:
            self.made = install()

        def on_config_validation_error(self, cfg: Any) -> None:
            self.made.undo()

    return AxolotlPlugin
