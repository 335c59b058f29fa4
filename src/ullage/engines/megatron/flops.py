"""FLOPs of a Megatron-Core GPT, from its config: the cost of its sequences, and the work of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def transformer_terms(config: Any, vocab_size: int = 0) -> tuple[int, int] | None:
    """Forward FLOPs per token, and per squared token (causal half only), of a GPT with this ``TransformerConfig``.

    A batch costs ``terms[0]·Σlength + terms[1]·Σlength²`` forward and three times that with backward. ``vocab_size``:
    of the output layer, 0 to leave it out. Returns ``None`` for a config without sizes, and for experts or latent
    attention, for which there is no formula here.
    """
    hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if not hidden or not layers or not heads:
        return None
    if getattr(config, "num_moe_experts", None) or getattr(config, "multi_latent_attention", False):
        return None
    # Multiply-adds per token and layer: query and output projections, key and value projections (fewer heads with
    # grouped queries), and two matrices of the MLP, or three if it is gated. A multiply-add is two FLOPs.
    dim = getattr(config, "kv_channels", None) or hidden // heads
    keys = getattr(config, "num_query_groups", None) or heads
    inner = getattr(config, "ffn_hidden_size", None) or 4 * hidden
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    projections = 2 * hidden * heads * dim + 2 * hidden * keys * dim
    linear = 2 * (layers * (projections + matrices * hidden * inner) + hidden * vocab_size)
    # Scores and their product with the values are 4·heads·dim FLOPs per pair, and half of the pairs are causal.
    return linear, 2 * layers * heads * dim


def flops_of_lengths(one_sequence: Callable[[int], float], length: int, num_tokens: int, squares: int) -> float:
    """FLOPs of sequences of any lengths, by a formula that knows only sequences of one length.

    Args:
        one_sequence: FLOPs of a sequence by its length: a·length + b·length², as of a transformer.
        length: a length at which to read the formula; the other is twice this.
        num_tokens: Σlength.
        squares: Σlength².
    """
    once, twice = one_sequence(length), one_sequence(2 * length)
    quadratic = (twice - 2 * once) / (2 * length**2)
    return (once / length - quadratic * length) * num_tokens + quadratic * squares
