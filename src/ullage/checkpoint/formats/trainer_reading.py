"""Reading of a Trainer's checkpoint without DeepSpeed: weights, and the optimizer's state by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ullage.checkpoint.files.torchfile import RefusedFile, read_torch_file
from ullage.checkpoint.formats import run_files
from ullage.checkpoint.formats.safetensors import divided, read_safetensors
from ullage.checkpoint.formats.torch_optimizer import NumberedState, read_numbered, trainer_orders, unnamed
from ullage.checkpoint.inventory import File, Inventory
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero.details import Details
from ullage.checkpoint.zero.folder import record_table
from ullage.errors import CheckpointError

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def read_trainer(folder: Path) -> Inventory:
    """The inventory of a folder with ``model.safetensors`` and ``optimizer.pt``.

    State whose names are not known is an optimizer's problem of the inventory, and the weights are read without it.
    Raises ``CheckpointError`` for a file that cannot be read, or that asks to run code.
    """
    base = read_safetensors(folder)
    path, number = folder / OPTIMIZER, len(base.files)
    source = read_torch_file(path)
    weights = {t.name: t for t in base.tensors if t.key == "fp32"}
    try:
        found = read_numbered(source.root, weights, source, number, OPTIMIZER, partial(trainer_orders, folder))
    except RefusedFile:
        raise
    except CheckpointError as error:
        found = NumberedState([], problem=Problem.of_error(error, OPTIMIZER))
    if found.problem is None and not any(found.names):
        found.problem = unnamed(OPTIMIZER, "no parameter")
    details = Details(
        {}, {}, found.steps, found.groups if found.problem is None else [], names=found.names, numbers=found.numbers,
        settings_file=source, scheduler=_schedule(folder), global_step=run_files.steps_taken(folder),
        buffers_known=base.details.buffers_known,
    )  # fmt: skip
    group_of = {name: index for index, names in enumerate(found.names) for name in names}
    tensors = [replace(t, group=group_of.get(t.name)) for t in divided(base.tensors, set(group_of))]
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


def _schedule(folder: Path) -> object:
    path = folder / SCHEDULER
    return read_torch_file(path).root if path.is_file() else None
