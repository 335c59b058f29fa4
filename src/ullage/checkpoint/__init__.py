"""Checkpoints that fit any machine layout: read, check, convert, verify.

    inventory = ullage.checkpoint.read(folder)       # what is in it; no tensor data, no code of the file
    problems = ullage.checkpoint.check(inventory)    # [] when every tensor is whole
    report = ullage.checkpoint.convert(folder, target, format="universal")
    problems = ullage.checkpoint.verify(folder, target)

Only numpy is needed: neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

from pathlib import Path

from ullage.checkpoint.inventory import File, Fragments, Group, Inventory, Merge, Problem, Slice, Tensor, Topology, check
from ullage.checkpoint.locate import locate


def read(folder: str | Path) -> Inventory:
    """What a checkpoint holds: logical tensors and their fragments, topology, paddings. Reads no tensor data.

    ``folder``: the tag's folder of a DeepSpeed ZeRO checkpoint, or its parent with ``latest`` or
    ``latest_checkpointed_iteration.txt``. Problems are collected, not raised: see :func:`check`. Raises
    ``CheckpointError`` for a folder that is no checkpoint, for expert files, and for a file that asks to run code.
    """
    path, found = locate(folder)
    if found == "zero":
        from ullage.checkpoint.zero import read_zero

        return read_zero(path)
    from ullage.errors import CheckpointError

    raise CheckpointError(f"cannot read the format {found}", where=str(path))


__all__ = [
    "File",
    "Fragments",
    "Group",
    "Inventory",
    "Merge",
    "Problem",
    "Slice",
    "Tensor",
    "Topology",
    "check",
    "read",
]
