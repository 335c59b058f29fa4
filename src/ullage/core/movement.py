"""Movement of a batch to a device, by one function that is dispatched on the type of its argument.

Loops that ask ``hasattr(x, "to")`` or rebuild whatever looks like a tuple break on a ``PackedSequence`` (a namedtuple
whose constructor takes other arguments), on frozen dataclasses, on mappings with a constructor of their own, and on
objects whose ``to`` means something else. Here a type is known, or it is a container, which is copied and refilled
without a call of its constructor, or it is left alone. A container in which nothing moved is returned as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict, UserList, deque
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ullage.core.batch import RaggedBatch
from ullage.core.rows import remembered

T = TypeVar("T")


@functools.singledispatch
def _move(value: Any, **how: Any) -> Any:
    kind = type(value)
    if kind.__name__ == "BlockMask" and kind.__module__ == "torch.nn.attention.flex_attention":
        return value.to(how["device"])  # by name: importing flex attention costs a second that few batches need
    if dataclasses.is_dataclass(kind):
        return _refill_attributes(value, [field.name for field in dataclasses.fields(kind)], how)
    return value


def to_device(
    value: T, device: torch.device | str | int, *, non_blocking: bool = False, float_dtype: torch.dtype | None = None
) -> T:
    """``value`` with its tensors on ``device``; the argument itself is never changed.

    Args:
        value: tensors (nested ones too), ``RaggedBatch``, ``PackedSequence``, attention block masks, namedtuples,
            dataclasses, and any Mapping or Sequence of these, at any depth; strings, numbers, modules and unknown
            objects are returned as they are.
        device: a device, its name, or its index.
        non_blocking: do not wait for the device, if the memory is pinned.
        float_dtype: the dtype to which floating tensors are cast; ``None`` keeps theirs.

    Register a type of your own::

        @ullage.to_device.register(MyBatch)
        def _(value, device, *, non_blocking, float_dtype):
            return MyBatch(ullage.to_device(value.tokens, device))
    """
    return _move(value, device=torch.device(device), non_blocking=non_blocking, float_dtype=float_dtype)


def to_cuda_at_once(fields: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Fields with the host's tensors on a CUDA device, by one copy of their bytes, for which nothing waits.

    What they hold stays known on the host (:func:`ullage.core.rows.on_host`). All else is as it was.
    """
    plain = {id(each): each for each in fields.values() if type(each) is Tensor and each.is_cpu and not each.is_nested}
    if not plain or device.type != "cuda":
        return dict(fields)
    # Each at a multiple of 16 bytes, which vector loads ask for.
    parts = [each.contiguous().view(-1).view(torch.uint8) for each in plain.values()]
    host = torch.cat([nn.functional.pad(each, (0, -len(each) % 16)) for each in parts]).pin_memory()
    moved, there, start = {}, host.to(device, non_blocking=True), 0
    for key, each in plain.items():
        # Not as a view of the others: a write to one would count as a write to all.
        found, kept = (all[start : start + each.nbytes].view(each.dtype).view(each.shape).data for all in (there, host))
        moved[key], start = found, start + each.nbytes + -each.nbytes % 16
        if not each.is_floating_point():
            remembered(found, "numbers", kept.numpy)
    return {name: moved.get(id(each), each) for name, each in fields.items()}


def _register(kind: type) -> Any:
    def decorate(function: Any) -> Any:
        _move.register(kind, lambda value, *, device, **how: function(value, device, **how))
        return function

    return decorate


to_device.register = _register  # pyright: ignore[reportFunctionMemberAccess]


@_move.register
def _(value: Tensor, *, device: torch.device, non_blocking: bool, float_dtype: torch.dtype | None) -> Tensor:
    dtype = float_dtype if float_dtype is not None and value.is_floating_point() else value.dtype
    return value.to(device=device, dtype=dtype, non_blocking=non_blocking)


@_move.register
def _(value: RaggedBatch, **how: Any) -> RaggedBatch:
    return value.map(lambda tensor: _move(tensor, **how))


@_move.register
def _(value: PackedSequence, **how: Any) -> PackedSequence:
    """``batch_sizes`` stays on the CPU, where every recurrent kernel reads it."""
    data, sorted_indices, unsorted_indices = (
        _move(part, **how) for part in (value.data, value.sorted_indices, value.unsorted_indices)
    )
    return PackedSequence(data, value.batch_sizes, sorted_indices, unsorted_indices)


for _kind in (str, bytes, bytearray, memoryview, range, Set, nn.Module):
    _move.register(_kind, lambda value, **how: value)


@_move.register
def _(value: tuple, **how: Any) -> tuple:
    moved = [_move(item, **how) for item in value]
    if _same(moved, value):
        return value
    # Past the constructor: a namedtuple's takes its fields one by one, and a subclass may take anything.
    rebuilt = tuple.__new__(type(value), moved)
    if hasattr(value, "__dict__"):
        rebuilt.__dict__.update(vars(value))
    return rebuilt


@_move.register
def _(value: Mapping, **how: Any) -> Mapping:
    # It cannot be copied or refilled; a new one shows the moved items.
    if isinstance(value, MappingProxyType):
        return MappingProxyType(_move(dict(value), **how))
    # Only a copy of these is known to have items of its own; others are rebuilt from their attributes.
    if not isinstance(value, (dict, UserDict)):
        return _refill_attributes(value, _attributes(value), how)
    moved = {key: _move(item, **how) for key, item in value.items()}
    if _same(moved.values(), value.values()):
        return value
    # A shallow copy keeps the type, a default factory, and attributes; then each item is replaced.
    rebuilt = copy.copy(value)
    for key, item in moved.items():
        rebuilt[key] = item
    return rebuilt


@_move.register
def _(value: Sequence, **how: Any) -> Sequence:
    if not isinstance(value, (list, deque, UserList)):
        return _refill_attributes(value, _attributes(value), how)
    moved = [_move(item, **how) for item in value]
    if _same(moved, value):
        return value
    rebuilt = copy.copy(value)
    for i, item in enumerate(moved):
        rebuilt[i] = item
    return rebuilt


def _attributes(value: Any) -> list[str]:
    """The names of an object's attributes, in its dict and its slots."""
    # ``__slots__`` may be one string, and every base class adds its own.
    slots = [base.__dict__.get("__slots__", ()) for base in type(value).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [*getattr(value, "__dict__", ()), *(name for name in names if name not in ("__dict__", "__weakref__"))]


def _same(moved: Any, original: Any) -> bool:
    return all(new is old for new, old in zip(moved, original))


def _refill_attributes(value: Any, names: list[str], how: dict[str, Any]) -> Any:
    """A copy with the named attributes moved and everything else kept, its type and being frozen included."""
    moved = {name: _move(getattr(value, name), **how) for name in names if hasattr(value, name)}
    if all(new is getattr(value, name) for name, new in moved.items()):
        return value
    # ``object.__setattr__`` passes by a frozen dataclass, whose own refuses.
    rebuilt = copy.copy(value)
    for name, item in moved.items():
        object.__setattr__(rebuilt, name, item)
    return rebuilt
