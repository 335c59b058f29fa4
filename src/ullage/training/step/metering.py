"""Metrics of a training run: tokens, padding, imbalance and FLOPs, by the names under which they are logged.

docs/training.md lists every name with its meaning and unit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ullage.core.batch import RaggedBatch
from ullage.planning import MultimodalCost, Plan, RecurrentCost, TransformerCost
from ullage.planning.plans import Statistics


@dataclass
class StepTimes:
    """Seconds of this rank that packed steps took beside the model's own work, added up.

    Attributes:
        wait: for the other ranks before a step, and for the device's work on the step before.
        plan: planning.
        exchange: bringing the sequences to the ranks that train on them, and packing them.
        steps: the number of steps.
    """

    wait: float = 0.0
    plan: float = 0.0
    exchange: float = 0.0
    steps: int = 0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to the seconds ``name``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)


_logger = logging.getLogger(__name__)

#: For each treatment of sequences over the capacity: the names in the logs, and those of a plan's statistics.
_OVERSIZE_COUNTS = {
    "drop": {"dropped_sequences": "num_dropped", "dropped_tokens": "dropped_tokens"},
    "truncate": {"truncated_sequences": "num_truncated", "truncated_tokens": "truncated_tokens"},
}

#: The seconds of :class:`StepTimes` in the logs, in its order.
_TIMES = ("wait_seconds", "plan_seconds", "exchange_seconds")


class LeftOut:
    """Counts of what is not trained on: sequences and tokens over the capacity, and steps in which no label counts.

    A plan covers all ranks, so the counts are the same on each. ``oversize``: what becomes of sequences over the
    capacity; under ``"error"`` there is nothing to count.
    """

    def __init__(self, oversize: str) -> None:
        self._names = _OVERSIZE_COUNTS.get(oversize, {})
        self._since, self._all = self._zeros(), self._zeros()
        self.empty_steps = 0

    def _zeros(self) -> dict[str, int]:
        return dict.fromkeys(self._names, 0)

    def add(self, statistics: Statistics) -> None:
        """Count what a plan drops or truncates."""
        for name, field in self._names.items():
            self._since[name] += getattr(statistics, field)
            self._all[name] += getattr(statistics, field)

    def since(self) -> dict[str, float]:
        """Counts of what was dropped or truncated since the last call."""
        counts, self._since = self._since, self._zeros()
        return {**counts}

    def totals(self) -> dict[str, float]:
        """Counts of what was dropped or truncated in all, and of empty steps, if there were any."""
        totals: dict[str, float] = {f"total_{name}": count for name, count in self._all.items()}
        return totals | ({"total_empty_steps": self.empty_steps} if self.empty_steps else {})


class TokenMeter:
    """Meter of the tokens that go through a model, since the last log and in the whole run.

    Each rank counts its own batches; :meth:`rates` and :meth:`closing` add them up.

    ``num_tokens`` and ``num_padded_tokens`` are those of all ranks in the whole run, up to the last log: real tokens,
    and the elements of the same batches if padded to their longest sequences. Tokens between two logs do not count if
    a batch did not tell them from padding. ``left_out``: see :class:`LeftOut`.
    ``times``: since the last log, added to by whoever makes the steps. ``plan``: of the last packed step, None before.
    """

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(
        self,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        *,
        num_devices: int = 1,
        peak_flops: float | None = None,
        oversize: str = "error",
    ) -> None:
        """Start again from zero.

        Args:
            device: where the ranks add up their counts.
            group: the ranks whose batches differ (those of dp); None for one process.
            num_devices: devices of the whole run, for ``mfu``.
            peak_flops: FLOP/s that one device could do; None leaves ``mfu`` out.
            oversize: what becomes of sequences over the capacity: ``"error"``, ``"truncate"`` or ``"drop"``.
        """
        self._device, self._group = device, group
        self.left_out = LeftOut(oversize)
        self.plan: Plan | None = None
        self._peak = None if peak_flops is None else peak_flops * num_devices
        self.num_tokens = self.num_padded_tokens = self._num_computed = 0
        self._begin_interval()

    def _begin_interval(self) -> None:
        # Tokens, elements computed, elements if padded, capacity, FLOPs: of this rank, since the last log.
        self._counts = [0.0] * 5
        self._imbalances: list[float] = []
        # Of every resource besides tokens what was taken and its capacity, by the plans: over all ranks.
        self._taken: dict[str, list[int]] = {}
        self.times = StepTimes()
        self._began = time.perf_counter()

    def add(self, tokens: float, computed: int, padded: int, capacity: int = 0, flops: float = 0.0) -> None:
        """Count a batch of this rank.

        Args:
            tokens: real tokens; NaN where the batch does not tell them from padding.
            computed: elements that the model is given, padding included.
            padded: elements of the batch if padded to its longest sequence.
            capacity: slots that the batch could have had; 0 where nothing is packed.
            flops: model FLOPs of the batch, forward and backward; 0 where nothing is packed.
        """
        for k, number in enumerate((tokens, computed, padded, capacity, flops)):
            self._counts[k] += number

    def add_packed(self, microbatches: Sequence[RaggedBatch], plan: Plan, flops: float) -> None:
        """Count a packed step: this rank's microbatches of it, their model FLOPs, and the plan of all ranks."""
        layouts = [microbatch.layout for microbatch in microbatches if len(microbatch)]
        longest = max((int(layout.lengths.max()) for layout in layouts), default=0)
        self.add(
            sum(layout.num_tokens for layout in layouts),
            sum(layout.size for layout in layouts),
            sum(layout.num_items for layout in layouts) * longest,
            # Empty microbatches count as capacity too: this rank could have had tokens in them.
            plan.num_microbatches * plan.capacity,
            flops,
        )
        self.plan = plan
        statistics = plan.statistics()
        self._imbalances.append(statistics.rank_imbalance)
        for each in statistics.resources:
            taken = self._taken.setdefault(each.name, [0, 0])
            taken[0] += each.amount
            taken[1] += plan.num_microbatches * plan.ranks * (each.capacity or 0)
        self.left_out.add(statistics)

    def rates(self) -> dict[str, float]:
        """Metrics since the last log, over all ranks; then start again. One reduction; waits for the device.

        Without tokens, only what was left out.
        """
        imbalances, taken, seconds = self._imbalances, self._taken, time.perf_counter() - self._began
        tokens, computed, _, capacity, flops, *times, steps = self._reduce()
        rates: dict[str, float] = {}
        # Nothing may have been trained since the last log; the ratios would then divide by zero. NaN is not known.
        if tokens > 0:
            rates["tokens_per_second"] = round(tokens / seconds, 1)
            rates["padding_computed"] = round(1 - tokens / computed, 4)
        if tokens and imbalances:
            rates["capacity_unused"] = round(1 - tokens / capacity, 4)
            for name, (amount, limit) in taken.items():
                rates[f"{name}_per_second"] = round(amount / seconds, 1)
                if limit:
                    rates[f"{name}_capacity_unused"] = round(1 - amount / limit, 4)
            rates["imbalance"] = round(sum(imbalances) / len(imbalances), 4)
            rates["flops_per_second"] = flops / seconds
            if self._peak is not None:
                rates["mfu"] = round(flops / seconds / self._peak, 4)
        if tokens and steps:
            # Sums over ranks of seconds and of steps: a mean per step of a rank. One process waits for nobody.
            alone = self._group is None
            means = {name: round(part / steps, 6) for name, part in zip(_TIMES, times, strict=True)}
            rates |= {name: mean for name, mean in means.items() if not (alone and name == "wait_seconds")}
            if alone or dist.get_rank(self._group) == 0:
                told = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
                _logger.info("since the last log %.3f s; per step and rank: %s", seconds, told)
        return rates | self.left_out.since()

    def closing(self) -> dict[str, float]:
        """Metrics of the whole run, over all ranks. One reduction; waits for the device."""
        self._reduce()
        avoided = {"padding_avoided": round(self.padding_avoided, 4)} if self.num_padded_tokens else {}
        return avoided | self.left_out.totals()

    @property
    def padding_avoided(self) -> float:
        """The part of padded batches that was not computed, up to the last log; 0 before there are any tokens."""
        return 1 - self._num_computed / self.num_padded_tokens if self.num_padded_tokens else 0.0

    def _reduce(self) -> list[float]:
        """Counts of all ranks since the last log. They are added to those of the run."""
        times = self.times
        mine = [*self._counts, times.wait, times.plan, times.exchange, times.steps]
        # float64 holds token counts exactly up to 2**53; float32 would stop at 16.8 million.
        sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        counts = sums.tolist()
        self.num_tokens += 0 if math.isnan(counts[0]) else int(counts[0])
        self._num_computed += int(counts[1])
        self.num_padded_tokens += int(counts[2])
        self._begin_interval()
        return counts


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model; ZeRO-3 leaves the full count of one that it has sharded beside it."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def cost_of(model: nn.Module) -> TransformerCost | RecurrentCost | MultimodalCost:
    """Cost of a sequence in this model: its FLOPs, or time steps and rows.

    Of a tower that is frozen a third counts: it runs no backward.
    """
    config = getattr(model, "config", None)
    # An estimate ends no run: a configuration that has no formula may raise anything.
    with suppress(Exception):
        if getattr(config, "cell", None) is not None:
            return RecurrentCost()
        cost = MultimodalCost.from_config(config)
        part = 1 if _trains_tower(model) else 1 / 3
        return replace(cost, tower=TransformerCost(cost.tower.linear * part, cost.tower.quadratic * part))
    with suppress(Exception):
        return TransformerCost.from_config(config)
    # Its matrices cost every token the same.
    return TransformerCost(linear=2 * num_parameters(model), quadratic=0)


def _trains_tower(model: nn.Module) -> bool:
    return any(each.requires_grad for name, each in model.named_parameters() if "vis" in name)
