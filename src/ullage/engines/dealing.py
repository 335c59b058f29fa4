"""Conversion of plans to the lists of ids that other frameworks take."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.errors import InputError
from ullage.planning.plans import Plan


def bins_of(plan: Plan) -> list[list[int]]:
    """Ids of every bin, in the order of microbatches and then ranks: bin ``microbatch·ranks + rank``."""
    return [
        plan.members(microbatch, rank).tolist()
        for microbatch in range(plan.num_microbatches)
        for rank in range(plan.ranks)
    ]


def fill_empty(bins: list[list[int]], costs: Sequence[float], what: str = "bins") -> list[list[int]]:
    """``bins`` without empty ones: each takes the cheapest sequence of the most expensive bin that has several.

    ``costs``: cost of each sequence by id. ``what``: the caller's word for bins, for the error. Changes ``bins`` and
    returns it. A sequence fits wherever it is alone, so no capacity is exceeded. Raises ``InputError`` for fewer
    sequences than bins.
    """
    num_sequences = sum(map(len, bins))
    if num_sequences < len(bins):
        raise InputError(
            f"there are fewer sequences than {what}, and none may be empty",
            expected=f"at least {len(bins)} sequences",
            found=num_sequences,
        )
    work = [sum(costs[i] for i in ids) for ids in bins]
    for k, ids in enumerate(bins):
        if ids:
            continue
        # One exists: there are at least as many sequences as bins, and this bin is empty.
        source = max((j for j in range(len(bins)) if len(bins[j]) > 1), key=lambda j: work[j])
        cheapest = min(bins[source], key=lambda i: costs[i])
        bins[source].remove(cheapest)
        ids.append(cheapest)
        work[source] -= costs[cheapest]
        work[k] = costs[cheapest]
    return bins
