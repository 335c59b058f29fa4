"""The folder that holds the files of a checkpoint, and its format, from the folder or parent that a user names.

Beside it lie small files that a Trainer leaves, in the checkpoint or in the folder around it.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.paths import checkpoint_path, is_remote, read_start
from ullage.checkpoint.files.torchfile import as_checkpoint_error, read_torch_file
from ullage.core.errors import CheckpointError

#: Bytes of a pointer that are read: no folder has a longer name.
_LONGEST_TAG = 4096
#: In a target: the folder in which a conversion notes what is done, and the file that says that all is there.
JOURNAL, COMPLETE = ".journal", "ullage.json"
#: In a checkpoint of a model that ``ullage.engines.fsdp`` has sharded: the folder with model and optimizer.
MODEL_AND_OPTIMIZER = "model_and_optimizer"
_POINTERS = ("latest", "latest_checkpointed_iteration.txt", "latest_universal")
TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
#: States beside model and optimizer, as ``ullage.engines.fsdp`` writes them.
STATES = "ullage_states.json"


def locate_checkpoint(folder: str | Path) -> tuple[Path, str]:
    """(folder of the files, format). The folder may be the tag's or its parent, which says which tag is the latest.

    Of a Trainer's folder it is the newest checkpoint in it, also where the weights that a run has ended with lie there.

    Raises ``CheckpointError`` for a folder that is missing or not a checkpoint.
    """
    with as_checkpoint_error(str(folder)):
        folder = checkpoint_path(folder)
        there = folder.is_dir()
    if not there:
        if not is_remote(folder) and folder.is_file():
            raise CheckpointError(
                "this is a file",
                where=str(folder),
                expected="the folder of a checkpoint, or its parent",
                hint=f"give its folder: {folder.parent}",
            )
        here = (
            [] if is_remote(folder) or not folder.parent.is_dir() else [path.name for path in folder.parent.iterdir()]
        )
        near = get_close_matches(folder.name, here, 1, 0.7)
        hint = f"did you mean {folder.parent / near[0]}?" if near else None
        expected = "the folder of a checkpoint, or its parent"
        raise CheckpointError("no such folder", where=str(folder), expected=expected, hint=hint)
    found = _format(folder)
    # Trainer puts a copy of the weights beside `latest`, which names a folder that has the optimizer too.
    pointed = any((folder / pointer).is_file() for pointer in _POINTERS)
    kept = checkpoints_of(folder) if found in (None, "safetensors") and not pointed else []
    if kept:
        return locate_checkpoint(kept[-1])
    if found and not (found in ("safetensors", "trainer") and pointed):
        return folder, found
    inner = folder / MODEL_AND_OPTIMIZER
    if not found and inner.is_dir() and _format(inner) == "dcp":
        return inner, "dcp"
    for pointer in _POINTERS:
        path = folder / pointer
        if not path.is_file():
            continue
        with as_checkpoint_error(str(path)):
            tag = read_start(path, _LONGEST_TAG).decode("utf-8", "replace").strip()
        candidates = [tag]
        if pointer == "latest_checkpointed_iteration.txt" and tag.isdigit():
            # Megatron's file holds the bare number; its folders are named iter_0000010, DeepSpeed's global_step10.
            candidates += [f"global_step{tag}", f"iter_{int(tag):07d}"]
        for name in candidates:
            with as_checkpoint_error(str(path)):
                there = bool(name) and (folder / name).is_dir()
            if there and _format(folder / name):
                return folder / name, _format(folder / name) or ""
        raise CheckpointError(
            f"{pointer} names a checkpoint that is not there", where=str(folder), found=tag[:200] or "nothing"
        )
    names, inner = sorted(p.name for p in folder.iterdir()), list[str]()
    for name in names:
        with suppress(CheckpointError):
            inner += [name] if (folder / name).is_dir() and _format(folder / name) else []
    raise CheckpointError(
        "the folder is not a checkpoint",
        where=str(folder),
        expected="*_optim_states.pt, zero/, *.safetensors or .metadata in it, or a file named latest",
        found=", ".join(names[:4]) or "an empty folder",
        hint=f"give a folder in it that is one: {', '.join(inner[:4])}" if inner else None,
    )


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in a Trainer's folder, oldest first; without those that lack what Trainer writes last."""
    with as_checkpoint_error(str(folder)):
        named = {path: re.fullmatch(r"checkpoint-(\d{1,18})", path.name) for path in folder.iterdir()}
        numbers = {path: int(name[1]) for path, name in named.items() if name and (path / TRAINER_STATE).is_file()}
    return sorted(numbers, key=lambda path: numbers[path])


def _format(folder: Path) -> str | None:
    with as_checkpoint_error(str(folder)):
        names = [p.name for p in folder.iterdir()]
    if any(n.endswith(("_optim_states.pt", "_model_states.pt")) for n in names) and "zero" not in names:
        return "zero"
    if "zero" in names and (folder / "zero").is_dir():
        return "universal"
    weights = [n for n in names if n.endswith(".safetensors")]
    if "optimizer.pt" in names and any(n.startswith(("model", "adapter_model")) for n in weights):
        return "trainer"
    if weights:
        return "safetensors"
    if ".metadata" not in names:
        return None
    # Either tells, so that damage of one does not make another format of it.
    if "common.pt" in names or _is_megatron(folder):
        hint = "export the model with megatron-bridge, and give the folder that it writes"
        raise CheckpointError("Megatron-Core's distributed checkpoints are not read", where=str(folder), hint=hint)
    return "dcp"


def _is_megatron(folder: Path) -> bool:
    """Whether ``metadata.json`` is that of Megatron-Core's distributed checkpoints."""
    path = folder / "metadata.json"
    if not path.is_file():
        return False
    with as_checkpoint_error(str(path)):
        try:
            told = json.loads(read_start(path, _LONGEST_TAG))
        except (ValueError, RecursionError):
            return False
    return isinstance(told, dict) and told.get("sharded_backend") == "torch_dist"


def text_of(folder: Path, name: str) -> bytes | None:
    """A small file in the folder, or in the checkpoint around it."""
    for place in (folder, folder.parent):
        if (place / name).is_file():
            with as_checkpoint_error(str(place / name)):
                return (place / name).read_bytes()
    return None


def object_of(folder: Path, name: str) -> dict[str, Any]:
    """The content of such a file of JSON; empty where there is none, or something else."""
    text = text_of(folder, name)
    try:
        said = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def steps_taken(folder: Path) -> int | None:
    """The number of steps in ``trainer_state.json``, where there is one."""
    found = object_of(folder, TRAINER_STATE).get("global_step")
    return found if type(found) is int else None


def schedule_beside(folder: Path) -> Any:
    """The state of the schedule in a file that ``ullage.engines.fsdp`` or a Trainer has left; None without one."""
    places = (folder / SCHEDULER, folder.parent / SCHEDULER)
    found = next((read_torch_file(path).root for path in places if path.is_file()), None)
    return object_of(folder, STATES).get("scheduler", found)
