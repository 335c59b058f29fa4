"""What a model is made of: the parts whose effect on a token's neighbours is known, and those of other authors.

A part is known where its class, and every class that it inherits a ``forward`` from, is torch's, transformers' or
ullage's own, or a wrapper that leaves a token's neighbours alone (listed below); where nothing was
put in the place of its ``forward``; and where no hook of another author runs beside it. What known parts do together is
proved for each model type by the audit. Nothing is run here, and no weights are read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrize import ParametrizationList
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Whose code the parts of a model run: the classes and functions that are known not to let tokens meet, as data.
#
# A wrapper is recognised by what it is, the module that its class or function was written in, and never by its name.
# What is not listed here may do anything to a token's neighbours, and is believed only with a proof.


#: Packages whose functions, as hooks, in the place of a ``forward`` or around one, leave a token's neighbours alone:
#: they cast, move, gather, checkpoint, log, add noise to embeddings, or call a kernel for the same computation.
_FUNCTIONS = {
    "accelerate", "builtins", "contextlib", "deepspeed", "functools", "liger_kernel", "peft", "torch", "torchao",
    "transformers", "trl", "ullage", "wandb",
}  # fmt: skip
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
    "adalora", "adamss", "beft", "boft", "c3a", "deft", "delora", "fourierft", "frod", "glora", "gralora", "hira",
    "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "lycoris_utils", "miss", "mixed", "oft", "osf", "peanut",
    "psoft", "pvera", "randlora", "road", "shira", "supertuning", "tinylora", "trainable_tokens", "tuners_utils",
    "unilora", "vblora", "vera", "waveft",
)  # fmt: skip
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
    "abc", "builtins", "typing", "typing_extensions",  # bases that are no modules
    "transformers", "ullage", "peft.tuners._buffer_dict", "peft.utils",
    *_TORCH, *(f"peft.tuners.{tuner}" for tuner in _TUNERS), *_QUANTIZED,
)  # fmt: skip
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


#: Modules of torch whose classes work on single tokens; those of all others let neighbours meet, as convolutions,
#: recurrences, pools, paddings (which shift) and norms of more than a token do.
_TOKEN_WISE = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("_functions", "activation", "adaptive", "container", "dropout", "linear", "loss", "module", "sparse")
)
_TOKEN_WISE_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.CrossMapLRN2d)
#: Attributes of a class that decide what a call does, whoever else defines them.
_DECISIVE = frozenset(
    {
        "__call__",
        "__getattr__",
        "__getattribute__",
        "_call_impl",
        "_is_stateful",
        "_supports_attention_backend",
        "_wrapped_call_impl",
        "base_model_prefix",
        "loss_function",
    }
)
#: Methods that no forward calls.
_BESIDE_FORWARD = frozenset(
    {
        "_init_weights",
        "_reorder_cache",
        "extra_repr",
        "from_pretrained",
        "generate",
        "get_input_embeddings",
        "get_output_embeddings",
        "prepare_inputs_for_generation",
        "push_to_hub",
        "reset_parameters",
        "resize_token_embeddings",
        "save_pretrained",
        "set_input_embeddings",
        "set_output_embeddings",
        "tie_weights",
    }
)
_METHODS = (FunctionType, property, classmethod, staticmethod, functools.cached_property)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks")


@dataclass(frozen=True)
class UnknownPart:
    """A part of a model that may let tokens meet.

    Attributes:
        path: of the module; "" is the model itself.
        kind: the name of its class.
        why: what is not known about it, as in "a class of my_package.layers".
        is_hook: whether it runs around the module's ``forward``, and not within.
    """

    path: str
    kind: str
    why: str
    is_hook: bool = False

    def is_within(self, path: str) -> bool:
        """Whether it runs within the ``forward`` of the module of this path."""
        return self.path.startswith(f"{path}.") or not path or (self.path == path and not self.is_hook)

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'} ({self.kind}), {self.why}"


def unknown_parts(model: nn.Module) -> list[UnknownPart]:
    """The parts of a model that are not known to leave tokens alone, in the order of its modules.

    >>> shift = {"__module__": "mine.layers", "forward": lambda self, rows: rows + rows.roll(1, 1)}
    >>> Shift = type("Shift", (nn.Module,), shift)
    >>> [str(part) for part in unknown_parts(nn.Sequential(nn.Linear(2, 2), Shift()))]
    ['1 (Shift), a class of mine.layers']
    """
    families = _families(model)
    reasons: dict[type, str | None] = {}
    unknown = [*_global_hooks(model), *_attention_of_others(model)]
    of_weights: tuple[str, ...] = ()
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        # What makes weights of weights sees no token.
        if of_weights and path.startswith(of_weights):
            continue
        if isinstance(module, ParametrizationList):
            of_weights = (*of_weights, f"{path}.")
        modules[path] = module
        kind = type(module)
        if kind not in reasons:
            reasons[kind] = _reason(kind, families)
        reason = reasons[kind] or _replaced(module) or _variant(module) or _put_in(path, modules)
        if reason is not None:
            unknown.append(UnknownPart(path, kind.__name__, reason))
        unknown.extend(_hooks(path, module))
    return unknown


def _attention_of_others(model: nn.Module) -> Iterator[UnknownPart]:
    """The first layer of each attention implementation that another author has registered."""
    seen: set[Any] = {None}
    for path, module in model.named_modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if name in seen or "attention" not in type(module).__name__.lower():
            continue
        seen.add(name)
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        author = None if function is None else unknown_author(function)
        if author is not None:
            yield UnknownPart(path, type(module).__name__, f"whose attention {name!r} is of {author}")


def lets_tokens_meet(module: nn.Module) -> bool:
    """Whether a module is torch's own, or inherits one, whose output at a token depends on other tokens."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn.modules."):
            return not _is_token_wise(kind, module)
    return False


def _put_in(path: str, modules: dict[str, nn.Module]) -> str | None:
    """Why a convolution or the like of torch is not known: the class around it does not name it in its ``__init__``.

    A Mamba mixer names ``Conv1d`` there. In a Llama somebody has put it there.
    """
    module = modules[path]
    if not path or not lets_tokens_meet(module):
        return None
    kind = next(each for each in type(module).__mro__ if each.__module__.startswith("torch.nn.modules."))
    while path:
        path = path.rpartition(".")[0]
        holder = type(modules[path])
        # Containers and adapters hold what others made.
        if is_of_a_model(holder):
            return None if kind.__name__ in _names_in_init(holder) else f"which {holder.__name__} does not make itself"
    return "which no model of transformers makes"


@functools.lru_cache(maxsize=1024)
def _names_in_init(kind: type) -> frozenset[str]:
    """The names that a class and its bases refer to where they make their parts."""
    left = [getattr(vars(base).get("__init__"), "__code__", None) for base in kind.__mro__ if is_of_a_model(base)]
    names: set[str] = set()
    while left:
        code = left.pop()
        if code is not None:
            names.update(code.co_names)
            left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(names)


def _is_token_wise(kind: type, module: Any) -> bool:
    """``kind``: the class of torch that ``module`` is or inherits."""
    if kind.__name__ in ("MultiheadAttention", "Softmax2d", "EmbeddingBag"):
        return False
    if issubclass(kind, _TOKEN_WISE_NORMS):
        return issubclass(kind, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1
    if issubclass(kind, (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)):
        return module.dim == -1
    return kind.__module__ in _TOKEN_WISE


def _families(model: nn.Module) -> frozenset[str] | None:
    """The models of transformers that a model is made of, by its configs; None if that is not known."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or not isinstance(config, PreTrainedConfig):
        return None
    kinds: list[type] = [*type(model).__mro__]
    left: list[Any] = [config]
    while left:
        each = left.pop()
        kinds += type(each).__mro__
        left += [value for value in vars(each).values() if isinstance(value, PreTrainedConfig)]
    return frozenset(name for kind in kinds if (name := _family(kind)) is not None)


def _family(kind: type) -> str | None:
    """The model of transformers that a class belongs to: "llama" for ``transformers.models.llama.modeling_llama``."""
    return kind.__module__.split(".")[2] if kind.__module__.startswith("transformers.models.") else None


def _reason(kind: type, families: frozenset[str] | None) -> str | None:
    """Why a class is not known; None if it is."""
    names: set[str] = set()
    for base in kind.__mro__:
        own = vars(base)
        if not is_known_class(base):
            names |= own.keys()
            if "forward" in own or names & _DECISIVE:
                return f"a class of {base.__module__}"
            continue
        family = _family(base)
        if family is not None and families is not None and family not in families:
            return f"a part of another model, {family}"
        author = unknown_author(own["forward"]) if "forward" in own else None
        if author is not None:
            return f"with a forward of {author}"
        # Methods that a forward of the family's own may call.
        if family is not None or "forward" in own:
            for name in sorted(names & own.keys() - _BESIDE_FORWARD):
                if not name.startswith("__") and isinstance(own[name], _METHODS):
                    return f"whose {name} was replaced in a subclass"
    return None


def _replaced(module: nn.Module) -> str | None:
    """Whether a function of another author stands among the attributes of a module, its ``forward`` first of all."""
    own = vars(module)
    for name, value in own.items():
        if isinstance(value, FUNCTIONS) or name == "forward":
            author = None if name in _BESIDE_FORWARD else unknown_author(value)
            if author is not None:
                return f"with a {name} of {author}"
    return None


def lora_variants(module: nn.Module) -> list[Any]:
    """The variants of a layer of PEFT's LoRA, DoRA for example; none of any other module."""
    variants = vars(module).get("lora_variant")
    return list(variants.values()) if isinstance(variants, dict) else []


def _variant(module: nn.Module) -> str | None:
    """Whether a layer of PEFT's LoRA is of a variant that looks at more than a token."""
    for variant in lora_variants(module):
        if type(variant).__name__ not in LORA_VARIANTS or not is_known_class(type(variant)):
            return f"of the variant {type(variant).__name__}"
    return None


def _hooks(path: str, module: nn.Module) -> Iterator[UnknownPart]:
    own = vars(module)
    for kind in _HOOKS:
        for hook in own[kind].values() if own.get(kind) else ():
            author = unknown_author(hook)
            if author is not None:
                yield UnknownPart(path, type(module).__name__, f"with a hook of {author}", is_hook=True)


def _global_hooks(model: nn.Module) -> Iterator[UnknownPart]:
    """Hooks that torch runs around every module."""
    for kind in (*_GLOBAL_HOOKS, "_global_backward_hooks"):
        for hook in getattr(torch_module, kind, {}).values():
            author = unknown_author(hook)
            if author is not None:
                why = f"with a hook of {author} around every module"
                yield UnknownPart("", type(model).__name__, why, is_hook=True)
