"""Numbers of every dtype as bytes: dtypes by torch's names, casts that round to nearest, quantised states.

Optimizers of 8 bits save codes of one byte in blocks: an element is ``table[code] * scale`` of its block. A file has
its own codes, scales and table: an optimizer quantises what one rank holds by itself, with blocks that begin at the
first of that rank's elements. So a fragment needs no more than its place to be decoded: how far its first byte is from
the first code of its file says which block it begins in. Any range of elements can be decoded alone.
Source: ``dequantize_blockwise`` in ``bitsandbytes/functional.py`` 0.50.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ullage.core.layout import Int64

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

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


# Quantised states

#: Reads float32 values: ``(file, byte offset, number of values)``.
Table = Callable[[int, int, int], Floats]
#: Values of the table: one per code.
NUM_CODES = 256


@dataclass(frozen=True)
class CodedPart:
    """The codes of one file.

    Attributes:
        codes: byte of the file at which the first code lies.
        scales: byte at which the first scale lies, float32.
        table: byte at which the values of the codes lie, float32.
        num_codes: elements of the part.
        block: elements per scale, of the last block perhaps fewer.
    """

    codes: int
    scales: int
    table: int
    num_codes: int
    block: int

    @property
    def num_scales(self) -> int:
        """Number of blocks."""
        return -(-self.num_codes // self.block)


@dataclass(frozen=True, eq=False)
class CodedBlocks:
    """How the fragments of a tensor are decoded, by number of the file that holds them."""

    parts: dict[int, CodedPart]

    @staticmethod
    def join(several: list[CodedBlocks | None]) -> CodedBlocks | None:
        """Those of all; None where there are none."""
        parts = {file: part for blocks in several if blocks is not None for file, part in blocks.parts.items()}
        return CodedBlocks(parts) if parts else None

    def decode(self, file: int, offset: int, codes: npt.NDArray[np.uint8], table: Table) -> Floats:
        """The values of the ``codes`` that begin at byte ``offset`` of ``file``, float32."""
        part = self.parts[file]
        first = offset - part.codes
        blocks: Int64 = np.arange(first, first + len(codes)) // part.block
        # One multiplication in float32 per element, as the optimizer itself decodes.
        return table(file, part.table, NUM_CODES)[codes] * table(file, part.scales, part.num_scales)[blocks]


def elements_per_scale(num_codes: int, num_scales: int) -> int | None:
    """Elements per scale, which the files do not say; None where no size in use gives this number of scales.

    The sizes are powers of two, so two of them give one number only where all elements are one block.
    """
    sizes = (1 << power for power in range(6, 13))
    return next((size for size in sizes if num_codes and -(-num_codes // size) == num_scales), None)
