"""Whose code the parts of a model run: the classes and functions that are known not to let tokens meet, as data.

A wrapper is recognised by what it is, the module that its class or function was written in, and never by its name.
What is not listed here may do anything to a token's neighbours, and is believed only with a proof.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

#: Packages whose functions, as hooks, in the place of a ``forward`` or around one, leave a token's neighbours alone:
#: they cast, move, gather, checkpoint, log, add noise to embeddings, or call a kernel for the same computation.
_FUNCTIONS = frozenset(
    (
        *("accelerate", "builtins", "contextlib", "deepspeed", "functools", "liger_kernel", "peft", "torch", "torchao"),
        *("transformers", "trl", "ullage", "wandb"),
    )
)
#: Modules of torch whose classes wrap others. Not listed: torch.jit and torch.fx, whose code is made of anybody's.
_TORCH = (
    "torch._dynamo.eval_frame",
    "torch.ao.nn",
    "torch.ao.quantization",
    "torch.distributed",
    "torch.nn.modules",
    "torch.nn.parallel",
    "torch.nn.qat",
    "torch.nn.quantized",
    "torch.nn.utils.parametrizations",
    "torch.nn.utils.parametrize",
)
#: PEFT's tuners whose layers change the weights of single tokens. Not listed: those that put tokens of their own before
#: a sequence, choose by sequence (poly, xlora), average over tokens (lily), or add a model (shadow).
_TUNERS = (
    *("adalora", "adamss", "beft", "boft", "c3a", "deft", "delora", "fourierft", "frod", "glora", "gralora", "hira"),
    *("hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "lycoris_utils", "miss", "mixed", "oft", "osf", "peanut"),
    *("psoft", "pvera", "randlora", "road", "shira", "supertuning", "tinylora", "trainable_tokens", "tuners_utils"),
    *("unilora", "vblora", "vera", "waveft"),
)
#: Modules whose linear layers, embeddings and norms keep their weights in another form, or compute them fused.
_QUANTIZED = (
    "aqlm.inference",
    "auto_gptq.nn_modules.qlinear",
    "awq.modules.linear",
    "bitsandbytes.nn.modules",
    "compressed_tensors.linear",
    "deepspeed.linear",
    "eetq.modules.qlinear",
    "gptqmodel.nn_modules.qlinear",
    "hqq.core.quantize",
    "liger_kernel.transformers.geglu",
    "liger_kernel.transformers.layer_norm",
    "liger_kernel.transformers.rms_norm",
    "liger_kernel.transformers.swiglu",
    "optimum.quanto.nn",
    "torchao.float8.float8_linear",
    "torchao.quantization",
    "transformer_engine.pytorch.module",
    "vptq.layers.vqlinear",
)
_CLASSES = (
    *("abc", "builtins", "typing", "typing_extensions"),  # bases that are no modules
    *("transformers", "ullage", "peft.tuners._buffer_dict", "peft.utils"),
    *_TORCH,
    *(f"peft.tuners.{tuner}" for tuner in _TUNERS),
    *_QUANTIZED,
)
#: LoRA's variants (DoRA among them) that work on single tokens; others average over the batch, or find their first
#: token in a row (aLoRA).
LORA_VARIANTS = frozenset(
    {
        "ArrowLinearVariant",
        "BdLoraLinearVariant",
        "DoraConv1dVariant",
        "DoraConv2dVariant",
        "DoraConv3dVariant",
        "DoraEmbeddingVariant",
        "DoraLinearVariant",
        "KasaLinearVariant",
        "MiCAEmbeddingVariant",
        "MiCALinearVariant",
        "QALoraLinearVariant",
    }
)
#: Types of attributes that a module may call as a function.
FUNCTIONS = (FunctionType, MethodType, functools.partial)


def is_known_class(kind: type) -> bool:
    """Whether a class itself, its bases left aside, is written in a module whose classes are known."""
    return _is_listed(kind.__module__)


def is_of_a_model(kind: type) -> bool:
    """Whether a class is a part of transformers' models or of ours, and no container, wrapper or tensor's layer."""
    return kind.__module__.partition(".")[0] in ("transformers", "ullage")


@functools.lru_cache(maxsize=4096)
def _is_listed(module: str) -> bool:
    return any(module == known or module.startswith(f"{known}.") for known in _CLASSES)


def unknown_author(function: Any) -> str | None:
    """The module of the first code that ``function`` runs and that is not known; None if all of it is.

    Read off the code itself, since whoever wraps a function gives the wrapper the name and module of what it wraps.
    What it wraps, holds in its closure or is bound to is looked at too.
    """
    return next((author for author in _authors(function) if not _is_listed_function(author)), None)


def _is_listed_function(module: str) -> bool:
    return module.partition(".")[0] in _FUNCTIONS or _is_listed(module)


def _authors(function: Any) -> Iterator[str]:
    """The modules in which a function and all that it wraps were written."""
    seen: set[int] = set()
    left = [function]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            yield str(each.__globals__.get("__name__", "?"))
            left += [cell for cell in _closure(each) if isinstance(cell, FUNCTIONS)]
        elif isinstance(each, MethodType):
            left.append(each.__func__)
        elif isinstance(each, functools.partial):
            left.append(each.func)
        else:
            # An object that is called: its class, and the functions that it holds.
            yield type(each).__module__
            left += [value for value in getattr(each, "__dict__", {}).values() if isinstance(value, FUNCTIONS)]
        wrapped = getattr(each, "__wrapped__", None)
        if wrapped is not None:
            left.append(wrapped)


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
