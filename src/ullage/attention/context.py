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
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.attention.gathered import gathered, ulysses
from ullage.attention.packed_call import PackedCall
from ullage.attention.slices import Slices
from ullage.batch import RaggedBatch
from ullage.errors import DistributedError, InputError, UllageError, require_one_of
from ullage.layout import Layout
from ullage.ranks import Axis, agree
from ullage.ranks.topology import require_axis
from ullage.schema import IGNORED_LABEL, fill_value

#: How the attention of a row is shared.
METHODS = ("auto", "ulysses", "gather")

# Each thread has its own value, and a thread of the backward pass starts with the default: that is why a row also
# remembers which context served it (``served_by``).
_ACTIVE: ContextVar[ContextParallel | None] = ContextVar("ullage_context_parallel", default=None)


class _CutRows:
    """Count of the rows that ``shard_batch`` cut and that have come to no attention yet, and of attention calls.

    Leaving ``context_parallel`` raises if a row was cut and no attention took part: then the model has computed each
    slice as if it were a row. A row may be freed before its block ends, because ``model(**shard_batch(...))`` keeps no
    reference. So a row that is freed within a block stays counted until the outermost block ends; one that is freed
    outside every block was not meant for one.
    """

    def __init__(self) -> None:
        self.num_cut = 0
        self.num_calls = 0
        self._waiting: set[int] = set()
        self._gone: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether a row was cut that has come to no attention."""
        return bool(self._waiting)

    def add(self, slices: Slices) -> None:
        """Count a row that was cut."""
        self.num_cut += 1
        slices.number = self.num_cut
        self._waiting.add(slices.number)
        # The callback gets the row's number, not the row, which it would keep alive. At exit nothing is left to count.
        finalize(slices, self._drop, slices.number).atexit = False

    def serve(self, slices: Slices) -> None:
        """Note that a row has come to an attention."""
        self._waiting.discard(slices.number)

    def forget_gone(self) -> None:
        """Forget the rows that were freed within the outermost block, which ends."""
        self._waiting -= self._gone
        self._gone.clear()

    def _drop(self, number: int) -> None:
        if _ACTIVE.get() is None:
            self._waiting.discard(number)
        else:
            self._gone.add(number)


_CUT_ROWS = _CutRows()


class ContextParallel(contextlib.ContextDecorator):
    """Context manager that :func:`context_parallel` returns; it may be entered any number of times.

    Args:
        axis: as for :func:`context_parallel`.
        method: one of ``METHODS``.
        fallback: whether keys may be gathered where the heads cannot be exchanged.
    """

    def __init__(self, axis: Axis, method: str, fallback: bool) -> None:
        require_one_of(method, METHODS, "method")
        self.axis, self.size, self.rank = require_axis(axis), axis.size, axis.rank
        self.group = axis.require_group() if axis.size > 1 else None
        # The all-to-alls address ranks of the group, the slices ranks of the axis: both must count alike.
        if axis.order != list(range(axis.size)):
            raise InputError("the process group counts its ranks otherwise than the axis", found=axis.order)
        self.method, self.fallback = method, fallback
        self._entered: list[tuple[Any, int]] = []

    def __enter__(self) -> ContextParallel:
        # A stack, since the same object may be entered again within its own block. The number of calls so far shows on
        # leaving whether any attention ran inside.
        self._entered.append((_ACTIVE.set(self), _CUT_ROWS.num_calls))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        token, num_calls = self._entered.pop()
        _ACTIVE.reset(token)
        # Rows were cut that no attention used, and none ran in this block: the model has another implementation.
        is_missed = _CUT_ROWS.waiting and num_calls == _CUT_ROWS.num_calls
        if _ACTIVE.get() is None:
            _CUT_ROWS.forget_gone()
        if kind is None and is_missed:
            raise InputError(
                "no attention ran context parallel, although a row was cut for it",
                hint="ask require_context_parallel(model); load the model with attn_implementation='ullage'",
            )

    @torch.compiler.disable(reason="where the slices lie is data")
    def attend(self, call: PackedCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of this rank's slice of a row, [1, t, query heads, value dim]; collective.

        ``query`` [1, query heads, t, dim], ``key`` and ``value`` [1, key heads, t, dim] of the slice. Waits for the
        device once per row. Raises on every rank if one of them has to refuse the call.
        """
        _CUT_ROWS.num_calls += 1
        slices = self._agree(call.slices, lambda: call.require_exact(query, key), query, key)
        # Every rank takes the same branch below, since method, fallback and heads were compared for the row's first
        # layer.
        by_heads = self.uses_ulysses(query.shape[1])
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.size == 1:
            return call.attend(query, key, value)[None]
        if by_heads:
            return ulysses(query, key, value, slices, self.group, call.attend)[None]
        options = {"window": call.window, "scale": call.scale, "dropout": call.dropout}
        return gathered(query, key, value, slices, self.group, **options)[None]

    def uses_ulysses(self, heads: int) -> bool:
        """Whether this number of query heads on this rank is exchanged (Ulysses); if not, keys are gathered.

        Raises ``InputError`` where they cannot be exchanged and ``fallback`` is off.
        """
        if self.method == "gather":
            return False
        if heads % self.size == 0:
            return True
        if self.fallback:
            return False
        raise InputError(
            "the query heads cannot be divided over the context-parallel ranks",
            expected=f"a multiple of {self.size}",
            found=heads,
            hint="allow the fallback, or choose method='gather'",
        )

    def _agree(self, slices: Slices | None, check: Callable[[], None], query: Tensor, key: Tensor) -> Slices:
        """The slices, after ``check``; for a row's first layer together with the other ranks: if one fails, all raise.

        Collective and waits for the device, once a row.
        """
        if slices is not None:
            # An attention has the row, also where it refuses it: from here on no block has missed it.
            _CUT_ROWS.serve(slices)
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
                # What decides the branch and the sizes of the exchange. shape[1::2] is (heads, dim) without the tokens,
                # of which the ranks may hold different numbers.
                facts = f"{self.method} {self.fallback} {query.dtype} {query.shape[1::2]} {key.shape[1::2]}"
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
                    expected="the lengths, order, method and heads of rank 0",
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
        self.uses_ulysses(query.shape[1])


def context_parallel(axis: Axis, *, method: str = "auto", fallback: bool = True) -> ContextParallel:
    """Run attn_implementation="ullage" over the ranks of ``axis``, within ``with`` or in a decorated function.

    Args:
        axis: an axis of a topology, or ``Axis.from_group(group)`` of a process group.
        method: ``"ulysses"`` exchanges heads, ``"gather"`` gathers keys and values, ``"auto"`` is ulysses where the
            query heads (those on this rank, after tensor parallel) divide by the ranks, and gather elsewhere.
        fallback: whether ``"auto"`` and ``"ulysses"`` may gather where the heads do not divide; if not, that raises
            ``InputError`` on every rank.

    The backward pass may run after ``with`` has ended. Raises ``InputError`` for an unknown method and for a group that
    this process is not in.

    >>> with context_parallel(Axis("cp")) as context:
    ...     context.size
    1
    """
    return ContextParallel(axis, method, fallback)


def serving(slices: Slices | None) -> ContextParallel | None:
    """The ``ContextParallel`` that serves a call with these slices; None for a call of one process alone.

    A row remembers it, because a layer may be recomputed after ``with`` has ended, or on a thread of the backward pass.
    """
    found = _ACTIVE.get()
    if slices is None:
        return None if found is None or found.size == 1 else found
    found = found or slices.served_by
    if found is None:
        # A row cut into one slice is whole, so it needs no context around it.
        if slices.size == 1:
            return ContextParallel(Axis("cp"), "auto", fallback=True)
        raise InputError(
            "a slice of a row came to the attention, but no context_parallel is in force",
            hint="call the model within context_parallel(axis)",
        )
    return found


def shard_batch(batch: RaggedBatch, axis: Axis, order: str = "zigzag", *, num_items: Any = None) -> dict[str, Any]:
    """Keywords for a Hugging Face decoder: this rank's slice of a packed row.

    Args:
        batch: the whole row, equal on all ranks.
        axis: as for :func:`context_parallel`; one without a group, ``Axis("cp", size, rank)``, will do.
        order: ``"zigzag"``, which gives the ranks equal work when keys are gathered, or ``"contiguous"``.
        num_items: number of labels that count over all ranks of the step, by which the model divides the sum of its
            loss; if None, that of this row, at least 1.

    Returns a dict of

    - the token-aligned fields and ``position_ids`` [1, t], cut to the slice;
    - ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 [N + 1] and ``max_length_q``, ``max_length_k`` of the whole row;
    - ``context_slices``, which tells the attention where in the row the slice lies;
    - if there are labels, ``shift_labels`` [1, t], shifted within each sequence before the cut so that no label is
      lost, and ``num_items_in_batch``. Losses and gradients of the ranks then add up to those of the row.

    Slices differ by two tokens at most; a row with fewer tokens than ranks gets padding at its end. Not collective;
    does not wait for the device. Raises ``InputError`` for an order that does not exist.
    """
    size, rank = require_axis(axis).size, axis.rank
    has_labels = "labels" in batch and "labels" not in batch.per_sequence
    # Labels are shifted before the cut: the label of a slice's last token may lie on another rank.
    if has_labels and "shift_labels" not in batch:
        batch = batch.with_shift_labels()
    slices = Slices.of(batch.layout, size, rank, order)
    # A decoder needs a token on every rank: a row with too few gets one slot of padding more.
    # 2·size places are one for each zigzag chunk, and so two for each rank.
    tail = 2 * size if min(slices.lengths) == 0 else 0
    if tail:
        lengths, slots = (np.append(batch.layout.lengths, 0), np.append(batch.layout.slots, tail))
        slices = Slices.of(Layout.from_slots(lengths, slots), size, rank, order)
    if size > 1:
        _CUT_ROWS.add(slices)
    row = {name: batch[name] for name in batch.names if name not in batch.per_sequence}
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
    whole = RaggedBatch(row, slices.layout).to_flattened()
    take = torch.from_numpy(slices.index).to(batch.device)
    mine = {name: whole[name].index_select(1, take) for name in ("position_ids", *row)}
    return {**whole, **mine, **extra}


def _digest(text: str) -> int:
    # 63 bits, because the digests travel as signed int64.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
