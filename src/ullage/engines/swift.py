"""ms-swift adapter, not run against tests of ms-swift, which has none of this function alone.

ms-swift packs its data set in chunks of 1000 samples, each by one function; what is left over joins the next chunk::

    swift.dataset.packing.calculate_matched_group = ullage.engines.swift.calculate_matched_group

or one option, ``--external_plugins``, with the file that :data:`ullage.engines.plugins.SWIFT_PLUGIN` names. Its packing
processes are spawned as soon as torch.distributed or CUDA is in use, which is always so under torchrun: the method that
they run is replaced as well, so that they have ours too. The signature is that of ``swift/dataset/packing.py`` of
November 2026 (4.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ullage.core.errors import require_one_of
from ullage.engines.replacing import Replacements, original, replace
from ullage.planning.lists import bins

MODULE = "swift.dataset.packing"
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


def create_packed_idx(*arguments: Any) -> None:
    """ms-swift's own method, which its packing processes run; in one that was spawned our function is put in place."""
    original(create_packed_idx, install)(*arguments)


def install() -> Replacements:
    """Replace the function, wherever it was imported, in this process and in ms-swift's packing processes."""
    worker = f"{MODULE}.PackingDataset.create_packed_idx"
    table = {f"{MODULE}.calculate_matched_group": calculate_matched_group, worker: create_packed_idx}
    return replace(table, optional=(worker,))
