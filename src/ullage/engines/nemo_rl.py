"""NeMo-RL adapter: its factory of sequence packers, over ullage's plan.

NeMo-RL packs on the driver, which holds every row: a packer makes bins, and bin *k* goes to data-parallel shard
``k % shards``. The bins of a plan, listed in the order of microbatches and then ranks, therefore arrive at the ranks
that the plan chose, without a change to NeMo-RL. One line puts it in place::

    nemo_rl.distributed.batched_data_dict.get_packer = ullage.engines.nemo_rl.get_packer

or ``ullage.engines.nemo_rl.install()``, wherever it was imported.

Shown with NeMo-RL's tests/unit/data/packing/test_algorithms.py and tests/unit/distributed/test_batched_data_dict.py of
22 August 2026 over this factory. NeMo-RL is not installed where this project is tested.
"""

from __future__ import annotations

import enum

from ullage.engines.packers import BinPacker, require_algorithm, stand_for
from ullage.engines.replacing import Replacements, replace

MODULE = "nemo_rl.data.packing"
#: NeMo-RL's names of algorithms, and ``BALANCED``. The first keeps arrival order; all others are the plan.
ARRIVAL = "CONCATENATIVE"
ALGORITHMS = (ARRIVAL, "FIRST_FIT_DECREASING", "FIRST_FIT_SHUFFLE", "MODIFIED_FIRST_FIT_DECREASING", "BALANCED")


def get_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> BinPacker:
    """Packer for an algorithm's name; replaces NeMo-RL's factory of this name.

    Args:
        algorithm: one of NeMo-RL's names in any case, or a member of its enum. ``concatenative`` keeps arrival order;
            the others, and ``balanced``, are the plan.
        collect_metrics: accepted and ignored.
        bin_capacity, min_bin_count, bin_count_multiple: as for :class:`ullage.engines.packers.BinPacker`.

    Raises ``InputError``, a ``ValueError``, for another name.

    >>> get_packer("first_fit_shuffle", 8, bin_count_multiple=2).pack([5, 3, 4, 4])
    [[2, 3], [0, 1]]
    """
    order = "next_fit" if require_algorithm(algorithm, ALGORITHMS) == ARRIVAL else "balanced"
    stand_for(f"{MODULE}.algorithms", "SequencePacker")
    return BinPacker(bin_capacity, min_bin_count, bin_count_multiple, order=order)


def install() -> Replacements:
    """Replace the factory, wherever it was imported."""
    return replace({f"{MODULE}.algorithms.get_packer": get_packer})
