"""Small files that a Trainer leaves in a checkpoint or in the folder around it: its state, and that of the schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ullage.checkpoint.files.torchfile import as_checkpoint_error

TRAINER_STATE = "trainer_state.json"
#: States beside model and optimizer, as ``ullage.engines.fsdp`` writes them.
_STATES = "ullage_states.json"


def text_of(folder: Path, name: str) -> bytes | None:
    """A small file in the folder, or in the checkpoint around it."""
    for place in (folder, folder.parent):
        if (place / name).is_file():
            with as_checkpoint_error(str(place / name)):
                return (place / name).read_bytes()
    return None


def steps_taken(folder: Path) -> int | None:
    """The number of steps in ``trainer_state.json``, where there is one."""
    found = _object(folder, TRAINER_STATE).get("global_step")
    return found if type(found) is int else None


def schedule(folder: Path) -> Any:
    """The state of the learning rate's schedule that ``ullage.engines.fsdp`` saved, where there is one."""
    return _object(folder, _STATES).get("scheduler")


def _object(folder: Path, name: str) -> dict[str, Any]:
    text = text_of(folder, name)
    try:
        said = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
