"""Kinds of run whose files lie otherwise than their names and shapes say; told by ``ds_config``, which every file has.

ZenFlow and NVMe are refused by name before anything is read wrongly. ZenFlow keeps every matrix of its flat buffers
transposed, in shapes that do not show it, and does not save the moments of the columns that it selects. State on NVMe
is a copy of raw swap files beside the checkpoint. SuperOffload steps in a process of its own, whose moments nobody
saves; its weights are those of any run at stage 3. MiCS cuts over fewer ranks than there are.
Source: ``runtime/zenflow``, ``runtime/superoffload``, ``runtime/swap_tensor`` and ``save_checkpoint`` in
``runtime/engine.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.states import WEIGHTS_ONLY


def _zero_config(folder: Folder) -> dict[str, Any]:
    """``zero_optimization`` of the configuration that the run was started with; empty where no file has it."""
    for held in (*folder.models.values(), *folder.shards.values()):
        config = held.root.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        if isinstance(zero, dict):
            return zero
    return {}


def _offload(zero: dict[str, Any]) -> dict[str, Any]:
    found = zero.get("offload_optimizer")
    return found if isinstance(found, dict) else {}


def unsaved_state(folder: Folder) -> list[Problem]:
    """The reason why the optimizer's state is not in the files, though the weights are."""
    if not _offload(_zero_config(folder)).get("super_offload"):
        return []
    what = "a SuperOffload run keeps the optimizer's state in a process of its own and does not save it"
    return [Problem(what, hint=WEIGHTS_ONLY)]


def require_known_kind(folder: Folder) -> None:
    """Raise ``RefusedFile`` for a kind of run whose state cannot be read from its files."""
    zero = _zero_config(folder)
    device = str(_offload(zero).get("device", "none"))
    if zero.get("zenflow"):
        raise RefusedFile(
            "a ZenFlow run is not supported: its weights are saved transposed, and part of its moments not at all",
            where=str(folder.path),
            hint="load it with DeepSpeed under the same configuration, and save the module's own weights",
        )
    if device == "nvme" or (folder.path / "offloaded_tensors").exists():
        raise RefusedFile(
            "the optimizer's state was offloaded to NVMe, so it is not in these files",
            where=str(folder.path),
            expected="state in *_optim_states.pt",
            found="swap files in offloaded_tensors",
            hint="load it with DeepSpeed under the same configuration, and save with offload_optimizer on the CPU",
        )


def shard_groups(folder: Folder, world: int) -> int:
    """How often the run holds its shards: MiCS cuts over ``mics_shard_size`` ranks, of which the first group saves.

    Args:
        folder: the files read.
        world: number of ranks over which the shards are cut.
    """
    size = _zero_config(folder).get("mics_shard_size", -1)
    claimed = {model.dp_world_size for model in folder.models.values()} - {None}
    if size != world or len(claimed) != 1:
        return 1
    dp = claimed.pop() or 0
    return dp // world if dp % world == 0 else 1
