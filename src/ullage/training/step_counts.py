"""Counts of a step that the ranks tell each other before it: one row of integers from each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ullage.errors import DistributedError
from ullage.layout import Int64


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step from every rank.

    Attributes:
        labels: [ranks], label elements that count, on the device.
        batches: [ranks], batches drawn, on the host.
        complete: whether every batch of every rank has labels.
        weight: sum of the weights of the sequences of all ranks, where sequences are weighed; else 0.
        failed: whether a rank has a problem.
        stop: the signal that a rank was asked to stop by, 0 without.
    """

    labels: Tensor
    batches: Int64
    complete: bool
    weight: float
    failed: bool = False
    stop: int = 0

    @classmethod
    def sum(cls, meetings: Sequence[StepCounts]) -> StepCounts:
        """The counts of a step that was drawn in several rounds."""
        return cls(
            torch.stack([met.labels for met in meetings]).sum(0),
            np.sum([met.batches for met in meetings], 0),
            all(met.complete for met in meetings),
            math.fsum(met.weight for met in meetings),
        )

    @staticmethod
    def row(
        labels: int, complete: bool, problem: BaseException | None, batches: int, stop: int, weight: float
    ) -> list[int]:
        """What a rank tells the others before a step: six integers, of which the last holds the bits of a float64."""
        return [labels, int(complete), int(problem is not None), batches, stop, int(np.float64(weight).view(np.int64))]

    @classmethod
    def of(cls, ranks: Tensor, sharing: Sequence[Sequence[int]] | None = None) -> StepCounts:
        """The counts that the rows [ranks, 6] of all ranks tell. Waits for their device.

        ``sharing``: the ranks that draw the same batches, each group one rank of the result; None if all draw others.
        Raises ``DistributedError`` on every rank if those of a group have drawn others.
        """
        told = ranks.cpu().numpy()
        _, complete, failed, _, stops, _ = told.T
        if sharing is not None:
            drawn = told[np.array(sharing)]
            if not failed.any() and (drawn != drawn[:, :1])[..., [0, 3]].any():
                raise DistributedError(
                    "ranks that share their batches have drawn different ones",
                    expected="as many batches and labels on the ranks of tp and cp",
                    found=f"(labels, batches) by place in dp: {drawn[..., [0, 3]].tolist()}",
                    hint="a data set that draws random numbers has to draw the same on these ranks",
                )
            firsts = [group[0] for group in sharing]
            told, ranks = told[firsts], ranks[firsts]
        batches, weights = told[:, 3], told[:, 5]
        return cls(
            labels=ranks[:, 0],
            batches=batches,
            complete=bool(complete.all()),
            # fsum rounds once, so the order of the ranks does not matter.
            weight=math.fsum(np.ascontiguousarray(weights).view(np.float64).tolist()),
            failed=bool(failed.any()),
            stop=int(stops.max()),
        )
