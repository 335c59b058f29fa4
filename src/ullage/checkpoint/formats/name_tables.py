"""The names of Llama and Qwen in Megatron-Core and in Hugging Face, as data, and how rows of the one are the other's.

A layer of Megatron-Core holds query, key and value in one matrix, interleaved by query group, and the two input
projections of the MLP in one, the gate first. Both are rows of the matrices of Hugging Face, so a rule is a list of
row ranges, and serves the weights, the master weights and the moments alike, in both directions.
Source: ``megatron/core/models/gpt/gpt_layer_specs.py``, ``transformer/attention.py`` and ``transformer/mlp.py`` of
Megatron-Core 0.16.1; ``modeling_llama.py``, ``modeling_qwen2.py`` and ``modeling_qwen3.py`` of transformers.

The architecture of a model, which its shapes do not tell, is in Megatron's ``args`` and Hugging Face's ``config.json``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.files.unpickling import Inert
from ullage.core.errors import CheckpointError

Rule = Literal["same", "vocabulary", "grouped", "halves"]
#: Rows ``[begin, end)`` of Megatron-Core's tensor.
Range = tuple[int, int]
#: Megatron's flags under which weights mean something else than those of Hugging Face.
_OTHER_MEANING = ("apply_layernorm_1p", "layernorm_zero_centered_gamma", "rotary_interleaved", "attention_output_gate")


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


def row_ranges(row: NameRow, rows: int, architecture: Architecture, where: str) -> list[list[Range]]:
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
    starts = range(0, rows, max(1, query + 2 * channels))
    return [
        [(at, at + query) for at in starts],
        [(at + query, at + query + channels) for at in starts],
        [(at + query + channels, at + query + 2 * channels) for at in starts],
    ]


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.json`` in the folder, or beside it; None where there is none. Raises ``CheckpointError``."""
    for path in (folder / "config.json", folder.parent / "config.json"):
        if path.is_file():
            with as_checkpoint_error(str(path)):
                try:
                    found = json.loads(path.read_bytes())
                except (ValueError, RecursionError) as error:
                    raise CheckpointError("not JSON", where=str(path), found=str(error)[:200]) from None
            return metadata.mapping(found, "config.json", str(path))
    return None


def of_config(config: dict[str, Any], where: str) -> Architecture:
    """The architecture that a ``config.json`` says. Raises ``CheckpointError``."""
    heads = metadata.integer(config.get("num_attention_heads"), "num_attention_heads", where, 1)
    groups = config.get("num_key_value_heads")
    channels, vocabulary = config.get("head_dim"), config.get("vocab_size")
    hidden = config.get("hidden_size")
    if channels is None and hidden is not None:
        channels = metadata.integer(hidden, "hidden_size", where, 1) // heads
    return Architecture(
        heads,
        heads if groups is None else metadata.integer(groups, "num_key_value_heads", where, 1),
        None if channels is None else metadata.integer(channels, "head_dim", where, 1),
        None if vocabulary is None else metadata.integer(vocabulary, "vocab_size", where, 1),
    )


def of_args(args: Inert, where: str) -> Architecture | None:
    """The architecture that Megatron's ``args`` say; None where they say nothing of heads.

    Raises ``CheckpointError``, also for flags under which the weights are not those of Hugging Face.
    """
    for flag in _OTHER_MEANING:
        if args.get(flag):
            raise CheckpointError(
                "weights that Hugging Face's models have no place for", where=where, found=f"args.{flag}"
            )
    if args.get("swiglu") is False:
        raise CheckpointError("an MLP without a gate, which Llama and Qwen have", where=where, found="args.swiglu")
    if args.get("num_attention_heads") is None:
        return None
    heads = metadata.integer(args.get("num_attention_heads"), "args.num_attention_heads", where, 1)
    # Without grouped attention, ``num_query_groups`` is a default that means nothing.
    grouped = args.get("group_query_attention", True) and args.get("num_query_groups") is not None
    groups = metadata.integer(args.get("num_query_groups"), "args.num_query_groups", where, 1) if grouped else heads
    channels = args.get("kv_channels")
    return Architecture(
        heads, groups, None if channels is None else metadata.integer(channels, "args.kv_channels", where, 1)
    )


def architecture_of(folder: Path, args: Any) -> Architecture:
    """The architecture of a folder of Megatron's, from ``args`` in ``common.pt`` and ``config.json`` beside it.

    Raises ``CheckpointError`` where neither says it, or where they differ.
    """
    where = str(folder / "common.pt")
    config = read_config(folder)
    told = of_config(config, "config.json") if config is not None else None
    found = of_args(args, where) if isinstance(args, Inert) else None
    if found is None or told is None:
        made = found or told
        if made is None:
            raise CheckpointError(
                "nothing says how many heads the model has",
                where=where,
                expected="args in common.pt, as Megatron-LM's training saves them",
                found="none",
                hint="put the model's config.json into the folder",
            )
        return made
    if (found.heads, found.groups) != (told.heads, told.groups):
        raise CheckpointError(
            "args and config.json are of two models",
            where=where,
            expected=f"{told.heads} heads, {told.groups} key-value heads",
            found=f"{found.heads} and {found.groups}",
        )
    return told


def megatron_args(config: dict[str, Any], iteration: int, where: str) -> dict[str, Any]:
    """Megatron's ``args`` for the model of a ``config.json``: what ``--use-checkpoint-args`` takes over.

    Raises ``CheckpointError`` for a model of another family.
    """
    if config.get("model_type") not in MODEL_TYPES:
        raise CheckpointError(
            "a model without a table of names",
            where=where,
            expected=" or ".join(MODEL_TYPES),
            found=metadata.brief(config.get("model_type")),
        )
    shape = of_config(config, where)
    integers = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
    }
    args: dict[str, Any] = {
        ours: metadata.integer(config.get(theirs), theirs, where, 1) for ours, theirs in integers.items()
    }
    # transformers 5 has the base of the rotary embedding among ``rope_parameters``; before, it stood alone.
    rope = config.get("rope_parameters") if isinstance(config.get("rope_parameters"), dict) else {}
    return {
        **args,
        "seq_length": args["max_position_embeddings"],
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "group_query_attention": shape.groups != shape.heads,
        "kv_channels": shape.channels,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "rotary_base": config.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "add_bias_linear": bool(config.get("mlp_bias")),
        "add_qkv_bias": bool(config.get("attention_bias")) or config["model_type"] == "qwen2",
        "qk_layernorm": config["model_type"] == "qwen3",
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "iteration": iteration,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": "torch_dist",
    }
