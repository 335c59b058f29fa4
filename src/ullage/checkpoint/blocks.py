"""Values saved as codes of one byte, in blocks: an element is ``table[code] * scale`` of its block.

Every file has its own codes, scales and table: an optimizer quantises what one rank holds by itself, with blocks that
begin at the first of that rank's elements. So a fragment needs no more than its place to be decoded: how far its first
byte is from the first code of its file says which block it begins in. Any range of elements can be decoded alone.
Source: ``dequantize_blockwise`` in ``bitsandbytes/functional.py`` 0.50.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ullage.layout import Int64

Floats = npt.NDArray[np.float32]
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


def block_size(num_codes: int, num_scales: int) -> int | None:
    """Elements per scale, which the files do not say; None where no size in use gives this number of scales.

    The sizes are powers of two, so two of them give one number only where all elements are one block.
    """
    sizes = (1 << power for power in range(6, 13))
    return next((size for size in sizes if num_codes and -(-num_codes // size) == num_scales), None)
