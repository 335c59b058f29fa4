"""The folder that a plain Trainer resumes from, without DeepSpeed: what ``ullage.engines.fsdp`` saved, put together.

    model.safetensors        the weights; of a PEFT model, adapter_model.safetensors with those of the adapter
    optimizer.pt             state by number, in the order of the groups, and their hyperparameters
    scheduler.pt             the state of the learning rate's schedule
    trainer_state.json       and config.json, tokenizer: copied from the source

Source: transformers 5.23 ``trainer.py``, ``_save_optimizer_and_scheduler`` and ``_load_optimizer_and_scheduler``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.files.archive import Target, TensorCopy, archive
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.formats.safetensors import companions, weights_targets
from ullage.checkpoint.formats.universal import number
from ullage.checkpoint.inventory import Inventory, Tensor
from ullage.checkpoint.zero.details import Details
from ullage.errors import CheckpointError

#: Small files of a Trainer's checkpoint that are the same in both kinds of run.
_COPIED = ("trainer_state.json", "adapter_config.json")
#: States beside model and optimizer, as the engine writes them.
_STATES = "ullage_states.json"
_LIMIT = 64 << 20


def trainer_targets(inventory: Inventory) -> list[Target]:
    """The files of the folder, without the tensors' bytes.

    Raises ``CheckpointError`` for a source that is not what the engine's Trainer saved.
    """
    state = _text(inventory.folder, _COPIED[0])
    told = _text(inventory.folder, _STATES)
    scheduler = json.loads(told).get("scheduler") if told is not None else None
    if inventory.format != "dcp" or state is None or scheduler is None:
        raise CheckpointError(
            "only what ullage.engines.fsdp.Trainer saved becomes a Trainer's checkpoint",
            where=str(inventory.folder),
            expected=f"checkpoint-N with model_and_optimizer, {_COPIED[0]} and a scheduler",
            found=inventory.format,
        )
    adapter = _text(inventory.folder, "adapter_config.json")
    weights = [t for t in inventory.tensors if t.kind != "parameter" or t.key == "fp32"]
    if adapter is None:
        targets = weights_targets(inventory, "model", {t.name: t for t in weights})
    else:
        targets = weights_targets(inventory, "adapter_model", {t.name: t for t in adapter_of(inventory).tensors})
    targets += [optimizer_target(inventory), archive("scheduler.pt", scheduler, stem="scheduler", limit=_LIMIT)]
    for name in _COPIED:
        text = _text(inventory.folder, name)
        if text is not None:
            targets.append(Target(name, len(text), texts=((0, text),)))
    return targets + companions(inventory)


def adapter_of(inventory: Inventory) -> Inventory:
    """The trained weights alone, by the names of PEFT's file, which leave out the adapter's own."""
    trained = [t for t in inventory.tensors if t.kind == "parameter" and t.key == "fp32"]
    return replace(inventory, tensors=tuple(replace(t, name=t.name.replace(".default.", ".")) for t in trained))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (folder / "adapter_model.safetensors").is_file()


def optimizer_target(inventory: Inventory) -> Target:
    """``optimizer.pt``: the optimizer's ``state_dict``, parameters numbered through the groups."""
    details = inventory.details
    assert isinstance(details, Details)
    states: dict[str, list[Tensor]] = {}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter" and tensor.key != "fp32":
            states.setdefault(tensor.name, []).append(tensor)
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    count = 0
    for index, group in enumerate(details.param_groups):
        names = group.get("params") or []
        value, dtype = details.steps.get(index, (None, None))
        for k, name in enumerate(names, start=count):
            if name in states:
                step = {} if value is None else {"step": number(value, dtype)}
                state[k] = step | {t.key: TensorCopy(t, t.dtype) for t in states[name]}
        groups.append(
            {**{k: v for k, v in group.items() if k != "params"}, "params": [*range(count, count + len(names))]}
        )
        count += len(names)
    return archive("optimizer.pt", {"state": state, "param_groups": groups}, stem="optimizer", limit=_LIMIT)


def _text(folder: Path, name: str) -> bytes | None:
    """A small file in the folder, or in the checkpoint around it."""
    for place in (folder, folder.parent):
        if (place / name).is_file():
            with as_checkpoint_error(str(place / name)):
                return (place / name).read_bytes()
    return None
