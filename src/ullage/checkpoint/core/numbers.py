"""Numbers of every dtype as bytes: dtypes by torch's names, casts that round to nearest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Bytes per element. All that torch 2.15 can save; what it packs below a byte counts per packed byte.
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "bcomplex32": 4,
    "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}  # fmt: skip

#: Dtypes that weights can be cast between.
FLOATS = ("float64", "float32", "float16", "bfloat16")

#: Storage class -> dtype. A dtype without a class of its own is saved as an ``UntypedStorage``, its name apart.
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}

#: ``struct`` codes of the dtypes of which single numbers are read and written.
NUMBER_CODES = {
    "float32": "f", "float64": "d", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?",
}  # fmt: skip

#: Names in headers of safetensors.
SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "complex64": "C64",
}  # fmt: skip

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
