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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.numbers import ITEM_BYTES, NUMBER_CODES
from ullage.checkpoint.core.paths import OpenFile, opened
from ullage.checkpoint.files.unpickling import Refused, TensorRef, Unpickler
from ullage.core.errors import CheckpointError

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
        theirs = type(error).__module__ not in ("builtins", "pickle", "_pickle", "struct", "zlib")
        if theirs and "://" in path:  # an object store's: no credentials, no bucket
            raise CheckpointError(f"cannot read: {error}", where=path) from error
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


# The zip directory, which is read strictly.
#
# ``torch.save`` writes records uncompressed, without comments, under one common folder. Readers of zip files differ in
# what they make of anything else: one believes the directory, another the header before the data. So a file in
# which the two differ is damaged, and a file that passes means the same to every reader.
# Source: the zip specification (APPNOTE 4.3); ``caffe2/serialize/inline_container.cc`` of torch.

# The fixed parts of a zip file, each with a signature of four bytes at its head; below, fields are taken by number:
# header before the data, entry of the directory, end of the directory, its zip64 form, and the place of that form.
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
#: What a field of 16 or 32 bits holds when the number stands in the zip64 form.
_MANY, _FAR = 0xFFFF, 0xFFFFFFFF
#: Flags that change nothing for a stored record: sizes follow the data; names are UTF-8.
_HARMLESS_FLAGS = 0x8 | 0x800
#: Bit of the external attributes (MS-DOS): the entry is a folder.
_IS_FOLDER = 0x10
#: Room for the extra fields of a header, of which alignment is up to 67 bytes: one read is enough as a rule.
_MORE = 192


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """One record: where its bytes begin in the file, how many there are, and the CRC-32 that the directory holds."""

    offset: int
    num_bytes: int
    crc: int


class Part:
    """A range of an open file, of which the last bytes (all, in a small file) are read at once."""

    def __init__(self, path: str, file: OpenFile, base: int, size: int) -> None:
        self.path, self.base, self.size = path, base, size
        self._file = file
        self._tail_at = max(0, size - file.tail_bytes)
        self._tail = file.pread(size - self._tail_at, base + self._tail_at)

    def read(self, at: int, num_bytes: int) -> bytes:
        """Bytes of the range. Raises ``CheckpointError`` where it ends first."""
        if at < 0 or num_bytes < 0 or at + num_bytes > self.size:
            raise self.damaged(f"{num_bytes} bytes at {at} in {self.size}")
        if at >= self._tail_at:
            found = self._tail[at - self._tail_at : at - self._tail_at + num_bytes]
        else:
            parts, done = [], 0
            while done < num_bytes and (got := self._file.pread(num_bytes - done, self.base + at + done)):
                parts.append(got)
                done += len(got)
            found = b"".join(parts)
        if len(found) != num_bytes:
            raise self.damaged(f"the file ends at {self.base + at + len(found)}")
        return found

    def hold(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch (place, bytes) that are about to be read at once, where the file is in a store."""
        self._file.hold((self.base + at, num_bytes) for at, num_bytes in ranges if 0 <= at < self._tail_at)

    def damaged(self, found: str) -> CheckpointError:
        """The error of a file that breaks a rule; ``found`` says which."""
        return CheckpointError(
            "truncated, corrupted, or not a file of torch.save",
            where=self.path,
            found=f"{self.size} bytes; {found}",
            hint="copy the file again from where it was saved",
        )


def read_records(part: Part) -> dict[str, ArchiveRecord]:
    """The records by name, without the common folder. Raises ``CheckpointError`` for a file that breaks a rule."""
    count, at, size = _directory(part)
    text = part.read(at, size)
    part.hold(_headers(part, text, count))
    records: dict[str, ArchiveRecord] = {}
    folder: bytes | None = None
    ends: list[tuple[int, int]] = []
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > size:
            raise part.damaged("a directory that ends too early")
        entry = _ENTRY.unpack_from(text, position)
        name_size, extra_size, comment_size = entry[10:13]
        begin = position + _ENTRY.size
        name = text[begin : begin + name_size]
        extra = text[begin + name_size : begin + name_size + extra_size]
        position = begin + name_size + extra_size
        # entry[13] is the number of the disk on which the record begins: 0 in an archive of one file.
        if entry[0] != b"PK\x01\x02" or comment_size or entry[13] or position > size:
            raise part.damaged("a damaged directory")
        head, slash, tail = name.partition(b"/")
        # torch puts every record under one folder, the stem of the archive; its readers strip it, whatever its name.
        if not slash or not tail or tail.endswith(b"/") or (folder is not None and head != folder):
            raise part.damaged(f"a record named {name[:80]!r}")
        folder = head
        record, end = _record(part, entry, name, extra)
        label = tail.decode("utf-8", "replace")
        if label in records:
            raise part.damaged(f"two records named {label[:80]!r}")
        records[label] = record
        ends.append((record.offset - part.base, end))
    if position != size:
        raise part.damaged("a directory that goes on after its last entry")
    # Records may not overlap one another or the directory.
    ends.sort()
    if any(low < end for (low, _), (_, end) in zip(ends[1:], ends)) or (ends and ends[-1][1] > at):
        raise part.damaged("records that overlap")
    return records


def _headers(part: Part, text: bytes, count: int) -> Iterable[tuple[int, int]]:
    """(place, bytes) of the headers that a directory names, as far as it can be believed; lazily."""
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > len(text):
            return
        entry = _ENTRY.unpack_from(text, position)
        name_size, extra_size, comment_size = entry[10:13]
        begin = position + _ENTRY.size + name_size
        position = begin + extra_size + comment_size
        at = _sizes(part, text[begin : begin + extra_size], [entry[8], entry[9], entry[16]])[2]
        yield at, _LOCAL.size + name_size + _MORE


def _directory(part: Part) -> tuple[int, int, int]:
    """(number of entries, where they begin, bytes of them), from the end of the file."""
    at = part.size - _END.size
    end = _END.unpack(part.read(at, _END.size))
    # end[7]: bytes of a comment, end[1] and end[2]: numbers of disks. torch writes none of them, so the end of the
    # directory is the last 22 bytes, and nothing has to be searched for.
    if end[0] != b"PK\x05\x06" or end[7] or end[1] or end[2]:
        raise part.damaged("no end of a zip directory")
    short = end[4], end[5], end[6]
    count, size, start = short
    # torch writes the zip64 form always, others only where a number does not fit.
    begin = max(0, at - _LOCATOR64.size)
    locator = _LOCATOR64.unpack(part.read(begin, at - begin).ljust(_LOCATOR64.size, b"\0"))
    if locator[0] == b"PK\x06\x07":
        before, at = at - _LOCATOR64.size, locator[2]
        far = _END64.unpack(part.read(at, _END64.size))
        count, size, start = far[7], far[8], far[9]
        # A field of the short form has the same number, or the marker. The zip64 end must reach exactly to its locator.
        same = all(a in (b, _MANY if i == 0 else _FAR) for i, (a, b) in enumerate(zip(short, far[7:])))
        whole = far[0] == b"PK\x06\x06" and far[6] == far[7] and at + 12 + far[1] == before
        if not (same and whole) or locator[1] or locator[3] > 1 or far[4] or far[5]:
            raise part.damaged("a damaged end of a zip64 directory")
    # The last test bounds ``count`` by the bytes that are there, before anyone loops over it.
    if end[3] != end[4] or start + size != at or count * _ENTRY.size > size:
        raise part.damaged(f"a directory of {count} entries in {size} bytes at {start}")
    return count, start, size


def _record(part: Part, entry: tuple, name: bytes, extra: bytes) -> tuple[ArchiveRecord, int]:
    """(the record, the end of its data in the range), where entry and header agree. Raises ``CheckpointError``."""
    flags, method, crc = entry[3], entry[4], entry[7]
    packed, size, at = _sizes(part, extra, [entry[8], entry[9], entry[16]])
    where = f"{part.path}, {name.decode('utf-8', 'replace')[:80]}"
    head = part.read(at, min(_LOCAL.size + len(name) + _MORE, part.size - at))  # with what follows it, mostly
    if len(head) < _LOCAL.size:
        raise part.damaged(f"no header at {at}")
    local = _LOCAL.unpack_from(head)
    if method or packed != size:
        raise CheckpointError("a record of the file is damaged or compressed", where=where)
    follows = bool(flags & 0x8)  # the header then leaves sizes and sum open: they stand after the data
    # Directory and header must say the same: readers differ in which of the two they believe.
    same = local[0] == b"PK\x03\x04" and local[2] == flags and local[3] == method and local[9] == len(name)
    same = same and (local[6] == crc or (follows and local[6] == 0))
    if not same or flags & ~_HARMLESS_FLAGS or entry[15] & _IS_FOLDER:
        raise CheckpointError("a record of the file is damaged or compressed", where=where)
    rest = head[_LOCAL.size : _LOCAL.size + local[9] + local[10]]
    if len(rest) < local[9] + local[10]:
        rest = part.read(at + _LOCAL.size, local[9] + local[10])
    sizes = (local[7], local[8])
    if _FAR in sizes:
        # Both must equal ``size`` below, so it does not matter in which order the two are taken from the extra field.
        sizes = tuple(_sizes(part, rest[local[9] :], [local[8], local[7]])[:2])
    if rest[: local[9]] != name or not (sizes == (size, size) or (follows and sizes == (0, 0))):
        raise CheckpointError("a record of the file is damaged or compressed", where=where)
    offset = at + _LOCAL.size + local[9] + local[10]
    if offset + size > part.size:
        raise CheckpointError(
            "truncated", where=where, expected=f"at least {offset + size} bytes", found=f"{part.size} bytes"
        )
    return ArchiveRecord(part.base + offset, size, crc), offset + size


def _sizes(part: Part, extra: bytes, values: list[int]) -> list[int]:
    """``values`` (for an entry: packed size, size, offset), those that do not fit 32 bits taken from ``extra``."""
    if _FAR not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        # Extra field 1 is zip64: 8 bytes for each number that did not fit, and only for those.
        if kind == 1:
            wide = [x[0] for x in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            order = [1, 0, *range(2, len(values))]  # size comes before packed size
            missing = [i for i in order if values[i] == _FAR]
            if len(wide) < len(missing):
                break
            for i, number in zip(missing, wide):
                values[i] = number
            return values
        at += 4 + length
    raise part.damaged("a record without its size")
