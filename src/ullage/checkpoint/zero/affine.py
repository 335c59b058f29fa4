"""The geometric description of tensor-parallel slices: ``affine_map`` of ``universal_checkpoint_info``.

A map says, by a pattern of parameter names, the shape of the whole, the shape of each rank's slice, and pieces: blocks
of elements that lie at (offset, strides) of the whole and at (offset, strides) of the slice, in elements of the flat
tensors. ``locations`` are the ranks that hold the same block. The map needs no category of layout, so it also describes
what no list of patterns can, such as a fused projection of which a part is cut and the rest is on every rank.

Where the patterns, or the usual order, say the same, their bands are read, by whole rows; else the runs of the map, one
by one. Blocks on several ranks are read from the first, and every other choice of rank is a second tensor that a
conversion compares with the first.
Source: ``deepspeed/checkpoint/affine.py`` of DeepSpeed 0.19.8 (encoding 1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ullage.checkpoint.core.inventory import Fragments, Merge, Slice
from ullage.checkpoint.files import metadata
from ullage.core.errors import CheckpointError
from ullage.core.layout import Int64

_ENTRY = "affine_map of universal_checkpoint_info"
#: The encoding of maps that is understood.
_ENCODING = 1
#: Runs of elements of one parameter: a layout of more is refused, since each costs 32 bytes.
_MAX_RUNS = 1 << 22
_NO_RUNS = np.zeros((0, 4), np.int64)


@dataclass(frozen=True)
class Piece:
    """A block of elements: of one shape in the whole and in the slice, each with an offset and strides, in elements.

    Shape and strides are folded: no dim of size 1, and no two dims that are one in both tensors.
    """

    shape: tuple[int, ...]
    whole: tuple[int, tuple[int, ...]]
    slice: tuple[int, tuple[int, ...]]
    locations: tuple[int, ...]

    def runs(self) -> Int64:
        """[n, 3] of start in the whole, start in the slice, and length, of runs that are contiguous in both."""
        # The left half of [2, 6], in a slice of [2, 3], is a shape of (2, 3) with strides (6, 1) and (3, 1): its two
        # rows are the runs (0, 0, 3) and (6, 3, 3).
        last = self.shape[-1:] if self.whole[1][-1:] == self.slice[1][-1:] == (1,) else ()
        length = last[0] if last else 1
        outer = self.shape[: len(self.shape) - len(last)]
        if math.prod(outer) > _MAX_RUNS:
            raise CheckpointError("a piece of more runs than can be held", expected=_MAX_RUNS, found=math.prod(outer))
        starts = [np.full(outer, offset, np.int64) for offset in (self.whole[0], self.slice[0])]
        for axis, size in enumerate(outer):
            along = np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(outer))])
            starts[0] += along * self.whole[1][axis]
            starts[1] += along * self.slice[1][axis]
        return np.column_stack([starts[0].reshape(-1), starts[1].reshape(-1), np.full(starts[0].size, length)])


@dataclass(frozen=True)
class AffineMap:
    """The map of one parameter: the whole, and by tensor-parallel rank the slice and its pieces."""

    shape: tuple[int, ...]
    slices: dict[int, tuple[int, ...]]
    pieces: dict[int, tuple[Piece, ...]]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole, in order."""
        numel = math.prod(self.shape)
        return len(self.slices) > 1 and all(
            len(held) == 1 and held[0].shape in ((numel,), ()) and held[0].whole == held[0].slice
            and held[0].locations == tuple(sorted(self.slices))
            for held in self.pieces.values()
        ) and all(math.prod(s) == numel for s in self.slices.values())  # fmt: skip

    @property
    def num_holders(self) -> int:
        """The most ranks that hold one piece."""
        return max((len(p.locations) for held in self.pieces.values() for p in held), default=1)

    def chosen(self, choice: int) -> list[tuple[int, Piece]]:
        """(rank, piece) of every piece once: of those that several ranks hold, from the rank of this ``choice``."""
        return [
            (rank, piece)
            for rank, held in sorted(self.pieces.items())
            for piece in held
            if rank == piece.locations[choice % len(piece.locations)]
        ]

    def fragments(self, slices: list[Slice], choice: int, item_bytes: int) -> Fragments:
        """The fragments of the whole, run by run, from those of ``slices``."""
        parts: list[Fragments] = []
        for rank, piece in self.chosen(choice):
            for whole, begin, length in piece.runs().tolist():
                found = slices[rank].fragments.window(begin, begin + length, item_bytes)
                parts.append(found.moved(whole - begin))
                if len(parts) > _MAX_RUNS:
                    raise CheckpointError("a parameter of more runs than can be held", expected=_MAX_RUNS)
        return Fragments.join(parts)


class Joint(NamedTuple):
    """The shape of the whole, how the slices make it, and the entries of a universal file beside it."""

    shape: tuple[int, ...]
    merge: Merge
    extra: dict[str, Any]


def place_by_map(
    name: str, given: AffineMap, slices: list[Slice], stated: Joint | None, usual: Callable[[], Joint]
) -> Joint | None:
    """The placement of a map, where the patterns or the usual order say the same, or all ranks hold the same.

    Args:
        name: of the parameter, for errors.
        given: its map.
        slices: those of tensor-parallel ranks 0, 1, ...
        stated: what the lists of patterns say of this parameter; None where they say nothing.
        usual: what is done where nothing is said.

    None where the map alone says it. Raises ``CheckpointError`` where the map does not fit the slices, or says
    otherwise than the patterns.
    """
    sizes = [math.prod(s.shape) for s in slices]
    described = [math.prod(given.slices[r]) if r in given.slices else -1 for r in range(len(slices))]
    if described != sizes or len(given.slices) != len(slices):
        raise CheckpointError("affine_map describes other slices", where=name, expected=described, found=sizes)
    same = stated
    if stated is None:
        with suppress(CheckpointError):
            same = usual()
    if same is not None and _is_same(given, same, slices):
        merge = Merge("replicated") if given.is_replicated else same.merge
        return Joint(given.shape, merge, same.extra)
    if stated is not None:
        kind = "replicated" if given.is_replicated else "columns"
        raise CheckpointError(
            "affine_map and the patterns of universal_checkpoint_info contradict each other",
            where=name,
            expected=f"{stated.merge.kind}, {list(stated.shape)}, as the patterns say",
            found=f"{kind}, {list(given.shape)}",
        )
    return Joint(given.shape, Merge("replicated"), {}) if given.is_replicated else None


def _is_same(given: AffineMap, stated: Joint, slices: list[Slice]) -> bool:
    """Whether the patterns place every element where the map does."""
    kind = "replicated" if given.is_replicated else "columns"
    same = math.prod(stated.shape) == math.prod(given.shape)
    if len(slices) > 1 or stated.merge.kind == "columns":
        same = same and stated.merge.kind == kind
    if same and stated.merge.kind == "columns":
        mine = np.concatenate([_with_rank(rank, piece.runs()) for rank, piece in given.chosen(0)] or [_NO_RUNS])
        same = np.array_equal(_joined_runs(mine), _joined_runs(_runs_of(stated.merge, slices)))
    return same


def _with_rank(rank: int, runs: Int64) -> Int64:
    """[n, 4] of start in the whole, rank, start in the slice, and length."""
    return np.column_stack([runs[:, 0], np.full(len(runs), rank), runs[:, 1:]])


def _runs_of(merge: Merge, slices: list[Slice]) -> Int64:
    """Runs of bands of columns, row by row, as [n, 4]."""
    rows, parts = np.arange(merge.outer), [_NO_RUNS]
    for band in merge.bands:
        width = math.prod(slices[band.slice].shape) // max(1, merge.outer)
        whole = rows * merge.size * merge.inner + band.at * merge.inner
        begin = rows * width + band.begin * merge.inner
        length = np.full(merge.outer, band.width * merge.inner)
        parts.append(_with_rank(band.slice, np.column_stack([whole, begin, length])))
    return np.concatenate(parts)


def _joined_runs(runs: Int64) -> Int64:
    """The same runs by start, those that continue one another as one."""
    # Rows are (start in the whole, rank, start in the slice, length): (0, 1, 4, 2) and (2, 1, 6, 3) become (0, 1, 4,
    # 5).
    runs = runs[runs[:, 3] > 0]
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = runs[:, [0, 2]] + runs[:, 3:]
    follows = (ends[:-1] == runs[1:, [0, 2]]).all(axis=1) & (runs[:-1, 1] == runs[1:, 1])
    first = np.flatnonzero(np.concatenate([[True], ~follows])) if len(runs) else np.zeros(0, np.int64)
    joined = runs[first].copy()
    joined[:, 3] = np.add.reduceat(runs[:, 3], first) if len(runs) else 0
    return joined


class AffineMaps:
    """The maps of a checkpoint, looked up by the name of a parameter; ``info`` is ``universal_checkpoint_info``."""

    def __init__(self, info: dict[str, Any], where: str) -> None:
        self._where = where
        entry = metadata.mapping(info.get("affine_map"), _ENTRY, where)
        encoding = metadata.integer(entry.get("version", _ENCODING), f"version of {_ENTRY}", where)
        if encoding > _ENCODING:
            raise CheckpointError(
                "affine_map is of an unknown encoding",
                where=where or None,
                expected=f"up to {_ENCODING}",
                found=encoding,
            )
        self._maps = metadata.mapping(entry.get("params"), _ENTRY, where)
        metadata.regexes(list(self._maps), _ENTRY, where)

    def find(self, name: str) -> AffineMap | None:
        """The map of a parameter, or None. Raises ``CheckpointError`` for a malformed map, or where two match."""
        found = [pattern for pattern in self._maps if re.match(pattern, name)]
        if len(found) > 1:
            raise CheckpointError("more than one pattern of affine_map matches", where=name, found=found)
        return _map(name, self._maps[found[0]], self._where) if found else None

    def empty_slice(self, name: str, rank: int) -> tuple[int, ...] | None:
        """The shape of a slice of which a rank holds no element; None where no map says so."""
        try:
            given = self.find(name)
        except CheckpointError:  # said where the slices are joined
            return None
        shape = given.slices.get(rank) if given is not None else None
        return shape if shape is not None and 0 in shape else None


def _map(name: str, given: Any, where: str) -> AffineMap:
    where = f"{where}, parameter {name}"
    held = metadata.mapping(given, _ENTRY, where)
    whole = metadata.shape(held.get("logical_shape"), _ENTRY, where)
    slices: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, tuple[Piece, ...]] = {}
    for key, rank in metadata.mapping(held.get("ranks"), _ENTRY, where).items():
        # Keys are numbers, and texts where the map went through JSON.
        number = metadata.integer(int(key) if isinstance(key, str) and key.isdecimal() else key, _ENTRY, where)
        rank = metadata.mapping(rank, _ENTRY, where)
        slices[number] = metadata.shape(rank.get("shard_shape"), _ENTRY, where)
        listed = metadata.sequence(rank.get("pieces"), _ENTRY, where)
        made = [_piece(p, math.prod(whole), math.prod(slices[number]), where) for p in listed]
        pieces[number] = tuple(piece for piece in made if math.prod(piece.shape))
        if any(number not in piece.locations for piece in pieces[number]):
            raise metadata.malformed(_ENTRY, where, f"locations that name rank {number}, which holds the piece", None)
    # A piece must be where its locations say that it is, or a choice of another rank would lose it.
    blocks = {(rank, p.shape, p.whole) for rank, held in pieces.items() for p in held}
    for held in pieces.values():
        for piece in held:
            for rank in piece.locations:
                if (rank, piece.shape, piece.whole) not in blocks:
                    raise metadata.malformed(_ENTRY, where, f"a piece on rank {rank}, as its locations say", "none")
    return AffineMap(whole, slices, pieces)


def _piece(given: Any, whole: int, slice_: int, where: str) -> Piece:
    """One piece, checked and folded; ``whole`` and ``slice_`` are numbers of elements."""
    held = metadata.mapping(given, _ENTRY, where)
    if held.get("scale", 1.0) != 1.0:
        raise CheckpointError(
            "a slice holds its values scaled, which is not supported",
            where=where,
            expected="scale 1",
            found=metadata.brief(held.get("scale")),
            hint="convert it with DeepSpeed's own converter, which refuses the optimizer's state too",
        )
    shape = metadata.shape(held.get("shape"), _ENTRY, where)
    sides = []
    for key, numel in (("source", whole), ("dest", slice_)):
        pair = metadata.sequence(held.get(key), _ENTRY, where)
        if len(pair) != 2:
            raise metadata.malformed(_ENTRY, where, f"{key}: an offset and strides", pair)
        offset, strides = metadata.integer(pair[0], _ENTRY, where), metadata.integers(pair[1], _ENTRY, where)
        last = offset + sum((d - 1) * s for d, s in zip(shape, strides))
        if len(strides) != len(shape) or (math.prod(shape) and last >= numel):
            raise metadata.malformed(_ENTRY, where, f"a piece within the {numel} elements of its tensor", f"{pair}")
        sides.append((offset, strides))
    locations = tuple(sorted(set(metadata.integers(held.get("locations"), _ENTRY, where))))
    return _fold(shape, sides, locations)


def _fold(shape: tuple[int, ...], sides: list[tuple[int, list[int]]], locations: tuple[int, ...]) -> Piece:
    """The piece without dims of size 1, and with dims that are one in both tensors joined."""
    if 0 in shape:
        return Piece((0,), (0, ()), (0, ()), locations)
    # A shape of (2, 3, 4) with strides (24, 4, 1) in the whole and (12, 4, 1) in the slice: the last two dims are one
    # in both, and (2, 12) with strides (24, 1) and (12, 1) is left.
    dims: list[tuple[int, int, int]] = []
    for size, a, b in zip(shape, sides[0][1], sides[1][1]):
        if size == 1:
            continue
        if dims and (dims[-1][1], dims[-1][2]) == (size * a, size * b):
            dims[-1] = dims[-1][0] * size, a, b
        else:
            dims.append((size, a, b))
    dims = dims or [(1, 1, 1)]
    sizes, a, b = zip(*dims)
    return Piece(tuple(sizes), (sides[0][0], tuple(a)), (sides[1][0], tuple(b)), locations)
