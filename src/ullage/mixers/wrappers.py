"""Models within wrappers: DDP, engines, ``torch.compile``, adapters."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ullage.core.errors import InputError


def bare(model: nn.Module) -> nn.Module:
    """The module that a ``torch.compile`` wrapper, DDP, an engine or adapters in its layers (PEFT) hold.

    One with a learned prompt stays wrapped: its own forward, which lengthens every row, is what has to be fed.
    """
    if isinstance(model, PreTrainedModel):
        return model
    module: Any = _unwrapped(model)
    return module.base_model.model if _is_adapted(module) and not has_learned_prompt(module) else module


def _unwrapped(model: Any) -> nn.Module:
    # Every wrapper holds its model under one of these names. accelerate reads the metadata of an installed package at
    # each call, which takes about a millisecond.
    if not hasattr(model, "module") and not hasattr(model, "_orig_mod"):
        return model
    try:
        from accelerate.utils import extract_model_from_parallel
    except ModuleNotFoundError:  # the audit needs torch and transformers alone: there are torch's own wrappers only
        model = getattr(model, "_orig_mod", model)
        return model.module if isinstance(model, DistributedDataParallel) else model
    module: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    return module


def has_learned_prompt(model: nn.Module) -> bool:
    """Whether PEFT puts a learned prompt or prefix before every sequence."""
    return _is_adapted(model) and any(config.is_prompt_learning for config in model.peft_config.values())  # pyright: ignore


def refuse_learned_prompt(model: nn.Module) -> None:
    """Raise ``InputError`` for a model before whose every sequence PEFT puts a learned prompt."""
    if has_learned_prompt(model):
        raise InputError(
            "a learned prompt cannot be packed: it would have to stand before each sequence of a row",
            where=type(model).__name__,
            expected="an adapter in the layers of the model, such as LoRA",
            found="prompt learning",
            hint="leave packing out, or take another kind of adapter",
        )


def _is_adapted(module: Any) -> bool:
    peft = sys.modules.get("peft")  # whoever holds such a model has loaded it
    return peft is not None and isinstance(module, (peft.PeftModel, peft.PeftMixedModel))
