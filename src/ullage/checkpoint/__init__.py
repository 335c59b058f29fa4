"""Checkpoints for any number of ranks: read, check, convert, verify.

    inventory = ullage.checkpoint.read(folder)       # its tensors and layout; reads no tensor data, runs no code
    problems = inventory.problems()                  # [] when every tensor is whole
    report = ullage.checkpoint.convert(folder, target, format="universal")
    problems = ullage.checkpoint.verify(folder, target)
    differences = ullage.checkpoint.diff(folder, other)             # by name, state and element

Only numpy is needed: neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

from ullage.checkpoint.conversion.converting import Report, convert
from ullage.checkpoint.conversion.differing import TensorDifference, Differences, diff
from ullage.checkpoint.formats.table import read, targets
from ullage.checkpoint.core.inventory import File, Fragments, Group, Inventory, Merge, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.conversion.verifying import verify
from ullage.core.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Differences",
    "File",
    "Fragments",
    "Group",
    "Inventory",
    "Merge",
    "Problem",
    "Report",
    "Slice",
    "Tensor",
    "TensorDifference",
    "WrittenBy",
    "convert",
    "diff",
    "read",
    "targets",
    "verify",
]
