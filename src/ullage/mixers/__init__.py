"""Whatever lets tokens see each other, on packed rows: any transformers model packed, by lengths where need be.

``pack_model(model)`` changes a model in place so that ``model(**batch.to_flattened())`` gives each sequence what it
gets alone, and returns a handle to undo it.
"""

from __future__ import annotations

from ullage.mixers.packed_model import PackedModel, call_equally_often, is_packed, pack_model, run_towers_always
from ullage.mixers.packed_model import SequencesMeet
from ullage.mixers.ways import CompetingSequences, Way

__all__ = [
    "CompetingSequences",
    "PackedModel",
    "SequencesMeet",
    "Way",
    "call_equally_often",
    "is_packed",
    "pack_model",
    "run_towers_always",
]
