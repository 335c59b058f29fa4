"""SkyRL adapter: its factory of sequence packers, over ullage's plan.

SkyRL packs a global batch on the driver and each rank's rows in its worker, by packers of one factory::

    skyrl.train.dataset.bin_packing.make_seq_packer = ullage.engines.skyrl.make_seq_packer

before ``collators`` and ``worker_utils`` import it, or ``ullage.engines.skyrl.install()`` at any time. Shown with
SkyRL's tests/backends/skyrl_train/distributed/test_bin_packing.py and test_token_based_batching_utils.py of 21 August
2026 over this factory. SkyRL is not installed where this project is tested.
"""

from __future__ import annotations

import enum

from ullage.engines.packers import BinPacker, require_algorithm, stand_for
from ullage.engines.replacing import Replacements, replace

MODULE = "skyrl.train.dataset.bin_packing"
#: Name of an algorithm -> the class of SkyRL's that its packer stands for, and what a sequence above the capacity does.
ALGORITHMS = {"FIRST_FIT_DECREASING": ("FirstFitDecreasing", "error"), "BALANCED": ("Balanced", "alone")}


def make_seq_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> BinPacker:
    """Packer for an algorithm's name; replaces SkyRL's factory of this name.

    ``algorithm``: one of SkyRL's names in any case, or a member of its enum. Both are the plan; they differ in a
    sequence above ``bin_capacity``, which ``first_fit_decreasing`` refuses and ``balanced`` leaves alone in its bin,
    with a warning. Raises ``InputError``, a ``ValueError``, for another name.
    """
    theirs, oversize = ALGORITHMS[require_algorithm(algorithm, ALGORITHMS)]
    stand_for(MODULE, theirs)
    return BinPacker(bin_capacity, min_bin_count, bin_count_multiple, oversize=oversize)


def install() -> Replacements:
    """Replace the factory, wherever it was imported."""
    return replace({f"{MODULE}.make_seq_packer": make_seq_packer})
