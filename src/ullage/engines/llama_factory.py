"""LLaMA-Factory adapter, not run against tests of LLaMA-Factory, which has none of this function.

LLaMA-Factory packs each batch of samples that ``datasets`` maps, by lengths alone::

    llamafactory.data.processor.supervised.greedy_knapsack = ullage.engines.llama_factory.greedy_knapsack

The signature is that of ``llamafactory/data/processor/processor_utils.py`` of August 2026.
"""

from __future__ import annotations

from typing import Any

from ullage.engines.replacing import Replacements, original, replace
from ullage.planning.lists import bins

#: The method that packs: ``datasets`` maps it, and names what it caches after it.
_MAPPED = "llamafactory.data.processor.supervised.PackedSupervisedDatasetProcessor.preprocess_dataset"


def greedy_knapsack(numbers: list[int], capacity: int) -> list[list[int]]:
    """``numbers`` in as few knapsacks as can be found: the lengths themselves, the largest first.

    ``numbers`` stays as it is; LLaMA-Factory's sorts and empties it. Raises ``InputError`` for a number above
    ``capacity``, with which LLaMA-Factory's does not end.

    >>> greedy_knapsack([5, 3, 4, 4], 8)
    [[5, 3], [4, 4]]
    """
    found = bins(numbers, capacity, order="fewest")
    return [sorted((numbers[i] for i in ids), reverse=True) for ids in found]


def preprocess_packed_dataset(processor: Any, examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """LLaMA-Factory's own method under another name.

    ``datasets`` names what it keeps of a map after the mapped function: by its name, not by the global names that it
    reads. Under LLaMA-Factory's name it would take the rows that were packed before :func:`install`, and keep ours
    for those who do without.
    """
    method: Any = original(preprocess_packed_dataset, install)
    return method(processor, examples)


def install() -> Replacements:
    """Replace the function, wherever it was imported; ``datasets`` keeps its rows apart from those without it."""
    knapsack = "llamafactory.data.processor.processor_utils.greedy_knapsack"
    return replace({knapsack: greedy_knapsack, _MAPPED: preprocess_packed_dataset})
