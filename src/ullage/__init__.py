"""ullage: training on sequences of unequal length, from the batch to the checkpoint.

Nothing is imported until a name is used, so ``import ullage`` costs milliseconds and ``ullage inspect`` never loads
torch or transformers.
"""

from __future__ import annotations

from ullage.core.lazy import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ullage import (
        attention as attention,
        checkpoint as checkpoint,
        cli as cli,
        datasets as datasets,
        engines as engines,
        exchange as exchange,
        mixers as mixers,
        models as models,
        planning as planning,
        proofs as proofs,
        ranks as ranks,
        report as report,
        training as training,
    )
    from ullage.core.batch import RaggedBatch as RaggedBatch
    from ullage.core.errors import (
        CheckpointError as CheckpointError,
        DistributedError as DistributedError,
        InputError as InputError,
        TrainingError as TrainingError,
        UllageError as UllageError,
        UsageError as UsageError,
    )
    from ullage.core.layout import Layout as Layout, Pieces as Pieces
    from ullage.mixers import PackedModel as PackedModel, pack_model as pack_model
    from ullage.core.movement import to_device as to_device
    from ullage.planning import (
        MultimodalCost as MultimodalCost,
        Plan as Plan,
        RecurrentCost as RecurrentCost,
        TransformerCost as TransformerCost,
        pack_lengths as pack_lengths,
        plan as plan,
    )
    from ullage.proofs import Audit as Audit, audit as audit
    from ullage.training import (
        RaggedCollator as RaggedCollator,
        Trainer as Trainer,
        TrainingArguments as TrainingArguments,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "core.batch": ["RaggedBatch"],
            "core.errors": [
                "CheckpointError", "DistributedError", "InputError", "TrainingError", "UllageError", "UsageError",
            ],
            "core.layout": ["Layout", "Pieces"],
            "mixers": ["PackedModel", "pack_model"],
            "core.movement": ["to_device"],
            "planning": ["MultimodalCost", "Plan", "RecurrentCost", "TransformerCost", "pack_lengths", "plan"],
            "proofs": ["Audit", "audit"],
            "training": ["RaggedCollator", "Trainer", "TrainingArguments"],
        },
        modules=[
            "attention", "checkpoint", "cli", "datasets", "engines", "exchange", "mixers", "models", "planning",
            "proofs", "ranks", "report", "training",
        ],
    )  # fmt: skip

#: The module that draws what is shown in a notebook, for ``ullage.core.display``: it lies far below what it draws, and
#: only here are both known.
_DRAWN_BY = "ullage.report.inline"

__version__ = "0.1.0"
