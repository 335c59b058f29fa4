"""Records of a ``.pt`` file, from its zip directory, which is read strictly.

``torch.save`` writes records uncompressed, without comments, under one common folder. Readers of zip files differ in
what they make of anything else: one believes the directory, another the header before the data. So a file in
which the two differ is damaged, and a file that passes means the same to every reader.
Source: the zip specification (APPNOTE 4.3), and how ``caffe2/serialize/inline_container.cc`` of torch writes and reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ullage.checkpoint.remote.paths import OpenFile
from ullage.errors import CheckpointError

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
