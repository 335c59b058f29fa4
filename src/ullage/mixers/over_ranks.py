"""A mixer of a row that ranks share: each rank gets whole sequences, and slices of the row again afterwards.

Within :func:`ullage.attention.context_parallel` a rank holds a slice of a packed row, wherever sequences end. A mixer
(convolution, scan, state) carries something from token to token of a sequence and nothing to another sequence. So the
sequences of the row are dealt out to the ranks, the longest first, each to the rank with the fewest tokens; one
all-to-all brings a rank the tokens of its sequences, the mixer runs on them as it does on any packed row, and one
all-to-all takes the results back. The ranks share this work as evenly as the lengths allow: a row of one sequence has
its mixers run on one rank, while attention and everything by token stay shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.attention.context import serving
from ullage.attention.ulysses import Slices, exchange_rows
from ullage.core.layout import Int64, Layout
from ullage.core.rows import on_device, permute
from ullage.mixers.by_lengths import PackedRow


class _Dealt:
    """The sequences of a row as dealt out to the ranks that share it, from the side of one of them.

    Attributes:
        order: the tokens of this rank's slice by the rank that they go to, int64 [t], and ``inverse``, the way back.
        sends, receives: tokens that go to each rank, and come from each.
        layout: of this rank's sequences, in the order of the row.
    """

    def __init__(self, slices: Slices, device: torch.device) -> None:
        layout, size = slices.layout, slices.size
        owners = _owners(layout.slots, size)
        of_token = np.repeat(owners, layout.slots)
        mine = of_token[slices.index]
        order = np.argsort(mine, kind="stable")
        self.order, self.inverse = (on_device(each, device) for each in (order, np.argsort(order)))
        self.sends = np.bincount(mine, minlength=size).tolist()
        # Slices are neighbouring tokens, rank by rank, so what arrives is in the order of the row.
        parts = np.split(of_token, np.cumsum(slices.lengths)[:-1])
        self.receives = [int(np.count_nonzero(part == slices.rank)) for part in parts]
        kept = owners == slices.rank
        self.layout = Layout.from_slots(layout.lengths[kept], layout.slots[kept])

    def gather(self, slice_: Tensor, group: Any) -> Tensor:
        """Values [1, t, ...] of the slice as those of this rank's sequences."""
        return exchange_rows(permute(slice_[0], self.order, self.inverse), self.sends, self.receives, group)[None]

    def scatter(self, values: Tensor, group: Any) -> Tensor:
        """Undo :meth:`gather`."""
        return permute(exchange_rows(values[0], self.receives, self.sends, group), self.inverse, self.order)[None]


def _owners(slots: Int64, size: int) -> Int64:
    """The rank of each sequence: the longest first, each to the rank that has the fewest tokens.

    >>> _owners(np.array([2, 9, 4, 4]), 2).tolist()
    [1, 0, 1, 1]
    """
    loads, owners = [0] * size, np.zeros(len(slots), np.int64)
    for i in np.argsort(-slots, kind="stable").tolist():
        owners[i] = rank = loads.index(min(loads))
        loads[rank] += int(slots[i])
    return owners


@lru_cache(maxsize=8)
def _dealt(slices: Slices, device: torch.device) -> _Dealt:
    # One object for all layers of a row.
    return _Dealt(slices, device)


def over_ranks(
    row: PackedRow,
    run: Callable[[PackedRow, tuple[Any, ...], dict[str, Any]], Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """What a mixer gives for this rank's slice of a row, by ``run`` on whole sequences.

    Args:
        row: with ``slices``.
        run: the mixer for a packed row, its arguments and its keywords; gives tensors [1, T, ...], or tuples of them.
        arguments, keywords: of the slice; tensors [1, t, ...] are exchanged, all else is handed on.

    Collective within ``context_parallel``; waits for the device once per row, as attention does. Raises on every rank
    if one holds a slice of another row.
    """
    slices = row.slices
    context = serving(slices)
    assert slices is not None
    assert context is not None
    tokens = next(each for each in (*arguments, *keywords.values()) if _is_of(each, len(slices.index)))
    context.meet(slices, tokens)
    if context.size == 1:
        return run(PackedRow(slices.layout, None, row.device), arguments, keywords)
    dealt, group = _dealt(slices, tokens.device), context.group
    layout, size = dealt.layout, dealt.layout.size
    # A rank without a sequence takes part all the same, with one token that counts for nothing: its parameters have
    # gradients, and the others get those of their tokens.
    spare = 0 if layout.num_tokens else 1
    if spare:
        layout = Layout.from_slots(np.append(layout.lengths, 1), np.append(layout.slots, 1))

    def gather(values: Tensor) -> Tensor:
        there = dealt.gather(values, group)
        return torch.cat([there, there.new_zeros(1, 1, *there.shape[2:])], 1) if spare else there

    arguments = _mapped(arguments, len(slices.index), gather)
    keywords = _mapped(keywords, len(slices.index), gather)
    with context.apart():
        outputs = run(PackedRow(layout, None, row.device), arguments, keywords)
    return _mapped(outputs, layout.size, lambda values: dealt.scatter(values[:, :size], group))


def _is_of(value: Any, num_tokens: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and tuple(value.shape[:2]) == (1, num_tokens)


def _mapped(value: Any, num_tokens: int, function: Callable[[Tensor], Tensor]) -> Any:
    """A function of all tensors [1, num_tokens, ...] in tuples, lists and dicts, in their order."""
    if isinstance(value, dict):
        return {name: _mapped(each, num_tokens, function) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(each, num_tokens, function) for each in value)
    return function(value) if _is_of(value, num_tokens) else value
