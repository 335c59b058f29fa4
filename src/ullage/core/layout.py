"""Layouts: segments laid end to end in a flat buffer, each followed by its own padding, and cuts of that buffer.

A packed microbatch, a ``PackedSequence``, a ZeRO parameter group and a ZeRO-3 parameter are all a :class:`Layout`.
Item *i* occupies the slot ``[starts[i], starts[i] + slots[i])`` of the buffer, and its tokens are the first
``lengths[i]`` elements of that slot. A cut divides the buffer into shards; which part of which item lies in which
shard is one question with one answer, :meth:`Layout.pieces`. Padding is whatever no piece covers, so a tail that
spans one shard, three, or seven hundred needs no special case, and no length is ever computed by subtraction from
a padding count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ullage.core.display import Shown, quantity
from ullage.core.errors import InputError, require_int, require_one_of

Int64 = npt.NDArray[np.int64]
Integers = Sequence[int] | npt.NDArray[np.integer]

#: How context parallel cuts a row, see :meth:`Layout.cut`.
ORDERS = ("zigzag", "contiguous")

_INT32_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class Pieces:
    """The parts of items that lie in shards, ordered by item, then by shard. All arrays are int64 [pieces].

    Elements ``[item_start, item_start + length)`` of ``item`` are elements ``[shard_start, shard_start + length)``
    of ``shard``. No piece is empty.

    Attributes:
        item, shard: the item that the piece is of, and the shard that it lies in.
        item_start, shard_start: where the piece begins, counted from the start of the item and of the shard.
        length: elements of the piece.
    """

    item: Int64
    shard: Int64
    item_start: Int64
    shard_start: Int64
    length: Int64

    def __len__(self) -> int:
        return len(self.item)


@dataclass(frozen=True, eq=False)
class TimeMajor:
    """A layout transposed, as ``PackedSequence`` wants it: all first tokens, then all second tokens, and so on.

    Attributes:
        index [num_tokens]: flat position of each token.
        batch_sizes [longest length]: number of items that still run at each time step.
        order [n]: items by decreasing length, equal lengths in their order.
        inverse [n]: the place of each item in ``order``.
    """

    index: Int64
    batch_sizes: Int64
    order: Int64
    inverse: Int64


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Shown):
    """Places of items of unequal length in one flat buffer.

    ``lengths``: integers >= 0, one per item. ``pad_to_multiple_of``: each item's slot is its length rounded up to this.
    All arrays are int64 and read-only. Touches no device. Raises ``InputError`` (a ``ValueError``) for lengths
    that are negative or not integers.

    >>> layout = Layout([3, 5], pad_to_multiple_of=4)
    >>> layout.slots, layout.starts, layout.size
    (array([4, 8]), array([0, 4]), 12)
    >>> pieces = layout.pieces([0, 6, 12])
    >>> [tuple(map(int, row)) for row in zip(pieces.item, pieces.shard, pieces.item_start, pieces.length)]
    [(0, 0, 0, 3), (1, 0, 0, 2), (1, 1, 2, 3)]
    """

    lengths: Int64
    slots: Int64
    starts: Int64

    def __init__(self, lengths: Integers, pad_to_multiple_of: int = 1) -> None:
        lengths = as_lengths(lengths)
        pad_to_multiple_of = require_int(pad_to_multiple_of, "pad_to_multiple_of", least=1)
        self._fill(lengths, -(-lengths // pad_to_multiple_of) * pad_to_multiple_of)

    @classmethod
    def from_slots(cls, lengths: Integers, slots: Integers) -> Layout:
        """A layout whose slots are given: ``slots[i] >= lengths[i]``, both in elements. Raises ``InputError``."""
        lengths, slots = as_lengths(lengths), as_lengths(slots, "slots")
        if len(lengths) != len(slots):
            raise InputError("lengths and slots disagree", expected=f"{len(lengths)} slots", found=len(slots))
        small = np.flatnonzero(slots < lengths)
        if len(small):
            i = int(small[0])
            raise InputError(
                "a slot is smaller than its item",
                where=f"item {i}",
                expected=f"at least {lengths[i]}",
                found=int(slots[i]),
            )
        # Past ``__init__``, which would round the lengths up.
        layout = object.__new__(cls)
        layout._fill(lengths, slots)
        return layout

    @classmethod
    def divide(cls, lengths: Int64, slots: Int64, counts: Int64) -> list[Layout]:
        """Layouts of ``counts[k]`` items each from the lengths and slots of all items, one after another.

        int64 arrays with ``0 <= lengths <= slots``, which is not checked. Nothing is computed layout by layout, so that
        hundreds of them cost little more than one.
        """
        ends = np.cumsum(counts)
        filled, used = (np.concatenate([[0], np.cumsum(array)]) for array in (slots, lengths))
        begins = ends - counts
        starts = filled[:-1] - np.repeat(filled[begins], counts)
        sizes, tokens = (array[ends] - array[begins] for array in (filled, used))
        for array in (lengths := lengths.copy(), slots := slots.copy(), starts):
            array.flags.writeable = False
        layouts = []
        for begin, end, size, num_tokens in zip(begins.tolist(), ends.tolist(), sizes.tolist(), tokens.tolist()):
            layout = object.__new__(cls)
            # Past the frozen class, and with the two sums that every batch asks for in place.
            layout.__dict__.update(
                lengths=lengths[begin:end],
                slots=slots[begin:end],
                starts=starts[begin:end],
                size=size,
                num_tokens=num_tokens,
            )
            layouts.append(layout)
        return layouts

    def _fill(self, lengths: Int64, slots: Int64) -> None:
        starts = starts_of(slots)
        for name, array in (("lengths", lengths), ("slots", slots), ("starts", starts)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        """Real elements, without padding."""
        return int(self.lengths.sum())

    @cached_property
    def size(self) -> int:
        """Elements of the buffer, padding included."""
        return int(self.slots.sum())

    @cached_property
    def max_seqlen(self) -> int:
        """The longest item in elements, 0 if there is none."""
        return int(self.lengths.max(initial=0))

    @property
    def ullage(self) -> float:
        """The part of the buffer that is padding: ``1 - num_tokens / size``, 0.0 if the buffer is empty."""
        return 1.0 - self.num_tokens / self.size if self.size else 0.0

    def __len__(self) -> int:
        return self.num_items

    def _facts(self) -> Iterator[str]:
        yield quantity(self.num_items, "item")
        yield quantity(self.num_tokens, "token")
        yield quantity(self.size, "slot")
        yield f"ullage {100 * self.ullage:.1f} %"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(self.slots, other.slots)

    def __hash__(self) -> int:
        return hash((self.lengths.tobytes(), self.slots.tobytes()))

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Cumulated lengths, int32 [num_items + 1], from 0; they index a buffer without padding.

        Raises ``InputError`` at 2**31 elements and beyond, which int32 cannot count.
        """
        return _cumulated(self.lengths, self.num_tokens)

    @property
    def cu_seqlens_padded(self) -> npt.NDArray[np.int32]:
        """Cumulated slots, int32 [num_items + 1], from 0: item *i* begins at element ``cu_seqlens_padded[i]``.

        Raises ``InputError`` at 2**31 elements and beyond, which int32 cannot count.
        """
        return _cumulated(self.slots, self.size)

    def pieces(self, cuts: Integers) -> Pieces:
        """The parts of items that lie in each shard.

        ``cuts`` [k + 1]: positions in the buffer that never decrease; shard *s* is ``[cuts[s], cuts[s + 1])`` and may
        be empty. Cuts may leave out either end of the buffer or reach past it: what no shard covers has no piece.
        Each element of an item that lies within the cuts is in exactly one piece. Raises ``InputError`` for cuts
        that decrease.
        """
        cuts = _as_int64(cuts, "cuts")
        if len(cuts) == 0:
            raise InputError("cuts are empty", expected="at least one position")
        falls = np.flatnonzero(np.diff(cuts) < 0)
        if len(falls):
            k = int(falls[0]) + 1
            raise InputError("cuts must not fall", where=f"cut {k}", expected=f">= {cuts[k - 1]}", found=int(cuts[k]))
        shards = len(cuts) - 1
        ends = self.starts + self.lengths
        # The first and the last shard that each item touches. Ends outside the cuts are clipped to the outermost
        # shards; an item that lies outside altogether touches none.
        first = np.maximum(np.searchsorted(cuts, self.starts, side="right") - 1, 0)
        last = np.minimum(np.searchsorted(cuts, ends, side="left") - 1, shards - 1)
        counts = np.where(self.lengths > 0, np.maximum(last - first + 1, 0), 0)
        # One candidate for each item and each shard that it touches; its ends are those of the item, cut off at the
        # shard.
        item = np.repeat(np.arange(self.num_items), counts)
        shard = ranges(first, counts)
        begin = np.maximum(self.starts[item], cuts[shard])
        length = np.minimum(ends[item], cuts[shard + 1]) - begin
        # Empty shards between two others have no piece.
        real = length > 0
        item, shard, begin, length = item[real], shard[real], begin[real], length[real]
        return Pieces(item, shard, begin - self.starts[item], begin - cuts[shard], length)

    def cut(self, size: int, rank: int, order: str = "zigzag") -> Int64:
        """The positions in the buffer that context-parallel ``rank`` of ``size`` holds, int64, in the rank's order.

        ``"zigzag"``: every slot is cut into ``2·size`` chunks, of which the rank takes chunks ``rank`` and
        ``2·size − 1 − rank``, so that under a causal mask all ranks have the same work. ``"contiguous"``: the buffer is
        cut into ``size`` parts wherever that falls. Nothing is padded: where sizes do not divide, chunks differ by one
        element, and what is left over of a slot goes to the next chunks in turn, so that ranks differ by at most two
        elements. Each element is on one rank; a rank may have none. Raises ``InputError`` for a rank or an order that
        does not exist. Source of zigzag: Transformer Engine's ``thd_get_partitioned_indices``.

        >>> Layout([8, 4]).cut(2, 0).tolist(), Layout([8, 4]).cut(2, 1).tolist()
        ([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])
        """
        require_one_of(order, ORDERS, "order of slices")
        require_context_rank(size, rank)
        if order == "contiguous":
            return np.arange(self.size * rank // size, self.size * (rank + 1) // size)
        if size == 1:
            return np.arange(self.size)
        chunks = 2 * size
        each, left = np.divmod(self.slots, chunks)
        # Slot i gives its ``left`` odd elements to chunks first, first + 1, ... (mod chunks): where slot i - 1 ended.
        first = starts_of(left) % chunks

        # Each chunk has ``each`` elements of every slot, and one more if it got an odd one. Odd elements before a
        # chunk: those given at or after ``first`` and below it, and those that went round to chunk 0.
        def begin(chunk: int) -> Int64:
            before, wrapped = np.clip(chunk - first, 0, left), np.clip(first + left - chunks, 0, chunk)
            return self.starts + chunk * each + before + wrapped

        # Chunk by chunk within each slot: [slot, 2] flattened is the order of the row.
        mine = (rank, chunks - 1 - rank)
        starts = np.stack([begin(chunk) for chunk in mine], 1).reshape(-1)
        ends = np.stack([begin(chunk + 1) for chunk in mine], 1).reshape(-1)
        return ranges(starts, ends - starts)

    def token_index(self) -> Int64:
        """The flat position of every real element, int64 [num_tokens], in order."""
        return ranges(self.starts, self.lengths)

    def positions(self) -> Int64:
        """Each flat position counted from the start of its slot, int64 [size]; padding continues the count."""
        return counting(self.slots)

    def padding_mask(self) -> npt.NDArray[np.bool_]:
        """True on the padding, bool [size]."""
        return self.positions() >= np.repeat(self.lengths, self.slots)

    def item_ids(self) -> Int64:
        """The item whose slot holds each flat position, int64 [size]."""
        return np.repeat(np.arange(self.num_items), self.slots)

    def time_major(self, order: Integers | None = None) -> TimeMajor:
        """The same items, transposed: time first, long items first. See :class:`TimeMajor`.

        ``order`` lists the items by decreasing length; given, it decides the order of equal lengths. Raises
        ``InputError`` for an order that does not decrease. Source: the layout of
        ``torch.nn.utils.rnn.PackedSequence``, reached by one index.
        """
        if order is None:
            order = np.argsort(-self.lengths, kind="stable")
        else:
            order = _as_int64(order, "order")
            if not np.array_equal(np.sort(order), np.arange(self.num_items)) or (
                np.any(np.diff(self.lengths[order]) > 0)
            ):
                raise InputError("order must list every item once, by decreasing length", found=order.tolist())
        inverse = np.empty_like(order)
        inverse[order] = np.arange(self.num_items)
        # Items that still run at time t are those longer than t: all, less the ones of length <= t.
        ending = np.bincount(self.lengths, minlength=self.max_seqlen + 1)
        batch_sizes = (self.num_items - np.cumsum(ending))[: self.max_seqlen].astype(np.int64)
        # At each time step the running items are the first of ``order``; token t lies t behind its start.
        row = counting(batch_sizes)
        time = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
        return TimeMajor(self.starts[order][row] + time, batch_sizes, order, inverse)


def require_context_rank(size: int, rank: int) -> None:
    """Raise ``InputError`` unless ``rank`` is one of ``size`` context-parallel ranks."""
    if size < 1 or not 0 <= rank < size:
        raise InputError("no such context-parallel rank", expected=f"0 to {size - 1}", found=rank)


def _cumulated(sizes: Int64, total: int) -> npt.NDArray[np.int32]:
    if total >= _INT32_LIMIT:
        raise InputError(
            "cu_seqlens cannot count this many elements in int32",
            expected=f"fewer than {_INT32_LIMIT}",
            found=total,
            hint="put fewer sequences into one batch",
        )
    cumulated = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=cumulated[1:])
    return cumulated


def starts_of(sizes: Int64) -> Int64:
    """First position of each part when parts of these sizes lie end to end: int64 [n], the first one 0."""
    return np.cumsum(sizes) - sizes


def ranges(starts: Int64, lengths: Int64) -> Int64:
    """``starts[i], starts[i] + 1, ...``, ``lengths[i]`` of them for each *i*, end to end.

    >>> ranges(np.array([10, 3]), np.array([2, 3])).tolist()
    [10, 11, 3, 4, 5]
    """
    # Count through all elements, and shift each run from where it lies in the result to its own start.
    return np.arange(int(lengths.sum())) + np.repeat(starts - starts_of(lengths), lengths)


def counting(lengths: Int64) -> Int64:
    """``0, 1, ..., lengths[i] - 1`` for each *i*, end to end: int64 [sum of lengths]."""
    return ranges(np.zeros_like(lengths), lengths)


def as_lengths(values: Integers, name: str = "lengths") -> Int64:
    """A fresh int64 array of ``values``, each an integer >= 0. Raises ``InputError`` that names the first bad one."""
    array = _as_int64(values, name)
    bad = np.flatnonzero(array < 0)
    if len(bad):
        i = int(bad[0])
        raise InputError(f"{name} must not be negative", where=f"item {i}", expected=">= 0", found=int(array[i]))
    return array


def _as_int64(values: Integers, name: str) -> Int64:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InputError(f"{name} are not a flat list of integers", found=str(error)) from error
    if array.ndim != 1:
        raise InputError(f"{name} must have one dimension", expected="[n]", found=f"shape {list(array.shape)}")
    # Whole numbers are accepted as floats too; an empty list has dtype float64.
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~(np.isfinite(array) & (array == np.floor(array))))
        if len(bad):
            i = int(bad[0])
            raise InputError(f"{name} must be integers", where=f"item {i}", found=array[i])
    elif array.dtype.kind not in "iu" and array.size:
        raise InputError(f"{name} must be integers", found=f"dtype {array.dtype}")
    return array.astype(np.int64)
