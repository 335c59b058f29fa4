"""Reading of the description in a ``.pt`` file, without reading its tensors and without running its code.

A file of ``torch.save`` is a zip archive, uncompressed (``ziparchive``): ``data.pkl`` describes the objects
(``unpickling``), and each storage is a record ``data/<key>`` whose bytes lie at an offset known from the archive's
directory. So the place of every element is known once ``data.pkl`` has been read (source: ``torch/serialization.py``,
``caffe2/serialize/inline_container.cc``).
"""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.files.unpickling import Refused, TensorRef, Unpickler
from ullage.checkpoint.files.ziparchive import ArchiveRecord, Part, read_records
from ullage.checkpoint.numbers import ITEM_BYTES, NUMBER_CODES
from ullage.checkpoint.remote.paths import opened
from ullage.errors import CheckpointError

#: Records beside the storages that a loader reads.
_DESCRIBING = ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment")
#: A record up to this size is read whole for one number in it, so that its checksum can be compared.
_SMALL_RECORD = 1 << 20


class RefusedFile(CheckpointError):
    """A file that ends the reading of its checkpoint: it asks to run code, or it is of a kind that is not supported."""


@dataclass
class TorchFile:
    """The content of one ``.pt`` file: ``root``, its objects with :class:`TensorRef` for tensors, and its records.

    ``records`` are the storages by key; ``others`` are all other records by name. ``strangers`` are the classes and
    functions of packages that not every loader has; ``root`` has stand-ins for them.
    """

    path: str
    num_bytes: int
    root: Any
    records: dict[str, ArchiveRecord] = field(repr=False)
    #: False when the file was saved without checksums (``torch.serialization.set_crc32_options(False)``).
    has_crcs: bool = True
    others: dict[str, ArchiveRecord] = field(default_factory=dict, repr=False)
    strangers: tuple[str, ...] = ()
    #: the path that it was read from, to read more of it; a URL's knows its store
    origin: Any = field(default=None, repr=False)

    @property
    def description_bytes(self) -> int:
        """Bytes of ``data.pkl``."""
        record = self.others.get("data.pkl")
        return record.num_bytes if record else 0

    def place(self, tensor: TensorRef) -> int:
        """The byte offset of the tensor's first element; all of it lies within its record.

        Raises ``CheckpointError`` when the file cannot hold it.
        """
        record = self.records.get(tensor.storage)
        # A storage without bytes need not have a record.
        if record is None and tensor.numel == 0:
            return 0
        item = ITEM_BYTES[tensor.dtype]
        first, last = tensor.start * item, (tensor.start + tensor.span) * item
        if record is None or first < 0 or last > record.num_bytes:
            raise CheckpointError(
                "a tensor lies outside its file",
                where=f"{self.path}, storage {tensor.storage[:80]}",
                expected=f"{last} bytes",
                found=f"{record.num_bytes if record else 0} bytes",
            )
        return record.offset + first


def read_torch_file(path: str | os.PathLike[str], base: int = 0, num_bytes: int | None = None) -> TorchFile:
    """Read the description in a ``.pt`` file, no tensor data.

    ``base`` and ``num_bytes``: place of the archive where it is a part of the file, as in a distributed checkpoint.

    Raises ``CheckpointError`` for a file that is missing, truncated, corrupted, not of ``torch.save`` (1.6 or newer),
    or that asks for a function that no checkpoint needs.
    """
    where = str(path)
    with as_checkpoint_error(where), opened(path) as file:
        size = file.size
        held = size - base if num_bytes is None else num_bytes
        part = Part(where, file, base, held)
        if base < 0 or held < 0 or base + held > size:
            raise part.damaged(f"an archive at {base} in {size} bytes")
        return replace(_read_archive(part), origin=path)


def read_pickle(path: Path) -> Any:
    """A plain pickle without tensors, under the same rules. Raises ``CheckpointError``."""
    with as_checkpoint_error(str(path)), opened(path) as file:
        return Unpickler(file.pread(file.size, 0)).load()


@contextmanager
def as_checkpoint_error(path: str) -> Iterator[None]:
    """A context in which every error that damage can cause becomes one ``CheckpointError`` that names ``path``."""
    try:
        yield
    except Refused as refused:
        raise RefusedFile(
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
    except Exception as error:  # the pickle machine raises anything at all for a damaged program
        raise CheckpointError(
            "truncated, corrupted, or not a file of torch.save",
            where=path,
            found=f"{_size(path)}{type(error).__name__}: {str(error)[:200]}",
            hint="copy the file again from where it was saved",
        ) from error


def _size(path: str) -> str:
    """The size of a file as the beginning of a line; nothing for a URL."""
    try:
        return f"{os.path.getsize(path)} bytes; "
    except OSError:
        return ""


def _read_archive(part: Part) -> TorchFile:
    records = read_records(part)
    if "data.pkl" not in records:
        raise CheckpointError("not a file of torch.save: it has no data.pkl", where=part.path)
    # A file saved without checksums has zeros in their place, in all records.
    has_crcs = any(record.crc for record in records.values())
    storages = {name[5:]: record for name, record in records.items() if name.startswith("data/")}
    others = {name: record for name, record in records.items() if not name.startswith("data/")}
    # Only what describes is read; the storages, which are nearly all of the file, are not.
    part.hold((r.offset - part.base, r.num_bytes) for name, r in others.items() if name in _DESCRIBING)
    content = {
        name: part.read(record.offset - part.base, record.num_bytes)
        for name, record in others.items()
        if name in _DESCRIBING
    }
    for name, data in content.items() if has_crcs else ():
        if zlib.crc32(data) != others[name].crc:
            what = "the description of the tensors" if name == "data.pkl" else f"the record {name[:80]!r}"
            raise CheckpointError(
                f"corrupted: {what} fails its checksum",
                where=part.path,
                hint="copy the file again from where it was saved",
            )
    if content.get("byteorder", b"little") != b"little":
        raise CheckpointError("the file was saved on a big-endian machine", where=part.path)
    machine = Unpickler(content["data.pkl"])
    root = machine.load()
    if isinstance(root, type):
        raise pickle.UnpicklingError("a class instead of content")
    return TorchFile(part.path, part.size, root, storages, has_crcs, others, tuple(machine.strangers))


def as_number(value: Any, file: TorchFile) -> int | float | bool | None:
    """A Python number, or a tensor of one element read from the file; None when it is neither."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, TensorRef) or value.numel != 1 or value.dtype not in NUMBER_CODES:
        return None
    return struct.unpack("<" + NUMBER_CODES[value.dtype], read_bytes(file, value))[0]


def read_bytes(file: TorchFile, tensor: TensorRef) -> bytes:
    """The bytes of a small contiguous tensor. Raises ``CheckpointError``, also if a small record fails its checksum."""
    if not tensor.numel:
        return b""
    at, record = file.place(tensor), file.records[tensor.storage]
    with as_checkpoint_error(file.path), opened(file.origin or file.path) as stream:
        # A checksum is that of a whole record, so a number in a large one is taken without comparing it.
        if record.num_bytes > _SMALL_RECORD:
            return Part(file.path, stream, at, tensor.num_bytes).read(0, tensor.num_bytes)
        whole = Part(file.path, stream, record.offset, record.num_bytes).read(0, record.num_bytes)
        if file.has_crcs and zlib.crc32(whole) != record.crc:
            raise CheckpointError(
                "corrupted: the data fails its checksum",
                where=f"{file.path}, storage {tensor.storage[:80]}",
                hint="copy the file again from where it was saved",
            )
        return whole[at - record.offset : at - record.offset + tensor.num_bytes]
