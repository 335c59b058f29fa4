"""Packed attention for Hugging Face models: ``import ullage.attention`` registers ``attn_implementation="ullage"``.

``require_packing`` raises, before anything is trained, for a model that does not keep packed sequences apart;
``packed_attention`` is the attention itself, for a row of sequences and their lengths; ``context_parallel`` and
``shard_batch`` share a row over several ranks.
"""

from __future__ import annotations

from ullage.core.extras import needed_by

with needed_by("ullage.attention", ["transformers"]):
    from transformers import AttentionInterface, AttentionMaskInterface

from ullage.attention.context import context_parallel, shard_batch
from ullage.attention.explaining import explain
from ullage.attention.interface import attention
from ullage.attention.packed_call import describe_masks, packed_mask
from ullage.attention.segments import packed_attention
from ullage.attention.support import (
    NAME,
    context_parallel_problem,
    packing_problem,
    require_context_parallel,
    require_packing,
    supports_context_parallel,
    supports_packing,
)

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, packed_mask)
describe_masks()

__all__ = [
    "context_parallel",
    "context_parallel_problem",
    "explain",
    "packed_attention",
    "packing_problem",
    "require_context_parallel",
    "require_packing",
    "shard_batch",
    "supports_context_parallel",
    "supports_packing",
]
