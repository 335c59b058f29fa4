"""The formats of a checkpoint: which function reads each, and which lays out the files of each.

To add a format, name its reader in ``_READERS``, and what lays out its files in ``_WRITERS``;
``docs/layout.md`` has the other places that a format to be written needs.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import checkpoint_path, let_go, list_anew, name_store_errors
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats import model_states, trainer_folder, universal
from ullage.checkpoint.formats.dcp import dcp_targets, read_dcp
from ullage.checkpoint.formats.entries import known_buffers
from ullage.checkpoint.formats.hub_names import hub_named
from ullage.checkpoint.formats.locate import checkpoints_of, locate_checkpoint
from ullage.checkpoint.formats.safetensors import read_safetensors, safetensors_targets
from ullage.checkpoint.formats.trainer_folder import read_trainer, trainer_targets
from ullage.checkpoint.formats.universal import read_universal, universal_targets
from ullage.checkpoint.formats.zero_shards import notes_on_rounded, read_zero, zero_targets
from ullage.checkpoint.zero.states import WEIGHTS_ONLY
from ullage.core.errors import CheckpointError, InputError

_READERS = {
    "zero": read_zero,
    "universal": read_universal,
    "safetensors": read_safetensors,
    "dcp": read_dcp,
    "trainer": read_trainer,
}
#: What lays out the files of the formats that take a dtype, and may leave the optimizer's state out.
_WRITERS = {"safetensors": safetensors_targets, "dcp": dcp_targets}
#: The formats that are shards of a number of ranks, and their ZeRO stage.
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
#: The formats that a checkpoint can be converted to.
FORMATS = ("universal", *_WRITERS, "trainer", *STAGES)
#: Files beside the target by which DeepSpeed finds it.
POINTERS = {"universal": "latest_universal", **dict.fromkeys(STAGES, "latest")}


def read(folder: str | Path, *, storage_options: dict[str, Any] | None = None) -> Inventory:
    """The inventory of a checkpoint: logical tensors and their fragments, parallel sizes, paddings.

    ``folder`` is a folder of this machine or a URL that fsspec knows, for which ``storage_options`` are fsspec's: the
    tag's folder of a DeepSpeed ZeRO checkpoint, or its parent with ``latest`` or ``latest_checkpointed_iteration.txt``;
    or a universal, safetensors or DCP folder; or ``checkpoint-N`` of a Trainer, with ``optimizer.pt`` or
    a folder of these in it; or a Trainer's folder, of which it is the newest checkpoint, and a note says so. No tensor
    data is read, and no code of the files is run. Problems are collected, not raised: see :meth:`Inventory.problems`.

    Raises ``CheckpointError`` for a folder that is not a checkpoint, for experts of a kind that is not read, and for a
    file that asks to run code.
    """
    given = checkpoint_path(folder, storage_options)
    path, format = locate_checkpoint(given)
    try:
        with list_anew(path):
            found = _READERS[format](path)
            kept = [] if path == given else checkpoints_of(given)
            if not any(each in (path, path.parent) for each in kept):
                return found
            said = f"{given.name} holds {', '.join(each.name for each in kept)}: this is the newest"
            return replace(found, notes=(said, *found.notes))
    finally:
        let_go(path)


def targets(
    inventory: Inventory,
    format: str = "universal",
    *,
    dtype: str | None = None,
    optimizer: bool | None = None,
    ranks: int | None = None,
) -> list[Target]:
    """The files that a conversion would write, without the tensors' bytes. Writes nothing.

    ``dtype``, ``optimizer`` and ``ranks`` are those of :func:`ullage.checkpoint.convert`. Raises ``InputError`` for
    options that the format does not have, and ``CheckpointError`` for what it cannot hold: optimizer state that belongs
    to the layout it was saved on, or parameters whose names cannot be names of files.
    """
    require_format(format, ranks)
    with name_store_errors(inventory.folder):
        return _targets(hub_named(inventory, format), format, dtype, optimizer, ranks)


def _targets(
    inventory: Inventory, format: str, dtype: str | None, optimizer: bool | None, ranks: int | None
) -> list[Target]:
    carried = carries_optimizer(format, optimizer)
    if carried:
        require_none(inventory, list(inventory.optimizer_problems))
        if format in POINTERS:
            _require_whole_states(inventory)
    if format in STAGES:
        return zero_targets(inventory, stage=STAGES[format], ranks=ranks, dtype=dtype, optimizer=carried)
    if format in _WRITERS:
        return _WRITERS[format](inventory, dtype=dtype, optimizer=carried)
    article = "a universal" if format == "universal" else "a Trainer's"
    if optimizer is False:
        raise InputError(f"{article} checkpoint always has the optimizer's state", hint="leave optimizer out")
    if dtype is not None:
        raise InputError(f"{article} checkpoint keeps its dtypes", found=f"dtype {dtype}", hint="leave dtype out")
    return universal_targets(inventory) if format == "universal" else trainer_targets(inventory)


def _require_whole_states(inventory: Inventory) -> None:
    """Raise ``CheckpointError`` for state that is not of its weight's shape: engines cut both in one way."""
    whole = {tensor.name: tensor.shape for tensor in inventory.tensors if tensor.key == "fp32"}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter" and tensor.shape != whole.get(tensor.name, tensor.shape):
            raise CheckpointError(
                "an engine cuts state as it cuts the weights, and this state is of another shape",
                where=f"{inventory.folder}, parameter {tensor.name}",
                expected=f"{list(whole[tensor.name])}, as the weight",
                found=f"{tensor.key} {list(tensor.shape)}",
                hint=f"--to trainer and --to dcp keep it; {WEIGHTS_ONLY}",
            )


def shards_folder(inventory: Inventory, target: Path, format: str) -> Path:
    """The folder of the files: of ZeRO shards one named by the step, in ``target`` if that is not named so itself."""
    if format not in STAGES or re.fullmatch(r"global_step\d+", target.name):
        return target
    return target / f"global_step{model_states.global_step(inventory)}"


def notes(inventory: Inventory, format: str, targets: list[Target]) -> list[str]:
    """Facts about a conversion that hinder nothing: what the source lacks, or the target leaves out or rounds.

    ``targets``: the files that the conversion writes.
    """
    if format in STAGES:
        said = [*model_states.notes_on_schedule(inventory), *notes_on_rounded(targets)]
        trained = {tensor.name for tensor in inventory.tensors if tensor.kind == "parameter" and tensor.key != "fp32"}
        is_told = inventory.groups or trained.issuperset(inventory.parameters) or known_buffers(inventory) is not None
        if STAGES[format] == 3 and not is_told:
            said.append("nothing says which tensors are buffers: those of floats are taken for parameters")
        return said
    if format == "trainer":
        return trainer_folder.notes_for_trainer(inventory)
    return universal.notes_for_engines(inventory) if format == "universal" else []


def require_format(format: str, ranks: int | None = None) -> None:
    """Raise ``InputError`` for a format that nothing can be converted to, or that is not of a number of ranks."""
    if format not in FORMATS:
        raise InputError("unknown format", expected=" or ".join(FORMATS), found=format)
    if ranks is not None and format not in STAGES:
        raise InputError(
            f"{format} is for any number of ranks",
            found=f"ranks {ranks}",
            hint=f"shards are --to {' or '.join(STAGES)}",
        )


def carries_optimizer(format: str, optimizer: bool | None) -> bool:
    """Whether a conversion carries the optimizer's state: by default not to safetensors."""
    return bool(optimizer) if format == "safetensors" else optimizer is not False


def require_none(inventory: Inventory, problems: list[Problem]) -> None:
    """Raise ``CheckpointError`` with the first problem and the number of all; its ``problems`` lists all of them."""
    if not problems:
        return
    first = problems[0]
    more = f" (and {len(problems) - 1} more; `ullage inspect` lists them)" if len(problems) > 1 else ""
    error = CheckpointError(
        first.what + more,
        where=f"{inventory.folder.name}: {first.where or inventory.folder}",
        expected=first.expected,
        found=first.found,
        hint=first.hint,
    )
    error.problems = problems  # pyright: ignore[reportAttributeAccessIssue]
    raise error
