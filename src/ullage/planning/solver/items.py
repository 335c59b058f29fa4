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
    """Items to place, in any order or sorted by falling cost, as the kernel says.

    Attributes:
        slots [items]: slots that each item takes.
        costs [items]: cost of each item, in the unit of the cost model.
        counts [items]: sequences in each item; 1 unless sequences are kept together.
    """

    slots: Int64
    costs: Int64
    counts: Int64


class SharedItems(NamedTuple):
    """Items that several ranks may share.

    Attributes:
        slots, costs [levels, items]: slots and cost of each item at each degree, summed over all ranks that share it.
        counts [items]: sequences in each item.
        degrees [levels]: number of ranks that share an item, rising from 1.
    """

    slots: Table
    costs: Table
    counts: Int64
    degrees: Int64


class Bins(NamedTuple):
    """Bins and the items in them. A kernel that moves an item keeps all four arrays up to date.

    Attributes:
        home [items]: the bin of each item, or ``NOWHERE``.
        load [bins]: cost of the items in each bin.
        held [bins]: slots of the items in each bin.
        num_sequences [bins]: sequences of the items in each bin.
    """

    home: Int64
    load: Int64
    held: Int64
    num_sequences: Int64


class Room(NamedTuple):
    """Capacity of a bin: slots, and sequences (``NO_LIMIT`` if any number of them)."""

    capacity: int
    max_sequences: int
