"""The model and the tokenizer that a call names: where they are, which revision, and a line about each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ullage.cli.train.model import SIZES, is_preset, unknown_model
from ullage.cli.train.names import (
    TOKENIZER_FILES,
    Located,
    NotFoundError,
    is_on_disk,
    is_repository,
    locate,
    model_files,
    pinned_commit,
    tokenizer_files,
)
from ullage.cli.train.record import read_record
from ullage.cli.train.settings import TrainCommand
from ullage.cli.train.weights import read_config
from ullage.datasets.text import byte_tokenizer
from ullage.errors import InputError, first_line
from ullage.training.saving import WEIGHT_FILES

#: The word of ``--tokenizer`` for transformers' byte tokenizer.
BYTES = "bytes"


@dataclass(frozen=True)
class Chosen:
    """What the names of a call mean.

    Attributes:
        model: where the model's folder or config is; None for a preset, and where a checkpoint says everything.
        tokenizer: the tokenizer.
        notes: lines to be printed.
        revisions: by argument, ``repository@commit`` of what came from the cache or the hub.
    """

    model: Located | None
    tokenizer: Any
    notes: tuple[str, ...]
    revisions: dict[str, str]


def choose(command: TrainCommand, checkpoint: Path | None) -> Chosen:
    """Find the model and the tokenizer of a call; collective where a name is not on the disk.

    A run that continues takes the revisions that it took before, which the command holds, and the tokenizer of its
    checkpoint unless the call names another. Raises ``InputError`` for a name that means nothing, and for a model with
    weights that comes without a tokenizer where the call names none.
    """
    before = command.revisions
    model = None
    # A checkpoint has the config and the weights, and from most trainers the tokenizer.
    whole = checkpoint is not None and (_has_tokenizer(checkpoint) or command.data.tokenizer is not None)
    if checkpoint is None or not whole or not _says_same_model(command, checkpoint):
        model = _model(command, before.get("model"))
    tokenizer, at, note = _tokenizer(command, model, checkpoint, before)
    pinned = {name: found.pinned for name, found in (("model", model), ("tokenizer", at)) if found is not None}
    revisions = {name: pin for name, pin in pinned.items() if pin is not None}
    notes = [f"tokenizer: {note}"] if model is None else [f"model: {model}", f"tokenizer: {note}"]
    return Chosen(model, tokenizer, tuple(notes), {**before, **revisions})


def revisions_before(command: TrainCommand, checkpoint: Path | None) -> dict[str, str]:
    """By argument, what the run in the output folder, or of the checkpoint, took from the cache or the hub."""
    if checkpoint is None and command.output.overwrite_output_dir:
        return {}
    folder = command.folder if checkpoint is None else checkpoint.parent
    return (read_record(folder) or {}).get("revisions") or {}


def _says_same_model(command: TrainCommand, checkpoint: Path) -> bool:
    """Whether the run of the checkpoint was started with the model arguments of this call, or the call has none."""
    settings = (read_record(checkpoint.parent) or {}).get("settings", {})
    names = ("model", *SIZES)
    return command.given.isdisjoint(names) or (
        "model" in settings and all(settings.get(name) == getattr(command.model, name) for name in names)
    )


def _model(command: TrainCommand, before: str | None) -> Located | None:
    name = command.model.model
    path = Path(name)
    # A preset gives way to a folder that holds a model, not to one that happens to have its name.
    if is_preset(name) and not any((path / file).is_file() for file in ("config.json", *WEIGHT_FILES)):
        return None
    if not is_on_disk(name) and not is_repository(name):
        raise unknown_model(name)
    wanted = partial(model_files, pickle=command.model.allow_pickle_weights, code=command.model.trust_remote_code)
    try:
        found = locate(name, "model", wanted, revision=pinned_commit(name, before))
    except NotFoundError as error:
        if "/" in name:
            raise
        # A word without a slash may as well be a preset with a typing error.
        raise unknown_model(name, error) from error
    # Before its tokenizer is read, which reads the config too and would speak of a tokenizer.
    config = found.path / "config.json" if found.path.is_dir() else found.path
    if config.is_file():
        read_config(config)
    return found


def _tokenizer(
    command: TrainCommand, model: Located | None, checkpoint: Path | None, before: dict[str, str]
) -> tuple[Any, Located | None, str]:
    """The tokenizer, where it came from if that has a revision, and what is said of it."""
    asked, code = command.data.tokenizer, command.model.trust_remote_code
    wanted = partial(tokenizer_files, code=code)
    if checkpoint is not None and "tokenizer" not in command.given and _has_tokenizer(checkpoint):
        return _read(checkpoint, code), None, "that of the checkpoint"
    if asked == BYTES and not is_on_disk(asked):
        return byte_tokenizer(), None, "bytes"
    if asked is not None:
        found = locate(asked, "tokenizer", wanted, revision=pinned_commit(asked, before.get("tokenizer")))
        return _read(found.path, code), found, str(found)
    if model is None or not any((model.path / name).is_file() for name in WEIGHT_FILES):
        if model is not None and model.path.is_dir() and _has_tokenizer(model.path):
            return _read(model.path, code), None, "the model's own"
        return byte_tokenizer(), None, "bytes, for a new model (--tokenizer NAME takes another)"
    if _has_tokenizer(model.path):
        return _read(model.path, code), None, "the model's own"
    if model.revision is not None:  # the cache may hold the model alone
        found = locate(f"{model.name}@{model.revision}", "tokenizer", wanted)
        return _read(found.path, code), None, "the model's own"
    raise InputError(
        "this model comes without a tokenizer",
        where=str(model.path),
        expected=" or ".join(TOKENIZER_FILES[:2]),
        found="none",
        hint="name the one that it was trained with, --tokenizer FOLDER or NAME, or train it on bytes, "
        f"--tokenizer {BYTES}",
    )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _read(folder: Path, code: bool) -> Any:
    if not folder.is_dir():
        raise InputError("the tokenizer cannot be read", where=str(folder), expected="a folder", found="a file")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=code)
    except Exception as error:  # a torn file raises whatever its reader raises
        raise InputError("this folder holds no tokenizer", where=str(folder), found=first_line(error)) from error
