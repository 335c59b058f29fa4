"""The names of Llama and Qwen in Megatron-Core and in Hugging Face, as data, and how rows of the one are the other's.

A layer of Megatron-Core holds query, key and value in one matrix, interleaved by query group, and the two input
projections of the MLP in one, the gate first. Both are rows of the matrices of Hugging Face, so a rule is a list of
row ranges, and serves the weights, the master weights and the moments alike, in both directions.
Source: ``megatron/core/models/gpt/gpt_layer_specs.py``, ``transformer/attention.py`` and ``transformer/mlp.py`` of
Megatron-Core 0.16.1; ``modeling_llama.py``, ``modeling_qwen2.py`` and ``modeling_qwen3.py`` of transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ullage.errors import CheckpointError

Rule = Literal["same", "vocabulary", "grouped", "halves"]
#: Rows ``[begin, end)`` of Megatron-Core's tensor.
Range = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """The numbers of a model that the shapes of its tensors do not tell.

    Attributes:
        heads: number of query heads.
        groups: number of key-value heads.
        channels: elements of a head; None where nothing says so, and then the rows decide.
        vocabulary: rows of the embedding that are tokens; None where nothing says so, and then all rows are kept.
    """

    heads: int
    groups: int
    channels: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class NameRow:
    """A tensor of Megatron-Core, the tensors of Hugging Face in it, and the rule; ``{n}`` is the layer's number."""

    megatron: str
    names: tuple[str, ...]
    rule: Rule = "same"

    @property
    def layered(self) -> bool:
        """Whether each layer has one."""
        return "{n}" in self.megatron

    @property
    def stacked(self) -> str:
        """The name under which Megatron-Core stacks the layers, along a dim in front."""
        return self.megatron.replace("{n}.", "")

    def of_layer(self, layer: int | None) -> tuple[str, ...]:
        """The names of Hugging Face in one layer."""
        return tuple(name.replace("{n}", str(layer)) for name in self.names)


_LAYER, _HF = "decoder.layers.{n}.", "model.layers.{n}."
_QKV = tuple(f"{_HF}self_attn.{name}_proj" for name in "qkv")
_GATED = (f"{_HF}mlp.gate_proj", f"{_HF}mlp.up_proj")


def _each(names: tuple[str, ...], what: str) -> tuple[str, ...]:
    return tuple(f"{name}.{what}" for name in names)


#: In the order of the model. Rows of one Hugging Face name: Megatron-Core has one of the two.
NAMES = (
    NameRow("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    NameRow(f"{_LAYER}self_attention.linear_qkv.layer_norm_weight", (f"{_HF}input_layernorm.weight",)),
    NameRow(f"{_LAYER}input_layernorm.weight", (f"{_HF}input_layernorm.weight",)),
    NameRow(f"{_LAYER}self_attention.linear_qkv.weight", _each(_QKV, "weight"), "grouped"),
    NameRow(f"{_LAYER}self_attention.linear_qkv.bias", _each(_QKV, "bias"), "grouped"),
    NameRow(f"{_LAYER}self_attention.q_layernorm.weight", (f"{_HF}self_attn.q_norm.weight",)),
    NameRow(f"{_LAYER}self_attention.k_layernorm.weight", (f"{_HF}self_attn.k_norm.weight",)),
    NameRow(f"{_LAYER}self_attention.linear_proj.weight", (f"{_HF}self_attn.o_proj.weight",)),
    NameRow(f"{_LAYER}self_attention.linear_proj.bias", (f"{_HF}self_attn.o_proj.bias",)),
    NameRow(f"{_LAYER}mlp.linear_fc1.layer_norm_weight", (f"{_HF}post_attention_layernorm.weight",)),
    NameRow(f"{_LAYER}pre_mlp_layernorm.weight", (f"{_HF}post_attention_layernorm.weight",)),
    NameRow(f"{_LAYER}mlp.linear_fc1.weight", _each(_GATED, "weight"), "halves"),
    NameRow(f"{_LAYER}mlp.linear_fc1.weight_w", (f"{_HF}mlp.gate_proj.weight",)),
    NameRow(f"{_LAYER}mlp.linear_fc1.weight_v", (f"{_HF}mlp.up_proj.weight",)),
    NameRow(f"{_LAYER}mlp.linear_fc1.bias", _each(_GATED, "bias"), "halves"),
    NameRow(f"{_LAYER}mlp.linear_fc2.weight", (f"{_HF}mlp.down_proj.weight",)),
    NameRow(f"{_LAYER}mlp.linear_fc2.bias", (f"{_HF}mlp.down_proj.bias",)),
    NameRow("decoder.final_layernorm.weight", ("model.norm.weight",)),
    NameRow("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)
#: Rows that are read and never written: Megatron-Core's usual layers have the other name.
READ_ONLY = frozenset(
    f"{_LAYER}{name}"
    for name in (
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight_w",
        "mlp.linear_fc1.weight_v",
    )
)
#: Modules that have an entry ``_extra_state`` of their own, which holds nothing without FP8. A loader that builds them
#: asks for it; those with ``{n}`` once per layer.
EXTRA_STATES = tuple(
    f"{_LAYER}{name}"
    for name in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
)
#: Buffers of Hugging Face that are computed, and that Megatron-Core computes too.
COMPUTED = re.compile(r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.(?:original_)?inv_freq")
#: Families of Hugging Face whose models have these names and nothing else.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
#: Tied names: alias -> the name that is stored.
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def ranges_of(row: NameRow, rows: int, architecture: Architecture, where: str) -> list[list[Range]]:
    """For each Hugging Face name of ``row``, the ranges of Megatron-Core's ``rows`` that are its rows, in order.

    Raises ``CheckpointError`` where the numbers of the architecture do not divide the rows.
    """
    if row.rule == "same":
        return [[(0, rows)]]
    if row.rule == "vocabulary":
        size = rows if architecture.vocabulary is None else architecture.vocabulary
        if size > rows:
            raise CheckpointError(
                "fewer rows than the vocabulary has tokens", where=where, expected=f"at least {size}", found=rows
            )
        return [[(0, size)]]
    if row.rule == "halves":
        if rows % 2:
            raise CheckpointError("the gate and the other projection do not halve the rows", where=where, found=rows)
        return [[(0, rows // 2)], [(rows // 2, rows)]]
    heads, groups = architecture.heads, architecture.groups
    channels = rows // max(1, heads + 2 * groups)
    divides = heads > 0 and groups > 0 and heads % groups == 0 and channels * (heads + 2 * groups) == rows
    if not divides or architecture.channels not in (None, channels):
        size = "" if architecture.channels is None else f" of {architecture.channels}"
        raise CheckpointError(
            "the heads do not divide the rows of query, key and value",
            where=where,
            expected=f"rows for {heads} query and twice {groups} key-value heads{size}",
            found=f"{rows} rows",
            hint="num_attention_heads, num_query_groups and kv_channels are those of args in common.pt, or config.json",
        )
    # A group: the rows of its query heads, those of its key, those of its value.
    query = heads // groups * channels
    starts = range(0, rows, query + 2 * channels)
    return [
        [(at, at + query) for at in starts],
        [(at + query, at + query + channels) for at in starts],
        [(at + query + channels, at + query + 2 * channels) for at in starts],
    ]
