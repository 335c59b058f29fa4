"""A packer: lengths in, bins out, in a number that the frameworks' data-parallel ranks can share."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable

from ullage.core.errors import InputError
from ullage.core.layout import Integers
from ullage.planning.lists import bins


class BinPacker:
    """Packer of sequences into as few bins as possible, with balanced work.

    Args:
        bin_capacity: most tokens in a bin.
        min_bin_count: least number of bins.
        bin_count_multiple: the number of bins is a multiple of this; each group of that many bins runs at the same
            time, one per rank.
        order, oversize: as for :func:`ullage.planning.lists.bins`.

    Raises ``InputError``, a ``ValueError``, for numbers out of range.
    """

    def __init__(
        self,
        bin_capacity: int,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        order: str = "balanced",
        oversize: str = "error",
    ) -> None:
        if min_bin_count is not None and min_bin_count < 0:
            raise InputError("min_bin_count must be nonnegative", found=min_bin_count)
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise InputError("bin_count_multiple must be positive", found=bin_count_multiple)
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count
        self.bin_count_multiple = bin_count_multiple
        self.order = order
        self.oversize = oversize

    def pack(self, sequence_lengths: Integers) -> list[list[int]]:
        """Ids of each bin, none of them empty; ``[]`` without sequences, unless a number of bins is required.

        Raises ``InputError``, a ``ValueError``, for a sequence above the capacity, and for fewer sequences than bins.
        """
        return bins(
            sequence_lengths,
            self.bin_capacity,
            ranks=self.bin_count_multiple or 1,
            least=self.min_bin_count or 0,
            order=self.order,
            oversize=self.oversize,
        )


def require_algorithm(algorithm: enum.Enum | str, names: Iterable[str]) -> str:
    """Name of an algorithm, which is a text in any case or a member of an enum. Raises ``InputError`` for another."""
    name = algorithm.name if isinstance(algorithm, enum.Enum) else str(algorithm)
    if name.upper() not in names:
        raise InputError("Unknown packing algorithm", expected=" or ".join(names), found=name)
    return name.upper()


def stand_for(module: str, name: str) -> None:
    """Make ``isinstance`` count a :class:`BinPacker` as the abstract class ``name`` of ``module``, if it is loaded."""
    theirs = getattr(sys.modules.get(module), name, None)
    if theirs is not None and not issubclass(BinPacker, theirs):
        theirs.register(BinPacker)
