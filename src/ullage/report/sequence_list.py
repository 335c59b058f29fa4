"""Every sequence of a plan by its id: its tokens, its microbatch and its rank, with a link to its block on the page.

The list is folded into runs of consecutive ids, so that one is found in two clicks, or by the browser's search.
"""

from __future__ import annotations

from typing import NamedTuple

from ullage.planning import Plan

#: Sequences listed at the most, and in one fold.
MAX_LISTED, _FOLD = 4096, 256


class Listed(NamedTuple):
    """One sequence. ``place``: microbatch and rank as text. ``block``: the id of the sequence that names its block."""

    id: int
    tokens: int
    place: str
    block: int | None


class Fold(NamedTuple):
    """Entries of consecutive ids; the ``name`` is the first and the last of them."""

    name: str
    entries: tuple[Listed, ...]


def folds(plan: Plan, blocks: dict[int, int]) -> list[Fold]:
    """The first ``MAX_LISTED`` sequences. ``blocks``: for each sequence that is drawn, the one that names its block."""
    listed = min(len(plan.lengths), MAX_LISTED)
    places = zip(plan.lengths[:listed].tolist(), plan.bins[:listed].tolist())
    entries = [Listed(i, tokens, _place(plan, where), blocks.get(i)) for i, (tokens, where) in enumerate(places)]
    return [
        Fold(_between(first, min(first + _FOLD, listed) - 1), tuple(entries[first : first + _FOLD]))
        for first in range(0, listed, _FOLD)
    ]


def _between(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _place(plan: Plan, where: int) -> str:
    if where < 0:
        return "dropped"
    microbatch, rank = divmod(where, plan.ranks)
    degree = plan.degree(microbatch, rank)
    return f"{microbatch} · {rank}" + (f"–{rank + degree - 1}" if degree > 1 else "")
