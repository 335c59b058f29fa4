"""Writes ``.pt`` files that ``torch.load`` reads, without torch and before the tensors are there.

The layout of the archive (see ``torchfile``) follows from the sizes alone, so everything but the tensors' bytes is
composed first: headers, the pickle program, the directory. The bytes are then copied to the offsets left for them, by
anyone, in any order, and their checksums are filled in last. Records start at multiples of 64, as torch writes them.
Files beyond 4 GiB use zip64.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ullage.checkpoint.inventory import Tensor
from ullage.checkpoint.torchfile import ITEM_BYTES, STORAGE_OF, Inert, Named, Size, TensorRef
from ullage.errors import CheckpointError

_ALIGNMENT = 64
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
    """A file to be written: fixed ``texts`` at offsets, and payloads; or a plain copy of source file ``copy_of``."""

    name: str
    num_bytes: int
    payloads: tuple[Payload, ...] = ()
    texts: tuple[tuple[int, bytes], ...] = ()
    copy_of: int | None = None


@dataclass(frozen=True)
class Constant:
    """A small tensor whose bytes are known now."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, eq=False)
class Stream:
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
class Call:
    """A value that a function of another package makes when it is loaded."""

    module: str
    name: str
    args: tuple[Any, ...]


class _Pickler:
    """Protocol 2, for the few types that checkpoints hold."""

    def __init__(self, stored: Callable[[TensorRef], Stream] | None) -> None:
        self.parts: list[bytes] = []
        self.records: list[Constant | Stream] = []
        self._stored = stored

    def dump(self, value: Any) -> bytes:
        self.parts.append(b"\x80\x02")
        self._save(value)
        self.parts.append(b".")
        return b"".join(self.parts)

    def _save(self, value: Any) -> None:
        write = self.parts.append
        if value is None:
            write(b"N")
        elif value is True or value is False:
            write(b"\x88" if value else b"\x89")
        elif type(value) is int:
            self._integer(value)
        elif type(value) is float:
            write(b"G" + struct.pack(">d", value))
        elif type(value) is str:
            data = value.encode("utf-8", "surrogatepass")
            write(b"X" + struct.pack("<I", len(data)) + data)
        elif type(value) in (bytes, bytearray):
            self._call("_codecs", "encode", (bytes(value).decode("latin1"), "latin1"))
        elif type(value) is tuple:
            self._sequence(b"(", value, b"t")
        elif type(value) is Size:
            self._call("torch", "Size", (tuple(value),))
        elif isinstance(value, (set, frozenset)):
            self._call("__builtin__", type(value).__name__, (sorted(value, key=repr),))
        elif isinstance(value, dict):
            self._mapping(value)
        elif isinstance(value, list):
            self._sequence(b"](", value, b"e")
        elif isinstance(value, type) and issubclass(value, Inert):
            self._name(value.module, value.name)
        elif isinstance(value, type) and value in (dict, list, int, float, set, str, tuple, bool):
            self._name("__builtin__", value.__name__)
        elif isinstance(value, Named):
            self._name(value.module, value.name)
        elif isinstance(value, Call):
            self._call(value.module, value.name, value.args)
        elif isinstance(value, complex):
            self._call("__builtin__", "complex", (value.real, value.imag))
        elif isinstance(value, Inert):
            self._inert(value)
        elif isinstance(value, Instance):
            self._name(value.module, value.name)
            write(b")\x81")
            self._save(value.state)
            write(b"b")
        elif isinstance(value, (Constant, Stream, TensorRef)):
            self._tensor(value)
        else:
            raise CheckpointError("cannot write an object of this type", found=type(value).__name__)

    def _integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.parts.append(b"K" + bytes([value]))
        elif -(2**31) <= value < 2**31:
            self.parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.parts.append(b"\x8a" + bytes([len(data)]) + data)

    def _sequence(self, opening: bytes, values: Any, closing: bytes) -> None:
        self.parts.append(opening)
        for value in values:
            self._save(value)
        self.parts.append(closing)

    def _items(self, items: Any) -> None:
        self.parts.append(b"(")
        for key, value in items:
            self._save(key)
            self._save(value)
        self.parts.append(b"u")

    def _mapping(self, value: dict[Any, Any]) -> None:
        if isinstance(value, OrderedDict):
            self._call("collections", "OrderedDict", ())
        elif isinstance(value, defaultdict):
            self._call("collections", "defaultdict", (value.default_factory,))
        else:
            self.parts.append(b"}")
        self._items(value.items())

    def _name(self, module: str, name: str) -> None:
        self.parts.append(f"c{module}\n{name}\n".encode())

    def _call(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        self._name(module, name)
        self._save(args)
        self.parts.append(b"R")

    def _inert(self, value: Inert) -> None:
        self._name(value.module, value.name)
        self._save(value.args)
        self.parts.append(b"R" if value.called else b"\x81")
        if value.items and isinstance(value.items[0], tuple):
            self._items(value.items)
        elif value.items:
            self._sequence(b"(", value.items, b"e")
        if value.state is not None:
            self._save(value.state)
            self.parts.append(b"b")

    def _tensor(self, value: Constant | Stream | TensorRef) -> None:
        if isinstance(value, TensorRef):
            assert self._stored is not None, "a tensor of a file needs to know which"
            value = self._stored(value)
        shape = value.shape if isinstance(value, Constant) else value.tensor.shape
        strides, step = [], 1
        for dim in reversed(shape):
            strides.append(step)
            step *= max(1, dim)
        numel = 1
        for dim in shape:
            numel *= dim
        self._name("torch._utils", "_rebuild_tensor_v2")
        self.parts.append(b"((")
        self._save("storage")
        self._name("torch", STORAGE_OF[value.dtype])
        for item in (str(len(self.records)), "cpu", numel):
            self._save(item)
        self.parts.append(b"tQ")
        for item in (0, tuple(shape), tuple(reversed(strides)), False, OrderedDict()):
            self._save(item)
        self.parts.append(b"tR")
        self.records.append(value)


def dumps(value: Any) -> bytes:
    """The pickle of a value without tensors."""
    return _Pickler(None).dump(value)


def archive(
    name: str,
    root: Any,
    stored: Callable[[TensorRef], Stream] | None = None,
    base: int = 0,
    stem: str = "archive",
) -> Target:
    """The target file of ``torch.save(root)``; tensors in ``root`` are :class:`Constant`, :class:`Stream`, or
    ``TensorRef``, which ``stored`` turns into a stream. ``base`` shifts all offsets: an archive within a file."""
    pickler = _Pickler(stored)
    program = pickler.dump(root)
    fixed: list[tuple[str, bytes]] = [("data.pkl", program), ("byteorder", b"little"), ("version", b"3\n")]
    at, texts, payloads, directory = 0, [], [], []
    waiting: list[tuple[Stream, int, int, int]] = []  # stream, offset of data, header, entry in the directory
    for record, data in [*fixed, *((f"data/{i}", r) for i, r in enumerate(pickler.records))]:
        stream = data if isinstance(data, Stream) else None
        known = b"" if stream else data.data if isinstance(data, Constant) else data
        assert isinstance(known, bytes)
        size = stream.tensor.numel * ITEM_BYTES[stream.dtype] if stream else len(known)
        crc = 0 if stream else zlib.crc32(known)
        header, entry = _headers(f"{stem}/{record}".encode(), size, crc, at)
        texts.append((base + at, header + known))
        if stream is not None:
            waiting.append((stream, at + len(header), at, len(directory)))
        directory.append(entry)
        at += len(header) + size
    starts = [at]
    for entry in directory:
        starts.append(starts[-1] + len(entry))
    ending = b"".join(directory) + _ending(len(directory), starts[-1] - at, at)
    texts.append((base + at, ending))
    for stream, offset, header_at, index in waiting:
        crc_at = (base + header_at + 14, base + starts[index] + 16)
        payloads.append(Payload(stream.tensor, base + offset, stream.dtype, crc_at))
    return Target(name, at + len(ending), tuple(payloads), tuple(texts))


def _headers(name: bytes, size: int, crc: int, at: int) -> tuple[bytes, bytes]:
    """(local header, padded so that the data is aligned; entry of the central directory) of one stored record."""
    big = size >= _LIMIT
    extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
    padding = -(at + 30 + len(name) + len(extra) + 4) % _ALIGNMENT
    local = struct.pack("<4s5H", b"PK\x03\x04", 45 if big else 20, 0x800, 0, 0, 0x21)
    sizes = struct.pack("<3L", crc, *([_LIMIT] * 2 if big else [size] * 2))
    fill = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    header = local + sizes + struct.pack("<HH", len(name), len(extra) + len(fill)) + name + extra + fill
    far = at >= _LIMIT
    fields = ([size, size] if big else []) + ([at] if far else [])
    extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
    entry = struct.pack("<4s6H", b"PK\x01\x02", 45 if fields else 20, 45 if fields else 20, 0x800, 0, 0, 0x21)
    entry += sizes + struct.pack("<5H2L", len(name), len(extra), 0, 0, 0, 0, _LIMIT if far else at) + name + extra
    return header, entry


def _ending(count: int, size: int, at: int) -> bytes:
    """The end of the central directory, which starts at ``at``."""
    far = b""
    if at + size >= _LIMIT or count >= 0xFFFF:
        far = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
        far += struct.pack("<4sLQL", b"PK\x06\x07", 0, at + size, 1)
    short = min(count, 0xFFFF)
    return far + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, short, short, min(size, _LIMIT), min(at, _LIMIT), 0)
