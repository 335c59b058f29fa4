"""Plan and exchange of a step: the sequences of all ranks as one global batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ullage.batch import RaggedBatch
from ullage.exchange import exchange, gather_lengths
from ullage.planning import Plan, plan
from ullage.planning.cost import Cost
from ullage.ranks import Topology
from ullage.training.arguments import PackingOptions
from ullage.training.packed_batch import PackedBatch
from ullage.training.step_times import StepTimes
from ullage.training.trl.padded import PaddedLoss

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPlanner:
    """Plans steps and exchanges them.

    Attributes:
        topology: all ranks along dp.
        options: of packing.
        cost: of the model.
        meets_every_microbatch: whether ranks wait for each other in each microbatch.
        times: what planning and exchanging took is added to them.
    """

    topology: Topology
    options: PackingOptions
    cost: Cost
    meets_every_microbatch: bool
    times: StepTimes = field(default_factory=StepTimes)

    def packed(self, batches: list[RaggedBatch], padded: PaddedLoss | None) -> PackedBatch:
        """Plan and exchange the batches of all ranks; returns this rank's part. Collective.

        ``batches``: of this rank. ``padded``: which of its sequences stay together, and go together.
        """
        options = self.options

        def planned(lengths: Any) -> Plan:
            if padded is None:
                return self._plan(lengths, options.capacity, options.oversize)
            asked = padded.planned_lengths(lengths, options.capacity, options.oversize)
            made = self._plan(asked, options.capacity, options.oversize, padded.groups(len(lengths)))
            return replace(made, original_lengths=lengths)

        return self._exchanged(batches, planned)

    def packed_beside(self, batches: list[RaggedBatch]) -> PackedBatch:
        """The same for what runs without gradients: a sequence over the capacity gets a microbatch of its length."""
        least = self.options.capacity
        return self._exchanged(batches, lambda all: self._plan(all, max(least, int(all.max(initial=1))), "error"))

    def _plan(self, lengths: Any, capacity: int, oversize: str, together: Any = None) -> Plan:
        """The plan, the same on every rank. If it drops every sequence, it has one empty microbatch per rank."""
        ranks = self.topology.dp.size
        limits: dict[str, Any] = {"ranks": ranks, "capacity": capacity, "oversize": oversize}
        # Where ranks wait for each other in each microbatch, the plan has to balance each; otherwise they wait once, at
        # the reduction of gradients.
        made = plan(
            lengths,
            cost=self.cost,
            strategy=self.options.strategy,
            sync="microbatch" if self.meets_every_microbatch else "step",
            keep_together=together,
            **limits,
        )
        if made.num_microbatches:
            return made
        # Nothing is left to train on. One empty microbatch on every rank keeps their collectives in step.
        return plan(lengths, strategy="preassigned", assignment=[[[]] * ranks], **limits)

    def _exchanged(self, batches: list[RaggedBatch], make_plan: Callable[[Any], Plan]) -> PackedBatch:
        # The empty array first, so that a rank without batches concatenates to no lengths.
        lengths = np.concatenate([np.zeros(0, np.int64), *(batch.layout.lengths for batch in batches)])
        times = self.times
        before = replace(times)
        with times.measured("exchange"):
            gathered = gather_lengths(lengths, self.topology)
        with times.measured("plan"):
            schedule = make_plan(gathered.lengths)
        with times.measured("exchange"):
            microbatches = tuple(exchange(schedule, batches, self.topology, gathered))
        _logger.debug(
            "rank %d: %d sequences in %d microbatches per rank; planned in %.4f s, exchanged in %.4f s",
            self.topology.dp.rank,
            schedule.num_sequences,
            schedule.num_microbatches,
            times.plan - before.plan,
            times.exchange - before.exchange,
        )
        return PackedBatch(microbatches, schedule)
