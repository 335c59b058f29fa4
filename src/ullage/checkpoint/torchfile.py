"""Reads what a ``.pt`` file says about its tensors, without reading the tensors and without running its code.

A file of ``torch.save`` is a zip archive, uncompressed: ``data.pkl`` describes the objects, and each storage is a
record ``data/<key>`` whose bytes lie at an offset known from the archive's directory. So the place of every element is
known once ``data.pkl`` has been read (source: ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``).

``data.pkl`` is a program for the pickle machine, and ``torch.load(weights_only=False)`` would let it call anything.
Here every name it asks for is looked up in a short list: containers of the standard library are real, tensors become
:class:`TensorRef`, classes known from checkpoints become inert stand-ins (:class:`Inert`) that only remember what they
were given, and every other name is refused, by name.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ullage.errors import CheckpointError

#: bytes an element, by torch's name of the dtype
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items() if name != "UntypedStorage"}

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True, slots=True)
class Record:
    """One storage in a file: where its bytes begin, how many there are, and the CRC-32 that the archive holds."""

    offset: int
    num_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a file, not read: ``start`` is its first element in the record of storage ``storage``."""

    storage: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    contiguous: bool

    @property
    def numel(self) -> int:
        number = 1
        for dim in self.shape:
            number *= dim
        return number

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


class _InertType(type):
    """Tells ``cls(*args)`` (REDUCE) from ``cls.__new__(cls, *args)`` (NEWOBJ), which a writer must repeat as it was."""

    def __call__(cls, *args: Any) -> Any:
        made: Any = cls.__new__(cls, *args)  # pyright: ignore[reportCallIssue, reportArgumentType]
        made.called = True
        return made


class Inert(metaclass=_InertType):
    """Stands in for an object of a class that is not imported: remembers its arguments, state and items."""

    module: str = ""
    name: str = ""
    called: bool
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any) -> Inert:
        made = object.__new__(cls)
        made.called, made.args, made.state, made.items = False, args, None, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}{self.args}>"

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute of the object as it was saved."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class Named:
    """A value that is only a name, such as ``torch.float32``."""

    module: str
    name: str


class Size(tuple):
    """``torch.Size``."""


class _Refused(Exception):
    """A name that no checkpoint needs. Holds the name."""


def _rebuild_tensor(storage: Any, start: int, size: Any, stride: Any, *rest: Any) -> TensorRef:
    if not isinstance(storage, tuple) or len(storage) != 2:
        raise pickle.UnpicklingError("a tensor without a storage")
    key, dtype = storage
    if len(rest) >= 3 and isinstance(rest[2], Named) and rest[2].name in ITEM_BYTES:  # v3: the dtype stands apart
        dtype = rest[2].name
    expected, contiguous = 1, True
    for dim, step in zip(reversed(size), reversed(stride)):
        contiguous = contiguous and (dim == 1 or step == expected)
        expected *= dim
    return TensorRef(key, dtype, start, Size(size), contiguous or expected == 0)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes of its own, which are left out."""
    if function not in (_rebuild_tensor, _rebuild_parameter):
        raise _Refused(f"torch._tensor._rebuild_from_type_v2 with {function!r}")
    return function(*args)


def _encode(text: str, encoding: str = "utf-8", *_: Any) -> bytes:
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise _Refused(f"_codecs.encode to {encoding!r}")
    return text.encode(encoding)


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    return cls.__new__(cls)


_REAL: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("torch", "Size"): Size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("_codecs", "encode"): _encode,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copy_reg", "_reconstructor"): _reconstructor,
}
for _type in (set, frozenset, dict, list, tuple, int, float, str, bytes, bytearray, complex, bool, object, slice):
    _REAL["builtins", _type.__name__] = _REAL["__builtin__", _type.__name__] = _type

#: Names that become stand-ins. A package in ``_CLASSES_OF`` may only name classes, which are written in CapWords.
_INERT = {
    ("torch", "device"), ("torch.serialization", "_get_layout"), ("torch", "Generator"), ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"), ("torch.storage", "TypedStorage"), ("argparse", "Namespace"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"), ("numpy", "dtype"), ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "scalar"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("types", "SimpleNamespace"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), ("enum", "Enum"),
    ("datetime", "datetime"), ("datetime", "timedelta"),
}  # fmt: skip
_CLASSES_OF = ("deepspeed", "megatron", "transformers", "accelerate", "torch.distributed.checkpoint.metadata")

_stand_ins: dict[tuple[str, str], type] = {}


def _resolve(module: str, name: str) -> Any:
    """What a pickle gets when it asks for ``module.name``. Raises ``_Refused``; imports nothing."""
    found = _REAL.get((module, name))
    if found is not None:
        return found
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return Named("torch", name)
    if module == "torch" and (name in ITEM_BYTES or name in ("strided", "per_tensor_affine")):
        return Named(module, name)
    known_class = (
        (module in _CLASSES_OF or module.partition(".")[0] in _CLASSES_OF)
        and name.isidentifier()
        and name[:1].isupper()
    )
    if (module, name) not in _INERT and not known_class:
        raise _Refused(f"{module}.{name}")
    stand_in = _stand_ins.get((module, name))
    if stand_in is None:
        stand_in = type(name, (Inert,), {"module": module, "name": name})
        _stand_ins[module, name] = stand_in
    return stand_in


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _resolve(module_name, global_name)

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], Named):
            raise pickle.UnpicklingError(f"an unknown kind of storage: {pid!r}")
        return str(pid[2]), _STORAGES[pid[1].name]


@dataclass
class TorchFile:
    """What one ``.pt`` file holds: ``root``, its objects with :class:`TensorRef` for tensors, and its records."""

    path: str
    num_bytes: int
    root: Any
    records: dict[str, Record] = field(repr=False)
    #: False when the file was saved without checksums (``torch.serialization.set_crc32_options(False)``).
    has_crcs: bool = True

    def place(self, tensor: TensorRef) -> int:
        """The byte offset of the tensor's first element. Raises ``CheckpointError`` when the file cannot hold it."""
        record = self.records.get(tensor.storage)
        if record is None and tensor.numel == 0:
            return 0
        first = tensor.start * ITEM_BYTES[tensor.dtype]
        if record is None or first + tensor.num_bytes > record.num_bytes or not tensor.contiguous:
            what = (
                "a tensor is not contiguous" if record and not tensor.contiguous else "a tensor lies outside its file"
            )
            raise CheckpointError(
                what,
                where=f"{self.path}, storage {tensor.storage}",
                expected=f"{first + tensor.num_bytes} bytes",
                found=f"{record.num_bytes if record else 0} bytes",
            )
        return record.offset + first


class _Part(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, fd: int, base: int, size: int) -> None:
        self._fd, self._base, self._size, self._at = fd, base, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if self._at < 0:
            raise OSError(22, "negative seek position")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        done = os.preadv(self._fd, [view], self._base + self._at) if len(view) else 0
        self._at += done
        return done


def read_torch_file(path: str | os.PathLike[str], base: int = 0, num_bytes: int | None = None) -> TorchFile:
    """Reads the description in a ``.pt`` file, no tensor data. ``base`` and ``num_bytes``: an archive within a file.

    Raises ``CheckpointError`` for a file that is missing, truncated, corrupted, not of ``torch.save`` (1.6 or newer),
    or that asks for a name outside the list, which is how a pickle runs code.
    """
    path = os.fspath(path)
    with _as_checkpoint_error(path), open(path, "rb", buffering=0) as raw:
        size = os.fstat(raw.fileno()).st_size
        part = _Part(raw.fileno(), base, size - base if num_bytes is None else num_bytes)
        with zipfile.ZipFile(io.BufferedReader(part, 1 << 16)) as archive:
            return _read_archive(path, raw, archive, base)


def read_pickle(path: str | os.PathLike[str]) -> Any:
    """A plain pickle without tensors, under the same rules. Raises ``CheckpointError``."""
    path = os.fspath(path)
    with _as_checkpoint_error(path), open(path, "rb") as stream:
        return _Unpickler(stream).load()


@contextmanager
def _as_checkpoint_error(path: str) -> Iterator[None]:
    try:
        yield
    except _Refused as refused:
        raise CheckpointError(
            f"refused: the file wants to call {refused}, and a checkpoint has no need of it",
            where=path,
            hint="do not load this file with torch.load either, unless you know who wrote it",
        ) from None
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError("a file is missing", where=path) from None
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror or error}", where=path) from error
    except Exception as error:
        raise CheckpointError(
            "truncated, corrupted, or not a file of torch.save",
            where=path,
            found=f"{os.path.getsize(path)} bytes; {type(error).__name__}: {error}",
            hint="copy the file again from where it was saved",
        ) from error


def _read_archive(path: str, raw: io.FileIO, archive: zipfile.ZipFile, base: int) -> TorchFile:
    infos = {info.filename.partition("/")[2] or info.filename: info for info in archive.infolist()}
    if "data.pkl" not in infos:
        raise CheckpointError("not a file of torch.save: it has no data.pkl", where=path)
    fd, size = raw.fileno(), os.fstat(raw.fileno()).st_size
    records = {n: _record(path, fd, size, info, base) for n, info in infos.items() if not n.startswith(".data/")}
    version = records.get("version")
    has_crcs = version is None or zlib.crc32(os.pread(fd, version.num_bytes, version.offset)) == version.crc
    if "byteorder" in records and os.pread(fd, 6, records["byteorder"].offset) != b"little":
        raise CheckpointError("the file was saved on a big-endian machine", where=path)
    program = os.pread(fd, records["data.pkl"].num_bytes, records["data.pkl"].offset)
    if has_crcs and zlib.crc32(program) != records["data.pkl"].crc:
        raise CheckpointError("corrupted: the description of the tensors fails its checksum", where=path)
    storages = {name[5:]: record for name, record in records.items() if name.startswith("data/")}
    return TorchFile(path, size, _Unpickler(io.BytesIO(program)).load(), storages, has_crcs)


def _record(path: str, fd: int, size: int, info: zipfile.ZipInfo, base: int) -> Record:
    header = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, base + info.header_offset))
    if header[0] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("a record of the file is damaged or compressed", where=f"{path}, {info.filename}")
    offset = base + info.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
    if offset + info.file_size > size:
        raise CheckpointError(
            "truncated",
            where=f"{path}, {info.filename}",
            expected=f"at least {offset + info.file_size} bytes",
            found=f"{size} bytes",
        )
    return Record(offset, info.file_size, info.CRC)


def as_number(value: Any, file: TorchFile) -> int | float | bool | None:
    """A Python number, or a tensor of one element read from the file; None when it is neither."""
    if isinstance(value, (int, float)):
        return value
    codes = {"float32": "f", "float64": "d", "int64": "q", "int32": "i", "float16": "e", "bool": "?", "uint8": "B"}
    if not isinstance(value, TensorRef) or value.numel != 1 or value.dtype not in codes:
        return None
    with open(file.path, "rb") as stream:
        stream.seek(file.place(value))
        return struct.unpack("<" + codes[value.dtype], stream.read(ITEM_BYTES[value.dtype]))[0]


def read_bytes(file: TorchFile, tensor: TensorRef) -> bytes:
    """The bytes of a small tensor."""
    with open(file.path, "rb") as stream:
        stream.seek(file.place(tensor))
        return stream.read(tensor.num_bytes)
