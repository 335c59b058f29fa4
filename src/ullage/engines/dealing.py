"""Plans as the lists of ids that other frameworks hand around."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.errors import InputError
from ullage.planning.plans import Plan


def bins_of(plan: Plan) -> list[list[int]]:
    """The ids of every bin, microbatch by microbatch and in each rank by rank: bin ``microbatch·ranks + rank``."""
    return [
        plan.members(microbatch, rank).tolist()
        for microbatch in range(plan.num_microbatches)
        for rank in range(plan.ranks)
    ]


def fill_empty(bins: list[list[int]], costs: Sequence[float], what: str = "bins") -> list[list[int]]:
    """``bins`` with none of them empty: each empty one takes the cheapest sequence of the dearest that has several.

    A sequence fits wherever it is alone, so no capacity is exceeded. Raises ``InputError`` for fewer sequences than
    bins.
    """
    held = sum(map(len, bins))
    if held < len(bins):
        raise InputError(
            f"there are fewer sequences than {what}, and none may be empty",
            expected=f"at least {len(bins)} sequences",
            found=held,
        )
    work = [sum(costs[i] for i in ids) for ids in bins]
    for k, ids in enumerate(bins):
        if ids:
            continue
        dearest = max((j for j in range(len(bins)) if len(bins[j]) > 1), key=lambda j: work[j])
        cheapest = min(bins[dearest], key=lambda i: costs[i])
        bins[dearest].remove(cheapest)
        ids.append(cheapest)
        work[dearest] -= costs[cheapest]
        work[k] = costs[cheapest]
    return bins
