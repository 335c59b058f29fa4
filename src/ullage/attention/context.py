"""Context parallel: one packed row over several ranks, each with a slice of its tokens.

``shard_batch`` makes this rank's keywords of a row, and within ``context_parallel(group)`` the attention of
``attn_implementation="ullage"`` gives each token what it would get on one process. Everything else in a decoder works
on single tokens and needs no other rank. The loss divides by the labels of the whole row, so losses and gradients of
the ranks add up to those of one process.

Before the first layer of a row the ranks compare what they hold, in one gather of three integers, so that a row cut
for another group, or a call that one rank has to refuse, raises on every rank instead of leaving the others waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.attention.gathered import gathered
from ullage.attention.slices import Slices, cut
from ullage.attention.ulysses import ulysses
from ullage.batch import IGNORED_LABEL, RaggedBatch, fill_value
from ullage.errors import DistributedError, InputError, UllageError
from ullage.exchange.topology import Axis
from ullage.layout import Layout

METHODS = ("auto", "ulysses", "gather")

_ACTIVE: ContextVar[ContextParallel | None] = ContextVar("ullage_context_parallel", default=None)


class ContextParallel(contextlib.ContextDecorator):
    """What :func:`context_parallel` makes: in force while it is entered, any number of times."""

    def __init__(self, group: Any, method: str, fallback: bool) -> None:
        if method not in METHODS:
            raise InputError("no such method", expected=" or ".join(map(repr, METHODS)), found=repr(method))
        self.group, self.size, self.rank = _place(group)
        self.method, self.fallback = method, fallback
        self._tokens: list[Any] = []

    def __enter__(self) -> ContextParallel:
        self._tokens.append(_ACTIVE.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        _ACTIVE.reset(self._tokens.pop())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slices: Slices,
        kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
        options: dict[str, Any],
    ) -> Tensor:
        """Attention of this rank's slice [t, heads, dim]; ``kernel`` is that of a whole row. Collective."""
        if self.size == 1:
            return kernel(query, key, value)
        if self.uses_ulysses(query.shape[1]):
            return ulysses(query, key, value, slices, self.group, kernel)
        return gathered(query, key, value, slices, self.group, **options)

    def uses_ulysses(self, heads: int) -> bool:
        """Whether this many query heads, as they are on this rank, are exchanged; if not, keys are gathered.

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

    def agree(self, slices: Slices | None, check: Callable[[], None], query: Tensor, key: Tensor) -> None:
        """Runs ``check``, once a row together with the other ranks. Raises on every rank if it fails on one.

        Collective and waits for the device, once a row: the layers that follow know that the ranks agree.
        """
        failure: UllageError | None = None
        try:
            check()
            self._check(slices, query)
        except UllageError as error:
            failure = error
        if slices is not None and slices.served_by is self:
            if failure is not None:
                raise failure
            return
        records = [(0, 0)]
        if self.size > 1:
            facts = f"{self.method} {self.fallback} {query.shape[1:]} {key.shape[1:]} {query.dtype}"
            digest = 0 if failure is not None or slices is None else slices.digest ^ _digest(facts)
            mine = torch.tensor([failure is not None, digest], device=query.device)
            every = torch.empty(self.size, 2, dtype=torch.int64, device=query.device)
            sends = [1] * self.size
            dist.all_to_all_single(every, mine.expand(self.size, 2).contiguous(), sends, sends, group=self.group)
            records = every.tolist()
        if failure is not None:
            raise failure
        for rank, (failed, digest) in enumerate(records):
            if failed:
                raise DistributedError(
                    "another rank refused its slice", where=f"rank {rank} of the group", hint="its own error says why"
                )
            if digest != records[0][1]:
                raise DistributedError(
                    "ranks of a context-parallel group hold slices of different rows",
                    where=f"rank {rank} of the group",
                    expected="the row, order, method and heads of rank 0",
                    found="others",
                )
        assert slices is not None
        slices.served_by = self

    def _check(self, slices: Slices | None, query: Tensor) -> None:
        if slices is None:
            raise InputError(
                "context parallel takes slices of packed rows only",
                found="a call without context_slices",
                hint="give the model what shard_batch makes, or leave context_parallel",
            )
        if (slices.size, slices.rank) != (self.size, self.rank):
            raise InputError(
                "a row was cut for another group",
                expected=f"rank {self.rank} of {self.size}",
                found=f"rank {slices.rank} of {slices.size}",
                hint="give shard_batch the group that context_parallel has",
            )
        if len(slices.index) != query.shape[2]:
            raise InputError(
                "the model's row is not the slice that was cut for it",
                expected=f"{len(slices.index)} tokens",
                found=query.shape[2],
            )
        self.uses_ulysses(query.shape[1])


def context_parallel(group: Any, *, method: str = "auto", fallback: bool = True) -> ContextParallel:
    """Makes attn_implementation="ullage" run over the ranks of ``group``, within ``with`` or on a decorated function.

    ``group``: a process group, a topology's axis, a device mesh of one dimension, or None for one process. ``method``:
    ``"ulysses"`` exchanges heads, ``"gather"`` gathers keys and values, ``"auto"`` is ulysses where the query heads
    (those on this rank, after tensor parallel) divide by the ranks, and else gather. ``fallback``: whether "ulysses"
    too may gather where they do not divide; off, both raise ``InputError`` on every rank. Backward may run outside.

    >>> with context_parallel(None) as context:
    ...     context.size
    1
    """
    return ContextParallel(group, method, fallback)


def serving(slices: Slices | None) -> ContextParallel | None:
    """What serves a call: what served the row's first layer, so that a recomputed layer may run outside; None if plain."""
    found = _ACTIVE.get() if slices is None or slices.served_by is None else slices.served_by
    if found is None and slices is not None:
        raise InputError(
            "a slice of a row came to the attention, but no context_parallel is in force",
            hint="call the model within context_parallel(group)",
        )
    return found


def shard_batch(
    batch: RaggedBatch, group: Any, rank: int | None = None, order: str = "zigzag", *, num_items: Any = None
) -> dict[str, Any]:
    """Keywords for a Hugging Face decoder: this rank's slice of a packed row.

    The token-aligned fields and ``position_ids`` [1, t], cut; ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 [N + 1] and
    ``max_length_q``, ``max_length_k`` of the whole row; ``context_slices``, by which the attention knows what the slice
    is a slice of; and if there are labels, ``shift_labels`` [1, t], shifted within each sequence before the cut so that
    none is lost, and ``num_items_in_batch``, by which the model divides the sum of its loss: ``num_items``, the labels
    that count over all ranks of the step, or those of this row, at least 1. Losses and gradients then add over ranks.

    ``group``: as for :func:`context_parallel`, or a number of ranks, with ``rank``. ``order``: ``"zigzag"``, which
    gathering needs for equal work, or ``"contiguous"``. Slices differ by two tokens at most; a row with fewer tokens
    than ranks gets padding at its end. Pure; does not wait for the device. Raises ``InputError`` for a rank or an
    order that does not exist.
    """
    _, size, rank = _place(group, rank)
    has_labels = "labels" in batch and "labels" not in batch.per_sequence
    if has_labels and "shift_labels" not in batch:
        batch = batch.with_shift_labels()
    slices = cut(batch.layout, size, rank, order)
    tail = 0
    if min(slices.lengths) == 0:  # a decoder needs a token on every rank
        tail = 2 * size
        layout = batch.layout
        slices = cut(Layout.from_slots(np.append(layout.lengths, 0), np.append(layout.slots, tail)), size, rank, order)
    row = {name: batch[name] for name in batch.names if name not in batch.per_sequence}
    layout = slices.layout
    if has_labels:
        counted = (row["shift_labels"] != IGNORED_LABEL).sum().clamp(min=1) if num_items is None else num_items
        starts = torch.from_numpy(batch.layout.starts[batch.layout.slots > 0]).to(batch.device)
        row["labels"] = row["labels"].index_fill(0, starts, IGNORED_LABEL)
    if tail:
        row = {
            name: torch.cat([values, values.new_full((tail, *values.shape[1:]), fill_value(name))])
            for name, values in row.items()
        }
    row.setdefault("position_ids", torch.from_numpy(layout.positions()).to(batch.device))
    take = torch.from_numpy(slices.index).to(batch.device)
    cu_seqlens = torch.from_numpy(layout.cu_seqlens(padded=True)).to(batch.device)
    longest = int(layout.slots.max(initial=0))
    return {
        **{name: values.index_select(0, take)[None] for name, values in row.items()},
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "context_slices": slices,
        "use_cache": False,
        **({"num_items_in_batch": counted} if has_labels else {}),
    }


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _place(group: Any, rank: int | None = None) -> tuple[Any, int, int]:
    """The process group, its size, and this rank within it."""
    if isinstance(group, Axis):
        if group.size > 1 and list(group.order) != list(range(group.size)):
            raise InputError("the ranks of the group are not in the order of the axis", found=list(group.order))
        return group.group, group.size, group.rank if rank is None else rank
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        group = group.get_group()
    if group is None:
        group = 1
    if isinstance(group, int):
        if rank is None and group != 1:
            raise InputError("a number of ranks does not tell which of them this is", hint="pass rank, or the group")
        return None, group, rank or 0
    return group, dist.get_world_size(group), dist.get_rank(group) if rank is None else rank
