"""What the writers of several formats share: an optimizer's groups by name, and single entries of files.

Formats save groups in different ways: by names (DCP), by number (``optimizer.pt``), or as one flat buffer per group
(ZeRO). The order of the names is that of the optimizer that saved them, and ZeRO lays parameters out in it: an engine
that loads such shards must have its groups in the same order.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.core.inventory import Fragments, Inventory, Merge, Slice, Tensor
from ullage.checkpoint.core.numbers import FLOATS, NUMBER_CODES
from ullage.checkpoint.files.archive import Payload, Target, archive
from ullage.checkpoint.files.pickling import Constant, TensorCopy, is_writable
from ullage.checkpoint.files.torchfile import TorchFile, as_number, read_bytes
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats.locate import text_of
from ullage.checkpoint.zero.modules import whole_tensor
from ullage.checkpoint.zero.parallel import flatten_bands
from ullage.checkpoint.zero.shards import ModelFile, ShardFile
from ullage.checkpoint.zero.states import Details, kept_by_group
from ullage.core.errors import CheckpointError, InputError

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
        stepped: those of the names that have state; an optimizer has none of a parameter that it has not stepped.
    """

    names: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    step: Any = None
    step_dtype: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    stepped: tuple[str, ...] = ()


def optimizer_groups(inventory: Inventory, *, needed_by: str | None = None, hint: str = "") -> list[OptimizerGroup]:
    """The groups of the optimizer that saved the inventory; ``[]`` where the files do not tell them.

    Raises ``CheckpointError`` with ``hint`` for none where ``needed_by`` names a format, for a group that names what is
    no parameter, and for two groups with one parameter.
    """
    details = Details.of(inventory)
    count = len(details.param_groups)
    # As the files list them, else in the order of the tensors.
    listed = [*(details.names or []), *([] for _ in range(count))]
    for tensor in inventory.tensors if details.names is None else ():
        if tensor.kind == "parameter" and tensor.key == "fp32" and tensor.group is not None and tensor.group < count:
            listed[tensor.group].append(tensor.name)
    kept, states = kept_by_group(details), states_by_name(inventory)
    found = []
    for index, settings in enumerate(details.param_groups):
        step, dtype = details.steps.get(index, (None, None))
        others = {key: setting(value, key, details) for key, value in settings.items() if key not in LISTING}
        names = tuple(listed[index])
        stepped = tuple(name for name in names if name in states) or names  # of an optimizer that counts alone, all
        found.append(OptimizerGroup(names, others, step, dtype, kept.get(index, {}), stepped))
    held = {tensor.name for tensor in inventory.tensors if tensor.kind == "parameter"}
    counts = Counter(name for group in found for name in group.names)
    strange = sorted(name for name, count in counts.items() if count > 1 or name not in held)
    if strange:
        raise CheckpointError(
            "a group of the optimizer names what is not one of its parameters alone",
            where=f"{inventory.folder}, parameter {strange[0]}",
            hint="the weights can be converted without the optimizer: --weights-only",
        )
    if needed_by is not None and not found:
        what = f"{needed_by} has the groups of an optimizer, and this one holds none"
        raise CheckpointError(what, where=str(inventory.folder), found=f"{inventory.format} without them", hint=hint)
    return found


def setting(value: Any, name: str, details: Details) -> Any:
    """A hyperparameter as it was saved; one that is a tensor (a rate that a graph reads) with its value."""
    if not isinstance(value, TensorRef):
        return value
    source = details.settings_file or next((shard.source for shard in details.shards.values()), None)
    if source is None or not value.contiguous:
        raise CheckpointError("a setting of the optimizer cannot be written", where=name, found="a tensor")
    return Constant(value.dtype, tuple(value.shape), read_bytes(source, value))


def weights_of(inventory: Inventory) -> list[Tensor]:
    """The master weights, and what no optimizer holds."""
    return [t for t in inventory.tensors if t.kind != "parameter" or t.key == "fp32"]


def states_of(inventory: Inventory) -> list[Tensor]:
    """The optimizer's tensors, without the weights."""
    return [t for t in inventory.tensors if t.kind == "parameter" and t.key != "fp32"]


def states_by_name(inventory: Inventory) -> dict[str, dict[str, Tensor]]:
    """State tensors of each trained parameter by key, without the weights."""
    found: dict[str, dict[str, Tensor]] = {}
    for tensor in states_of(inventory):
        found.setdefault(tensor.name, {})[tensor.key] = tensor
    return found


def assign_groups(
    tensors: Iterable[Tensor], group_of: dict[str, int], buffers: Container[str] = ()
) -> Iterator[Tensor]:
    """The tensors with their groups; weights that are in no group, where there are some, are frozen or buffers."""
    for tensor in tensors:
        if tensor.name in buffers and tensor.key == "fp32":
            yield replace(tensor, key="buffer", kind="buffer")
        elif group_of and tensor.kind == "parameter" and tensor.key == "fp32" and tensor.name not in group_of:
            yield replace(tensor, key="frozen", kind="frozen")
        else:
            yield replace(tensor, group=group_of.get(tensor.name))


def known_buffers(inventory: Inventory) -> list[str] | None:
    """Names of buffers, to be written beside tensors that no optimizer holds; None where there is nothing to say."""
    untrained = [tensor for tensor in inventory.tensors if tensor.kind != "parameter"]
    if not untrained or inventory.details is None or not inventory.details.buffers_known:
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


def saved_number(value: Any, source: TorchFile) -> tuple[Any, str | None]:
    """What :func:`number` takes: a number of a file, None for anything else, and the dtype of one that is a tensor."""
    return as_number(value, source), value.dtype if isinstance(value, TensorRef) else None


def text_file(name: str, text: bytes) -> Target:
    """A file of these bytes."""
    return Target(name, len(text), texts=((0, text),))


def copied_file(name: str, inventory: Inventory, number: int) -> Target:
    """A copy of a file of the source: one tensor of bytes without a name, cut at the file's records."""
    size = inventory.files[number].num_bytes
    records = inventory.records.get(number, np.zeros((0, 3), np.int64))
    bounds = np.unique([0, size, *records[:, 0], *(records[:, 0] + records[:, 1])])
    starts, lengths = bounds[:-1], np.diff(bounds)
    whole = Slice(0, (size,), Fragments(np.full_like(starts, number), starts, starts, lengths))
    return Target(name, size, (Payload(Tensor("", "bytes", (size,), "uint8", "buffer", (whole,)), 0, "uint8"),))


def small_file_targets(folder: Path, names: Iterable[str]) -> list[Target]:
    """Those of the small files that lie in the source folder or beside it, as they are."""
    texts = ((name, text_of(folder, name)) for name in names)
    return [text_file(name, text) for name, text in texts if text is not None]


def archive_again(name: str, content: Any, held: ShardFile | ModelFile | None, more: int = 0) -> Target:
    """An archive of what a file of the source describes. Tensors in it are carried over from there.

    Args:
        name: of the file.
        content: what it holds.
        held: the file that is described; None where nothing in ``content`` refers to one.
        more: bytes of description that ``content`` has beyond what ``held`` describes, at most.
    """
    source = held.source if held else None

    def stored(ref: TensorRef) -> TensorCopy:
        assert held is not None
        assert source is not None
        return TensorCopy(whole_tensor("", "carried", ref, held.file, source), ref.dtype)

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


def rows_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Rows ``[begin, end)`` along the first dim of ``tensor``, however its slices make the whole: the same bytes."""
    tensor = _flat(tensor)
    if (begin, end) == (0, tensor.shape[0]):
        return tensor
    shape = (end - begin, *tensor.shape[1:])
    item, merge = tensor.item_bytes, tensor.merge
    # Elements of each slice per row: its own, as wide as its bands, where rows lie in front of the dim that is cut.
    widths = [math.prod(shape[1:])] * len(tensor.slices)
    shapes: list[tuple[int, ...]] = [shape] * len(tensor.slices)
    if merge.kind == "columns":
        lines = merge.outer // tensor.shape[0]
        own = [merge.inner * sum(b.width for b in merge.bands if b.slice == n) for n in range(len(tensor.slices))]
        widths, shapes = [lines * width for width in own], [(lines * (end - begin), width) for width in own]
        merge = replace(merge, outer=lines * (end - begin))
    elif merge.kind == "strided":
        span = 1 + sum((d - 1) * s for d, s in zip(shape, merge.strides)) if math.prod(shape) else 0
        part = tensor.slices[0]
        first = begin * merge.strides[0]
        cut = part.fragments.window(first, first + span, item).moved(-first)
        return replace(tensor, shape=shape, slices=(Slice(part.model_rank, (span,), cut),))
    slices = [
        Slice(part.model_rank, own, part.fragments.window(begin * width, end * width, item).moved(-begin * width))
        for part, own, width in zip(tensor.slices, shapes, widths)
    ]
    return _flat(replace(tensor, shape=shape, slices=tuple(slices), merge=merge))


def _flat(tensor: Tensor) -> Tensor:
    """Slices side by side with nothing before the dim that is cut as one: their bands are stretches of the whole."""
    if tensor.merge.kind != "columns" or tensor.merge.outer != 1:
        return tensor
    fragments = flatten_bands(tensor.slices, tensor.merge, tensor.numel, tensor.item_bytes)
    whole = Slice(tensor.slices[0].model_rank, tensor.shape, fragments)
    return replace(tensor, slices=(whole,), merge=Merge())
