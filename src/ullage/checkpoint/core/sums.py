"""CRC-32 of a whole from the CRC-32 of its parts.

A CRC is linear: crc(A followed by B) = crc(A)·x^(8·|B|) + crc(B), over GF(2) modulo the polynomial. So each byte is
summed once, when it is read, and that one sum serves the record it came from (is the source intact?) and the record it
goes to (the new archive's checksum), in any order of the parts; and a large file is summed by several threads or ranks.
Source: ``crc32_combine`` of zlib.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ullage.core.layout import Int64

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
