"""Whatever lets tokens see each other, on packed rows: any transformers model packed, by lengths where need be.

``pack_model(model)`` changes a model in place so that ``model(**batch.to_flattened())`` gives each sequence what it
gets alone, and returns a handle to undo it.
"""

from __future__ import annotations

from ullage.core.extras import needed_by

with needed_by("ullage.mixers", ["transformers"]):
    import transformers  # noqa: F401  the error that says what brings it

from ullage.mixers.packed_model import PackedModel, SequencesMeet, pack_model
from ullage.mixers.packed_model import call_equally_often, is_packed, run_towers_always
from ullage.mixers.ways import CompetingSequences, Way

__all__ = [
    "CompetingSequences", "PackedModel", "SequencesMeet", "Way", "call_equally_often", "is_packed", "pack_model",
    "run_towers_always",
]  # fmt: skip
