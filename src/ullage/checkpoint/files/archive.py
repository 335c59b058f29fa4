"""Layout of ``.pt`` files that ``torch.load`` reads, composed without torch and before the tensors are there.

The layout of the archive (see ``torchfile``) follows from the sizes alone, so everything but the tensors' bytes is
composed first: headers, the pickle program, the directory. The bytes are then copied to the offsets left for them, by
any process, in any order, and their checksums are filled in last. Records start at multiples of 64, as torch
writes them. Files beyond 4 GiB use zip64.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ullage.checkpoint.core.inventory import Tensor
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.files.pickling import Constant, Pickler, TensorCopy
from ullage.checkpoint.files.unpickling import TensorRef

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
    """A file to be written.

    Attributes:
        name: relative to the target's folder.
        num_bytes: its size, known before anything is copied.
        payloads: tensors to be copied into it.
        texts: all other bytes, as (offset, bytes) in the order of offsets: headers, descriptions, directory.
    """

    name: str
    num_bytes: int
    payloads: tuple[Payload, ...] = ()
    texts: tuple[tuple[int, bytes], ...] = ()


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
    pickler = Pickler(stored, limit)
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
    return Target(name, at + len(ending), tuple(payloads), tuple(texts))


def archive_like(model: Target, name: str, copy: TensorCopy | None = None, base: int = 0) -> Target:
    """An archive that is ``model`` but for the bytes of its one tensor, ``copy``.

    Args:
        model: what :func:`archive` laid out with ``base`` 0.
        name: of the file.
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
    return Target(name, model.num_bytes, payloads, texts)


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
