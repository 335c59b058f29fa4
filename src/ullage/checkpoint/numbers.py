"""Numbers of every dtype as bytes: which are finite, and casts that round to nearest, ties to even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


#: By dtype: the unsigned integer of its size, and the bits of its exponent, which are all 1 in NaN and Inf alone.
_EXPONENTS = {"float32": (np.uint32, 0x7F800000), "float64": (np.uint64, 0x7FF0000000000000)}
_EXPONENTS |= {"float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}


def count_not_finite(chunk: Bytes, dtype: str) -> int:
    """Number of elements that are NaN or Inf; 0 for integers. One pass: a sum that is finite had only finite terms."""
    if dtype not in _EXPONENTS or not len(chunk):
        return 0
    if dtype in ("float32", "float64"):
        with np.errstate(all="ignore"):
            if np.isfinite(np.add.reduce(chunk.view(dtype))):
                return 0
    # A finite sum was proof. A sum that is not may have overflowed, so elements are counted: all bits of the exponent.
    unsigned, mask = _EXPONENTS[dtype]
    exponents = chunk.view(unsigned) & unsigned(mask)
    return int(np.count_nonzero(exponents == unsigned(mask)))


def as_floats(chunk: Bytes, dtype: str) -> npt.NDArray[np.floating]:
    """A view or copy of ``chunk`` as numbers; bfloat16 becomes float32."""
    if dtype == "bfloat16":
        return (chunk.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return chunk.view(dtype)


def from_floats(numbers: npt.NDArray[np.floating], dtype: str) -> Bytes:
    """The bytes of ``numbers`` as ``dtype``, rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(numbers.astype(dtype)).view(np.uint8)
    bits = np.ascontiguousarray(numbers.astype(np.float32)).view(np.uint32)
    # bfloat16 is the upper half: adding 0x7FFF and the last bit that stays rounds to nearest, ties to even.
    # A NaN is not rounded, which could carry it into infinity or a sign; bit 22 keeps it a (quiet) NaN.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded = np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), bits | np.uint32(0x400000), rounded)
    return (rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8)


def cast(chunk: Bytes, dtype: str, wanted: str) -> Bytes:
    """The elements of ``chunk`` in the dtype ``wanted``; ``chunk`` itself where that is its dtype already."""
    return chunk if dtype == wanted else from_floats(as_floats(chunk, dtype), wanted)
