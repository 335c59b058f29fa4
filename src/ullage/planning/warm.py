"""``python -m ullage.planning.warm``: compiles the planner's loops, so that nobody's first plan waits for it."""

from __future__ import annotations

import importlib


def warm() -> None:
    """Compiles every loop that is not compiled yet, or loads it. Takes seconds the first time."""
    from ullage.planning.compiled import MODULES

    for module in MODULES:
        importlib.import_module(f"ullage.planning.{module}")


if __name__ == "__main__":
    warm()
