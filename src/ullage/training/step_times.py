"""Seconds that packed steps take beside the model's own work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
    def measured(self, name: str) -> Iterator[None]:
        """Add the time of the block to the seconds ``name``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)
