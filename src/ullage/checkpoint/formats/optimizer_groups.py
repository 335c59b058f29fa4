"""Parameter groups of an optimizer by name, from the inventory of any format: what every writer of state begins with.

Formats save groups in different ways: by names (DCP), by number (``optimizer.pt``), or as one flat buffer per group
(ZeRO). The order of the names is that of the optimizer that saved them, and ZeRO lays parameters out in it: an engine
that loads such shards must have its groups in the same order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ullage.checkpoint.files.pickling import Constant
from ullage.checkpoint.files.torchfile import read_bytes
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import Inventory, Tensor
from ullage.checkpoint.zero.details import Details, kept_by_group
from ullage.errors import CheckpointError

#: Entries of a group that list its parameters.
LISTING = ("params", "param_names")


@dataclass(frozen=True, eq=False)
class OptimizerGroup:
    """One parameter group.

    Attributes:
        names: its parameters, in the optimizer's order.
        settings: hyperparameters, without the listing of the parameters.
        step: the step that its parameters are at; None where the optimizer counts none.
        step_dtype: dtype of the step as it was saved; None for a Python number.
        kept: state beside the step that is the same for all of its parameters.
    """

    names: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    step: Any = None
    step_dtype: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def optimizer_groups(inventory: Inventory) -> list[OptimizerGroup]:
    """The groups of the optimizer that saved the inventory; ``[]`` where the files do not tell them.

    Raises ``CheckpointError`` for a group that names what is no parameter, or two groups with one parameter.
    """
    details = inventory.details
    if not isinstance(details, Details) or not details.param_groups:
        return []
    listed = _listed(inventory, details)
    kept = kept_by_group(details)
    found = []
    for index, settings in enumerate(details.param_groups):
        step, dtype = details.steps.get(index, (None, None))
        others = {key: setting(value, key, details) for key, value in settings.items() if key not in LISTING}
        found.append(OptimizerGroup(tuple(listed[index]), others, step, dtype, kept.get(index, {})))
    held = {tensor.name for tensor in inventory.tensors if tensor.kind == "parameter"}
    counts = Counter(name for group in found for name in group.names)
    strange = sorted(name for name, count in counts.items() if count > 1 or name not in held)
    if strange:
        raise CheckpointError(
            "a group of the optimizer names what is not one of its parameters alone",
            where=f"{inventory.folder}, parameter {strange[0]}",
            hint="the weights can be converted without the optimizer: --weights-only",
        )
    return found


def _listed(inventory: Inventory, details: Details) -> list[list[str]]:
    """The names of each group: as the files list them, else in the order of the tensors."""
    count = len(details.param_groups)
    if details.names is not None:
        return [*details.names, *[[] for _ in range(count - len(details.names))]]
    found: list[list[str]] = [[] for _ in range(count)]
    for tensor in inventory.tensors:
        if tensor.kind == "parameter" and tensor.key == "fp32" and tensor.group is not None and tensor.group < count:
            found[tensor.group].append(tensor.name)
    return found


def setting(value: Any, name: str, details: Details) -> Any:
    """A hyperparameter as it was saved; one that is a tensor (a rate that a graph reads) with its value."""
    if not isinstance(value, TensorRef):
        return value
    source = details.settings_file or next((shard.source for shard in details.shards.values()), None)
    if source is None or not value.contiguous:
        raise CheckpointError("a setting of the optimizer cannot be written", where=name, found="a tensor")
    return Constant(value.dtype, tuple(value.shape), read_bytes(source, value))


def states_by_name(inventory: Inventory) -> dict[str, dict[str, Tensor]]:
    """State tensors of each trained parameter by key, without the weights."""
    found: dict[str, dict[str, Tensor]] = {}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter" and tensor.key != "fp32":
            found.setdefault(tensor.name, {})[tensor.key] = tensor
    return found


def known_buffers(inventory: Inventory) -> list[str] | None:
    """Names of buffers, to be written beside tensors that no optimizer holds; None where there is nothing to say."""
    details = inventory.details
    untrained = [tensor for tensor in inventory.tensors if tensor.kind != "parameter"]
    if not untrained or not isinstance(details, Details) or not details.buffers_known:
        return None
    return [tensor.name for tensor in untrained if tensor.kind == "buffer"]
