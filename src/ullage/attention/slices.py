"""The slices of one packed row over a context-parallel group, and the runs of queries in them; pure, without groups.

The row is cut by :meth:`Layout.cut`, without padding: slices may differ by two tokens, and a sequence shorter than its
chunks is no special case.

The attention computes a slice as *runs* of neighbouring tokens of one sequence, each with the keys that its last token
sees. A run never looks at a key behind it, and with a window not at one too far before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ullage.layout import Int64, Layout, require_context_rank

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of queries and the keys they see.

    Keys end where the queries end: the last query sees all of them, or the last ``window``.

    Attributes:
        start: place in the whole row of each run's first query, int64 [runs]
        queries: number of queries, neighbours from ``start`` on, int64 [runs]
        keys: number of keys, from the first one that the first query sees, int64 [runs]
    """

    start: Int64
    queries: Int64
    keys: Int64

    @property
    def key_start(self) -> Int64:
        """Positions at which the keys of each run begin."""
        return self.start + self.queries - self.keys

    def pairs(self, window: int | None = None) -> int:
        """Pairs of a query and a key that it sees: the work of the attention, for one head."""
        first = self.keys - self.queries + 1  # keys that the first query of each run sees
        # Query i of a run sees first + i keys, an arithmetic series; a window stops its growth.
        if window is None:
            return int((self.queries * first + self.queries * (self.queries - 1) // 2).sum())
        growing = np.clip(window - first, 0, self.queries)  # queries that see more keys than the one before
        full = self.queries - growing
        return int((growing * first + growing * (growing - 1) // 2 + full * np.minimum(window, self.keys)).sum())


class Slices:
    """One rank's slice of a packed row, and how the others are cut.

    Plain host data; what is computed from it is kept with it, so that the layers of a forward share it. Not a
    dataclass, a mapping or a tuple, because training wrappers take those apart.

    Attributes:
        layout: of the whole row.
        indices: for each rank the places in the row of its slice, int64 [elements]; together each place once.
        rank: the rank that this slice belongs to.
        order: ``"zigzag"`` or ``"contiguous"``.
        served_by: the ``ContextParallel`` that ran the row's first layer, kept for layers that are recomputed later.
        number: number of the row among those that ``shard_batch`` has cut; 0 if it was not counted.
    """

    def __init__(self, layout: Layout, indices: list[Int64], rank: int, order: str) -> None:
        self.layout, self.indices, self.rank, self.order = layout, indices, rank, order
        self.served_by: Any = None
        self.number = 0
        self._known: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, layout: Layout, size: int, rank: int, order: str = "zigzag") -> Slices:
        """The slices of a row over ``size`` ranks, as ``rank`` sees them. Raises ``InputError`` as ``Layout.cut``."""
        require_context_rank(size, rank)
        return cls(layout, [layout.cut(size, r, order) for r in range(size)], rank, order)

    def __repr__(self) -> str:
        return (
            f"Slices(rank {self.rank} of {self.size}, {len(self.index)} of {self.layout.size} elements, {self.order})"
        )

    @property
    def size(self) -> int:
        """Number of ranks that share the row."""
        return len(self.indices)

    @property
    def index(self) -> Int64:
        """Positions of this rank's elements in the whole row, int64 [elements]."""
        return self.indices[self.rank]

    @cached_property
    def lengths(self) -> list[int]:
        """Elements of each rank's slice."""
        return [len(index) for index in self.indices]

    @cached_property
    def digest(self) -> int:
        """63 bits that tell this cut of this row from any other, the same on every machine."""
        # Slots rather than lengths: the cut and the runs treat padding as tokens. 63 bits fit into a signed int64.
        text = hashlib.blake2b(f"{self.size} {self.order}".encode(), digest_size=8)
        text.update(self.layout.slots.tobytes())
        return int.from_bytes(text.digest(), "little") >> 1

    def runs(self, rank: int, window: int | None = None) -> Runs:
        """The runs of neighbouring tokens of one sequence in a rank's slice, in the slice's order."""
        items = self.remember("items", self.layout.item_ids)
        return self.remember(("runs", rank, window), lambda: _runs(self.layout, items, self.indices[rank], window))

    def needs(self, rank: int, window: int | None = None) -> Int64:
        """The keys that a rank's queries see, places in the whole row, ascending."""

        def make() -> Int64:
            runs = self.runs(rank, window)
            # +1 where the keys of a run begin and -1 behind their end: the running sum counts the runs that see each
            # key.
            change = np.zeros(self.layout.size + 1, np.int64)
            np.add.at(change, runs.key_start, 1)
            np.add.at(change, runs.start + runs.queries, -1)
            return np.flatnonzero(np.cumsum(change[:-1]))

        return self.remember(("needs", rank, window), make)

    def remember(self, name: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make``, made once for all layers."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]


def _runs(layout: Layout, items: Int64, index: Int64, window: int | None) -> Runs:
    item = items[index]
    # A run begins where the next place in the row is not the neighbour (another chunk) or is another sequence's.
    breaks = np.ones(len(index), bool)
    breaks[1:] = (np.diff(index) != 1) | (np.diff(item) != 0)
    first = np.flatnonzero(breaks)
    queries = np.diff(np.append(first, len(index)))
    start = index[first]
    # Keys begin with the sequence, or with the first one in the window of the run's first query.
    begin = layout.starts[item[first]]
    if window is not None:
        begin = np.maximum(begin, start - window + 1)
    return Runs(start, queries, start + queries - begin)
