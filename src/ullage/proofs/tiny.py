"""Tiny, randomly initialised models of every text type that the installed transformers knows; nothing is downloaded.

The default configuration of a type is read, and every size in it is cut by a rule on its name: widths to 64, two
layers (one of each kind in hybrids, so up to four), four experts, windows of four tokens. The same is done to nested
configurations. :mod:`ullage.proofs.tiny_settings` holds the rules and the entries that single types need.

Parameters that a type starts at a constant are drawn anew around it. A gate that starts at zero would close its path,
and what leaks through that path between sequences would not be seen.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from ullage.errors import InputError, require_one_of
from ullage.proofs.tiny_settings import KEPT, MISSING, PER_LAYER, RULES, SETTINGS, VOCABULARY, WIDTH

KINDS = ("causal", "masked", "seq2seq")

#: Most parameters of a tiny model.
MOST_PARAMETERS = 5_000_000

_AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}
_NAMES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
#: What a configuration or a model raises that does not take its sizes, or lacks a package.
_REFUSALS = (
    ImportError,
    OSError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    LookupError,
    StrictDataclassError,
)
_BASE_ENTRIES = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))


class CannotBuild(InputError):
    """A tiny model of a type cannot be built here; the message names what is missing."""


def model_types(kind: str) -> list[str]:
    """Model types of one of ``KINDS`` in the installed transformers, sorted."""
    return sorted(_NAMES[require_one_of(kind, KINDS, "kind of model")])


def kind_of(model: str | PreTrainedConfig) -> str:
    """The kind of head of a type: that of the configuration's ``architectures``, else the first of ``KINDS`` it has.

    Raises ``InputError`` if transformers knows no text model of this type.
    """
    model_type = model if isinstance(model, str) else model.model_type
    kinds = [kind for kind in KINDS if model_type in _NAMES[kind]]
    if not kinds:
        raise InputError("no such text model type in the installed transformers", found=repr(model_type))
    named = [] if isinstance(model, str) else model.architectures or []
    return next((kind for kind in kinds if {*named} & {*_classes(kind, model_type)}), kinds[0])


def auto_class(kind: str) -> type:
    """transformers' Auto class of one of ``KINDS``."""
    return _AUTO[require_one_of(kind, KINDS, "kind of model")]


def _classes(kind: str, model_type: str) -> tuple[str, ...]:
    """Names of the classes with this head."""
    names = _NAMES[kind][model_type]
    return (names,) if isinstance(names, str) else tuple(names)


def tiny_config(model: str | PreTrainedConfig) -> PreTrainedConfig:
    """Small configuration of a model type, or after a configuration of one's own; without dropout.

    Raises ``InputError`` if transformers knows no text model of this type, ``CannotBuild`` if its small configuration
    is refused.
    """
    model_type = model if isinstance(model, str) else model.model_type
    if not any(model_type in names for names in _NAMES.values()):
        raise InputError("no such text model type in the installed transformers", found=repr(model_type))
    try:
        return _shrunk(AutoConfig.for_model(model) if isinstance(model, str) else model)
    except _REFUSALS as error:
        raise _cannot_build(model_type, error) from error


def tiny_model(
    model: str | PreTrainedConfig, kind: str, *, seed: int = 0, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Tiny random model of a type, or after a configuration of one's own, in float32 on the CPU, in evaluation mode.

    ``kind`` is one of ``KINDS``, the head. The parameters depend on ``seed`` alone, and the random state of the caller
    stays as it is. ``attn_implementation`` is passed to transformers. Raises ``InputError`` for an unknown type or
    kind, ``CannotBuild`` where something is missing to build the model.
    """
    model_type = model if isinstance(model, str) else model.model_type
    if model_type not in model_types(kind):
        raise InputError(f"no such {kind} model type in the installed transformers", found=repr(model_type))
    if reason := MISSING.get((kind, model_type)):
        raise CannotBuild(f"cannot build a tiny {kind} model of type {model_type!r}", hint=reason)
    config = tiny_config(model)
    if kind == "causal" and not config.is_encoder_decoder:
        for switch in ("is_decoder", "causal"):
            if hasattr(config, switch):
                setattr(config, switch, True)
    if kind == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as from_pretrained would find it among the generation settings
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = _build(config, kind, dtype=torch.float32, **options)
        except _REFUSALS as error:
            raise _cannot_build(model_type, error) from error
        size = sum(parameter.numel() for parameter in made.parameters())
        if size > MOST_PARAMETERS:
            raise CannotBuild(
                f"the model of type {model_type!r} is not tiny", expected=f"<= {MOST_PARAMETERS} parameters", found=size
            )
        _vary(made)
    return made.eval()


def _build(config: PreTrainedConfig, kind: str, **options: Any) -> PreTrainedModel:
    """A model from ``config``, or from the part of a composite that the class of this head asks for (its decoder)."""
    model_class = _AUTO[kind]._model_mapping[type(config)]
    for part in vars(config).values():
        if type(part) is model_class.config_class and type(part) is not type(config):
            return model_class._from_config(part, **options)
    return _AUTO[kind].from_config(config, **options)


def _cannot_build(model_type: str, error: Exception) -> CannotBuild:
    return CannotBuild(
        f"cannot build a tiny model of type {model_type!r}", found=f"{type(error).__name__}: {str(error)[:300]}"
    )


def _shrunk(default: PreTrainedConfig) -> PreTrainedConfig:
    """A new configuration of the type of ``default``, with the sizes cut, at every depth."""
    settings = SETTINGS.get(default.model_type or type(default).__name__, {})
    entries = {
        field.name: field.default
        for field in dataclasses.fields(default)
        if field.init and field.name not in _BASE_ENTRIES
    }
    values: dict[str, Any] = {}
    layers = _kept_layers(default)
    free_ids = iter(range(VOCABULARY - 1, 2, -1))
    for name, declared in entries.items():
        value = vars(default).get(name, declared)
        if isinstance(value, PreTrainedConfig):
            values[name] = _shrunk(value)
        elif name in PER_LAYER and layers and isinstance(value, (list, tuple)):
            values[name] = [_small(name, value[layer]) for layer in layers]
        elif "drop" in name and isinstance(value, (bool, int, float)):
            values[name] = type(value)(0)
        elif name in _SPECIAL_IDS:
            values[name] = _SPECIAL_IDS[name]
        elif name.endswith(("_token_id", "_token_index", "_token_ids")) and isinstance(value, int):
            values[name] = next(free_ids)
        elif name == "vocab_size" and isinstance(value, int):
            values[name] = VOCABULARY
        elif name in ("initializer_range", "init_std") and isinstance(value, float):
            # Wide enough that attention is not uniform over so few channels.
            values[name] = 0.1
        elif isinstance(value, int) and not isinstance(value, bool) and declared is not None:
            values[name] = _small(name, value)
        elif type(value) is type(declared) and isinstance(value, (bool, float, str)) and value != declared:
            # Set by the configuration that this one is part of.
            values[name] = value
    if layers:
        if "num_hidden_layers" in entries:
            values["num_hidden_layers"] = len(layers)
        if overrides := _overrides(default):
            values["per_layer_config"] = {
                place: _small_overrides(overrides[layer]) for place, layer in enumerate(layers) if layer in overrides
            }
    _match_heads(values, vars(default))
    # Copied, since configurations change the dictionaries that they are given.
    values.update(copy.deepcopy(settings))
    return type(default)(**values)


def _small(name: str, value: Any) -> Any:
    """``value`` of the entry ``name``, not above what the rules allow."""
    if not isinstance(value, int) or isinstance(value, bool) or KEPT.fullmatch(name):
        return value
    return min(value, next((most for pattern, most in RULES if pattern.fullmatch(name)), WIDTH))


def _small_overrides(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that one layer has of its own, cut; its heads stay wider than those of the other layers."""
    values = {name: 32 if name == "head_dim" else _small(name, value) for name, value in entries.items()}
    _match_heads(values, entries)
    return values


def _match_heads(values: dict[str, Any], default: dict[str, Any]) -> None:
    """As many key and value heads as heads in ``values``, where ``default`` has so."""
    if values.get("num_key_value_heads") is None:
        return
    for heads in ("num_attention_heads", "n_head", "num_heads"):
        if default.get(heads) == default["num_key_value_heads"] and heads in values:
            values["num_key_value_heads"] = values[heads]


def _kept_layers(default: PreTrainedConfig) -> list[int]:
    """Layers of ``default`` that hold each kind of layer once, at least two; empty where no list tells the kinds."""
    lists = [value for name in PER_LAYER if isinstance(value := vars(default).get(name), (list, tuple)) and value]
    if not lists:
        return []
    length = min(map(len, lists))
    overrides = _overrides(default)
    lists.append([sorted(overrides.get(layer, ())) for layer in range(length)])
    kept: list[int] = []
    for values in lists:
        seen = {str(values[layer]) for layer in kept}
        for layer in range(length):
            if str(values[layer]) not in seen:
                seen.add(str(values[layer]))
                kept.append(layer)
    kept.extend(layer for layer in range(length) if layer not in kept and len(kept) < 2)
    return sorted(kept)


def _overrides(default: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Entries that single layers have of their own, by layer."""
    return {int(layer): entry for layer, entry in (default.to_dict().get("per_layer_config") or {}).items()}


@torch.no_grad()
def _vary(model: PreTrainedModel) -> None:
    """Draw every parameter anew whose values are all equal or not finite: noise around its value."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.numel() < 2:
            continue
        if not torch.isfinite(parameter).all():
            parameter.normal_(0.0, 0.1)
        elif (parameter == parameter.flatten()[0]).all():
            # A tiny constant (a layer scale of 1e-5) would close its path as much as a zero does.
            size = abs(float(parameter.flatten()[0]))
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if size < 0.1 else 0.1 * size)
