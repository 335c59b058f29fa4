"""``PackedSeqParams`` of a microbatch, with the fields that the installed megatron-core has.

``cu_seqlens_q`` has real lengths and ``cu_seqlens_q_padded`` the slots. A class with the field ``pad_between_seqs`` is
told by it that the two differ. Older ones have readers that take ``cu_seqlens_q`` for positions in the row: the roll of
multi-token-prediction labels, and Transformer Engine under context parallelism. For them it holds the slots as well,
which is exact under a causal mask, because padding follows every token of its sequence.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ullage.core.layout import Int64, Layout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True)
class RowFacts:
    """What describes a whole row besides its layout.

    Attributes:
        shown [sequences]: lengths that ``cu_seqlens_q`` shows; those of the layout, but for a dummy sequence.
        longest: ``max_seqlen``.
        degree: context-parallel degree of this microbatch; 0 if it is fixed.
        rolled: whether a multi-token-prediction layer rolls the labels.
        order: how context-parallel ranks cut the row.
    """

    shown: Int64
    longest: int
    degree: int
    rolled: bool
    order: str


@cache
def core_takes_groups() -> bool:
    """Whether the model of the installed megatron-core takes the context-parallel group of its microbatch."""
    try:
        from megatron.core import packed_seq_params
    except ImportError:
        return False
    return hasattr(packed_seq_params, "resolve_cp_group")


@cache
def _names() -> frozenset[str]:
    from megatron.core.packed_seq_params import PackedSeqParams

    return frozenset(field.name for field in dataclasses.fields(PackedSeqParams))


@cache
def _rolls_by_slots() -> bool:
    """Whether megatron-core rolls labels within the slots, and not within what ``cu_seqlens_q`` says."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "_get_packed_roll_cu_seqlens")


@cache
def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def packed_seq_params(
    layout: Layout, facts: RowFacts, part: int, device: torch.device, group: ProcessGroup | None
) -> PackedSeqParams:
    """The parameters of a row.

    Args:
        layout: of the whole row.
        facts: the rest that describes it.
        part: tokens of this rank's part.
        device: where the cumulated lengths are put.
        group: process group of the row's degree, if it has one of its own.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    names = _names()
    padded = torch.from_numpy(layout.cu_seqlens_padded).to(device)
    if "pad_between_seqs" in names:
        places = facts.rolled and not _rolls_by_slots()
    else:
        places = facts.rolled or np.array_equal(facts.shown, layout.slots) or _has_transformer_engine()
    shown = Layout.from_slots(facts.shown, layout.slots).cu_seqlens
    real = padded if places else torch.from_numpy(shown).to(device)
    own: dict[str, Any] = {"local_cp_size": facts.degree, "cp_group": group} if facts.degree else {}
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=facts.longest,
        max_seqlen_kv=facts.longest,
        **own,
    )
    # A core without the field cuts in zigzag order; ours then refuses the row by the attribute.
    if "cp_partition_mode" in names or facts.order != "zigzag":
        params.cp_partition_mode = facts.order
    if "pad_between_seqs" in names:
        params.pad_between_seqs = not places
    # One microbatch is one sample to the load balance of experts.
    if "tokens_per_sample" in names:
        params.tokens_per_sample = part
    # For recurrent layers, which see the whole row. The class would compute ``seq_idx`` from ``total_tokens`` itself,
    # and wait for the device to do so.
    if "total_tokens" in names:
        params.total_tokens = layout.size
    if "seq_idx" in names:
        params.seq_idx = torch.from_numpy(layout.item_ids().astype(np.int32))[None].to(device)
    return params
