"""OpenRLHF adapter, not run against tests of OpenRLHF, which has none of these functions.

OpenRLHF counts microbatches by first fit, then balances tokens over that many and does not look at the cap again. Both
functions are replaced together, so that the count is one with which balancing keeps the cap::

    ullage.engines.openrlhf.install()

or one assignment for each in ``openrlhf.trainer.ppo_utils.replay_buffer`` and ``experience_maker``. Ray's
``worker_process_setup_hook`` does it in every worker. Signatures are those of ``openrlhf/utils/seqlen_balancing.py`` of
August 2026.
"""

from __future__ import annotations

from collections.abc import Sequence

from ullage.engines.replacing import Replacements, replace
from ullage.engines.verl import get_seqlen_balanced_partitions as get_seqlen_balanced_partitions
from ullage.planning.lists import bins, partitions

MODULE = "openrlhf.utils.seqlen_balancing"


def get_minimum_num_micro_batch_size(
    total_lengths: Sequence[int], max_tokens_per_gpu: int, ring_attn_size: int, ds_tensor_parallel_size: int
) -> int:
    """Least number of parts into which :func:`get_seqlen_balanced_partitions` divides without exceeding the cap.

    The cap is ``max_tokens_per_gpu · ring_attn_size · ds_tensor_parallel_size`` tokens; a sample above it is alone.
    """
    cap = max_tokens_per_gpu * ring_attn_size * ds_tensor_parallel_size
    count = len(bins(total_lengths, cap, order="fewest", oversize="alone"))
    # Parts of even sums may need a few more than bins that are only filled; as many as samples always do.
    while count < len(total_lengths):
        parts = partitions(total_lengths, count)
        if all(len(part) == 1 or sum(total_lengths[i] for i in part) <= cap for part in parts):
            break
        count += 1
    return count


def install() -> Replacements:
    """Replace both functions, wherever they were imported."""
    ours = (get_seqlen_balanced_partitions, get_minimum_num_micro_batch_size)
    return replace({f"{MODULE}.{function.__name__}": function for function in ours})
