"""Context parallel: one packed row over several ranks, each with a slice of its tokens.

``shard_batch`` makes this rank's keywords of a row, and within ``context_parallel(axis)`` the attention of
``attn_implementation="ullage"`` gives each token what it would get on one process. Everything else in a decoder works
on single tokens and needs no other rank. The loss divides by the labels of the whole row, so losses and gradients of
the ranks add up to those of one process.

Before the first layer of a row the ranks compare what they hold, in one exchange of two integers, so that a row cut
for another group, or a call that one rank has to refuse, raises on every rank instead of leaving the others waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.attention.packed_call import PackedCall
from ullage.attention.ulysses import Slices, exchange_heads
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, fill_value
from ullage.core.errors import DistributedError, InputError, UllageError
from ullage.core.items import require_no_items
from ullage.core.layout import Layout, require_context_rank
from ullage.core.rows import on_device
from ullage.ranks import Axis, agree
from ullage.ranks.topology import require_axis

# Each thread has its own value, and a thread of the backward pass starts with the default: that is why a row also
# remembers which context served it (``served_by``).
_ACTIVE: ContextVar[ContextParallel | None] = ContextVar("ullage_context_parallel", default=None)
#: How many contexts are in force, in whatever thread: a compiled graph can read a number, and no context variable.
_ENTERED = [0]


#: Rows that ``shard_batch`` has cut and that have come to no attention yet, as long as somebody holds them.
_WAITING: WeakSet[Slices] = WeakSet()
#: How many rows were cut so far, and how many calls of an attention were made on slices.
_COUNTS = Counter(cut=0, called=0)


class ContextParallel(contextlib.ContextDecorator):
    """Context manager that :func:`context_parallel` returns; it may be entered any number of times.

    Args:
        axis: as for :func:`context_parallel`.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.size, self.rank = require_axis(axis), axis.size, axis.rank
        self.group = axis.require_group() if axis.size > 1 else None
        # The all-to-alls address ranks of the group, the slices ranks of the axis: both must count alike.
        if axis.order != list(range(axis.size)):
            raise InputError("the process group counts its ranks otherwise than the axis", found=axis.order)
        self._entered: list[tuple[Any, Counter[str], bool]] = []

    def __enter__(self) -> ContextParallel:
        # A stack, since the same object may be entered again within its own block.
        self._entered.append((_ACTIVE.set(self), _COUNTS.copy(), bool(_WAITING)))
        _ENTERED[0] += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        token, before, was_waiting = self._entered.pop()
        _ACTIVE.reset(token)
        _ENTERED[0] -= 1
        # A row was there that no attention took, and none ran in this block: the model has another implementation, and
        # has computed each slice as if it were a row. ``model(**shard_batch(...))`` keeps no reference to its row, so
        # those that were cut within the block are counted.
        was_cut = was_waiting or bool(_WAITING) or _COUNTS["cut"] > before["cut"]
        is_missed = was_cut and _COUNTS["called"] == before["called"]
        if kind is None and is_missed:
            raise InputError(
                "no attention ran context parallel, although a row was cut for it",
                hint="ask require_context_parallel(model); load the model with attn_implementation='ullage'",
            )

    def meet(self, slices: Slices, tokens: Tensor) -> None:
        """Compare with the other ranks what they hold of a row, before its first layer; ``tokens`` [1, t, dim].

        Collective and waits for the device, once a row. Raises on every rank if one holds a slice of another row.
        """
        _COUNTS["called"] += 1
        self._agree(slices, lambda: None, tokens[:, None], tokens[:, None])

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Whole sequences within: attention takes no slices there."""
        token = _ACTIVE.set(None)
        _ENTERED[0] -= 1
        try:
            yield
        finally:
            _ENTERED[0] += 1
            _ACTIVE.reset(token)

    @torch.compiler.disable(reason="where the slices lie is data")
    def attend(self, call: PackedCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of this rank's slice of a row, [1, t, query heads, value dim]; collective.

        ``query`` [1, query heads, t, dim], ``key`` and ``value`` [1, key heads, t, dim] of the slice. Waits for the
        device once per row. Raises on every rank if one of them has to refuse the call.
        """
        _COUNTS["called"] += 1
        slices = self._agree(call.slices, lambda: call.require_exact(query, key), query, key)
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.size == 1:
            return call.attend(query, key, value)[None]
        return exchange_heads(query, key, value, slices, self.group, call.of_heads(self.size, self.rank).attend)[None]

    def _agree(self, slices: Slices | None, check: Callable[[], None], query: Tensor, key: Tensor) -> Slices:
        """The slices, after ``check``; for a row's first layer together with the other ranks: if one fails, all raise.

        Collective and waits for the device, once a row.
        """
        if slices is not None:
            # An attention has the row, also where it refuses it: from here on no block has missed it.
            _WAITING.discard(slices)
        failure: UllageError | None = None
        try:
            self._check(slices, query)
            check()
        except UllageError as error:
            failure = error
        # Later layers of a row skip the comparison, which waits for the device. A rank that failed takes part in it
        # all the same: without its record the others would wait forever.
        try:
            if slices is None or slices.served_by is not self:
                # What decides the sizes of the exchange. shape[1::2] is (heads, dim) without the tokens, of which the
                # ranks may hold different numbers.
                facts = f"{query.dtype} {query.shape[1::2]} {key.shape[1::2]}"
                self._compare(failure, 0 if slices is None else slices.digest ^ _digest(facts), query.device)
            if failure is not None:
                raise failure
        finally:
            # Its traceback refers to this frame: without this, the cycle would keep the row until a collection.
            failure = None
        assert slices is not None
        slices.served_by = self
        return slices

    def _compare(self, failure: Exception | None, digest: int, device: torch.device) -> None:
        """Raise on every rank if one failed, or if the ranks have different digests."""
        if self.size == 1:
            return
        # The same record (failed, digest) goes to each rank, so that the all-to-all acts as an all-gather.
        mine = torch.tensor([[int(failure is not None), digest]] * self.size, device=device)
        every, ones = torch.empty_like(mine), [1] * self.size
        dist.all_to_all_single(every, mine, ones, ones, group=self.group)
        records = every.tolist()
        if any(failed for failed, _ in records):  # every rank sees it, so that all of them meet once more
            try:
                agree(failure, self.axis, "attending to its slice of a row")
            finally:
                failure = None
        for rank, (_, other) in enumerate(records):
            if other != records[0][1]:
                raise DistributedError(
                    "the ranks of a context-parallel axis hold slices of different rows",
                    where=f"rank {rank} of the axis",
                    expected="the lengths and heads of rank 0",
                    found="others",
                    hint="give each of them the same batch, with share(), before it is cut",
                )

    def _check(self, slices: Slices | None, query: Tensor) -> None:
        if slices is None:
            raise InputError(
                "context parallel takes slices of packed rows only",
                found="a call without context_slices",
                hint="give the model what shard_batch makes, or leave context_parallel",
            )
        if (slices.size, slices.rank) != (self.size, self.rank):
            raise InputError(
                "a row was cut for another axis",
                expected=f"rank {self.rank} of {self.size}",
                found=f"rank {slices.rank} of {slices.size}",
                hint="give shard_batch the axis that context_parallel has",
            )
        if len(slices.index) != query.shape[2]:
            raise InputError(
                "the model's row is not the slice that was cut for it",
                expected=f"{len(slices.index)} tokens",
                found=query.shape[2],
            )


def context_parallel(axis: Axis) -> ContextParallel:
    """Run attn_implementation="ullage" over the ranks of ``axis``, within ``with`` or in a decorated function.

    Args:
        axis: an axis of a topology, or ``Axis.from_group(group)`` of a process group.

    The backward pass may run after ``with`` has ended. Raises ``InputError`` for a group that this process is not in.

    >>> with context_parallel(Axis("cp")) as context:
    ...     context.size
    1
    """
    return ContextParallel(axis)


def serving(slices: Slices | None) -> ContextParallel | None:
    """The ``ContextParallel`` that serves a call with these slices; None for a call of one process alone.

    A row remembers it, because a layer may be recomputed after ``with`` has ended, or on a thread of the backward pass.
    """
    if slices is None and not _ENTERED[0]:
        return None
    context = _ACTIVE.get()
    if slices is None:
        return None if context is None or context.size == 1 else context
    context = context or slices.served_by
    if context is None:
        # A row cut into one slice is whole, so it needs no context around it.
        if slices.size == 1:
            return ContextParallel(Axis("cp"))
        raise InputError(
            "a slice of a row came to the attention, but no context_parallel is in force",
            hint="call the model within context_parallel(axis)",
        )
    return context


def shard_batch(batch: RaggedBatch, axis: Axis, *, num_items: Any = None) -> dict[str, Any]:
    """Keywords for a Hugging Face decoder: this rank's slice of a packed row.

    Args:
        batch: the whole row, equal on all ranks.
        axis: as for :func:`context_parallel`; one without a group, ``Axis("cp", size, rank)``, will do.
        num_items: number of labels that count over all ranks of the step, by which the model divides the sum of its
            loss; if None, that of this row, at least 1.

    Returns a dict of

    - the token-aligned fields and ``position_ids`` [1, t], cut to the slice;
    - ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 [N + 1] and ``max_length_q``, ``max_length_k`` of the whole row;
    - ``context_slices``, which tells the attention where in the row the slice lies;
    - if there are labels, ``shift_labels`` [1, t], shifted within each sequence before the cut so that no label is
      lost, and ``num_items_in_batch``. Losses and gradients of the ranks then add up to those of the row.

    A slice holds neighbouring tokens, wherever sequences end. Slices differ by one token at most; a row with fewer
    tokens than ranks gets padding at its end. Not collective; does not wait for the device. Raises ``InputError`` for a
    rank that does not lie on the axis.
    """
    size, rank = require_axis(axis).size, axis.rank
    require_context_rank(size, rank)
    require_no_items(batch.items, size)
    has_labels = "labels" in batch and "labels" not in batch.per_sequence
    # Labels are shifted before the cut: the label of a slice's last token may lie on another rank.
    if has_labels and "shift_labels" not in batch:
        batch = batch.with_shift_labels()
    layout = batch.layout
    # A decoder needs a token on every rank: a row with fewer gets one slot of padding more, a token for each rank.
    tail = size if layout.size < size else 0
    if tail:
        layout = Layout.from_slots(np.append(layout.lengths, 0), np.append(layout.slots, tail))
    slices = Slices(layout, size, rank)
    if size > 1:
        _COUNTS["cut"] += 1
        _WAITING.add(slices)
    row = {name: batch[name] for name in batch.names if name not in (*batch.per_sequence, *batch.items)}
    extra: dict[str, Any] = {"context_slices": slices, "use_cache": False}
    if has_labels:
        # The whole row's count on every rank, not the slice's, so that the ranks' losses add up to the row's.
        if num_items is None:
            num_items = (row["shift_labels"] != IGNORED_LABEL).sum().clamp(min=1)
        extra["num_items_in_batch"] = num_items
    if tail:
        for name, values in row.items():
            row[name] = torch.cat([values, values.new_full((tail, *values.shape[1:]), fill_value(name, values.dtype))])
    # Of the whole row: lengths. Of the slice: every field by token, and true positions.
    images = {name: batch[name] for name in batch.items}
    whole = RaggedBatch(row | images, layout, items=batch.items).to_flattened()
    take = on_device(slices.index, batch.device)
    mine = {name: whole[name].index_select(1, take) for name in ("position_ids", *row)}
    return {**whole, **mine, **extra}


def _digest(text: str) -> int:
    # 63 bits, because the digests travel as signed int64.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
