"""Saving on one layout, loading on another: model and optimizer through ``torch.distributed.checkpoint``.

Names are those that ``ullage convert --to dcp`` writes, so a DeepSpeed run goes on under FSDP2:

    model.<name>                         weights and buffers; of tied names one is enough
    optim.state.<name>.<key>             exp_avg, exp_avg_sq, step, ...
    optim.param_groups.<i>.<setting>     hyperparameters, and the names of the parameters

Beside it lie the model's ``config.json`` and, in ``ullage_states.json``, the states of whatever else was given (a
scheduler, an iterator), which must be plain numbers. A folder is written beside its place and renamed when every rank
has written its part. What is loaded is compared with the folder's metadata first, so that nothing is half loaded.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ullage.engines.fsdp.model import parallel_of
from ullage.engines.fsdp.optimizer import check_optimizer, make_state, names_of
from ullage.errors import CheckpointError, InputError
from ullage.training.saving import agreement, check_same_model, write_whole

STATES = "ullage_states.json"
#: Settings of a group that say how an optimizer computes on this machine, not what.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")


def save(folder: str | Path, model: Any, optimizer: torch.optim.Optimizer | None = None, **states: Any) -> None:
    """Writes ``folder``, whole or not at all; a folder of that name is replaced.

    ``states``: by name, objects with a ``state_dict`` of plain numbers, the same on every rank, or such dicts.
    Collective; waits for the device. Raises on every rank if one of them could not write.
    """
    parallel_of(model)
    folder = Path(folder)
    with agreement(_several(), "collecting a checkpoint"):
        told = {name: state.state_dict() if hasattr(state, "state_dict") else state for name, state in states.items()}
        try:
            text = json.dumps(told)
        except (TypeError, ValueError) as error:
            raise InputError("a state is more than plain numbers", where=", ".join(states), found=error) from error
    state = {"model": {name: _writable(value) for name, value in _weights(model).items()}}
    if optimizer is not None:
        state["optim"] = _optimizer_state(model, optimizer)

    def write(staging: Path) -> None:
        place = staging / folder.name
        with _quietly("written", folder):
            write_state(state, checkpoint_id=place)
        if _rank() == 0:
            model.config.save_pretrained(place)
            (place / STATES).write_text(text, encoding="utf-8")

    _write(folder.parent, write)


def load(
    folder: str | Path,
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    hyperparameters: bool = True,
    **states: Any,
) -> None:
    """Fills model and optimizer from a folder that :func:`save` or ``ullage convert --to dcp`` wrote, on any layout.

    ``hyperparameters``: whether the optimizer's settings (lr, betas, ...) become those of the folder too. ``states``:
    objects with ``load_state_dict``, by the names they were saved under. Collective; waits for the device. Raises
    ``CheckpointError`` on every rank, before anything is changed, for a folder that is none or of another model, and
    for an optimizer of other parameters or another kind.
    """
    parallel_of(model)
    folder = Path(folder)
    with agreement(_several(), "reading a checkpoint"):
        names = _metadata(folder)
        if (folder / "config.json").is_file():
            check_same_model(model.config, folder)
        told = _read_states(folder, states)
        weights = _weights(model, names)
        _check_names(folder, {f"model.{name}": value for name, value in weights.items()}, names)
        _check_nothing_is_left(folder, model, names)
        has_state = False
        if optimizer is not None:
            has_state = _check_optimizer(folder, model, optimizer, names, hyperparameters)
    targets = {name: _writable(value) for name, value in weights.items()}
    _load({"model": targets}, folder)
    _copy_back(weights, targets)
    if optimizer is not None:
        _load_optimizer(folder, model, optimizer, names, hyperparameters, has_state)
    for name, state in states.items():
        state.load_state_dict(told[name])


def is_checkpoint(folder: str | Path) -> bool:
    """Whether ``folder`` is a whole checkpoint of torch's format."""
    return (Path(folder) / ".metadata").is_file()


def save_pretrained(model: Any, folder: str | Path, *others: Any) -> None:
    """Writes the whole model so that ``from_pretrained`` reads it, and ``others`` (a tokenizer) beside it.

    Collective; rank 0 gathers all weights in its memory. Raises on every rank if they could not be written.
    """
    parallel_of(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write(staging: Path) -> None:
        if _rank() == 0:
            model.save_pretrained(staging, state_dict=whole)
            for other in others:
                other.save_pretrained(staging)

    _write(Path(folder), write)


def _weights(model: Any, found: Any = None) -> dict[str, Tensor]:
    """The model's tensors by name. Of tied names the first, or the first that is ``found`` in a folder."""
    weights = cast(dict[str, Tensor], get_model_state_dict(model))
    for names in _tied(model):
        names = [name for name in names if name in weights]
        kept = next((name for name in names if found is not None and f"model.{name}" in found), names[0])
        for name in names:
            if name != kept:
                del weights[name]
    return weights


def _tied(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is written of the optimizer: no state before its first step."""
    state: dict[str, Any] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, names_of(model, optimizer)):
        for parameter, name in zip(group["params"], names):
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                state[name] = {key: _writable(value) for key, value in held.items() if value is not None}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


def _check_optimizer(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, names: dict[str, Any], hyperparameters: bool
) -> bool:
    """Whether the folder holds states for this optimizer. Makes those of a new optimizer, to be filled."""
    check_optimizer(model, optimizer)
    groups = names_of(model, optimizer)
    if not any(name.startswith("optim.") for name in names):
        raise CheckpointError(
            "this checkpoint holds no optimizer", where=str(folder), hint="load the model alone, without an optimizer"
        )
    if hyperparameters:
        _check_groups(folder, groups, names)
    if not any(name.startswith("optim.state.") for name in names):
        return False
    new = not optimizer.state
    if new:
        make_state(optimizer)
    wanted = {
        f"optim.state.{name}.{key}": value
        for group, listed in zip(optimizer.param_groups, groups)
        for parameter, name in zip(group["params"], listed)
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
    try:
        _check_names(folder, wanted, names)
    except CheckpointError:
        if new:
            optimizer.state.clear()
        raise
    return True


def _check_groups(folder: Path, groups: list[list[str]], names: dict[str, Any]) -> None:
    marks = {name for name in names if name.startswith("optim.param_groups.")}
    saved = len({name.split(".")[2] for name in marks})
    if saved == len(groups):
        return
    raise CheckpointError(
        "the optimizer's parameter groups are others than the checkpoint's",
        where=str(folder),
        expected=f"{saved} groups",
        found=len(groups),
        hint="group the parameters alike, or load with hyperparameters=False to keep the optimizer's own settings",
    )


def _load_optimizer(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, names: dict[str, Any], settings: bool, has_state: bool
) -> None:
    groups = names_of(model, optimizer)
    if not has_state:
        optimizer.state.clear()
    held: dict[str, dict[str, Any]] = {}
    for group, listed in zip(optimizer.param_groups, groups):
        for parameter, name in zip(group["params"], listed):
            if parameter in optimizer.state:
                held[name] = {k: v for k, v in optimizer.state[parameter].items() if v is not None}
    targets = {name: {key: _writable(value) for key, value in state.items()} for name, state in held.items()}
    wanted: dict[str, Any] = {"optim": {"state": targets}}
    if settings:
        wanted["optim"]["param_groups"] = [
            {k: v for k, v in group.items() if f"optim.param_groups.{i}.{k}" in names}
            for i, group in enumerate(optimizer.param_groups)
        ]
        for group, listed in zip(wanted["optim"]["param_groups"], groups):
            group["params"] = listed
    _load(wanted, folder)
    for name, state in held.items():
        _copy_back(state, targets[name])
    for group, listed in zip(optimizer.param_groups, groups):
        for parameter, name in zip(group["params"], listed):
            if name in held:
                optimizer.state[parameter].update(held[name])
    for group, loaded in zip(optimizer.param_groups, wanted["optim"].get("param_groups", ())):
        group.update({key: value for key, value in loaded.items() if key not in _IMPLEMENTATION})


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise CheckpointError(
            "this folder holds no distributed checkpoint",
            where=str(folder),
            expected=".metadata and *.distcp files",
            found=type(error).__name__ if folder.is_dir() else "no such folder",
            hint="ullage convert --to dcp makes one of a DeepSpeed checkpoint",
        ) from error
    assert isinstance(metadata, Metadata)
    return metadata.state_dict_metadata


def _check_names(folder: Path, wanted: dict[str, Any], names: dict[str, Any]) -> None:
    """Each wanted item is in the folder, and of its size."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CheckpointError(
            "the checkpoint lacks what the model needs" if missing[0].startswith("model.") else
            "the checkpoint lacks what the optimizer needs",
            where=str(folder),
            expected=missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            found=f"{len(names)} other items",
        )  # fmt: skip
    for name, value in wanted.items():
        entry = names[name]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise CheckpointError(
                "a tensor of the checkpoint has another size",
                where=f"{folder}, {name}",
                expected=list(value.shape),
                found=list(entry.size),
                hint="continue with the model that it was made from",
            )


def _check_nothing_is_left(folder: Path, model: Any, names: dict[str, Any]) -> None:
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    left = [n for n in names if n.startswith("model.") and n.removeprefix("model.") not in known]
    if left:
        raise CheckpointError(
            "the checkpoint is of a larger model",
            where=str(folder),
            found=left[0] + (f" and {len(left) - 1} more" if len(left) > 1 else ""),
            hint="continue with the model that it was made from",
        )


def _read_states(folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    path = folder / STATES
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = [name for name in states if name not in told]
    if missing:
        raise CheckpointError(f"the checkpoint holds no state of {missing[0]!r}", where=str(path), found=list(told))
    return told


def _writable(value: Any) -> Any:
    """As torch's format can describe it: it knows no chunks of fused weights that tp cut in pieces.

    FSDP2 describes what it cut of a tp shard in the same words, but those chunks lie in one piece.
    """
    if not isinstance(value, DTensor) or not isinstance(value.placements[-1], _StridedShard):
        return value
    plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in value.placements]
    return value.redistribute(placements=plain)


def _copy_back(values: dict[str, Any], loaded: dict[str, Any]) -> None:
    """What was loaded beside the tensors themselves into them."""
    with torch.no_grad():
        for name, value in loaded.items():
            held = values[name]
            if value is held:
                continue
            if isinstance(held, DTensor):
                held._local_tensor.copy_(value.redistribute(placements=held.placements)._local_tensor)
            else:
                values[name] = value


def _load(state: dict[str, Any], folder: Path) -> None:
    with _quietly("read", folder):
        read_state(state, checkpoint_id=folder)


@contextmanager
def _quietly(done: str, folder: Path) -> Iterator[None]:
    """Without the remark that there is one process; with our error in place of torch's, which is no ``Exception``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(sorted(failed.failures.items(), key=lambda item: item[0])))
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the checkpoint could not be {done}", where=f"{folder}, rank {rank}", found=found
        ) from None


def _write(folder: Path, write: Any) -> None:
    write_whole(
        folder,
        write,
        several=_several(),
        saves=_rank() == 0,
        first_of_its_machine=int(os.environ.get("LOCAL_RANK", _rank())) == 0,
    )


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if _several() else 0
