"""The processor that a result was measured on, for its record. Needs nothing but the standard library."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The model of the processor as /proc/cpuinfo names it, else what the platform knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
