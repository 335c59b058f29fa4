"""Rotary frequencies that depend on the longest sequence of a row."""

from __future__ import annotations

from torch import nn


def row_limits(model: nn.Module) -> tuple[int | None, bool]:
    """Length above which the longest sequence of a row changes the rotary frequencies of all, and the kind of change.

    The length in tokens, None without a limit; and whether every length above it has its own frequencies (dynamic
    scaling) or all have the same (longrope). Source: ``transformers.modeling_rope_utils.dynamic_rope_update``.
    """
    longest: int | None = None
    dynamic = False
    for module in model.modules():
        # A string, or by kind of layer where a model has several (full and sliding attention, for example).
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str):
                continue
            if "dynamic" in kind:
                limit, dynamic = getattr(module, "original_max_seq_len", 0), True
            elif kind == "longrope":
                rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
                limit = (rope if layer is None else rope.get(layer, {})).get("original_max_position_embeddings", 0)
            else:
                continue
            longest = limit if longest is None else min(longest, limit)
    return longest, dynamic
