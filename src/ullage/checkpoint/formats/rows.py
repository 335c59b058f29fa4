"""Rows of a tensor as a tensor of their own: the same bytes of the same files."""

from __future__ import annotations

import math
from dataclasses import replace

from ullage.checkpoint.inventory import Fragments, Merge, Slice, Tensor


def rows_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Rows ``[begin, end)`` along the first dim of ``tensor``, however its slices make the whole."""
    if (begin, end) == (0, tensor.shape[0]):
        return tensor
    shape = (end - begin, *tensor.shape[1:])
    row, item, merge = math.prod(shape[1:]), tensor.item_bytes, tensor.merge
    if merge.kind == "columns" and merge.outer == 1:
        tensor, merge = _flat(tensor), Merge()
    if merge.kind == "columns":
        # A slice's own row is as wide as its bands; rows of the dims in front of the cut go with the first.
        lines = merge.outer // tensor.shape[0]
        slices = []
        for number, part in enumerate(tensor.slices):
            own = lines * merge.inner * sum(b.width for b in merge.bands if b.slice == number)
            narrow = (lines * (end - begin), own // max(1, lines))
            slices.append(Slice(part.model_rank, narrow, _cut(part.fragments, begin * own, end * own, item)))
        return replace(tensor, shape=shape, slices=tuple(slices), merge=replace(merge, outer=lines * (end - begin)))
    if merge.kind == "strided":
        span = 1 + sum((d - 1) * s for d, s in zip(shape, merge.strides)) if math.prod(shape) else 0
        first = begin * merge.strides[0]
        part = tensor.slices[0]
        cut = Slice(part.model_rank, (span,), _cut(part.fragments, first, first + span, item))
        return replace(tensor, shape=shape, slices=(cut,))
    slices = [
        Slice(part.model_rank, shape, _cut(part.fragments, begin * row, end * row, item)) for part in tensor.slices
    ]
    return replace(tensor, shape=shape, slices=tuple(slices), merge=merge)


def with_dim_in_front(tensor: Tensor) -> Tensor:
    """The tensor with a dim of length 1 before its own: one layer of a stack."""
    merge = tensor.merge
    if merge.kind == "strided":
        merge = replace(merge, strides=(0, *merge.strides))
    return replace(tensor, shape=(1, *tensor.shape), merge=merge)


def _cut(fragments: Fragments, start: int, stop: int, item: int) -> Fragments:
    return fragments.window(start, stop, item).moved(-start)


def _flat(tensor: Tensor) -> Tensor:
    """Slices side by side along the first dim as one: their bands are stretches of the whole."""
    inner, item = tensor.merge.inner, tensor.item_bytes
    parts = []
    for band in tensor.merge.bands:
        held = tensor.slices[band.slice].fragments
        cut = held.window(band.begin * inner, (band.begin + band.width) * inner, item)
        parts.append(cut.moved((band.at - band.begin) * inner))
    whole = Slice(tensor.slices[0].model_rank, tensor.shape, Fragments.join(parts))
    return replace(tensor, slices=(whole,), merge=Merge())
