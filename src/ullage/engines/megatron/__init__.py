"""Megatron-Core adapter: its entry points for sequence packing, over ullage's plans and steps.

:func:`wrap_data_iterator` and :func:`get_batch_on_this_rank_for_sequence_packing` have Megatron-Core's signatures,
config fields, sample keys and returned tuples. :func:`packed_step` is the first of them with the plan kept, and
:class:`PackingScheduler` packs the steps of a loop.
megatron-core is imported only by the functions that need it.
"""

from __future__ import annotations

from ullage.engines.megatron.batch import get_batch_on_this_rank_for_sequence_packing
from ullage.engines.megatron.scheduling import PackingScheduler
from ullage.engines.megatron.settings import schedulers, transformer_terms
from ullage.engines.megatron.wrapping import WrappedStep, packed_step, wrap_data_iterator

__all__ = [
    "PackingScheduler",
    "WrappedStep",
    "get_batch_on_this_rank_for_sequence_packing",
    "packed_step",
    "schedulers",
    "transformer_terms",
    "wrap_data_iterator",
]
