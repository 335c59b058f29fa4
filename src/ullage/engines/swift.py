"""ms-swift adapter, not run against tests of ms-swift, which has none of this function alone.

ms-swift packs its data set in chunks of 1000 samples, each by one function; what is left over joins the next chunk::

    swift.dataset.packing.calculate_matched_group = ullage.engines.swift.calculate_matched_group

Its packing processes are forked, so they have the replacement. The signature is that of ``swift/dataset/packing.py`` of
August 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ullage.core.errors import require_one_of
from ullage.engines.replacing import Replacements, replace
from ullage.planning.lists import bins

Packs = list[list[tuple[Any, int]]]


def calculate_matched_group(
    sequences: Sequence[tuple[Any, int]], packing_length: int, is_finished: bool = True, strategy: str = "binpack"
) -> tuple[Packs, list[tuple[Any, int]]]:
    """Packs of ``(sample, length)``, and the samples that are left for the next call.

    ``strategy``: ``"binpack"``, as few packs as can be found, or ``"sequential"``, which keeps the order. Unless
    ``is_finished``, the emptiest pack is held back; with ``"sequential"`` the last one, if it is not full. A sample
    above ``packing_length`` is alone in its pack, with a warning.
    """
    require_one_of(strategy, ("binpack", "sequential"), "strategy")
    given = list(sequences)
    lengths = [length for _, length in given]
    order = "next_fit" if strategy == "sequential" else "fewest"
    found = bins(lengths, packing_length, order=order, oversize="alone")
    left: list[int] = []
    if found and not is_finished:
        filled = [sum(lengths[i] for i in ids) for ids in found]
        k = len(found) - 1 if strategy == "sequential" else min(range(len(found)), key=filled.__getitem__)
        if strategy == "binpack" or filled[k] < packing_length:
            left = found.pop(k)
    return [[given[i] for i in ids] for ids in found], [given[i] for i in left]


def install() -> Replacements:
    """Replace the function, wherever it was imported."""
    return replace({"swift.dataset.packing.calculate_matched_group": calculate_matched_group})
