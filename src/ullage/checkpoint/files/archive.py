"""Layout of ``.pt`` files that ``torch.load`` reads, composed without torch and before the tensors are there.

The layout of the archive (see ``torchfile``) follows from the sizes alone, so everything but the tensors' bytes is
composed first: headers, the pickle program, the directory. The bytes are then copied to the offsets left for them, by
any process, in any order, and their checksums are filled in last. Records start at multiples of 64, as torch
writes them. Files beyond 4 GiB use zip64.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ullage.checkpoint.dtypes import ITEM_BYTES, STORAGE_OF
from ullage.checkpoint.files.unpickling import TYPES, Inert, Named, Size, TensorRef
from ullage.checkpoint.inventory import Tensor
from ullage.errors import CheckpointError

#: Bytes; counted from the beginning of the archive, also where the archive lies within a file, as torch counts.
_ALIGNMENT = 64
#: The marker in a 32-bit field of a zip file for "the number is in the zip64 field".
_LIMIT = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Payload:
    """A tensor's bytes in a target file: from ``offset``, as ``dtype``; its CRC-32 goes to each of ``crc_at``."""

    tensor: Tensor
    offset: int
    dtype: str
    crc_at: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Target:
    """A file to be written, or a plain copy of a source file.

    Attributes:
        name: relative to the target's folder.
        num_bytes: its size, known before anything is copied.
        payloads: tensors to be copied into it.
        texts: all other bytes, as (offset, bytes) in the order of offsets: headers, descriptions, directory.
        copy_of: number of the source file that it is a copy of; then there is nothing else in it.
        root: of an archive, its content as a loader must find it.
        stored: turns references to tensors of other files in ``root`` into tensors to copy.
    """

    name: str
    num_bytes: int
    payloads: tuple[Payload, ...] = ()
    texts: tuple[tuple[int, bytes], ...] = ()
    copy_of: int | None = None
    root: Any = None
    stored: Callable[[TensorRef], TensorCopy] | None = None


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


@lru_cache(1 << 14)
def _integer(value: int) -> bytes:
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
    pickler = _Pickler(None)
    pickler._name(module, name)
    pickler._sequence(b"(", args, b"t")
    return b"".join(pickler.parts) + b"R"


class _Pickler:
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
        elif kind in (set, frozenset):
            self._call("builtins", kind.__name__, (sorted(value, key=self._order),))
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
        return f"~{type(value).__name__}", _Pickler(self._stored, self._limit or 1 << 20).dump(value)

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
        # Numbers that are equal and of different types (1, True) must not share an entry of the cache.
        if all(
            type(a) is int or type(a) is str for a in (args[0] if len(args) == 1 and type(args[0]) is tuple else args)
        ):
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
    return _Pickler(None).dump(value)


def is_writable(value: Any, limit: int) -> bool:
    """Whether ``value`` can be written. Raises ``CheckpointError`` for one that contains itself."""
    try:
        _Pickler(lambda ref: TensorCopy(_somewhere(ref), ref.dtype), limit).dump(value)
    except Unwritable:
        return False
    return True


def _somewhere(ref: TensorRef) -> Tensor:
    return Tensor("", "", tuple(ref.shape), ref.dtype, "buffer", ())


def archive(
    name: str,
    root: Any,
    stored: Callable[[TensorRef], TensorCopy] | None = None,
    base: int = 0,
    stem: str = "archive",
    limit: int | None = None,
) -> Target:
    """The target file of ``torch.save(root)``.

    Args:
        name: of the file, relative to the target's folder.
        root: the content; its tensors are :class:`Constant`, :class:`TensorCopy`, or ``TensorRef``.
        stored: turns a ``TensorRef`` into a :class:`TensorCopy`.
        base: bytes by which all offsets are shifted, for an archive within a file.
        stem: the folder of the records in the archive.
        limit: bytes that the description may have at most.

    Raises ``CheckpointError`` for objects that cannot be written.
    """
    # The description comes first: it also collects the tensors, in the order of their records.
    pickler = _Pickler(stored, limit)
    program = pickler.dump(root)
    fixed: list[tuple[str, bytes]] = [("data.pkl", program), ("byteorder", b"little"), ("version", b"3\n")]
    at, texts, payloads, directory = 0, [], [], []
    waiting: list[tuple[TensorCopy, int, int, int]] = []  # stream, offset of data, header, entry in the directory
    for record, data in [*fixed, *((f"data/{i}", r) for i, r in enumerate(pickler.records))]:
        stream = data if isinstance(data, TensorCopy) else None
        known = b"" if stream else data.data if isinstance(data, Constant) else data
        assert isinstance(known, bytes)
        size = stream.tensor.numel * ITEM_BYTES[stream.dtype] if stream else len(known)
        crc = 0 if stream else zlib.crc32(known)
        header, entry = _headers(f"{stem}/{record}", size, crc, at)
        texts.append((base + at, header + known))
        if stream is not None:
            waiting.append((stream, at + len(header), at, len(directory)))
        directory.append(entry)
        at += len(header) + size
    # The directory follows the records, and the offset of each of its entries is known once all are composed.
    starts = [at]
    for entry in directory:
        starts.append(starts[-1] + len(entry))
    ending = b"".join(directory) + _ending(len(directory), starts[-1] - at, at)
    texts.append((base + at, ending))
    # A checksum stands twice: in the header of its record (byte 14) and in its entry of the directory (byte 16).
    for stream, offset, header_at, index in waiting:
        crc_at = (base + header_at + 14, base + starts[index] + 16)
        payloads.append(Payload(stream.tensor, base + offset, stream.dtype, crc_at))
    return Target(name, at + len(ending), tuple(payloads), tuple(texts), root=root, stored=stored)


def archive_like(model: Target, name: str, root: Any, copy: TensorCopy | None = None, base: int = 0) -> Target:
    """The archive of ``root``, which is that of ``model`` but for the bytes of its one tensor, ``copy``.

    Args:
        model: what :func:`archive` laid out with ``base`` 0.
        name: of the file.
        root: the content.
        copy: the tensor, of the dtype and shape of that in ``model``; None where the model has none to copy.
        base: bytes by which all offsets are shifted.
    """
    payloads, texts = model.payloads, model.texts
    if copy is not None:
        (held,) = payloads
        crc_at = tuple(base + place for place in held.crc_at)
        payloads = (Payload(copy.tensor, base + held.offset, copy.dtype, crc_at),)
    if base:
        texts = tuple((base + offset, text) for offset, text in texts)
    return Target(name, model.num_bytes, payloads, texts, root=root)


def _headers(name: str, size: int, crc: int, at: int) -> tuple[bytes, bytes]:
    """(local header, padded so that the data is aligned; entry of the central directory) of one stored record."""
    header, rest, entry, end = _header_parts(name, size, at)
    summed = struct.pack("<L", crc)
    return header + summed + rest, entry + summed + end


@lru_cache(1 << 12)
def _header_parts(name: str, size: int, at: int) -> tuple[bytes, bytes, bytes, bytes]:
    """What stands before and after the checksum, in the local header and in the entry of the central directory."""
    path = name.encode()
    big = size >= _LIMIT
    extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
    # 30: bytes of the fixed header. 4: id and length of the extra field "FB", which torch fills with "Z" to align.
    padding = -(at + 30 + len(path) + len(extra) + 4) % _ALIGNMENT
    # Version 45 asks for zip64; flag 0x800: the name is UTF-8; method 0: stored; date 0x21: 1 January 1980.
    local = struct.pack("<4s5H", b"PK\x03\x04", 45 if big else 20, 0x800, 0, 0, 0x21)
    sizes = struct.pack("<2L", *([_LIMIT] * 2 if big else [size] * 2))
    fill = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    rest = sizes + struct.pack("<HH", len(path), len(extra) + len(fill)) + path + extra + fill
    # The directory names in its zip64 field only the numbers that do not fit 32 bits, in this order.
    far = at >= _LIMIT
    fields = ([size, size] if big else []) + ([at] if far else [])
    extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
    entry = struct.pack("<4s6H", b"PK\x01\x02", 45 if fields else 20, 45 if fields else 20, 0x800, 0, 0, 0x21)
    end = sizes + struct.pack("<5H2L", len(path), len(extra), 0, 0, 0, 0, _LIMIT if far else at) + path + extra
    return local, rest, entry, end


def _ending(count: int, size: int, at: int) -> bytes:
    """The end of the central directory of ``count`` entries in ``size`` bytes, which starts at ``at``."""
    far = b""
    if at + size >= _LIMIT or count >= 0xFFFF:
        far = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
        far += struct.pack("<4sLQL", b"PK\x06\x07", 0, at + size, 1)
    short = min(count, 0xFFFF)
    return far + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, short, short, min(size, _LIMIT), min(at, _LIMIT), 0)
