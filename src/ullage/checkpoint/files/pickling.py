"""Writing of the pickle program that describes a file, without torch and without the classes that it names."""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ullage.checkpoint.core.inventory import Tensor
from ullage.checkpoint.core.numbers import ITEM_BYTES, STORAGE_OF
from ullage.checkpoint.files.unpickling import TYPES, Inert, Named, Size, TensorRef
from ullage.core.errors import CheckpointError


@dataclass(frozen=True)
class Constant:
    """A small tensor whose bytes are known before the copying."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, eq=False)
class TensorCopy:
    """A tensor to be copied into the archive, as ``dtype``."""

    tensor: Tensor
    dtype: str


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of a class that is not imported, made by ``cls.__new__(cls)`` and given ``state``."""

    module: str
    name: str
    state: Any


@dataclass(frozen=True)
class FunctionCall:
    """A value that a function of another package returns when the file is loaded."""

    module: str
    name: str
    args: tuple[Any, ...]


class Unwritable(CheckpointError):
    """An object that was read as a stand-in and cannot be written back as it was."""


#: How deep a description may nest: what contains itself is deeper than anything.
_MAX_DEPTH = 200


@lru_cache(1 << 14)
def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    # Only numbers whose hash is their own are kept: of numbers with one hash, each would be compared with all.
    return _small_integer(value) if 0 <= value < 2**31 else _any_integer(value)


@lru_cache(1 << 14)
def _small_integer(value: int) -> bytes:
    return _any_integer(value)


def _any_integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


#: The instructions for values that refer to no other, by their type.
_PLAIN: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: _text,
}


@lru_cache
def _storage(dtype: str) -> bytes:
    """The call that rebuilds a tensor, up to the name of its storage."""
    own = STORAGE_OF.get(dtype)
    rebuild = _global("torch._utils", "_rebuild_tensor_v2" if own else "_rebuild_tensor_v3")
    return rebuild + b"((" + _text("storage") + _global("torch" if own else "torch.storage", own or "UntypedStorage")


@lru_cache(1 << 12)
def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


@lru_cache(1 << 12)
def _plain_call(module: str, name: str, args: tuple[Any, ...]) -> bytes:
    """A call with numbers and texts, such as a size: a description repeats few of them for many tensors."""
    pickler = Pickler(None)
    pickler._name(module, name)
    pickler._sequence(b"(", args, b"t")
    return b"".join(pickler.parts) + b"R"


class Pickler:
    """A writer of pickles of protocol 2, for the objects that a file may hold (see ``unpickling``).

    Objects that a source names several times are written several times. So that a small source cannot ask for an
    endless target, no more than ``limit`` bytes are written.
    """

    def __init__(self, stored: Callable[[TensorRef], TensorCopy] | None, limit: int | None = None) -> None:
        self.parts: list[bytes] = []
        self.records: list[Constant | TensorCopy] = []
        self._stored, self._limit = stored, limit
        self._depth = self._num_bytes = 0
        self._write: Callable[[bytes], None] = self.parts.append if limit is None else self._write_counted

    def dump(self, value: Any) -> bytes:
        """The pickle of ``value``; its tensors are in ``records``."""
        # PROTO 2, one object, STOP: the protocol of torch.save. No memo, so no instruction needs a result number.
        self._write(b"\x80\x02")
        self._save(value)
        self._write(b".")
        return b"".join(self.parts)

    def _write_counted(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._limit is not None and self._num_bytes > self._limit:
            raise CheckpointError(
                "a description repeats itself without end", expected=f"at most {self._limit} bytes", found="more"
            )
        self.parts.append(data)

    def _save(self, value: Any) -> None:
        write = self._write
        plain = _PLAIN.get(type(value))
        if plain is not None:
            write(plain(value))
            return
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CheckpointError("a description contains itself, or nests too deeply", expected=f"{_MAX_DEPTH} levels")
        if type(value) is tuple:
            self._sequence(b"(", value, b"t")
        elif isinstance(value, dict):
            self._mapping(value)
        elif isinstance(value, list):
            self._sequence(b"](", value, b"e")
        elif isinstance(value, (Constant, TensorCopy, TensorRef)):
            self._tensor(value)
        elif isinstance(value, Inert):
            self._inert(value)
        elif isinstance(value, Instance):
            self._name(value.module, value.name)
            write(b")\x81")
            self._save(value.state)
            write(b"b")
        elif isinstance(value, FunctionCall):
            self._call(value.module, value.name, value.args)
        elif isinstance(value, Named) or (isinstance(value, type) and issubclass(value, Inert)):
            self._name(value.module, value.name)
        else:
            self._builtin(value)
        self._depth -= 1

    def _builtin(self, value: Any) -> None:
        """Values that a function of the standard library makes, and the types themselves."""
        kind = type(value)
        if kind is bytes:
            self._call("_codecs", "encode", (value.decode("latin1"), "latin1"))
        elif kind is bytearray:
            self._call("builtins", "bytearray", (value.decode("latin1"), "latin1"))
        elif kind is Size:
            self._call("torch", "Size", (tuple(value),))
        elif isinstance(value, (set, frozenset)):
            kind = "set" if isinstance(value, set) else "frozenset"
            self._call("builtins", kind, (sorted(value, key=self._order),))
        elif kind is complex:
            self._call("builtins", "complex", (value.real, value.imag))
        elif kind is slice:
            self._call("builtins", "slice", (value.start, value.stop, value.step))
        elif kind is object:
            self._call("copyreg", "_reconstructor", (object, object, None))
        elif callable(value) and value in TYPES:
            self._name("builtins", TYPES[value])
        else:
            raise Unwritable("cannot write an object of this type", found=kind.__name__.strip("_"))

    def _order(self, value: Any) -> tuple[str, Any]:
        """A sorting key for the members of a set that is the same in every process, unlike the set's own order."""
        if type(value) in (int, float, str, bytes, bool):
            return type(value).__name__, value
        return f"~{type(value).__name__}", Pickler(self._stored, self._limit or 1 << 20).dump(value)

    def _sequence(self, opening: bytes, values: Any, closing: bytes) -> None:
        self._write(opening)
        for value in values:
            self._save(value)
        self._write(closing)

    def _items(self, items: Any) -> None:
        self._write(b"(")
        for key, value in items:
            self._save(key)
            self._save(value)
        self._write(b"u")

    def _mapping(self, value: dict[Any, Any]) -> None:
        if isinstance(value, OrderedDict):
            self._call("collections", "OrderedDict", ())
        elif isinstance(value, defaultdict):
            self._call("collections", "defaultdict", (value.default_factory,))
        else:
            self._write(b"}")
        self._items(value.items())

    def _name(self, module: str, name: str) -> None:
        outer, _, inner = name.rpartition(".")
        if not outer:
            self._write(_global(module, name))
            return
        self._write(b"cbuiltins\ngetattr\n(")  # a class within a class
        self._name(module, outer)
        self._save(inner)
        self._write(b"tR")

    def _call(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        # Numbers that are equal and of different types (1, True) must not share an entry of the cache, and few entries
        # may have one hash.
        inner = args[0] if len(args) == 1 and type(args[0]) is tuple else args
        if len(inner) <= 16 and all(type(a) is str or (type(a) is int and 0 <= a < 2**60) for a in inner):
            self._write(_plain_call(module, name, args))
            return
        self._name(module, name)
        self._save(args)
        self._write(b"R")

    def _inert(self, value: Inert) -> None:
        self._name(value.module, value.name)
        self._save(value.args)
        self._write(b"R" if value.called else b"\x81")
        if value.items and isinstance(value.items[0], tuple):
            self._items(value.items)
        elif value.items:
            self._sequence(b"(", value.items, b"e")
        if value.state is not None:
            self._save(value.state)
            self._write(b"b")

    def _tensor(self, value: Constant | TensorCopy | TensorRef) -> None:
        requires_grad = is_parameter = False
        if isinstance(value, TensorRef):
            if self._stored is None:
                raise Unwritable("cannot write a tensor among plain values")
            requires_grad, is_parameter = value.requires_grad, value.is_parameter
            value = self._stored(value)
        shape = value.shape if isinstance(value, Constant) else value.tensor.shape
        # Strides of a contiguous tensor, in elements; a dim of length 0 counts as 1, as in torch.
        strides, step, numel = [], 1, 1
        for dim in reversed(shape):
            strides.append(step)
            step, numel = step * max(1, dim), numel * dim
        # A dtype without a storage class of its own is named beside an untyped storage, which is counted in bytes.
        own = STORAGE_OF.get(value.dtype)
        size = numel if own else numel * ITEM_BYTES[value.dtype]
        if is_parameter:
            self._name("torch._utils", "_rebuild_parameter")
            self._write(b"(")
        # The arguments of the rebuilder: the storage as a persistent id (its tuple ends with BINPERSID), then offset,
        # shape, strides, requires_grad, hooks, and in v3 the dtype. The outer call sets a parameter's requires_grad.
        self._write(_storage(value.dtype) + _text(str(len(self.records))) + _text("cpu") + _integer(size) + b"tQ")
        dtype = () if own else (Named("torch", value.dtype),)
        inner = requires_grad and not is_parameter
        for item in (0, tuple(shape), tuple(reversed(strides)), inner, OrderedDict(), *dtype):
            self._save(item)
        self._write(b"tR")
        if is_parameter:
            for item in (requires_grad, OrderedDict()):
                self._save(item)
            self._write(b"tR")
        self.records.append(value)


def pickled(value: Any) -> bytes:
    """The pickle of a value without tensors."""
    return Pickler(None).dump(value)


def is_writable(value: Any, limit: int) -> bool:
    """Whether ``value`` can be written. Raises ``CheckpointError`` for one that contains itself."""
    try:
        Pickler(lambda ref: TensorCopy(_somewhere(ref), ref.dtype), limit).dump(value)
    except Unwritable:
        return False
    return True


def _somewhere(ref: TensorRef) -> Tensor:
    return Tensor("", "", tuple(ref.shape), ref.dtype, "buffer", ())
