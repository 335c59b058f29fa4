"""LLaMA-Factory adapter, not run against tests of LLaMA-Factory, which has none of this function.

LLaMA-Factory packs each batch of samples that ``datasets`` maps, by lengths alone::

    llamafactory.data.processor.supervised.greedy_knapsack = ullage.engines.llama_factory.greedy_knapsack

The signature is that of ``llamafactory/data/processor/processor_utils.py`` of August 2026.
"""

from __future__ import annotations

from ullage.engines.lists import bins
from ullage.engines.replacing import Replacements, replace


def greedy_knapsack(numbers: list[int], capacity: int) -> list[list[int]]:
    """``numbers`` in as few knapsacks as can be found: the lengths themselves, the largest first.

    ``numbers`` stays as it is; LLaMA-Factory's sorts and empties it. Raises ``InputError`` for a number above
    ``capacity``, with which LLaMA-Factory's does not end.

    >>> greedy_knapsack([5, 3, 4, 4], 8)
    [[5, 3], [4, 4]]
    """
    found = bins(numbers, capacity, order="fewest")
    return [sorted((numbers[i] for i in ids), reverse=True) for ids in found]


def install() -> Replacements:
    """Replace the function, wherever it was imported."""
    return replace({"llamafactory.data.processor.processor_utils.greedy_knapsack": greedy_knapsack})
