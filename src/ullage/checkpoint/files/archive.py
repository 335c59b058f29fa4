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

import numpy as np
import numpy.typing as npt

from ullage.checkpoint.core.inventory import Tensor
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.files.pickling import Constant, Pickler, TensorCopy
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.core.layout import Int64

# CRC-32 of a whole from the CRC-32 of its parts.
#
# A CRC is linear: crc(A followed by B) = crc(A)·x^(8·|B|) + crc(B), over GF(2) modulo the polynomial. So each byte is
# summed once, when it is copied, and that one sum serves the record it came from (is the source intact?) and the record
# it goes to (the new archive's checksum), in any order of the parts. Source: ``crc32_combine`` of zlib.

UInt32 = npt.NDArray[np.uint32]
#: The polynomial of zip, gzip and PNG, bits reflected, without x^32.
_POLYNOMIAL = np.uint32(0xEDB88320)


def _times(a: UInt32, b: UInt32) -> UInt32:
    """a·b modulo the polynomial, elementwise; bit 31 is x^0."""
    # Schoolbook multiplication from x^0 up: ``b`` is multiplied by x in each round. The bits of a CRC are reflected, so
    # times x is a shift to the right, and the bit that falls out is x^32, which the polynomial replaces.
    product = np.zeros(np.broadcast(a, b).shape, np.uint32)
    b = b.copy()
    for bit in range(31, -1, -1):
        product ^= np.where((a >> np.uint32(bit)) & np.uint32(1), b, np.uint32(0))
        b = (b >> np.uint32(1)) ^ np.where(b & np.uint32(1), _POLYNOMIAL, np.uint32(0))
    return product


def _squares() -> list[UInt32]:
    """x^(2^k) for k = 0 .. 31; the powers repeat after that, since x^(2^32) = x."""
    table = [np.array([1 << 30], np.uint32)]
    for _ in range(31):
        table.append(_times(table[-1], table[-1]))
    return table


_SQUARES = _squares()


def _power(num_bytes: Int64) -> UInt32:
    """x^(8·num_bytes), elementwise."""
    # Most parts have one of a few sizes, so each distinct size is raised once, by square and multiply.
    distinct, back = np.unique(num_bytes, return_inverse=True)
    result = np.full(len(distinct), 1 << 31, np.uint32)
    for bit in range(int(distinct.max(initial=0)).bit_length()):
        chosen = (distinct >> bit) & 1 == 1
        if chosen.any():
            # (bit + 3): bytes are 8 = 2^3 bits. Modulo 32, because the squares repeat after 32 steps.
            result[chosen] = _times(np.broadcast_to(_SQUARES[(bit + 3) % 32], (int(chosen.sum()),)), result[chosen])
    return result[back]


def combine(crcs: Int64, num_bytes: Int64, owner: Int64) -> Int64:
    """The CRC-32 of each owner's parts, end to end.

    Part *i* has ``crcs[i]`` and ``num_bytes[i]`` and belongs to ``owner[i]``; parts of one owner stand together, in
    order. Returns int64 [max(owner) + 1].
    """
    result = np.zeros(int(owner.max(initial=-1)) + 1, np.uint32)
    if len(crcs) == 0:
        return result.astype(np.int64)
    # A part's sum is moved over the bytes that follow it within its owner; then the sums of one owner are added (XOR).
    # Parts of 3, 4 and 2 bytes, of which the first two are of one owner: ``end_of`` is [7, 7, 9], so the sum of the
    # first part is moved over the 4 bytes of the second, and the others stay.
    total = np.cumsum(num_bytes)
    last = np.concatenate([owner[1:] != owner[:-1], [True]])
    end_of = total[last][np.cumsum(np.concatenate([[0], last[:-1]]))]
    moved = _times(_power(end_of - total), crcs.astype(np.uint32))
    np.bitwise_xor.at(result, owner, moved)
    return result.astype(np.int64)


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
