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
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ullage.checkpoint.formats.dcp import LAYOUT
from ullage.core.errors import CheckpointError, InputError, listed
from ullage.engines.fsdp import chunks
from ullage.engines.fsdp.optimizer import (
    DistributedOptimizer,
    OptimizerLoader,
    TrainerOptimizer,
    optimizer_state,
    read_mapped,
)
from ullage.engines.fsdp.parallel import parallel_of
from ullage.engines.fsdp.weights import WeightFolder, names_in, tied_names
from ullage.ranks import Axis, together
from ullage.ranks.world import rank_here, require_same_folder
from ullage.training.saving.checkpoints import require_same_model
from ullage.training.saving.damage import examine
from ullage.training.saving.staging import not_written, old_of, recover, write_into, write_whole

STATES = "ullage_states.json"
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
        try:
            text = json.dumps(told)
        except (TypeError, ValueError) as error:
            raise InputError("a state is more than plain numbers", where=", ".join(states), found=error) from error
    state = {"model": {name: chunks.writable(value) for name, value in _weights(model).items()}}
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
            (place / STATES).write_text(text, encoding="utf-8")

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
    """Fill model and optimizer from a folder that :func:`save` or ``ullage convert --to dcp`` wrote, on any layout.

    A folder ``checkpoint-N`` of a plain Trainer, without DeepSpeed, is taken too, with ``optimizer.pt`` and
    ``scheduler.pt``: of such a folder ``states`` may name the ``scheduler``.

    Args:
        folder: the checkpoint, the same on every rank.
        model: from ``parallelize``; filled in place.
        optimizer: of the model; None to load the model alone.
        hyperparameters: whether the optimizer's settings (lr, betas, ...) become those of the folder too.
        allow_changed: take files that were changed since they were written.
        states: objects with ``load_state_dict``, by the names they were saved under.

    Collective; waits for the device. Raises ``CheckpointError`` on every rank, before anything is changed, for a folder
    that is no checkpoint, is damaged or of another model, and for an optimizer of other parameters or another kind.
    """
    parallel_of(model)
    folder = require_same_folder(Path(folder))
    with together(Axis.world(), "reading a checkpoint"):
        if rank_here() == 0:
            _put_back(folder)
    _require_undamaged(folder, allow_changed)
    if _is_trainers(folder):
        _load_trainers(folder, model, optimizer, hyperparameters, states)
        return
    with together(Axis.world(), "reading a checkpoint"):
        # All checks, on every rank together, before the model is touched. A new optimizer gets empty state here, since
        # torch fills only tensors that exist.
        names = _metadata(folder)
        if (folder / "config.json").is_file():
            require_same_model(model.config, folder)
        told = _read_states(folder, states)
        weights = _weights(model, names)
        chunks.require_names(folder, {f"model.{name}": value for name, value in weights.items()}, names)
        _require_nothing_is_left(folder, model, names)
        loader = None
        if optimizer is not None:
            loader = OptimizerLoader(model, optimizer, DistributedOptimizer(folder, names))
            loader.check()
    settings = loader.settings() if loader is not None and hyperparameters else []
    # The read fills tensors in place. Where torch cannot describe a layout, ``writable`` has made a copy, which is
    # then moved over.
    targets = {name: chunks.writable(value) for name, value in weights.items()}
    chunks.load_chunks({"model": targets}, folder)
    chunks.copy_back(weights, targets)
    if loader is not None:
        loader.load(settings)
    for name, state in states.items():
        state.load_state_dict(told[name])


def _is_trainers(folder: Path) -> bool:
    """Whether a folder holds a Trainer's weights, and neither torch's format nor DeepSpeed's."""
    if (folder / ".metadata").is_file() or (folder / "latest").is_file():
        return False
    return any(folder.glob("*model*.safetensors"))


def _load_trainers(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer | None, hyperparameters: bool, states: dict[str, Any]
) -> None:
    """Fill them from a plain Trainer's folder, of which each rank reads the elements that it holds. Collective.

    The way back is ``ullage convert --to trainer``.
    """
    with together(Axis.world(), "reading a Trainer's checkpoint"):
        require_same_model(model.config, folder)
        unknown = [name for name in states if name != "scheduler"]
        if unknown:
            raise CheckpointError(
                f"a Trainer's checkpoint holds no state of {unknown[0]!r}", where=str(folder), found=["scheduler"]
            )
        there, weights = WeightFolder(folder), _weights(model)
        if there.is_adapter:
            trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            weights = {name: value for name, value in weights.items() if name in trained}
        names = names_in(model, there, weights, tied_names(model))
        schedule = read_mapped(folder / "scheduler.pt") if states else None
        loader, settings = None, []
        if optimizer is not None:
            loader = OptimizerLoader(model, optimizer, TrainerOptimizer(folder / "optimizer.pt", model))
            settings = loader.settings() if hyperparameters else []
            loader.check()
    for name, value in weights.items():
        chunks.fill(value, lambda indices, name=names[name]: there.part(name, indices))
    if loader is not None:
        loader.load(settings)
    for state in states.values():
        state.load_state_dict(schedule)


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


def _weights(model: Any, found: Any = None) -> dict[str, Tensor]:
    """The model's tensors by name. Of tied names the first, or the first that is ``found`` in a folder."""
    # A tied weight is written once, under one name; the folder of another program may have chosen another name.
    weights = cast(dict[str, Tensor], get_model_state_dict(model))
    for names in tied_names(model):
        names = [name for name in names if name in weights]
        kept = next((name for name in names if found is not None and f"model.{name}" in found), names[0])
        for name in names:
            if name != kept:
                del weights[name]
    return weights


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


def _require_nothing_is_left(folder: Path, model: Any, names: dict[str, Any]) -> None:
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    left = [n for n in names if n.startswith("model.") and n.removeprefix("model.") not in known]
    if left:
        raise CheckpointError(
            "the checkpoint is of a larger model",
            where=str(folder),
            found=listed(left, 1),
            hint="continue with the model that it was made from",
        )


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


def _require_undamaged(folder: Path, allow_changed: bool) -> None:
    """Compare the folder with its manifest, if it has one. Collective. Raises ``CheckpointError`` on every rank."""
    finding = examine(folder, allow_changed=allow_changed)
    if finding.damage:
        raise finding.error("if the file was changed on purpose: load(..., allow_changed=True)")
    if rank_here() == 0 and folder.is_dir():
        for note in finding.notes:
            _LOG.warning(note)
