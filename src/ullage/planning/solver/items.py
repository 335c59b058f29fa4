"""The data of the kernels: items, bins, and what a bin may hold.

Every array is a C-contiguous int64 array. Inside the solver an item is its place in ``Items``, a bin its place in
``Bins``.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from ullage.layout import Int64

#: An int64 array of two dimensions.
Table = Annotated[Int64, 2]
#: The bin of an item that has none yet.
NOWHERE = -1


class Items(NamedTuple):
    """Slots, cost and number of sequences of each item, each [items]."""

    slots: Int64
    costs: Int64
    counts: Int64


class SharedItems(NamedTuple):
    """Items that 1, 2, 4, ... ranks may share: ``slots`` and ``costs`` [exponents, items], summed over all ranks that
    share the item, at degree ``2**exponent``; ``counts`` [items]."""

    slots: Table
    costs: Table
    counts: Int64


class Bins(NamedTuple):
    """``home`` [items]: the bin of each item, or ``NOWHERE``; ``load``, ``held``, ``num_sequences`` [bins]: cost, slots
    and sequences of the items in each bin, kept up to date by whoever moves an item."""

    home: Int64
    load: Int64
    held: Int64
    num_sequences: Int64


class Room(NamedTuple):
    """Capacity of a bin: slots, and sequences (``NO_LIMIT`` if any number of them)."""

    capacity: int
    max_sequences: int
