"""The formats of a checkpoint, each in one place: its reader; what lays out its files, and what that takes and notes.

To add a format, write ``formats/NAME.py``, and add its reader to ``_READERS`` and its row to ``FORMATS``; ``locate``
tells it from others by its files, and ``cli/convert.py`` lists its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import checkpoint_path, let_go, list_anew, name_store_errors
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats import dcp, safetensors, trainer_folder, universal, zero_shards
from ullage.checkpoint.formats.hub_names import hub_named
from ullage.checkpoint.formats.locate import checkpoints_of, locate_checkpoint
from ullage.checkpoint.formats.model_states import global_step
from ullage.checkpoint.zero.states import WEIGHTS_ONLY
from ullage.core.errors import CheckpointError, InputError

_READERS = {
    "zero": zero_shards.read_zero,
    "universal": universal.read_universal,
    "safetensors": safetensors.read_safetensors,
    "dcp": dcp.read_dcp,
    "trainer": trainer_folder.read_trainer,
}


@dataclass(frozen=True)
class Format:
    """A format that a checkpoint can be converted to.

    Attributes:
        write: lays out the files of an inventory; unless the optimizer's state is ``always`` written, given ``dtype``
            and ``optimizer``, and of shards ``stage`` and ``ranks`` too.
        optimizer: whether the optimizer's state is written: always, and nothing is cast; by default; or where it is
            asked for.
        stage: of ZeRO, for shards of a number of ranks.
        pointer: the file beside the target by which DeepSpeed finds it.
        notes: what the source lacks, or the target leaves out or rounds, of an inventory and the files.
    """

    write: Callable[..., list[Target]]
    optimizer: Literal["always", "default", "asked"] = "default"
    stage: int | None = None
    pointer: str | None = None
    notes: Callable[[Inventory, list[Target]], list[str]] = lambda inventory, targets: []


def _shards(stage: int) -> Format:
    notes = partial(zero_shards.notes_on_shards, stage)
    return Format(zero_shards.zero_targets, stage=stage, pointer="latest", notes=notes)


FORMATS: dict[str, Format] = {
    "universal": Format(
        universal.universal_targets, "always", pointer="latest_universal", notes=universal.notes_for_engines
    ),
    "safetensors": Format(safetensors.safetensors_targets, "asked"),
    "dcp": Format(dcp.dcp_targets),
    "trainer": Format(trainer_folder.trainer_targets, "always", notes=trainer_folder.notes_for_trainer),
    **{f"zero{stage}": _shards(stage) for stage in (1, 2, 3)},
}


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
    this, carried = FORMATS[format], carries_optimizer(format, optimizer)
    if carried:
        require_none(inventory, list(inventory.optimizer_problems))
        if this.pointer:
            _require_whole_states(inventory)
    if this.optimizer != "always":
        shards = {} if this.stage is None else {"stage": this.stage, "ranks": ranks}
        return this.write(inventory, dtype=dtype, optimizer=carried, **shards)
    article = "a universal" if format == "universal" else "a Trainer's"
    if optimizer is False:
        raise InputError(f"{article} checkpoint always has the optimizer's state", hint="leave optimizer out")
    if dtype is not None:
        raise InputError(f"{article} checkpoint keeps its dtypes", found=f"dtype {dtype}", hint="leave dtype out")
    return this.write(inventory)


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
    if FORMATS[format].stage is None or re.fullmatch(r"global_step\d+", target.name):
        return target
    return target / f"global_step{global_step(inventory)}"


def require_format(format: str, ranks: int | None = None) -> None:
    """Raise ``InputError`` for a format that nothing can be converted to, or that is not of a number of ranks."""
    if format not in FORMATS:
        raise InputError("unknown format", expected=" or ".join(FORMATS), found=format)
    if ranks is not None and FORMATS[format].stage is None:
        raise InputError(
            f"{format} is for any number of ranks",
            found=f"ranks {ranks}",
            hint="shards are of --to zero1, zero2 or zero3 with --ranks, in Python format= and ranks=",
        )


def carries_optimizer(format: str, optimizer: bool | None) -> bool:
    """Whether a conversion carries the optimizer's state: by default not to safetensors."""
    return bool(optimizer) if FORMATS[format].optimizer == "asked" else optimizer is not False


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
