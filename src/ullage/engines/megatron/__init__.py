"""Megatron-Core adapter: its entry points for sequence packing, over ullage's plans and steps.

:func:`wrap_data_iterator` and :func:`get_batch_on_this_rank_for_sequence_packing` have Megatron-Core's signatures,
config fields, sample keys and returned tuples. :func:`packed_step` is the first of them with the plan kept.
:func:`packed_block_spec` is a layer spec whose attention takes packed rows where Transformer Engine is not there, and
:func:`on_cpu` lets megatron-core run without CUDA. megatron-core is imported only by the functions that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ullage.engines.megatron.batch import get_batch_on_this_rank_for_sequence_packing
from ullage.engines.megatron.cpu import on_cpu
from ullage.engines.megatron.flops import transformer_terms
from ullage.engines.megatron.settings import schedulers
from ullage.engines.megatron.training import PackedTraining, pack_training
from ullage.engines.megatron.wrapping import WrappedStep, packed_step, wrap_data_iterator

from ullage.extras import needed_by

if TYPE_CHECKING:
    from ullage.engines.megatron.model import PackedCoreAttention, packed_block_spec, packed_layer_spec

__all__ = [
    "PackedCoreAttention",
    "PackedTraining",
    "WrappedStep",
    "get_batch_on_this_rank_for_sequence_packing",
    "on_cpu",
    "pack_training",
    "packed_block_spec",
    "packed_layer_spec",
    "packed_step",
    "schedulers",
    "transformer_terms",
    "wrap_data_iterator",
]


def __getattr__(name: str) -> Any:
    if name in ("PackedCoreAttention", "packed_block_spec", "packed_layer_spec"):  # its classes are megatron-core's
        with needed_by(f"ullage.engines.megatron.{name}"):
            from ullage.engines.megatron import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
