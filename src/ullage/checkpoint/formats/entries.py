"""What the writers of several formats share: an optimizer's groups by name, and single entries of files.

Formats save groups in different ways: by names (DCP), by number (``optimizer.pt``), or as one flat buffer per group
(ZeRO). The order of the names is that of the optimizer that saved them, and ZeRO lays parameters out in it: an engine
that loads such shards must have its groups in the same order.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.checkpoint.dtypes import FLOATS, NUMBER_CODES
from ullage.checkpoint.files.archive import Target, archive
from ullage.checkpoint.files.pickling import Constant, TensorCopy, is_writable
from ullage.checkpoint.files.torchfile import TorchFile, read_bytes
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import Inventory, Tensor
from ullage.checkpoint.zero.modules import whole_tensor
from ullage.checkpoint.zero.shards import ModelFile
from ullage.checkpoint.zero.states import Details, kept_by_group
from ullage.errors import CheckpointError, InputError

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


def cast_of(tensor: Tensor, dtype: str | None) -> str:
    """The dtype that a weight is written in. Raises ``InputError`` for a dtype that weights cannot be cast to."""
    if dtype is None:
        return tensor.dtype
    dtype = dtype.removeprefix("torch.")
    if dtype not in FLOATS[1:]:
        raise InputError("cannot cast weights to this dtype", expected=" or ".join(FLOATS[1:]), found=dtype)
    return dtype if tensor.dtype in FLOATS else tensor.dtype


def number(value: Any, dtype: str | None) -> Any:
    """A number as it was saved: a tensor of no dims, or a Python number."""
    if dtype is None or dtype not in NUMBER_CODES:
        return value
    code = NUMBER_CODES[dtype]
    return Constant(dtype, (), struct.pack("<" + code, value if code in "fde" else int(value)))


def described(name: str, content: Any, source: TorchFile | None, file: int, more: int = 0) -> Target:
    """An archive of what ``source`` describes. Tensors in it are carried over from there.

    Args:
        name: of the file.
        content: what it holds.
        source: the file that is described; None where nothing in ``content`` refers to one.
        file: its number in the inventory.
        more: bytes of description that ``content`` has beyond what ``source`` describes, at most.
    """

    def stored(ref: TensorRef) -> TensorCopy:
        assert source is not None
        return TensorCopy(whole_tensor("", "carried", ref, file, source), ref.dtype)

    with in_file(source):
        return archive(name, content, stored, stem=Path(name).stem, limit=_limit(source) + more)


def kept_entries(model: ModelFile) -> tuple[dict[Any, Any], list[str]]:
    """The model states that are written again, and the names of entries that cannot be, of classes that torch makes."""
    # Client state may hold objects that only torch can make. Such an entry is left out, rather than all of the states.
    limit = _limit(model.source)
    content = {k: v for k, v in model.root.items() if k not in ("frozen_param_fragments", "module")}
    left_out = [k for k, v in content.items() if not is_writable(v, limit)]
    kept = {k: v for k, v in model.root.items() if k != "frozen_param_fragments" and k not in left_out}
    return kept, [str(k) for k in left_out]


def _limit(source: TorchFile | None) -> int:
    """Most bytes of a description that is written again: an object that the source names often is written as often."""
    return (1 << 20) + 64 * (source.description_bytes if source else 0)


@contextmanager
def in_file(source: TorchFile | None) -> Iterator[None]:
    """A context in which an error that names no file names ``source``."""
    try:
        yield
    except CheckpointError as error:
        if error.where is None and source is not None:
            raise CheckpointError(
                error.what, where=source.path, expected=error.expected, found=error.found, hint=error.hint
            ) from None
        raise
