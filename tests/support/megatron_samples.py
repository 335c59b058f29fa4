"""Configs and samples of the Megatron tests, in the forms that its data sets give; needs no megatron-core."""

from types import SimpleNamespace

import torch

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def config(**changes):
    fields = {
        "max_seqlen_per_dp_cp_rank": 32,
        "sequence_packing_scheduler": "balanced",
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None,
    }
    made = SimpleNamespace(**{**fields, **changes})
    for name, value in changes.items():
        if value is ...:
            delattr(made, name)
    return made


def sample(length, padded=None, first=1):
    padded = padded or length
    tokens = torch.arange(first, first + padded)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (torch.arange(padded) < length).float(),
        "position_ids": torch.arange(padded),
        "original_seq_len": torch.tensor([length], dtype=torch.int32),
        "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
    }


def pack(samples):
    """A pre-packed sample, as Megatron's SFT dataset makes it, with the real lengths in ``cu_seqlens``."""
    lengths = [0, *(int(one["original_seq_len"]) for one in samples)]
    slots = [0, *(len(one["tokens"]) for one in samples)]
    return {name: torch.cat([one[name] for one in samples])[None] for name in FIELDS} | {
        "cu_seqlens": torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)[None],
        "cu_seqlens_padded": torch.tensor(slots, dtype=torch.int32).cumsum(0, dtype=torch.int32)[None],
    }


def eight():
    """A row of eight places with two sequences, as another iterator gives it."""
    fields = {name: torch.arange(8) for name in ("tokens", "labels", "position_ids")}
    ends = {"cu_seqlens": [0, 3, 7], "cu_seqlens_padded": [0, 4, 8], "max_seqlen": [4]}
    ends = {name: torch.tensor(value, dtype=torch.int32) for name, value in ends.items()}
    return {**fields, "loss_mask": torch.ones(8), **ends}
