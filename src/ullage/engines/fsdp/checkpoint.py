"""Saving on one layout, loading on another: model and optimizer through ``torch.distributed.checkpoint``.

Names are those that ``ullage convert --to dcp`` writes, so a DeepSpeed run goes on under FSDP2:

    model.<name>                         weights and buffers; of tied names one is enough
    optim.state.<name>.<key>             exp_avg, exp_avg_sq, step, ...
    optim.param_groups.<i>.<setting>     hyperparameters, and the names of the parameters

Beside it lie the model's ``config.json`` and, in ``ullage_states.json``, the states of whatever else was given (a
scheduler, an iterator), which must be plain numbers. A folder is written beside its place and renamed when every rank
has written its part, with a manifest of its files. What is loaded is compared with the manifest and with the folder's
metadata first, so that nothing is half loaded.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ullage.checkpoint import convert, read
from ullage.checkpoint.formats.dcp import LAYOUT, states_text
from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER, STATES
from ullage.checkpoint.formats.torch_optimizer import orders_of
from ullage.checkpoint.formats.trainer_folder import read_trainer
from ullage.core.errors import CheckpointError, InputError
from ullage.engines.fsdp import chunks
from ullage.engines.fsdp.optimizer import OptimizerLoader, optimizer_state
from ullage.engines.fsdp.parallel import parallel_of
from ullage.engines.fsdp.weights import saved_names, without_adapter
from ullage.ranks import Axis, together
from ullage.ranks.world import gather, rank_here, require_same_folder
from ullage.training.saving.checkpoints import require_same_model
from ullage.training.saving.damage import examine
from ullage.training.saving.staging import not_written, old_of, recover, write_into, write_whole

ADAPTER = "adapter_model.safetensors"
_LOG = logging.getLogger(__name__)


def save(folder: str | Path, model: Any, optimizer: torch.optim.Optimizer | None = None, **states: Any) -> None:
    """Write ``folder``, whole or not at all; a folder of that name is replaced.

    ``states``: by name, objects with a ``state_dict`` of plain numbers, the same on every rank, or such dicts.
    Collective; waits for the device. Raises on every rank if one of them could not write, or names another folder.
    """
    parallel_of(model)
    # Encoded before anything is written: where it fails, all ranks raise and the folder stays as it was.
    with together(Axis.world(), "collecting a checkpoint"):
        told = {name: state.state_dict() if hasattr(state, "state_dict") else state for name, state in states.items()}
        text = states_text(told)
        if text is None:
            raise InputError(
                "a state is more than plain numbers by names",
                where=next(name for name, state in told.items() if states_text({name: state}) is None),
                expected="numbers, texts and lists, in dicts whose keys are texts",
                hint="write it to a file of its own",
            )
    state = {"model": {name: chunks.writable(value) for name, value in _weights(model, saved_names(model, ())).items()}}
    if optimizer is not None:
        state["optim"] = optimizer_state(model, optimizer)

    parallel = parallel_of(model)
    sizes = {axis.name: axis.size for axis in (parallel.topology.dp, parallel.topology.cp, parallel.topology.tp)}
    sizes["dp_replicate"] = parallel.dp_replicate

    def write(place: Path) -> None:
        chunks.save_chunks(state, place)
        # Every rank writes its own chunks; what is the same everywhere is written by one.
        if rank_here() == 0:
            model.config.save_pretrained(place)
            for adapter in getattr(model, "peft_config", {}).values():
                adapter.save_pretrained(place)
            (place / LAYOUT).write_text(json.dumps(sizes), encoding="utf-8")
            (place / STATES).write_bytes(text)

    write_whole(folder, write, _require_written)


def load(
    folder: str | Path,
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    hyperparameters: bool = True,
    allow_changed: bool = False,
    **states: Any,
) -> None:
    """Fill model and optimizer from a folder that :func:`save` wrote on any layout, or from any other checkpoint.

    A checkpoint of another format (DeepSpeed's, a plain Trainer's ``checkpoint-N``, safetensors) is converted first,
    into a folder ``_NAME.dcp-...`` beside it, which is removed again.

    Args:
        folder: the checkpoint, the same on every rank.
        model: from ``parallelize``; filled in place.
        optimizer: of the model; None to load the model alone.
        hyperparameters: whether the optimizer's settings (lr, betas, ...) become those of the folder too.
        allow_changed: take files that were changed since they were written.
        states: objects with ``load_state_dict``, by the names they were saved under; of another format, ``scheduler``.

    Collective; waits for the device. Raises ``CheckpointError`` on every rank, before anything is changed, for a folder
    that is no checkpoint, is damaged or of another model, and for an optimizer of other parameters or another kind.
    """
    parallel_of(model)
    folder = require_same_folder(Path(folder))
    with together(Axis.world(), "reading a checkpoint"):
        if rank_here() == 0:
            _put_back(folder)
        if (folder / "config.json").is_file():
            require_same_model(model.config, folder)
    finding = examine(folder, allow_changed=allow_changed)
    if finding.damage:
        raise finding.error("if the file was changed on purpose: load(..., allow_changed=True)")
    if rank_here() == 0 and folder.is_dir():
        for note in finding.notes:
            _LOG.warning(note)
    with _in_torchs_format(folder, model, optimizer is not None) as place:
        _load(place, folder, model, optimizer, hyperparameters, states)


def _load(place: Path, folder: Path, model: Any, optimizer: Any, hyperparameters: bool, states: dict[str, Any]) -> None:
    """Load from ``place``, in torch's format, what ``folder`` holds. Collective."""
    with together(Axis.world(), "reading a checkpoint"):
        # All checks, on every rank together, before the model is touched.
        items = _metadata(place)
        told = _read_states(place, states)
        saved = saved_names(model, {name.removeprefix("model.") for name in items})
        weights = _weights(model, saved)
        if not place.is_relative_to(folder) and (folder / ADAPTER).is_file():
            trained = {saved[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
            weights = {name: value for name, value in weights.items() if name in trained}
        chunks.require_names(folder, {f"model.{name}": value for name, value in weights.items()}, items)
        known = {f"model.{name}" for name in (*saved, *saved.values())}
        chunks.require_known(folder, (name for name in items if name.startswith("model.")), known)
        loader = None
        if optimizer is not None:
            loader = OptimizerLoader(model, optimizer, place, items)
            loader.check()
    settings = loader.settings() if loader is not None and hyperparameters else []
    # The read fills tensors in place. Where torch cannot describe a layout, ``writable`` has made a copy, which is
    # then moved over.
    targets = {name: chunks.writable(value) for name, value in weights.items()}
    chunks.load_chunks({"model": targets}, place)
    chunks.copy_back(weights, targets)
    if loader is not None:
        loader.load(settings)
    for name, state in states.items():
        state.load_state_dict(told[name])


@contextmanager
def _in_torchs_format(folder: Path, model: Any, optimizer: bool) -> Iterator[Path]:
    """Within it the checkpoint ``folder`` lies in torch's format: itself, or converted beside it. Collective."""
    for own in (folder / MODEL_AND_OPTIMIZER, folder):
        if (own / ".metadata").is_file():
            yield own
            return
    # Another job may be loading it too: each has a folder of its own.
    converted = folder.absolute().with_name(f"_{folder.name}.dcp-{gather(uuid.uuid4().hex[:8])[0]}")
    try:
        with together(Axis.world(), "converting a checkpoint for FSDP2"):
            if rank_here() == 0:
                inventory = read(folder)
                if inventory.format == "trainer":  # whose optimizer's state is by number, in an order of the model's
                    inventory = read_trainer(inventory.folder, lambda: _orders(model, (folder / ADAPTER).is_file()))
                convert(inventory, converted, format="dcp", optimizer=optimizer)
        yield converted
    finally:
        if rank_here() == 0:
            shutil.rmtree(converted, ignore_errors=True)


def _orders(model: Any, is_adapter: bool) -> list[list[list[str]]]:
    """Orders in which a plain Trainer's optimizer may have got the model's parameters, by their names in its files."""
    orders = orders_of(model)
    if not is_adapter:
        return orders
    return [[[without_adapter(model, name) for name in names] for names in order] for order in orders]


def gather_weights(model: Any) -> dict[str, Any]:
    """All weights of a sharded model by name, on rank 0; the others take part in gathering them and keep none."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_pretrained(model: Any, folder: str | Path, *others: Any) -> None:
    """Write the whole model so that ``from_pretrained`` reads it, and ``others`` (a tokenizer) beside it.

    Collective; rank 0 gathers all weights in its memory. Raises on every rank if they could not be written.
    """
    parallel_of(model)
    whole = gather_weights(model)

    def write(staging: Path) -> None:
        if rank_here() == 0:
            model.save_pretrained(staging, state_dict=whole)
            for other in others:
                other.save_pretrained(staging)

    write_into(folder, write)


def _weights(model: Any, saved: dict[str, str]) -> dict[str, Tensor]:
    """The model's tensors by the names that they are saved under, tied ones once."""
    weights = cast(dict[str, Tensor], get_model_state_dict(model))
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        found.setdefault(saved.get(name, name), value)
    return found


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = FileSystemReader(folder).read_metadata()
    # ``.metadata`` is a pickle, and these are what a damaged or foreign one raises.
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise CheckpointError(
            "this folder holds no distributed checkpoint",
            where=str(folder),
            expected=".metadata and *.distcp files",
            found=type(error).__name__ if folder.is_dir() else "no such folder",
            hint=next(
                (f"take {path.parent}, which does" for path in folder.glob("*/.metadata")),
                "ullage convert --to dcp makes one of a DeepSpeed checkpoint",
            ),
        ) from error
    assert isinstance(metadata, Metadata)
    return metadata.state_dict_metadata


def _read_states(folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    path = folder / STATES
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = [name for name in states if name not in told]
    if missing:
        raise CheckpointError(f"the checkpoint holds no state of {missing[0]!r}", where=str(path), found=list(told))
    return told


def _require_written(place: Path) -> None:
    """Raise ``CheckpointError`` unless the metadata and every file that it names are there."""
    try:
        metadata = FileSystemReader(place).read_metadata()
        named = sorted({info.relative_path for info in (metadata.storage_data or {}).values()})
    except OSError:
        named = [".metadata"]
    missing = [name for name in named if not (place / name).is_file()]
    if missing:
        raise not_written(place, missing)


def _put_back(folder: Path) -> None:
    """Put back a folder that a killed save had moved aside. Raises ``CheckpointError`` that names it if it cannot."""
    try:
        recover(folder)
    except OSError as error:
        raise CheckpointError(
            "a save was interrupted, and the checkpoint cannot be put back",
            where=str(folder),
            found=f"it in {old_of(folder)}",
            hint=f"rename that folder: {error.strerror}",
        ) from error
