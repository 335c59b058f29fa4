"""The model that ``ullage audit MODEL`` means: a type, a folder with a config, or a folder with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from ullage.errors import InputError
from ullage.proofs.tiny import KINDS, auto_class, kind_of, tiny_model

#: Copies of the weights that an audit holds: the model, the gradients of two backwards, and one for float64 checks.
_COPIES = 4


def config_of(model: str, *, trust_remote_code: bool = False) -> str | PreTrainedConfig:
    """The configuration in a folder or file, or the model type itself. Runs code of the folder only if trusted.

    Raises ``InputError`` for what is neither.
    """
    path = Path(model)
    if not path.exists():
        kind_of(model)
        return model
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError("this folder holds no model", where=model, expected="config.json", found="none")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        line = " ".join(str(error).split())
        hint = "with --trust_remote_code the folder's own code is run" if "trust_remote_code" in line else None
        raise InputError("the configuration cannot be read", where=model, found=line[:200], hint=hint) from error


def tiny(config: str | PreTrainedConfig, *, kind: str | None, seed: int, attention: str | None) -> nn.Module:
    """A tiny model after a type or configuration; its own size after one with code of its own, which was trusted."""
    own = {} if isinstance(config, str) else getattr(config, "auto_map", None) or {}
    for each in (kind,) if kind else KINDS:
        if auto_class(each).__name__ in own:
            torch.manual_seed(seed)
            return auto_class(each).from_config(config, trust_remote_code=True).eval()
    return tiny_model(config, kind or kind_of(config), seed=seed, attn_implementation=attention)


def num_bytes(config: PreTrainedConfig, *, kind: str | None, layers: int | None, trust_remote_code: bool) -> int:
    """Memory that an audit of the whole model needs, in bytes, in float32; found without allocating any."""
    with torch.device("meta"):
        model = _class_of(config, kind).from_config(_cut(config, layers), trust_remote_code=trust_remote_code)
    return _COPIES * 4 * sum(parameter.numel() for parameter in model.parameters())


def whole(
    folder: str,
    config: PreTrainedConfig,
    *,
    kind: str | None,
    layers: int | None,
    attention: str | None,
    trust_remote_code: bool,
) -> nn.Module:
    """The folder's model with its weights, in float32; the first ``layers`` of it, if not None."""
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        return _class_of(config, kind).from_pretrained(
            folder,
            config=_cut(config, layers),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            "the weights cannot be loaded", where=folder, found=" ".join(str(error).split())[:200]
        ) from error


def _class_of(config: PreTrainedConfig, kind: str | None) -> Any:
    return auto_class(kind or kind_of(config))


def _cut(config: PreTrainedConfig, layers: int | None) -> PreTrainedConfig:
    """The configuration of the first layers alone."""
    if layers is None:
        return config
    text = config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(num_layers, int) or not 0 < layers <= num_layers:
        raise InputError("the model has no so many layers", expected=f"1 to {num_layers}", found=layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config
