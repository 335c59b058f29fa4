"""ullage: training on sequences of unequal length, from the batch to the checkpoint.

Nothing is imported until a name is used, so ``import ullage`` costs milliseconds and ``ullage inspect`` never loads
torch or transformers.
"""

from __future__ import annotations

from ullage.lazy import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ullage import (
        attention as attention,
        batch as batch,
        checkpoint as checkpoint,
        cli as cli,
        columns as columns,
        datasets as datasets,
        display as display,
        engines as engines,
        errors as errors,
        exchange as exchange,
        layout as layout,
        mixers as mixers,
        models as models,
        movement as movement,
        planning as planning,
        proofs as proofs,
        ranks as ranks,
        report as report,
        rows as rows,
        schema as schema,
        training as training,
    )
    from ullage.batch import RaggedBatch as RaggedBatch
    from ullage.errors import (
        CheckpointError as CheckpointError,
        DistributedError as DistributedError,
        InputError as InputError,
        TrainingError as TrainingError,
        UllageError as UllageError,
        UsageError as UsageError,
    )
    from ullage.layout import Layout as Layout, Pieces as Pieces
    from ullage.mixers import PackedModel as PackedModel, pack_model as pack_model
    from ullage.movement import to_device as to_device
    from ullage.planning import (
        Plan as Plan,
        RecurrentCost as RecurrentCost,
        TransformerCost as TransformerCost,
        pack_lengths as pack_lengths,
        plan as plan,
    )
    from ullage.proofs import Audit as Audit, audit as audit
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "batch": ["RaggedBatch"],
            "errors": [
                "CheckpointError", "DistributedError", "InputError", "TrainingError", "UllageError", "UsageError",
            ],
            "layout": ["Layout", "Pieces"],
            "mixers": ["PackedModel", "pack_model"],
            "movement": ["to_device"],
            "planning": ["Plan", "RecurrentCost", "TransformerCost", "pack_lengths", "plan"],
            "proofs": ["Audit", "audit"],
        },
        modules=[
            "attention", "batch", "checkpoint", "cli", "columns", "datasets", "display", "engines", "errors",
            "exchange", "layout", "mixers", "models", "movement", "planning", "proofs", "ranks", "report", "rows",
            "schema", "training",
        ],
    )  # fmt: skip

#: The module that draws what is shown in a notebook, for ``ullage.display``: it lies far below what it draws, and only
#: here are both known.
_DRAWN_BY = "ullage.report.inline"

__version__ = "0.1.0"
