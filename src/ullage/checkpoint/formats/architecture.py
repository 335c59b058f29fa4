"""The architecture of a GPT as Megatron's ``args`` and as Hugging Face's ``config.json`` say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.files.unpickling import Inert
from ullage.checkpoint.formats.name_tables import MODEL_TYPES, Architecture
from ullage.errors import CheckpointError

#: Megatron's flags under which weights mean something else than those of Hugging Face.
_OTHER_MEANING = ("apply_layernorm_1p", "layernorm_zero_centered_gamma", "rotary_interleaved", "attention_output_gate")


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
