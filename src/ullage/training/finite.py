"""Refusal of a step whose loss or gradient is not a number, before the weights are touched."""

from __future__ import annotations

from typing import Any

import torch

from ullage.errors import TrainingError


def require_finite(norm: Any, step: int) -> None:
    """Raise ``TrainingError`` for a gradient norm that is NaN or Inf, naming the step. Waits for the device."""
    if not torch.isfinite(torch.as_tensor(norm)):
        raise TrainingError(
            "the loss or its gradient is not a number",
            where=f"step {step}",
            expected="a finite gradient norm",
            found=float(norm),
            hint="lower learning_rate or max_grad_norm, and look for infinities in the data; "
            "the weights are those before this step",
        )
