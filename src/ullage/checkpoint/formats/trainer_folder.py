"""The folder that a plain Trainer resumes from, without DeepSpeed, from the inventory of any format with an optimizer.

    model.safetensors        the weights; of a PEFT model, adapter_model.safetensors with those of the adapter
    optimizer.pt             state by number, in the order of the groups, and their hyperparameters
    scheduler.pt             the state of the learning rate's schedule
    trainer_state.json       and config.json, tokenizer: copied from the source

Source: transformers 5.23 ``trainer.py``, ``_save_optimizer_and_scheduler`` and ``_load_optimizer_and_scheduler``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import File, Inventory
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.archive import Target, archive
from ullage.checkpoint.files.pickling import TensorCopy
from ullage.checkpoint.files.torchfile import RefusedFile, read_torch_file
from ullage.checkpoint.formats.entries import (
    OptimizerGroup,
    assign_groups,
    number,
    optimizer_groups,
    small_file_targets,
    states_by_name,
    weights_of,
)
from ullage.checkpoint.formats.locate import SCHEDULER, TRAINER_STATE, schedule_beside, steps_taken, text_of
from ullage.checkpoint.formats.model_states import schedule_of
from ullage.checkpoint.formats.safetensors import companions, read_safetensors, weights_targets
from ullage.checkpoint.formats.torch_optimizer import NumberedState, Order, read_numbered, trainer_orders, unnamed
from ullage.checkpoint.zero.folder import record_table
from ullage.core.errors import CheckpointError

#: Small files of a Trainer's checkpoint that are the same in both kinds of run.
_COPIED = (TRAINER_STATE, "adapter_config.json")
_LIMIT = 64 << 20
OPTIMIZER = "optimizer.pt"


def trainer_targets(inventory: Inventory) -> list[Target]:
    """The files of the folder, without the tensors' bytes.

    Raises ``CheckpointError`` for a source whose optimizer has no groups by name.
    """
    hint = "convert the weights alone, with --to safetensors"
    groups = optimizer_groups(inventory, needed_by="a Trainer's checkpoint", hint=hint)
    adapter = text_of(inventory.folder, "adapter_config.json")
    if adapter is None:
        targets = weights_targets(inventory, "model", {t.name: t for t in weights_of(inventory)})
    else:
        targets = weights_targets(inventory, "adapter_model", {t.name: t for t in adapter_of(inventory).tensors})
    targets.append(optimizer_target(inventory, groups))
    scheduler = schedule_of(inventory)
    if scheduler is not None:
        targets.append(archive(SCHEDULER, scheduler, stem="scheduler", limit=_LIMIT))
    targets += small_file_targets(inventory.folder, _COPIED)
    return targets + companions(inventory)


def notes_for_trainer(inventory: Inventory, targets: list[Target]) -> list[str]:
    """Notes on what transformers' Trainer asks for and the source does not have."""
    found = []
    if schedule_of(inventory) is None:
        found.append(f"the source has no state of a schedule: without {SCHEDULER}, Trainer loads no optimizer either")
    if text_of(inventory.folder, TRAINER_STATE) is None:
        found.append(
            f"the source has no {TRAINER_STATE}, which Trainer resumes by; optimizer.pt is a torch optimizer's"
        )
    return found


def adapter_of(inventory: Inventory) -> Inventory:
    """The trained weights alone, by the names of PEFT's file, which leave out the adapter's own."""
    trained = [t for t in inventory.tensors if t.kind == "parameter" and t.key == "fp32"]
    return replace(inventory, tensors=tuple(replace(t, name=t.name.replace(".default.", ".")) for t in trained))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (folder / "adapter_model.safetensors").is_file()


def optimizer_target(inventory: Inventory, groups: list[OptimizerGroup]) -> Target:
    """``optimizer.pt``: the optimizer's ``state_dict``, parameters numbered through the groups, which name them too."""
    states = states_by_name(inventory)
    listed: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    count = 0
    for group in groups:
        for k, name in enumerate(group.names, start=count):
            step = {} if group.step is None else {"step": number(group.step, group.step_dtype)}
            held = states.get(name, {})
            if name in group.stepped:
                state[k] = step | group.kept | {key: TensorCopy(t, t.dtype) for key, t in held.items()}
        numbers = [*range(count, count + len(group.names))]
        listed.append({**group.settings, "params": numbers, "param_names": list(group.names)})
        count += len(group.names)
    state = {k: held for k, held in state.items() if held}
    return archive("optimizer.pt", {"state": state, "param_groups": listed}, stem="optimizer", limit=_LIMIT)


def read_trainer(folder: Path, orders: Callable[[], list[Order]] | None = None) -> Inventory:
    """The inventory of a folder with ``model.safetensors`` and ``optimizer.pt``.

    ``orders``: gives those in which the optimizer may have got the parameters; by default of the class of the model.
    State whose names are not known is an optimizer's problem of the inventory, and the weights are read without it.
    Raises ``CheckpointError`` for a file that cannot be read, or that asks to run code.
    """
    base = read_safetensors(folder)
    path, number = folder / OPTIMIZER, len(base.files)
    source = read_torch_file(path)
    weights = {t.name: t for t in base.tensors if t.key == "fp32"}
    try:
        found = read_numbered(
            source.root, weights, source, number, OPTIMIZER, orders or partial(trainer_orders, folder)
        )
    except RefusedFile:
        raise
    except CheckpointError as error:
        found = NumberedState([], problem=Problem.of_error(error, OPTIMIZER))
    if found.problem is None and not any(found.names):
        found.problem = unnamed(OPTIMIZER, "no parameter")
    known = base.details.buffers_known
    schedule, step = schedule_beside(folder), steps_taken(folder)
    details = found.details(settings_file=source, scheduler=schedule, global_step=step, buffers_known=known)
    group_of = {name: index for index, names in enumerate(found.names) for name in names}
    tensors = assign_groups(base.tensors, group_of)
    problems = () if found.problem is None else (found.problem,)
    return replace(
        base,
        format="trainer",
        files=(*base.files, File(OPTIMIZER, source.num_bytes, "optimizer")),
        tensors=(*tensors, *found.tensors),
        steps={group: value for group, (value, _) in found.steps.items()},
        records={**base.records, number: record_table(source)},
        optimizer_problems=problems,
        details=details,
    )
