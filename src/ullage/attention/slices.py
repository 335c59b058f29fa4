"""How one packed row is cut over the ranks of a context-parallel group; pure, without groups.

Two orders. ``"zigzag"``: every sequence is cut into ``2·size`` chunks and rank *r* takes chunks *r* and ``2·size − 1 −
r``, so that under a causal mask the ranks have the same work. ``"contiguous"``: the row is cut into ``size`` parts
wherever that falls. Where everything divides, these are the slices of :mod:`ullage.exchange.sharding`. Where it does
not, no padding is added: chunks differ by one token, and the odd tokens of a sequence go to the ranks that come next
in turn, so that slices differ by two tokens at most and a sequence shorter than the chunks is no special case.

A slice is told to the attention as *pieces*: runs of neighbouring tokens of one sequence, each with the keys that its
last token sees. A piece never looks at a key behind it, and with a window not at one too far before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ullage.errors import InputError
from ullage.exchange.sharding import ORDERS
from ullage.layout import Int64, Layout

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of queries and the keys they see, places in the whole row, int64 [pieces].

    Queries are ``[start, start + queries)``; keys are the ``keys`` elements that end where the queries end. With a
    window the first query may see fewer of them: it never sees more than ``window``.
    """

    start: Int64
    queries: Int64
    keys: Int64

    @property
    def key_start(self) -> Int64:
        """Where the keys of each piece begin."""
        return self.start + self.queries - self.keys

    def pairs(self, window: int | None = None) -> int:
        """Pairs of a query and a key that it sees: the work of the attention, for one head."""
        first = self.keys - self.queries + 1  # keys that the first query of each piece sees
        if window is None:
            return int((self.queries * first + self.queries * (self.queries - 1) // 2).sum())
        growing = np.clip(window - first, 0, self.queries)  # queries that see more keys than the one before
        full = self.queries - growing
        return int((growing * first + growing * (growing - 1) // 2 + full * np.minimum(window, self.keys)).sum())


class Slices:
    """One rank's slice of a packed row, and how the others are cut.

    ``layout``: of the whole row; ``indices``: where in it the elements of each rank's slice stand, int64 [size] of
    [elements], together each element once. Plain host data; what is computed from it is kept with it, so the layers of
    a forward share it. ``served_by`` and ``number`` are the context's. Not a dataclass, a mapping or a tuple, because
    training wrappers take those apart.
    """

    def __init__(self, layout: Layout, indices: list[Int64], rank: int, order: str) -> None:
        self.layout, self.indices, self.rank, self.order = layout, indices, rank, order
        self.served_by: Any = None
        self.number = 0
        self._known: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        return (
            f"Slices(rank {self.rank} of {self.size}, {len(self.index)} of {self.layout.size} elements, {self.order})"
        )

    @property
    def size(self) -> int:
        """How many ranks share the row."""
        return len(self.indices)

    @property
    def index(self) -> Int64:
        """Where this rank's elements stand in the whole row, int64 [elements]."""
        return self.indices[self.rank]

    @cached_property
    def lengths(self) -> list[int]:
        """Elements of each rank's slice."""
        return [len(index) for index in self.indices]

    @cached_property
    def digest(self) -> int:
        """63 bits that tell this cut of this row from any other, the same on every machine."""
        text = hashlib.blake2b(f"{self.size} {self.order}".encode(), digest_size=8)
        text.update(self.layout.slots.tobytes())
        return int.from_bytes(text.digest(), "little") >> 1

    def pieces(self, rank: int, window: int | None = None) -> Pieces:
        """The runs of neighbouring tokens of one sequence in a rank's slice, in the slice's order."""
        items = self.remember("items", self.layout.item_ids)
        return self.remember(("pieces", rank, window), lambda: _pieces(self.layout, items, self.indices[rank], window))

    def needs(self, rank: int, window: int | None = None) -> Int64:
        """The keys that a rank's queries see, places in the whole row, ascending."""

        def make() -> Int64:
            pieces = self.pieces(rank, window)
            change = np.zeros(self.layout.size + 1, np.int64)
            np.add.at(change, pieces.key_start, 1)
            np.add.at(change, pieces.start + pieces.queries, -1)
            return np.flatnonzero(np.cumsum(change[:-1]))

        return self.remember(("needs", rank, window), make)

    def remember(self, name: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gives, made once for all layers."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]


def cut(layout: Layout, size: int, rank: int, order: str = "zigzag") -> Slices:
    """The slice of a row that context-parallel rank ``rank`` of ``size`` holds; every element is in one slice.

    Slices may be empty where the row has fewer elements than there are ranks. Raises ``InputError`` for a rank or an
    order that does not exist.
    """
    if order not in ORDERS:
        raise InputError("no such order of slices", expected=" or ".join(map(repr, ORDERS)), found=repr(order))
    if size < 1 or not 0 <= rank < size:
        raise InputError("no such context-parallel rank", expected=f"0 to {size - 1}", found=rank)
    if size == 1:
        return Slices(layout, [np.arange(layout.size)], rank, order)
    if order == "contiguous":
        cuts = layout.size * np.arange(size + 1) // size
        return Slices(layout, [np.arange(cuts[r], cuts[r + 1]) for r in range(size)], rank, order)
    lengths = _chunks(layout.slots, 2 * size)
    starts = layout.starts[:, None] + np.cumsum(lengths, 1) - lengths
    indices = []
    for r in range(size):
        mine = [r, 2 * size - 1 - r]
        indices.append(spans(starts[:, mine].reshape(-1), lengths[:, mine].reshape(-1)))
    return Slices(layout, indices, rank, order)


def _chunks(slots: Int64, count: int) -> Int64:
    """Lengths of each slot's chunks, int64 [n, count]: even, what is left over going to the chunks next in turn."""
    each, left = np.divmod(slots, count)
    first = (np.cumsum(left) - left) % count
    turn = (np.arange(count) - first[:, None]) % count
    return each[:, None] + (turn < left[:, None])


def _pieces(layout: Layout, items: Int64, index: Int64, window: int | None) -> Pieces:
    item = items[index]
    breaks = np.ones(len(index), bool)
    breaks[1:] = (np.diff(index) != 1) | (np.diff(item) != 0)
    first = np.flatnonzero(breaks)
    queries = np.diff(np.append(first, len(index)))
    start = index[first]
    begin = layout.starts[item[first]]
    if window is not None:
        begin = np.maximum(begin, start - window + 1)
    return Pieces(start, queries, start + queries - begin)


def spans(starts: Int64, lengths: Int64) -> Int64:
    """``starts[i], starts[i] + 1, ...``, ``lengths[i]`` of them for each *i*, end to end."""
    return np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
