"""How the loops of the planner are compiled: once, with their signatures given, kept on disk, free of the interpreter's
lock, on one thread and without reordering of floating point, so that every machine computes the same.

Numba notices when a function's own file changes, but not when a function that it calls does. So the first import
forgets what was compiled before the newest of the files below.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numba

#: The modules that hold compiled functions.
MODULES = (
    "arrival",
    "balancing",
    "bitset",
    "context",
    "critical",
    "dividing",
    "improving",
    "ordering",
    "packing",
    "placing",
    "totals",
)


def kernel(signature: Any) -> Any:
    """Decorates a function that is compiled for exactly this signature."""
    return numba.njit(signature, cache=True, nogil=True)


def _forget_stale() -> None:
    folder = Path(__file__).parent
    newest = max((folder / f"{module}.py").stat().st_mtime for module in MODULES)
    for index in (folder / "__pycache__").glob("*.nbi"):
        with contextlib.suppress(OSError):  # another process may have done it; a folder may be read-only
            if index.stat().st_mtime < newest:
                index.unlink()


_forget_stale()
