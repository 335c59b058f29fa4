"""What a sequence costs, so that equal work and not equal token counts is balanced.

A transformer's work on one sequence of ``L`` tokens is ``linear·L + quadratic·L²``: projections and MLP see tokens,
attention sees pairs of tokens. Both sums are additive over sequences, so a batch is described by Σlength and
Σlength² alone, whatever way it is packed. The linear term counts in the same unit as the quadratic one, so the
default ``24576·L + L²`` is a 7B transformer of hidden size 4096 up to a factor.

A cost model is any callable on an int64 array of lengths that returns one number a sequence. Costs are scaled by a
power of two where they would not fit, and rounded to int64 before anything is compared, so that every machine sees
the same numbers and makes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InputError
from ullage.layout import Int64

Cost = Callable[[Int64], Any]


@dataclass(frozen=True)
class RecurrentCost:
    pass


#: Sums of costs stay below this, so that no int64 comparison overflows.
_TOTAL_LIMIT = 2.0**60
#: Costs that are not integers are scaled up until the dearest has about this many bits.
_RESOLUTION_BITS = 40


@dataclass(frozen=True)
class TransformerCost:
    """Cost of a sequence of ``L`` tokens: ``linear·L + quadratic·L²``, in any unit.

    ``per_microbatch``: what every microbatch costs besides its sequences. ``communication``: what a token costs to be
    sent once around its context-parallel ranks; at degree ``d`` a sequence costs each of them
    ``cost/d + communication·L·(d − 1)/d``. Raises ``InputError`` for numbers that are negative or not finite.
    """

    linear: float = 24576
    quadratic: float = 1
    per_microbatch: float = 0
    communication: float = 0

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "per_microbatch", "communication"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise InputError(f"{name} cost must be a finite number", expected=">= 0", found=value)

    def __call__(self, lengths: Int64) -> npt.NDArray[np.float64]:
        length = np.asarray(lengths, np.float64)
        return length * (self.linear + self.quadratic * length)


def integer_costs(cost: Cost, lengths: Int64) -> tuple[Int64, int, int]:
    """The int64 cost of each sequence, and per-microbatch and communication costs in the same unit.

    Raises ``InputError`` for a cost that is negative, not a number, or not one number a sequence.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        raw = np.asarray(cost(lengths))
    if raw.shape != lengths.shape:
        raise InputError(
            "the cost model must return one number a sequence",
            expected=f"shape {list(lengths.shape)}",
            found=f"shape {list(raw.shape)}",
        )
    if raw.dtype.kind not in "iuf":
        raise InputError("the cost model must return numbers", found=f"dtype {raw.dtype}")
    real = raw.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(real) & (real >= 0)))
    if len(bad):
        i = int(bad[0])
        raise InputError(
            "a cost must be a finite number",
            where=f"sequence {i} of length {lengths[i]}",
            expected=">= 0",
            found=real[i],
        )
    extra = [float(getattr(cost, name, 0)) for name in ("per_microbatch", "communication")]
    scale = _scale(real)
    return np.rint(real * scale).astype(np.int64), round(extra[0] * scale), round(extra[1] * scale)


def _scale(costs: npt.NDArray[np.float64]) -> float:
    """A power of two: 1 for integers that fit."""
    total, dearest = float(costs.sum()), float(costs.max(initial=0.0))
    if dearest == 0:
        return 1.0
    if total >= _TOTAL_LIMIT:
        return 2.0 ** -int(np.ceil(np.log2(total / _TOTAL_LIMIT)) + 1)
    if np.array_equal(costs, np.rint(costs)):
        return 1.0
    room = int(np.floor(np.log2(_TOTAL_LIMIT / total)))
    return 2.0 ** min(max(0, _RESOLUTION_BITS - int(np.ceil(np.log2(dearest)))), room)
