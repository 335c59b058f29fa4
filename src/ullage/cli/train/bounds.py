"""Bounds of the arguments of ``ullage train``, looked at before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ullage.errors import InputError, UsageError


@dataclass(frozen=True)
class Bound:
    """The finite numbers that an argument may be: from ``least`` to ``most``.

    Attributes:
        least: the smallest.
        most: the largest.
        above: ``least`` itself is too small.
        below: ``most`` itself is too large.
        besides: numbers outside that mean something else.
    """

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    besides: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Whether ``value`` is one of them."""
        if value in self.besides:
            return True
        high_enough = value > self.least if self.above else value >= self.least
        low_enough = value < self.most if self.below else value <= self.most
        return high_enough and low_enough and math.isfinite(value)

    def __str__(self) -> str:
        words = [f"above {self.least:g}" if self.above else f"at least {self.least:g}"]
        if self.most < math.inf:
            words.append(f"below {self.most:.10g}" if self.below else f"at most {self.most:.10g}")
        return " and ".join(words) + "".join(f", or {other:g}" for other in self.besides)


_POSITIVE, _COUNT, _NOT_NEGATIVE = Bound(0, above=True), Bound(1), Bound(0)
#: Of a number of steps, or of a part of the run below 1.
_EVERY = _POSITIVE
_SEED = Bound(0, 2**32 - 1)

#: By argument. Those that are not here have no bounds, or the part of the run that reads them says more about them.
BOUNDS: dict[str, Bound] = {
    "num_train_epochs": _POSITIVE,
    "max_steps": Bound(1, besides=(-1,)),
    "held_out": Bound(0, 1, below=True),
    "max_length": _NOT_NEGATIVE,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "adam_beta1": Bound(0, 1, below=True),
    "adam_beta2": Bound(0, 1, below=True),
    "adam_epsilon": _NOT_NEGATIVE,
    "label_smoothing_factor": Bound(0, 1, below=True),
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "seed": _SEED,
    "data_seed": _SEED,
    "logging_steps": _EVERY,
    "eval_steps": _EVERY,
    "save_steps": _EVERY,
    "eval_delay": _NOT_NEGATIVE,
    "save_total_limit": _COUNT,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _COUNT,
    "torch_empty_cache_steps": _COUNT,
    "ddp_timeout": _COUNT,
    "packing_capacity": _COUNT,
    "packing_peak_flops": _POSITIVE,
    "hidden_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "stop_at_step": _COUNT,
    "dp": _COUNT,
    "cp": _COUNT,
    "tp": _COUNT,
    "dp_replicate": _COUNT,
}


def usage(error: ValueError | ImportError) -> UsageError:
    """An error about an argument as one of the call."""
    if not isinstance(error, InputError):
        return UsageError(str(error))
    return UsageError(error.what, where=error.where, expected=error.expected, found=error.found, hint=error.hint)


def require_bounds(given: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for the first argument that is outside its bounds; ``given``: name to value."""
    for name, bound in BOUNDS.items():
        value = _number(given.get(name))
        if value is not None and not bound.holds(value):
            raise UsageError("this argument is out of range", where=f"--{name}", expected=bound, found=given[name])


def _number(value: Any) -> float | None:
    """A value as a number; None for words such as auto, of which whoever reads them says what they may be."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
