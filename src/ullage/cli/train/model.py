"""The model and the tokenizer that a call names: found, read, and built by transformers.

A name is a file or folder here, a new model (a cell or llama, with sizes), or a repository of the Hugging Face hub
(``gpt2``, ``org/name``, either with ``@revision``), in this order. The hub's own library fetches the last into its
cache before anything is read: transformers would ask again for each file, and wait half a minute for each where there
is no network.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
)
from transformers.integrations import deepspeed as integration

from ullage.cli.train.limits import require_causal
from ullage.cli.train.lora import ADAPTER, adapted, quantized
from ullage.cli.train.pictures import PICTURES, picture_config
from ullage.cli.train.process import one_line_of
from ullage.cli.train.settings import ModelArguments, TrainCommand
from ullage.core.errors import InputError, listed
from ullage.datasets.chats import MARKS
from ullage.datasets.text import byte_tokenizer
from ullage.models import RecurrentConfig
from ullage.models.cells import CELLS
from ullage.ranks.world import agreement, gather, rank_here, several_ranks
from ullage.training.saving.checkpoints import WEIGHT_FILES

if TYPE_CHECKING:
    from ullage.cli.train.summary import Voice

#: The word of ``--tokenizer`` for transformers' byte tokenizer.
BYTES = "bytes"
#: A cell and its sizes: ``gru``, ``gru-512``, ``gru-512x2`` (hidden size, layers).
_NAME = re.compile(r"(?P<cell>[a-z][a-z0-9_]*)(-(?P<hidden_size>\d+)(x(?P<layers>\d+))?)?")
_HIDDEN_SIZE, _LLAMA_POSITIONS = 256, 8192
#: Small files of a repository: configs, tokenizers, templates. Weights are safetensors, unless pickles are allowed.
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe")
_TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    "tekken.json",
)
#: How like a name has to be to one that is there for the two to be taken for the same.
_NEAR = 0.8
#: How many names of weights a line holds.
_NAMED = 4


@dataclass(frozen=True)
class Chosen:
    """What the names of a call mean.

    ``model``: the folder or config; None for a new model by name, and where a checkpoint says everything.
    ``added``: the ids of tokens that this call gives to the tokenizer.
    ``processor``: of a model that takes images.
    """

    model: Path | None
    tokenizer: Any
    added: Sequence[int] = ()
    processor: Any = None

    @property
    def kind(self) -> Any:
        """The Auto class of the model."""
        return AutoModelForCausalLM if self.processor is None else AutoModelForImageTextToText


# Names


def find_or_fetch(command: TrainCommand, argument: str, name: str, kind: str, files: Sequence[str]) -> Path:
    """The file or folder that a name means, fetched if it is a repository's. Collective: if one rank fails, all raise.

    Args:
        command: takes down the commit, by ``argument``, and holds the one that its run took before.
        argument: that the name was given for.
        name: as it was typed.
        kind: "model", "tokenizer" or "dataset".
        files: patterns of those that are needed of a repository.
    """
    several = several_ranks()
    path, commit = Path(name), None
    for is_turn in (rank_here(several) == 0, rank_here(several) != 0):  # the first rank says what is wrong, for all
        with agreement(f"finding the {kind} {name}", several):
            if is_turn and not path.exists():
                refuse_near(name, kind)
                path = _snapshot(name, kind, files, command.revisions.get(argument))
                commit = path.name
    if len(set(gather(commit, several))) > 1:
        raise InputError(f"the {kind} is not the same on all machines", where=name, found="other files, or revisions")
    if commit is not None:
        command.revisions[argument] = f"{name.partition('@')[0]}@{commit}"
    return path


def refuse_near(name: str, kind: str) -> None:
    """Raise ``InputError`` for a name that is nearly a new model's, or nearly that of a file here.

    ``NAME@main`` is one of the hub for certain.
    """
    if "@" in name:
        return
    meant = [_near_model(name)] if kind == "model" and "/" not in name else []
    meant += get_close_matches(name, [BYTES], cutoff=_NEAR) if kind == "tokenizer" else []
    folder = Path(name).parent
    with contextlib.suppress(OSError):
        here = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        meant += [str(folder / near) for near in get_close_matches(Path(name).name, here, n=1, cutoff=_NEAR)]
    meant = [each for each in meant if each is not None]
    if meant:
        raise InputError(
            f"there is no such {kind} here",
            where=name,
            hint=f"did you mean {' or '.join(meant)}?"
            + ("" if kind == "data file" else f" {name}@main is the one of the hub"),
        )


def _near_model(name: str) -> str | None:
    """The name of a new model that was meant, if one was: ``llama-64x2`` by ``lama-64x2`` and by ``llama-64x2x9``."""
    head, _, sizes = name.partition("-")
    match = re.match(r"\d+(x\d+)?", sizes)
    near = get_close_matches(head, [*CELLS, "llama", PICTURES], n=1, cutoff=0.75)  # of four letters, three
    if not near or (sizes and match is None):
        return None
    return f"{near[0]}-{match[0]}" if match is not None else near[0]


def name_with_revision(command: TrainCommand, argument: str, name: str) -> str:
    """A name as it is printed: with the revision of what came from the cache or the hub."""
    repository, _, commit = command.revisions.get(argument, "").partition("@")
    return f"{repository}, revision {commit[:12]}" if commit and repository == name.partition("@")[0] else name


def _snapshot(name: str, kind: str, files: Sequence[str], before: str | None) -> Path:
    """The folder of a repository in the cache, with what is new on the hub if that can be asked.

    ``before``: ``repository@commit`` of what the run took before, which it takes again.
    """
    repository, _, revision = name.partition("@")
    if not revision and before is not None and before.partition("@")[0] == repository:
        revision = before.partition("@")[2]
    settings: dict[str, Any] = {
        "repo_type": "dataset" if kind == "dataset" else "model",
        "revision": revision or None,
        "allow_patterns": list(files),
    }
    download = f"hf download {repository}" + (" --repo-type dataset" if kind == "dataset" else "")
    what, hint = f"there is no such {kind} here, and none from the hub", f"get it where there is a network: {download}"
    with one_line_of(what, where=name, hint=hint):
        # A commit is what it was: asked for where there is no network, the hub's library would try for half a minute.
        # Of all else the hub may have a newer one; where it cannot be asked, the library takes what the cache holds.
        with contextlib.suppress(OSError, ValueError):
            here = Path(snapshot_download(repository, local_files_only=True, **settings))
            if here.name == revision:
                return here
        return Path(snapshot_download(repository, **settings))


def _is_new(name: str) -> bool:
    """Whether ``name`` is that of a new model: a cell or llama, with sizes or without."""
    match = _NAME.fullmatch(name)
    # It gives way to a folder that holds a model, not to one that happens to have its name.
    is_folder = any((Path(name) / file).is_file() for file in ("config.json", *WEIGHT_FILES))
    return match is not None and match["cell"] in (*CELLS, "llama", PICTURES) and not is_folder


# The model's folder, and the tokenizer


def choose(
    command: TrainCommand,
    checkpoint: Path | None,
    say: Voice,
    processor_of: Callable[[Path | None], tuple[Any, str]] | None = None,
) -> Chosen:
    """Find the model and the tokenizer of a call, and say what they are. Collective where a name is not on the disk.

    A run that continues takes the revisions that it took before, which the command holds, and the tokenizer of its
    checkpoint unless the call names another. ``processor_of`` gives the processor of a folder, or a new one, and what
    is said of it, for data with images. Raises ``InputError`` for a name that means nothing, and for a model with
    weights that comes without a tokenizer where the call names none.
    """
    model, name, code = None, command.model.model, command.model.trust_remote_code
    # A checkpoint has the config and the weights, and from most trainers the tokenizer.
    whole = checkpoint is not None and (_has_tokenizer(checkpoint) or command.data.tokenizer is not None)
    whole = whole and not command.adapter.use_peft  # of an adapter the checkpoint has no more than that
    if not whole and not _is_new(name):
        weights = ["model*.safetensors"] + ["pytorch_model*.bin"] * command.model.allow_pickle_weights
        model = find_or_fetch(command, "model", name, "model", [*_TEXTS, *weights, *["*.py"] * code])
        say(f"model: {name_with_revision(command, 'model', name)}")
        if not (model / ADAPTER).is_file():
            _config_from(model, command.model)  # before the tokenizer's reader speaks of it
    if processor_of is not None:
        processor, note = processor_of(checkpoint or model)
        say(f"processor: {note}")
        return Chosen(model, processor.tokenizer, processor=processor)
    tokenizer, note = _tokenizer(command, model, checkpoint)
    say(f"tokenizer: {note}")
    return Chosen(model, tokenizer)


def _tokenizer(command: TrainCommand, model: Path | None, checkpoint: Path | None) -> tuple[Any, str]:
    """The tokenizer, and what is said of it."""
    asked, code = command.data.tokenizer, command.model.trust_remote_code
    if checkpoint is not None and "tokenizer" not in command.given and _has_tokenizer(checkpoint):
        return _read_tokenizer(checkpoint, code), "that of the checkpoint"
    if asked == BYTES and not Path(asked).exists():
        return byte_tokenizer(), "bytes"
    if asked is not None:
        folder = find_or_fetch(command, "tokenizer", asked, "tokenizer", [*_TEXTS, *["*.py"] * code])
        return _read_tokenizer(folder, code), name_with_revision(command, "tokenizer", asked)
    if model is not None and _has_tokenizer(model):
        return _read_tokenizer(model, code), "the model's own"
    if model is None or not _has_weights(model):
        return byte_tokenizer(), "bytes, for a new model (--tokenizer NAME takes another)"
    raise InputError(
        "this model comes without a tokenizer",
        where=str(model),
        expected=" or ".join(_TOKENIZER_FILES[:2]),
        found="none",
        hint="name the one that it was trained with, --tokenizer FOLDER or NAME, or train it on bytes, "
        f"--tokenizer {BYTES}",
    )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def _read_tokenizer(folder: Path, code: bool) -> Any:
    with one_line_of("the tokenizer cannot be read", where=str(folder)):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=code)


# The model


def load_model(command: TrainCommand, chosen: Chosen, checkpoint: Path | None, say: Voice) -> Any:
    """A new model, or that of ``chosen`` with its weights; on resuming, the checkpoint's config decides.

    ``say`` takes a line about weights that were made new or are not used. Raises ``InputError`` for a folder that
    holds no model or lacks weights of it, and for a model that attends in both directions.
    """
    arguments, found = command.model, chosen.model
    if command.adapter.use_peft:
        base = _base(command, chosen, say)
        assert found is not None
        model = adapted(command, base, found, checkpoint, chosen.added, say)
    elif checkpoint is not None:
        model = _new(_config_from(checkpoint, arguments), arguments, chosen.kind)
        with contextlib.suppress(OSError, ValueError):  # it may have ends of its own, and how it samples
            model.generation_config = GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    elif found is not None and _has_weights(found):
        _refuse_dropout(arguments)
        model = load_pretrained(found, arguments, say, chosen.kind)
        _hold(model, chosen.tokenizer, say)
    else:
        config = _config(arguments, chosen)
        model = _drawn(lambda: _new(config, arguments, chosen.kind))
    if not command.adapter.use_peft and chosen.processor is None:  # adapters have looked already; towers look both ways
        require_causal(model)
    return model


def _base(command: TrainCommand, chosen: Chosen, say: Callable[[str], Any]) -> Any:
    """The model that an adapter is trained of."""
    found = chosen.model
    is_adapter = found is not None and (found / ADAPTER).is_file()
    if found is None or is_adapter or not _has_weights(found):
        raise InputError(
            "an adapter belongs to a model that is there",
            where=f"--model {command.model.model}",
            expected="a folder or a name of the hub with its weights",
            found="a new model" if found is None else "an adapter" if is_adapter else "a config",
            hint="merge the adapter into its model first"
            if found is not None and (found / ADAPTER).is_file()
            else None,
        )
    _refuse_dropout(command.model)
    model = load_pretrained(found, command.model, say, chosen.kind, **quantized(command))
    _hold(model, chosen.tokenizer, say)
    if chosen.processor is None:
        require_causal(model)
    return model


def load_pretrained(
    folder: Path, arguments: ModelArguments, say: Callable[[str], Any], kind: Any = AutoModelForCausalLM, **options: Any
) -> Any:
    """The causal language model in ``folder``, with its weights; ``kind`` is its Auto class.

    A head that was not saved, because the folder is another kind of model's, starts new, and a line says so; so do
    other missing weights where ``--allow_missing_weights`` asks for it. Weights that nobody reads are named too.
    ``options``: of ``from_pretrained``. Raises ``InputError`` for missing weights, for those of another size, and for
    pickled ones that were not asked for.
    """
    adapter = (folder / ADAPTER).is_file()
    if not adapter:
        _require_decoder(_config_from(folder, arguments), str(folder))
    pickled = not arguments.allow_pickle_weights and any(folder.glob("pytorch_model*.bin"))
    hint = "--allow_pickle_weights takes pytorch_model.bin; torch then reads tensors only" if pickled else None
    with one_line_of("the model cannot be loaded", where=str(folder), hint=hint):
        loaded: Any = kind.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=arguments.trust_remote_code,
            use_safetensors=None if arguments.allow_pickle_weights else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, all of them
            **options,
        )
    model, info = loaded
    if not adapter:
        _judge(folder, model, info, allowed=arguments.allow_missing_weights, say=say)
    return model


def _hold(model: Any, tokenizer: Any, say: Callable[[str], Any]) -> None:
    """Make room for tokens that the tokenizer was given: those that begin and end a turn. Collective under ZeRO 3.

    Ids that a vocabulary of other words leaves out are refused later, with the sample that has them.
    """
    rows, ids = model.get_input_embeddings().weight, [tokenizer.eos_token_id]
    ids += [tokenizer.convert_tokens_to_ids(mark) for marks in MARKS.values() for mark in marks]
    number = getattr(rows, "ds_shape", rows.shape)[0]
    known = {*tokenizer.get_added_vocab().values()}
    # Where a run of an adapter continues, its tokenizer has them and the model on the disk has not.
    if any(each in known and number <= each < len(tokenizer) for each in ids):
        model.resize_token_embeddings(len(tokenizer))
        say(f"{len(tokenizer) - number} tokens are new to the model, which start from the mean of the others")


def _judge(folder: Path, model: Any, info: dict[str, Any], *, allowed: bool, say: Callable[[str], Any]) -> None:
    """Raise for weights that the folder ought to hold; say what started new and what is not used."""
    missing = set(info["missing_keys"])
    head: set[str] = set()
    # A backbone, or a model for another task, has no head to be missed.
    if type(model).__name__ not in (getattr(model.config, "architectures", None) or [type(model).__name__]):
        head = {name for name in missing if not name.startswith(f"{model.base_model_prefix}.")}
    sizes = {f"{name} {list(there)} instead of {list(here)}" for name, there, here in info["mismatched_keys"]}
    kinds = (("without", missing - head), ("of another size", sizes))
    lost = "; ".join(f"{word} {_some(names)}" for word, names in kinds if names)
    if lost and not allowed:
        raise InputError(
            "the model's files lack weights",
            where=str(folder),
            expected=f"all {len(model.state_dict())} tensors of {type(model).__name__}",
            found=lost,
            hint="get the whole model again, or let these start new with --allow_missing_weights",
        )
    if head or lost:
        new = missing | {name for name, *_ in info["mismatched_keys"]}
        say(f"{folder} lacks weights, which start new: {_some(new)}")
    if info["unexpected_keys"]:
        say(f"{folder} holds weights that {type(model).__name__} does not use: {_some(info['unexpected_keys'])}")


def _some(names: Any) -> str:
    return listed(sorted(names), _NAMED)


def _require_decoder(config: Any, where: str) -> None:
    """Raise ``InputError`` for the config of an encoder with a decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            "this model reads one text and writes another",
            where=where,
            expected="a causal language model",
            found=f"an encoder with a decoder, of type {config.model_type}",
            hint="train it in Python, with ullage.training.Seq2SeqTrainer",
        )


def _new(config: Any, arguments: ModelArguments, kind: Any) -> Any:
    _require_decoder(config, arguments.model)
    what = "a causal language model" if kind is AutoModelForCausalLM else "a model that reads images and writes text"
    with one_line_of(f"this config does not describe {what}", where=arguments.model):
        return kind.from_config(config, trust_remote_code=arguments.trust_remote_code)


def _config(arguments: ModelArguments, chosen: Chosen) -> Any:
    if chosen.model is not None:
        _refuse_dropout(arguments)
        return _config_from(chosen.model, arguments)
    match = _NAME.fullmatch(arguments.model)
    assert match is not None
    recurrent = match["cell"] in CELLS
    hidden_size, layers = int(match["hidden_size"] or _HIDDEN_SIZE), int(match["layers"] or (1 if recurrent else 4))
    kinds = ("pad", "bos", "eos")
    ids: dict[str, Any] = {f"{kind}_token_id": getattr(chosen.tokenizer, f"{kind}_token_id", None) for kind in kinds}
    ids["vocab_size"] = len(chosen.tokenizer)
    if match["cell"] == PICTURES:
        return picture_config(hidden_size, layers, ids, chosen.processor)
    if recurrent:
        sizes = {"hidden_size": hidden_size, "num_hidden_layers": layers, "dropout": arguments.dropout or 0.0}
        return RecurrentConfig(cell=match["cell"], **sizes, **ids)
    _refuse_dropout(arguments)
    return _llama(hidden_size, layers, ids)


def _llama(hidden_size: int, num_hidden_layers: int, ids: dict[str, Any]) -> LlamaConfig:
    """Config of a llama in usual proportions: heads of 64, half as many for keys and values, a feed-forward of 8/3."""
    if hidden_size % 2 or hidden_size < 1 or num_hidden_layers < 1:
        raise InputError(
            "a llama's hidden size must be even, and it needs a layer",
            where="--model",
            found=f"hidden size {hidden_size}, {num_hidden_layers} layers",
        )
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


def _refuse_dropout(arguments: ModelArguments) -> None:
    if arguments.dropout is not None:
        raise InputError("--dropout is for a new recurrent model", where=f"--model {arguments.model}")


def _config_from(path: Path, arguments: ModelArguments) -> Any:
    code = arguments.trust_remote_code
    with one_line_of("the model config cannot be read", where=str(path)):
        # The code of a config lies beside it, which transformers finds by the folder alone.
        place = path.parent if code and path.is_file() else path
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=code)


def _drawn(make: Callable[[], Any]) -> Any:
    """The model that ``make`` makes, its weights from one seed the same under ZeRO 3 as without. Collective under it.

    There transformers takes each layer apart as soon as it is made, and draws the weights afterwards, from another
    place in the stream of random numbers. So the first rank also builds the model as a whole, in the memory of its
    host, and its weights take the place of those. Source: ``PreTrainedModel._from_config`` and
    ``initialize_weights_zero3`` of transformers 5.23.
    """
    if not integration.is_deepspeed_zero3_enabled():
        return make()
    import deepspeed

    several, whole = several_ranks(), None
    with agreement("drawing the weights of a new model", several):
        if rank_here(several) == 0:
            # What the other ranks draw next, this one draws too.
            with torch.random.fork_rng(devices=[]), _without_zero3():
                whole = dict(make().named_parameters(remove_duplicate=False))
    model = make()
    for name, parameter in model.named_parameters():
        # Whole on every rank within the block; what rank 0 leaves in it is what all go on with.
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if whole is not None:
                parameter.copy_(whole[name])
    return model


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """Let transformers build as if no configuration of DeepSpeed were there."""
    held: Any = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration.set_hf_deepspeed_config(held())
