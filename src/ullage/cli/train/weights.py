"""Weights of a model's folder, all of them or an error that lists what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from ullage.cli.train.names import model_files
from ullage.cli.train.settings import ModelArguments
from ullage.errors import InputError, first_line

if TYPE_CHECKING:
    from ullage.cli.train.summary import Voice

#: How many names of weights a line holds.
_NAMED = 4


def load_weights(folder: Path, arguments: ModelArguments, say: Voice) -> Any:
    """The causal language model in ``folder``, with its weights.

    A head that was not saved, because the folder is another kind of model's, starts new, and a line says so; so do
    other missing weights where ``--allow_missing_weights`` asks for it. Weights that nobody reads are named too.
    Raises ``InputError`` for missing weights, for those of another size, and for pickled ones that were not asked for.
    """
    if (folder / "config.json").is_file():
        require_decoder(read_config(folder / "config.json"), str(folder))
    pickle, code = arguments.allow_pickle_weights, arguments.trust_remote_code
    adapter = (folder / "adapter_config.json").is_file()
    if not adapter:
        model_files([path.name for path in folder.iterdir()], pickle=pickle, where=str(folder))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=code,
            use_safetensors=None if pickle else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, all of them
        )
    except Exception as error:  # a torn file raises whatever its reader raises
        raise InputError(
            "the model cannot be loaded", where=str(folder), found=why_not(error), hint=trust_hint(error)
        ) from error
    model, info = loaded
    if not adapter:
        _judge(folder, model, info, allowed=arguments.allow_missing_weights, say=say)
    return model


def read_config(file: Path) -> dict[str, Any]:
    """The settings in a model's ``config.json``. Raises ``InputError`` where they cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("the model config cannot be read", where=str(file), found=first_line(error)) from error
    if not isinstance(found, dict):
        raise InputError("the model config cannot be read", where=str(file), expected="a JSON object")
    return found


def require_decoder(config: Mapping[str, Any], where: str | None) -> None:
    """Raise ``InputError`` for the config of an encoder with a decoder."""
    if config.get("is_encoder_decoder"):
        raise InputError(
            "this model reads one text and writes another",
            where=where,
            expected="a causal language model",
            found=f"an encoder with a decoder, of type {config.get('model_type')}",
            hint="train it in Python, with ullage.training.Seq2SeqTrainer",
        )


def why_not(error: Exception) -> str:
    """Why transformers cannot make a causal language model, in a few words."""
    match = re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error))
    return first_line(error) if match is None else f"{match[1]}, which is no causal language model's"


def trust_hint(error: Exception) -> str | None:
    """The hint for a model that is code of its folder's own."""
    return "--trust_remote_code runs the Python files of its folder" if "trust_remote_code" in str(error) else None


def _judge(folder: Path, model: Any, info: dict[str, Any], *, allowed: bool, say: Voice) -> None:
    """Raise for weights that the folder ought to hold; say what started new and what is not used."""
    missing = set(info["missing_keys"])
    head = _new_head(model, missing)
    sizes = {f"{name} {list(there)} instead of {list(here)}" for name, there, here in info["mismatched_keys"]}
    lost = [
        text
        for text in (
            f"without {_some(missing - head)}" if missing - head else "",
            f"of another size {_some(sizes)}" if sizes else "",
        )
        if text
    ]
    if lost and not allowed:
        raise InputError(
            "the model's files lack weights",
            where=str(folder),
            expected=f"all {len(model.state_dict())} tensors of {type(model).__name__}",
            found="; ".join(lost),
            hint="get the whole model again, or let these start new with --allow_missing_weights",
        )
    if head or lost:
        new = missing | {name for name, *_ in info["mismatched_keys"]}
        say(f"{folder} lacks weights, which start new: {_some(new)}")
    if info["unexpected_keys"]:
        say(f"{folder} holds weights that {type(model).__name__} does not use: {_some(info['unexpected_keys'])}")


def _new_head(model: Any, missing: set[str]) -> set[str]:
    """The missing weights of a head that the folder's own class has not: a backbone, or a model for another task."""
    saved_as = getattr(model.config, "architectures", None) or [type(model).__name__]
    if type(model).__name__ in saved_as:
        return set()
    return {name for name in missing if not name.startswith(f"{model.base_model_prefix}.")}


def _some(names: Collection[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(sorted(names)[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
