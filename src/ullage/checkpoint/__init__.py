"""Checkpoints that fit any machine layout: read, check, convert, verify.

    inventory = ullage.checkpoint.read(folder)       # what is in it; no tensor data, no code of the file
    problems = inventory.problems()                  # [] when every tensor is whole
    report = ullage.checkpoint.convert(folder, target, format="universal")
    problems = ullage.checkpoint.verify(folder, target)

Only numpy is needed: neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

from pathlib import Path

from ullage.checkpoint.converting import Report, convert, plan
from ullage.checkpoint.inventory import (
    File,
    Fragments,
    Group,
    Inventory,
    Merge,
    Problem,
    Slice,
    Tensor,
    Topology,
)
from ullage.checkpoint.locate import locate
from ullage.checkpoint.paper import on_paper
from ullage.checkpoint.verifying import verify
from ullage.errors import CheckpointError


def read(folder: str | Path) -> Inventory:
    """What a checkpoint holds: logical tensors and their fragments, topology, paddings. Reads no tensor data.

    ``folder``: the tag's folder of a DeepSpeed ZeRO checkpoint, or its parent with ``latest`` or
    ``latest_checkpointed_iteration.txt``; or a universal, safetensors or DCP folder. Problems are collected, not
    raised: see :meth:`Inventory.problems`. Raises ``CheckpointError`` for a folder that is no
    checkpoint, for expert files, and for a file that asks to run code.
    """
    path, found = locate(folder)
    if found == "zero":
        from ullage.checkpoint.zero import read_zero

        return read_zero(path)
    if found == "universal":
        from ullage.checkpoint.universal import read_universal

        return read_universal(path)
    if found == "safetensors":
        from ullage.checkpoint.safetensors import read_safetensors

        return read_safetensors(path)
    from ullage.checkpoint.dcp import read_dcp

    return read_dcp(path)


__all__ = [
    "CheckpointError",
    "File",
    "Fragments",
    "Group",
    "Inventory",
    "Merge",
    "Problem",
    "Report",
    "Slice",
    "Tensor",
    "Topology",
    "convert",
    "on_paper",
    "plan",
    "read",
    "verify",
]
