"""The model that an audit is asked for: of a folder or the hub, new by its type and sizes, or of a module of one's own.

One with weights has them, in float32. Of a new one, parameters that start at a constant are drawn anew around it: a
gate that starts at zero would close its path, and what leaks through it between sequences would not be seen.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ullage.core.errors import InputError, first_line, require_one_of
from ullage.datasets.tables import refuse_slip
from ullage.mixers.trial import vary
from ullage.models.by_name import has_weights, new_config, sized_config

#: Heads of models, by kind.
HEADS: dict[str, Any] = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "image": transformers.AutoModelForImageTextToText,
}
#: Most parameters of a model without weights.
_MOST = 200_000_000


def named_model(
    name: str, *, kind: str | None = None, seed: int = 0, attention: str | None = None, trusted: bool = False
) -> nn.Module:
    """The model of a folder, a config file or a name, in float32 on the CPU, in evaluation mode.

    Args:
        name: as :func:`ullage.models.by_name.causal_model` takes it.
        kind: one of ``HEADS``; that of the model's files if None.
        seed: of the weights of a model that has none.
        attention: its implementation, for transformers.
        trusted: whether code that comes with the model may run.

    Raises ``InputError`` for what is no model, and for a large one without weights.
    """
    config = new_config(name, range(256))  # of as many tokens
    is_new = config is not None or (Path(name).exists() and not has_weights(name))
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        config = config or AutoConfig.from_pretrained(name, trust_remote_code=trusted)
        head = _head(config, kind)
        if is_new:
            return new_model(config, head, name, seed=seed, trusted=trusted, **options)
        return head.from_pretrained(name, dtype=torch.float32, trust_remote_code=trusted, **options).eval()
    except InputError:
        raise
    except (OSError, ValueError, KeyError) as error:
        hint = "with --trust_remote_code its own code is run" if "trust_remote_code" in str(error) else None
        if "/" not in name and not Path(name).exists():
            refuse_slip(name, "model")
            kind = name.partition("-")[0]
            kind = next(iter(get_close_matches(kind, CONFIG_MAPPING, n=1)), kind)
            hint = f"a new model is named by its type and sizes, such as {kind}-64x4"
        raise InputError("the model cannot be read", where=name, found=first_line(error)[:200], hint=hint) from error


def new_model(
    config: PreTrainedConfig, head: Any = None, where: str | None = None, *, seed: int = 0, **options: Any
) -> nn.Module:
    """A model with random weights, by default with the head that its config names; ``where``: for errors."""
    head = head or _head(config, None)
    trusted = options.pop("trusted", False)
    if hasattr(head, "from_config"):
        options["trust_remote_code"] = trusted
    make = getattr(head, "from_config", None) or head._from_config
    return _small(lambda: make(config, dtype=torch.float32, **options), where or config.model_type, seed)


def own_model(named: str, seed: int = 0) -> nn.Module:
    """The model that ``MODULE:NAME`` is or makes; as with ``python -m``, modules of the current folder are found.

    ``NAME`` is a model, a function without arguments that makes one, or a class; one of transformers' kind is made with
    64 channels and four layers, if its configuration takes such sizes. Raises ``InputError`` for anything else.
    """
    module_name, _, name = named.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that theirs imports
        hint = "it is looked for in the current folder and among what is installed"
        raise InputError("there is no such module", found=repr(error.name), hint=hint) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError("the module has no such name", where=module_name, found=repr(part))
        found = getattr(found, part)
    if isinstance(found, type):
        return _of_class(found, seed)
    torch.manual_seed(seed)
    if not isinstance(found, nn.Module) and callable(found):
        found = found()
    if not isinstance(found, nn.Module):
        expected = "a model class, or a function without arguments that returns a model"
        raise InputError("this is no model", where=named, expected=expected, found=type(found).__name__)
    return found


def _head(config: PreTrainedConfig, kind: str | None) -> Any:
    """The class that makes the model of a config."""
    kinds = HEADS if kind is None else [require_one_of(kind, HEADS, "kind of model")]
    own = getattr(config, "auto_map", None) or {}
    of_files = [getattr(transformers, name, None) for name in config.architectures or () if kind is None]
    fitting = (
        HEADS[each] for each in kinds if HEADS[each].__name__ in own or type(config) in HEADS[each]._model_mapping
    )
    if found := next(filter(None, [*([] if own else of_files), *fitting]), None):
        return found
    raise InputError("no model of this kind has this type", found=config.model_type, expected=" or ".join(kinds))


def _of_class(found: type, seed: int) -> nn.Module:
    hint = "name a function without arguments that returns a small model"
    if not issubclass(found, nn.Module):
        raise InputError("this is no class of a model", found=found.__name__, expected="a subclass of nn.Module")
    make: Callable[[], nn.Module] = found
    if issubclass(found, PreTrainedModel):
        kind = found.config_class
        if kind is None:
            raise InputError("the class has no config_class", where=found.__name__, hint=hint)
        make = lambda: found(sized_config(kind, 64, 4, range(256)))  # noqa: E731
    try:
        return _small(make, found.__name__, seed)
    except TypeError as error:  # it takes arguments
        raise InputError("the model is not made", where=found.__name__, found=str(error)[:300], hint=hint) from error


def _small(make: Callable[[], nn.Module], where: str, seed: int) -> nn.Module:
    """A new model, the same from one seed; the caller's random state stays. Raises ``InputError`` for a large one."""
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in make().parameters())
    except Exception:  # it makes tensors in a way of its own: its size is not known
        size = 0
    if size > _MOST:
        hint = "name a folder with weights, a small new one (llama-64x2), or a function that returns a small model"
        raise InputError(
            "the model is not small", where=where, expected=f"<= {_MOST} parameters", found=size, hint=hint
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make()
        if isinstance(made, PreTrainedModel):
            vary(made)
    return made.eval()
