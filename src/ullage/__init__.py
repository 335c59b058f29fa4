"""ullage: training on sequences of unequal length, from the batch to the checkpoint.

The face of the house. Nothing is imported until a name is touched, so ``import ullage`` costs milliseconds and
``ullage inspect`` never loads torch or transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage import (
        attention,
        batch,
        checkpoint,
        columns,
        datasets,
        engines,
        errors,
        exchange,
        layout,
        models,
        movement,
        places,
        planning,
        ranks,
        report,
        training,
    )
    from ullage.batch import RaggedBatch
    from ullage.errors import CheckpointError, DistributedError, InputError, TrainingError, UllageError, UsageError
    from ullage.layout import Layout, Pieces
    from ullage.movement import to_device
    from ullage.planning import Plan, RecurrentCost, TransformerCost, pack_lengths, plan

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "errors",
    "DistributedError": "errors",
    "InputError": "errors",
    "Layout": "layout",
    "Pieces": "layout",
    "Plan": "planning",
    "RaggedBatch": "batch",
    "RecurrentCost": "planning",
    "TrainingError": "errors",
    "TransformerCost": "planning",
    "UllageError": "errors",
    "UsageError": "errors",
    "pack_lengths": "planning",
    "plan": "planning",
    "to_device": "movement",
}
_ROOMS = (
    "attention", "batch", "checkpoint", "columns", "datasets", "engines", "errors", "exchange", "layout", "models",
    "movement", "places", "planning", "ranks", "report", "training",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"ullage.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"ullage.{name}")
    raise AttributeError(f"module 'ullage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_ROOMS])


__all__ = [
    "CheckpointError",
    "DistributedError",
    "InputError",
    "Layout",
    "Pieces",
    "Plan",
    "RaggedBatch",
    "RecurrentCost",
    "TrainingError",
    "TransformerCost",
    "UllageError",
    "UsageError",
    "attention",
    "batch",
    "checkpoint",
    "columns",
    "datasets",
    "engines",
    "errors",
    "exchange",
    "layout",
    "models",
    "movement",
    "pack_lengths",
    "places",
    "plan",
    "planning",
    "ranks",
    "report",
    "to_device",
    "training",
]
