"""The inventory of a checkpoint: its logical tensors, and for each the fragments of files that hold it.

A *fragment* says that some bytes of a file are some elements of a tensor. A checkpoint is whole when the fragments of
every tensor tile it: each element in exactly one fragment. :meth:`Inventory.problems` proves that, for every tensor,
before a byte is written. Padding is what no fragment covers, so it is never counted, subtracted or stripped.

A tensor that tensor parallelism has cut is made of *slices*, one per model rank; its fragments address a slice, and
:class:`Merge` says how the slices make the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ullage.checkpoint.core.manifest import problems_of
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.core.paths import list_anew
from ullage.checkpoint.core.problem import Problem
from ullage.core.display import Paged, quantity
from ullage.core.layout import Int64, Pieces


@dataclass(frozen=True)
class File:
    """A file of the checkpoint. ``name`` is relative to the folder; ranks are None where they mean nothing."""

    name: str
    num_bytes: int
    kind: Literal["optimizer", "model", "layer", "weights", "expert"]
    dp_rank: int | None = None
    model_rank: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Fragments:
    """Parts of one tensor, as four int64 arrays [n], ordered by ``start``.

    Attributes:
        file [n]: number of the file, its place in :attr:`Inventory.files`.
        offset [n]: byte of the file at which the part begins.
        start [n]: first element of the part in the tensor (or slice, where there are several).
        length [n]: elements of the part.
    """

    file: Int64
    offset: Int64
    start: Int64
    length: Int64

    def __len__(self) -> int:
        return len(self.file)

    def __repr__(self) -> str:
        return f"Fragments({len(self)} of {int(self.length.sum())} elements)"

    @classmethod
    def one(cls, file: int, offset: int, length: int) -> Fragments:
        """A whole tensor of ``length`` elements in one place; no fragment where it has no elements."""
        return cls.of([(file, offset, 0, length)] if length else [])

    @classmethod
    def of(cls, rows: Any) -> Fragments:
        """Fragments from (file, offset, start, length) of each, in any order."""
        table = np.asarray(rows, np.int64).reshape(-1, 4)
        return cls(*np.ascontiguousarray(table[np.argsort(table[:, 2], kind="stable")].T))

    @classmethod
    def join(cls, parts: list[Fragments]) -> Fragments:
        """The fragments of all ``parts``, which hold different elements of one tensor."""
        tables = [np.column_stack([p.file, p.offset, p.start, p.length]) for p in parts]
        return cls.of(np.concatenate(tables) if tables else [])

    def moved(self, distance: int) -> Fragments:
        """The same bytes, ``distance`` elements further on in the tensor."""
        return Fragments(self.file, self.offset, self.start + distance, self.length)

    def window(self, start: int, stop: int, item_bytes: int) -> Fragments:
        """The part of the fragments that holds elements ``[start, stop)``, cut to it; starts stay as they were."""
        # From the first fragment that ends after ``start`` to the last that begins before ``stop``.
        low = int(np.searchsorted(self.start + self.length, start, side="right"))
        high = int(np.searchsorted(self.start, stop, side="left"))
        begin = np.maximum(self.start[low:high], start)
        end = np.minimum(self.start[low:high] + self.length[low:high], stop)
        offset = self.offset[low:high] + (begin - self.start[low:high]) * item_bytes
        return Fragments(self.file[low:high], offset, begin, end - begin)


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of a tensor that one model rank holds: its shape, the fragments that tile it."""

    model_rank: int
    shape: tuple[int, ...]
    fragments: Fragments


@dataclass(frozen=True)
class Band:
    """``width`` indices of a dim: from ``begin`` in slice number ``slice``, to ``at`` in the whole."""

    slice: int
    begin: int
    at: int
    width: int


@dataclass(frozen=True)
class Merge:
    """The way in which slices make the whole.

    Attributes:
        kind: ``flat``: one slice, whose fragments address the whole itself. ``columns``: along one dim, bands of the
            slices lie side by side. ``replicated``: all slices are equal, the first is taken. ``average``: the mean of
            the slices. ``strided``: one slice, a stretch of a storage, in which the elements of the whole are strewn.
            ``joined``: no slice; stretches of other tensors end to end, such as the partition of a rank.
        outer: of columns, product of the dims before the one that is cut.
        size: of columns, indices of the dim that is cut.
        inner: of columns, product of the dims after it; the whole is ``[outer, size, inner]`` elements.
        bands: of columns, which indices of which slice go where.
        strides: of a strided tensor, by dim, in elements.
        stretches: of a joined tensor, in order; they tile it.
    """

    kind: Literal["flat", "columns", "replicated", "average", "strided", "joined"] = "flat"
    outer: int = 1
    size: int = 0
    inner: int = 1
    bands: tuple[Band, ...] = ()
    strides: tuple[int, ...] = ()
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, eq=False)
class Stretch:
    """Elements ``[at, at + length)`` of a joined tensor: those of ``tensor`` from ``start`` on; None for zeros."""

    at: int
    length: int
    tensor: Tensor | None = None
    start: int = 0


@dataclass(frozen=True, eq=False)
class Tensor:
    """One logical tensor.

    Attributes:
        name: the parameter's or buffer's.
        key: which state of it: ``fp32`` (the master weights), ``exp_avg``, ...; ``frozen`` or ``buffer`` for what no
            optimizer holds.
        shape: of the whole tensor, as it will be written.
        dtype: torch's name of it, without ``torch.``; ``fp32`` above is a name of DeepSpeed's and need not be float32.
        kind: what holds it: an optimizer (``parameter``), or the module alone.
        slices: by model rank; one where nothing cuts the tensor.
        merge: how the slices make the whole.
        group: its parameter group.
        extra: what a universal state file says beside the tensor, such as ``cat_dim``.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "frozen", "buffer"]
    slices: tuple[Slice, ...]
    merge: Merge = Merge()
    group: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.item_bytes

    @property
    def num_fragments(self) -> int:
        """Fragments of all slices."""
        return sum(len(s.fragments) for s in self.slices)


@dataclass(frozen=True, eq=False)
class Group:
    """One flat buffer (a parameter group; at stage 3 a sub-group) of one model rank, and how the ranks share it.

    Attributes:
        index: number of the group.
        model_rank: the rank among tensor- and pipeline-parallel ranks that holds it.
        names: its parameters, in the order of memory.
        pieces: where each parameter lies: ``item`` indexes ``names``, ``shard`` is the data-parallel rank.
        shard_size: elements that each rank holds; what no piece covers is padding.
        num_shards: number of data-parallel ranks.
        booked: padding by rank as the files book it, for the record: nothing is computed from it.
        ep_rank: of experts, the expert-parallel rank whose experts these are; the shards are those that hold them.
    """

    index: int
    model_rank: int
    names: tuple[str, ...]
    pieces: Pieces
    shard_size: int
    num_shards: int
    booked: tuple[int, ...] = ()
    ep_rank: int | None = None

    @property
    def size(self) -> int:
        """Elements of all shards, padding included."""
        return self.shard_size * self.num_shards

    @property
    def padding(self) -> int:
        """Elements of padding over all shards."""
        return self.size - int(self.pieces.length.sum())

    def padding_of(self) -> Int64:
        """Elements of padding in each shard, int64 [num_shards]."""
        held = np.bincount(self.pieces.shard, weights=self.pieces.length, minlength=self.num_shards)
        return self.shard_size - held.astype(np.int64)


@dataclass(frozen=True)
class WrittenBy:
    """The run that wrote the checkpoint: ZeRO stage, class of the optimizer wrapper, number of dp, tp and pp ranks.

    ``ep``: sizes of expert parallelism, ascending; several where layers of experts differ, none without experts.
    ``experts``: number of experts of each layer that has some.
    """

    stage: int | None = None
    wrapper: str = ""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, eq=False, repr=False)
class Inventory(Paged):
    """A checkpoint without its data. See :func:`ullage.checkpoint.read`.

    ``folder`` is the folder of the files (the tag's), ``format`` one of zero, universal, safetensors, dcp, trainer.
    ``steps`` is the optimizer's step by parameter group, as it was saved (a number; None where it keeps none).
    ``aliases`` maps a tied name to the name that is stored. ``notes`` are facts worth a line that hinder nothing.
    ``read_problems`` are those met while reading; :meth:`problems` adds those of the tiling. ``records`` gives, by
    file, the archive's records as an int64 array [n, 3] of offset, bytes and CRC-32. ``twins`` are pairs of tensors
    that two pipeline stages hold of one name, which must be equal. ``optimizer_problems`` prevent a
    conversion with the optimizer's state, and no other. ``details`` holds what only writers of other formats need.
    """

    folder: Path
    format: str
    written_by: WrittenBy
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]
    groups: tuple[Group, ...] = ()
    steps: dict[int, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    read_problems: tuple[Problem, ...] = ()
    records: dict[int, Int64] = field(default_factory=dict, repr=False)
    twins: tuple[tuple[Tensor, Tensor], ...] = field(default=(), repr=False)
    optimizer_problems: tuple[Problem, ...] = ()
    details: Any = field(default=None, repr=False)

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], Tensor]:
        return {(t.name, t.key): t for t in self.tensors}

    def __repr__(self) -> str:
        held = (
            f"{quantity(len(self.tensors), 'tensor')}, {self.num_bytes:,} bytes in {quantity(len(self.files), 'file')}"
        )
        found = f", {quantity(len(self.read_problems), 'problem')}" if self.read_problems else ""
        return f"Inventory({str(self.folder)!r}, {self.format}: {', '.join(self.keys)}; {held}{found})"

    def tensor(self, name: str, key: str = "fp32") -> Tensor:
        """The tensor of that name and key. Raises ``KeyError``."""
        return self._by_name[name, key]

    def __contains__(self, name_and_key: tuple[str, str]) -> bool:
        return name_and_key in self._by_name

    @property
    def keys(self) -> tuple[str, ...]:
        """The state keys of trained parameters, ``fp32`` first."""
        found = dict.fromkeys(t.key for t in self.tensors if t.kind == "parameter")
        return tuple(sorted(found, key=lambda k: (k != "fp32", k)))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of trained parameters, in the order of the file."""
        return tuple(dict.fromkeys(t.name for t in self.tensors if t.kind == "parameter"))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(t.num_bytes for t in self.tensors)

    @property
    def num_file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.num_bytes for f in self.files)

    @property
    def padding(self) -> int:
        """Elements of padding in the flat buffers (one buffer; each state key repeats it)."""
        return sum(g.padding for g in self.groups)

    def problems(self, *, manifest: bool = True) -> list[Problem]:
        """Every problem of the checkpoint: found while reading, in the tiling of a tensor, or in a file.

        ``[]`` means that each element of each tensor lies in exactly one fragment, and each fragment within its file.
        ``manifest``: compare the files with the ``manifest.json`` that lies there, if one does, for which they are read
        in full. Otherwise no tensor data is read.
        """
        found = list(self.read_problems)
        with list_anew(self.folder):
            if manifest:
                found += problems_of(self.folder)
            for file in self.files:
                path = self.folder / file.name
                size = path.stat().st_size if path.exists() else -1
                if size != file.num_bytes:
                    wanted, there = f"{file.num_bytes} bytes", "no file" if size < 0 else f"{size} bytes"
                    found.append(Problem("a file changed", file.name, file.dp_rank, expected=wanted, found=there))
        return found + self.tiling_problems()

    def tiling_problems(self) -> list[Problem]:
        """Every problem of the fragments of a tensor; looks at no file."""
        sizes = np.array([f.num_bytes for f in self.files], np.int64)
        return [problem for tensor in self.tensors for problem in _tensor_problems(self, tensor, sizes)]


def _tensor_problems(inventory: Inventory, tensor: Tensor, sizes: Int64) -> Iterator[Problem]:
    # Tiling: in order of start, each fragment begins where the one before ends, and the last ends with the slice. The
    # first break is enough: what follows it is mostly the same damage.
    for part in tensor.slices:
        fragments = part.fragments
        numel = math.prod(part.shape)
        item = tensor.item_bytes
        # Most tensors: one fragment that is the whole, within its file.
        one = len(fragments) == 1 and fragments.start[0] == 0 and fragments.length[0] == numel
        if one and fragments.offset[0] + numel * item <= sizes[fragments.file[0]]:
            continue
        ends = fragments.start + fragments.length
        expected = np.concatenate([[0], ends])
        found = np.concatenate([fragments.start, [numel]])
        for i in np.flatnonzero(expected != found)[:1]:
            low, high = sorted((int(expected[i]), int(found[i])))
            state = "no file holds" if expected[i] < found[i] else "two fragments claim"
            near = int(fragments.file[min(i, len(fragments) - 1)]) if len(fragments) else None
            file = inventory.files[near] if near is not None else None
            yield Problem(
                f"{state} elements [{low}, {high}) of {tensor.key}",
                file.name if file else None,
                file.dp_rank if file else None,
                tensor.group,
                tensor.name,
                expected=f"{numel} elements, each in one fragment",
            )
        outside = np.flatnonzero(fragments.offset + fragments.length * item > sizes[fragments.file])
        for i in outside[:1]:
            file = inventory.files[int(fragments.file[i])]
            yield Problem("a fragment ends beyond its file", file.name, file.dp_rank, tensor.group, tensor.name)
    # Bands tile the dim that is cut in the same way.
    if tensor.merge.kind == "columns":
        covered = sorted((b.at, b.at + b.width) for b in tensor.merge.bands if b.width)
        whole = covered and covered[0][0] == 0 and covered[-1][1] == tensor.merge.size
        if not whole or any(a[1] != b[0] for a, b in itertools.pairwise(covered)):
            yield Problem("the slices of the model ranks do not make the whole", parameter=tensor.name)
