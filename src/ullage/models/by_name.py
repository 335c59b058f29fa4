"""Causal language models by name: new ones of a type and sizes, as ``llama-64x2``, and those that are there."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import deepspeed as zero3
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from ullage.core.errors import InputError
from ullage.models.cells import CELLS
from ullage.models.configuration import RecurrentConfig


def new_config(name: str, tokenizer: Any) -> Any:
    """The config of a new model by type and sizes, ``None`` for a name that is none."""
    match = re.fullmatch(r"([a-z]\w*)(?:-(\d+)(?:x(\d+))?)?", name)
    if match is None or Path(name).is_dir() or not (match[1] in (*CELLS, "llama") or (match[2] and match[1] in CAUSAL)):
        return None
    hidden, layers = int(match[2] or 256), int(match[3] or (1 if match[1] in CELLS else 4))
    if match[1] in CELLS:
        return RecurrentConfig(cell=match[1], hidden_size=hidden, num_hidden_layers=layers, **_of_tokens(tokenizer))
    return sized_config(functools.partial(AutoConfig.for_model, match[1]), hidden, layers, tokenizer)


def sized_config(make: Callable[..., Any], hidden: int, layers: int, tokenizer: Any) -> Any:
    """The config of a transformer by its sizes, with at most 16 experts; ``make`` takes them by transformers' names."""
    heads = next((n for n in range(max(1, hidden // 64), 0, -1) if hidden and hidden % (2 * n) == 0), 0)
    if not heads or not layers:
        raise InputError("a model has layers, and an even hidden size", where="--model", found=f"{hidden}x{layers}")
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "head_dim": hidden // heads, **_of_tokens(tokenizer)}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads if heads % 2 else heads // 2}
    sizes |= {"intermediate_size": max(64, hidden * 8 // 3 // 64 * 64), "max_position_embeddings": 8192}
    config = make(**sizes)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(config, name, None) or 0) > 16:
            setattr(config, name, 16)
    return config


def _of_tokens(tokenizer: Any) -> dict[str, Any]:
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")}
    return {name: token for name, token in ids.items() if token is not None} | {"vocab_size": len(tokenizer)}


def has_weights(folder: str) -> bool:
    """Whether a folder holds the weights of a model."""
    return any(any(Path(folder).glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))


def causal_model(name: str, tokenizer: Any, revision: str = "main", code: bool = False) -> Any:
    """A new causal language model, or the one with its weights of a folder or the hub.

    Args:
        name: a type with sizes, a folder with weights or a config, or a name of the hub.
        tokenizer: of a new model.
        revision: of one of the hub.
        code: whether Python files that come with it may run.

    A new one is the same from one seed under every ZeRO stage. Raises ``InputError`` where files lack weights, and for
    a model that sees the tokens that it is to predict.
    """
    config = new_config(name, tokenizer)
    if config is None and Path(name).exists() and not has_weights(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=code)
    if config is None:
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": code, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        model, info = loaded
        lost = ", ".join(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        if lost and type(model).__name__ in (model.config.architectures or []):
            raise InputError("the model's files lack weights", where=name, found=textwrap.shorten(lost, 200))
    else:
        held = zero3._hf_deepspeed_config_weak_ref  # stage 3 draws layer by layer: drawn whole here, and cut later
        zero3.unset_hf_deepspeed_config()
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=code)
        zero3._hf_deepspeed_config_weak_ref = held
    require_causal(model)
    return model


def require_causal(model: Any) -> None:
    """Raise ``InputError`` where what is predicted before the last token depends on that token.

    One forward of two rows that differ there; a model that ZeRO 3 has loaded in parts is believed.
    """
    if any(hasattr(each, "ds_shape") for each in model.parameters()):
        return
    rows = torch.arange(8).repeat(2, 1) % model.config.get_text_config().vocab_size
    rows[1, -1] = 0
    with torch.no_grad():
        one, other = model.eval()(input_ids=rows.to(model.device)).logits[:, :-1]
    if (one - other).abs().max() > 20 * torch.finfo(one.dtype).eps * one.abs().max():
        hint = "set is_decoder=True in its config, or take a model that was trained to predict the next token"
        raise InputError(f"{type(model).__name__} sees the tokens that it is to predict", hint=hint)
