"""Views of logits [..., words] that are not computed: what they make of the hidden states [..., H] behind them.

A slice of tokens or another form of the leading dims is the same of the hidden states, as long as the last dim stays
apart from the others. Each function takes the hidden states, the number of words and the operation's own arguments. It
gives the hidden states of the result, and a step on the scores if the last dim is cut; None for what is no such view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor


class ScoreStep:
    """One operation on scores [n, words], with what stands beside them."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, scores: Tensor) -> Tensor:
        return self.func(scores, *self.args, **self.kwargs)


View = tuple[Tensor, Callable[[Tensor], Tensor] | None]


def _indexed(hidden: Tensor, words: int, index: Any) -> View | None:
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or isinstance(each, (int, slice, Tensor)) for each in entries):
        return None
    taken = [0 if each is None or each is Ellipsis else _dims_of(each) for each in entries]
    rest = hidden.ndim - sum(taken)
    places = [place for place, each in enumerate(entries) if each is Ellipsis]
    if rest < 0 or len(places) > 1:
        return None
    place = places[0] if places else len(entries)
    entries[place : place + 1] = [slice(None)] * rest
    # The last entry that takes a dim takes that of the words.
    last = max((place for place, each in enumerate(entries) if each is not None), default=None)
    if last is None or not isinstance(entries[last], slice) or any(each is None for each in entries[last:]):
        return None
    chosen, entries[last] = entries[last], slice(None)
    rows = hidden[tuple(entries)]
    if chosen.indices(words) == (0, words, 1):
        return rows, None
    return rows, ScoreStep(Tensor.__getitem__, ((Ellipsis, chosen),), {})


def _dims_of(entry: Any) -> int:
    is_mask = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.ndim if is_mask else 1


def _reshaped(hidden: Tensor, words: int, *shape: Any, **named: Any) -> View | None:
    sizes = tuple(named.get("shape", named.get("size", shape)))
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    if not sizes or not all(isinstance(each, int) for each in sizes):
        return None
    *leading, last = sizes
    if last == -1 and prod(leading) == prod(hidden.shape[:-1]):
        last = words
    # With no tokens, -1 could be anything.
    if last != words or not leading or not hidden.numel():
        return None
    known = prod(each for each in leading if each != -1)
    if leading.count(-1) > 1 or not known or prod(hidden.shape[:-1]) % known:
        return None
    return hidden.reshape(*leading, hidden.shape[-1]), None


def _flattened(hidden: Tensor, words: int, start_dim: int = 0, end_dim: int = -1) -> View | None:
    end = end_dim % hidden.ndim
    return None if end == hidden.ndim - 1 else (hidden.flatten(start_dim, end), None)


def _unflattened(hidden: Tensor, words: int, dim: int, sizes: Any) -> View | None:
    return None if dim % hidden.ndim == hidden.ndim - 1 else (hidden.unflatten(dim, sizes), None)


def _unsqueezed(hidden: Tensor, words: int, dim: int) -> View | None:
    place = dim % (hidden.ndim + 1)
    return None if place == hidden.ndim else (hidden.unsqueeze(place), None)


def _squeezed(hidden: Tensor, words: int, dim: int | None = None) -> View | None:
    return None if dim is None or dim % hidden.ndim == hidden.ndim - 1 else (hidden.squeeze(dim), None)


VIEWS: dict[str, Callable[..., View | None]] = {
    "getitem": _indexed,
    "view": _reshaped,
    "reshape": _reshaped,
    "flatten": _flattened,
    "unflatten": _unflattened,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
}
