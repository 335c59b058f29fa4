"""The model that ``--model`` means, built: a preset by name, a config, or the weights of a folder."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ullage.cli.train.drawing import drawn
from ullage.cli.train.limits import require_causal
from ullage.cli.train.settings import ModelArguments, TrainCommand
from ullage.cli.train.weights import load_weights, read_config, require_decoder, trust_hint, why_not
from ullage.errors import CheckpointError, InputError, first_line
from ullage.models import RecurrentConfig
from ullage.models.cells import CELLS
from ullage.training.saving import WEIGHT_FILES

if TYPE_CHECKING:
    from ullage.cli.train.names import Located
    from ullage.cli.train.summary import Voice

#: A cell and its sizes: ``gru``, ``gru-512``, ``gru-512x2`` (hidden size, layers).
_NAME = re.compile(r"(?P<cell>[a-z_]+)(-(?P<hidden_size>\d+)(x(?P<num_hidden_layers>\d+))?)?")
#: What a name of a new model, or flags beside it, may say of its size.
SIZES = ("hidden_size", "num_hidden_layers", "dropout")
_DEFAULT_HIDDEN_SIZE, _LLAMA_POSITIONS = 256, 8192


def is_preset(name: str) -> bool:
    """Whether ``name`` is that of a new model: a cell or llama, with sizes or without."""
    match = _NAME.fullmatch(name)
    return match is not None and match["cell"] in (*CELLS, "llama")


def unknown_model(name: str, absent: InputError | None = None) -> InputError:
    """The error for a name that means no model, with the presets that are near, or else with what ``absent`` says."""
    near = difflib.get_close_matches(name, (*CELLS, "llama"), n=2)
    return InputError(
        f"unknown model {name!r}",
        expected=f"one of {', '.join(CELLS)}, llama, with sizes such as gru-512x2, or a folder, a config .json or "
        "a name on the Hugging Face hub",
        found=None if absent is None else f"none of them: {absent.what}: {absent.found or absent.where}",
        hint=f"did you mean {' or '.join(near)}?" if near else None if absent is None else absent.hint,
    )


def load_model(
    command: TrainCommand, found: Located | None, tokenizer: Any, checkpoint: Path | None, say: Voice
) -> Any:
    """A new model, or that of ``found`` with its weights; on resuming, the checkpoint's config decides.

    Args:
        command: the arguments of the call.
        found: where the model of the call is; None for a preset.
        tokenizer: says the size of a preset's vocabulary.
        checkpoint: where the run continues from, if anywhere.
        say: takes a line about weights that were made new or are not used.

    Raises ``InputError`` for a folder that holds no model or lacks weights of it, and for a model that attends in both
    directions; ``CheckpointError`` if model arguments contradict the checkpoint.
    """
    arguments = command.model
    if checkpoint is not None:
        config = _config_from(checkpoint, arguments)
        # Model arguments of a call that resumes are not used, but must not contradict the checkpoint either.
        if found is not None or (is_preset(arguments.model) and not command.given.isdisjoint(("model", *SIZES))):
            _require_same(_config(arguments, found, tokenizer), config, checkpoint)
        model = _new(config, arguments)
    elif found is not None and any((found.path / name).is_file() for name in WEIGHT_FILES):
        _refuse_sizes(arguments)
        model = load_weights(found.path, arguments, say)
    else:
        config = _config(arguments, found, tokenizer)
        model = drawn(lambda: _new(config, arguments))
    require_causal(model)
    return model


def _new(config: Any, arguments: ModelArguments) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=arguments.trust_remote_code)
    except (ValueError, AssertionError) as error:
        if isinstance(error, InputError):
            raise
        require_decoder(config.to_dict(), arguments.model)
        raise InputError(
            "this config does not describe a causal language model",
            where=arguments.model,
            found=why_not(error),
            hint=trust_hint(error),
        ) from error


def _config(arguments: ModelArguments, found: Located | None, tokenizer: Any) -> Any:
    if found is not None:
        _refuse_sizes(arguments)
        return _config_from(found.path, arguments)
    match = _NAME.fullmatch(arguments.model)
    if match is None or not is_preset(arguments.model):
        raise unknown_model(arguments.model)
    return _by_name(arguments, match, tokenizer)


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
    given = [name for name in SIZES if getattr(arguments, name) is not None]
    if given:
        raise InputError(f"--{given[0]} is for a new model given by name", where=f"--model {arguments.model}")


def _config_from(path: Path, arguments: ModelArguments) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError("this folder holds no model", where=str(path), expected="config.json", found="none")
    read_config(file)
    code = arguments.trust_remote_code
    try:
        # The code of a config lies beside it, which transformers finds by the folder alone.
        return AutoConfig.from_pretrained(file.parent if code else file, local_files_only=True, trust_remote_code=code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "the model config cannot be read", where=str(file), found=first_line(error), hint=trust_hint(error)
        ) from error


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
