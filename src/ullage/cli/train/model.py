"""The model that ``--model`` means: a cell by name, a config, or a folder.

Nothing is downloaded: a name that is neither a cell nor on this disk is an error.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ullage.cli.train.settings import ModelArguments, TrainCommand
from ullage.datasets.text import byte_tokenizer
from ullage.errors import CheckpointError, InputError
from ullage.models import RecurrentConfig
from ullage.models.cells import CELLS
from ullage.training.saving import WEIGHT_FILES

#: A cell and its sizes: ``gru``, ``gru-512``, ``gru-512x2`` (hidden size, layers).
_NAME = re.compile(r"(?P<cell>[a-z_]+)(-(?P<hidden_size>\d+)(x(?P<num_hidden_layers>\d+))?)?")
_DEFAULT_HIDDEN_SIZE, _LLAMA_POSITIONS = 256, 8192
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def tokenizer_for(folder: str | None, model: str) -> Any:
    """The tokenizer in ``folder``, or the model's own, or the byte tokenizer. Raises ``InputError``."""
    own = Path(model)
    if folder is None and own.is_dir() and any((own / name).is_file() for name in _TOKENIZER_FILES):
        folder = model
    if folder is None:
        return byte_tokenizer()
    if not Path(folder).is_dir():
        raise InputError("the tokenizer cannot be read", where=folder, expected="a folder", found="nothing there")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError("this folder holds no tokenizer", where=folder, found=_first_line(error)) from error


def load_model(command: TrainCommand, tokenizer: Any, checkpoint: Path | None) -> Any:
    """A new model, or the folder's with its weights; on resuming, the checkpoint's config decides.

    Raises ``InputError`` for a folder or name that is not a model, and ``CheckpointError`` if model arguments
    contradict the checkpoint.
    """
    arguments = command.model
    if checkpoint is not None:
        config = _config_from(checkpoint)
        # Model arguments of a call that resumes are not used, but must not contradict the checkpoint either.
        if not command.given.isdisjoint(field.name for field in fields(arguments)):
            _require_same(_config(arguments, tokenizer), config, checkpoint)
        return _new(config)
    folder = Path(arguments.model)
    if folder.is_dir() and any((folder / name).is_file() for name in WEIGHT_FILES):
        _refuse_sizes(arguments)
        try:
            return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a torn file raises whatever its reader raises
            raise InputError("the model cannot be loaded", where=str(folder), found=_first_line(error)) from error
    return _new(_config(arguments, tokenizer))


def _new(config: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("this config does not describe a causal language model", found=_first_line(error)) from error


def _config(arguments: ModelArguments, tokenizer: Any) -> Any:
    path = Path(arguments.model)
    # A name of a cell wins over a folder of that name that holds no weights.
    match = _NAME.fullmatch(arguments.model)
    if match is not None and match["cell"] in (*CELLS, "llama"):
        return _by_name(arguments, match, tokenizer)
    if path.is_dir() or path.is_file():
        _refuse_sizes(arguments)
        return _config_from(path)
    near = difflib.get_close_matches(arguments.model, (*CELLS, "llama"), n=2)
    raise InputError(
        f"unknown model {arguments.model!r}",
        expected=f"one of {', '.join(CELLS)}, llama, with sizes such as gru-512x2, or a folder, or a config .json",
        hint=f"did you mean {' or '.join(near)}?" if near else None,
    )


def _by_name(arguments: ModelArguments, match: re.Match[str], tokenizer: Any) -> Any:
    recurrent = match["cell"] in CELLS
    sizes: dict[str, Any] = {"hidden_size": _DEFAULT_HIDDEN_SIZE, "num_hidden_layers": 1 if recurrent else 4}
    for name in ("hidden_size", "num_hidden_layers"):
        flag = getattr(arguments, name)
        if match[name] is not None and flag is not None and flag != int(match[name]):
            raise InputError(f"two values for {name}", where="--model", expected=int(match[name]), found=flag)
        # A size may stand in the name or in a flag; in both only if they agree.
        chosen = flag if flag is not None else match[name]
        if chosen is not None:
            sizes[name] = int(chosen)
    ids: dict[str, Any] = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")
    }
    ids["vocab_size"] = len(tokenizer)
    if recurrent:
        return RecurrentConfig(cell=match["cell"], dropout=arguments.dropout or 0.0, **sizes, **ids)
    if arguments.dropout is not None:
        raise InputError("--dropout is for recurrent models", where=f"--model {arguments.model}")
    return _llama(sizes["hidden_size"], sizes["num_hidden_layers"], ids)


def _llama(hidden_size: int, num_hidden_layers: int, ids: dict[str, Any]) -> LlamaConfig:
    """Config of a llama in usual proportions: heads of 64, half as many for keys and values, a feed-forward of 8/3."""
    if hidden_size % 2:
        raise InputError("a llama's hidden size must be even", where="--hidden_size", found=hidden_size)
    # At most one head per 64, and of an even size: rotary embeddings turn pairs of elements.
    heads = next(heads for heads in range(max(1, hidden_size // 64), 0, -1) if hidden_size % (2 * heads) == 0)
    return LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        intermediate_size=max(64, hidden_size * 8 // 3 // 64 * 64),
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 2 else heads // 2,
        max_position_embeddings=_LLAMA_POSITIONS,
        **ids,
    )


def _refuse_sizes(arguments: ModelArguments) -> None:
    given = [f.name for f in fields(arguments) if f.name != "model" and getattr(arguments, f.name) is not None]
    if given:
        raise InputError(f"--{given[0]} is for a new model given by name", where=f"--model {arguments.model}")


def _config_from(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError("this folder holds no model", where=str(path), expected="config.json", found="none")
    try:
        json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("the model config cannot be read", where=str(file), found=_first_line(error)) from error


def _require_same(asked: Any, found: Any, checkpoint: Path) -> None:
    ours, theirs = asked.to_dict(), found.to_dict()
    for name in ("model_type", "cell", "vocab_size", "hidden_size", "num_hidden_layers", "dropout"):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"the checkpoint's model has another {name}",
                where=str(checkpoint),
                expected=ours.get(name),
                found=theirs.get(name),
                hint="leave out the model arguments to continue with the checkpoint's own",
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
