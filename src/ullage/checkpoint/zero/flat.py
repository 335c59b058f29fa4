"""A flat tensor of a ZeRO shard: a partition of the weights or of a state, as its file holds it."""

from __future__ import annotations

from dataclasses import dataclass

from ullage.checkpoint.numbers import ITEM_BYTES, CodedPart


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flat tensor in a file.

    Attributes:
        dtype: of its elements.
        numel: number of elements.
        offset: byte of the file at which the first lies.
        digest: of its content, for a small tensor whose length is not the partition's; else None.
        coded: how its elements are decoded, where the file holds codes of one byte.
    """

    dtype: str
    numel: int
    offset: int
    digest: str | None = None
    coded: CodedPart | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes per element in the file."""
        return ITEM_BYTES[self.dtype] if self.coded is None else 1
