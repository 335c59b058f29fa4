"""Padded batches: what a step would take without packing.

Sequences stay in the order in which they arrive. A batch takes the next one for as long as all of it, padded to its
longest, fits into the capacity; batches go to the ranks in turn, and the ranks' batches of one turn are a microbatch.
Every slot is computed, so a sequence costs what the longest of its batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ullage.core.layout import Int64
from ullage.planning.placement import slots_of
from ullage.planning.plans import Plan


@dataclass(frozen=True)
class Padded:
    """Figures of padded batches, in the terms of a plan's.

    Attributes:
        num_batches: batches on all ranks.
        num_microbatches: per rank.
        num_slots: tokens and padding that are computed.
        padding_computed: the part of ``num_slots`` that is padding.
        ullage: the part of the capacity that holds no token.
        rank_imbalance, critical_path: work of the most expensive rank, over the step or microbatch by microbatch, over
            the mean rank's work *on tokens*: padding counts, so both are larger than 1 also on one rank.
    """

    num_batches: int
    num_microbatches: int
    num_slots: int
    padding_computed: float
    ullage: float
    rank_imbalance: float
    critical_path: float


def padded(plan: Plan) -> Padded | None:
    """The padded batches of the sequences that ``plan`` places; None where ranks share sequences, or sequences take
    more than tokens, which nobody pads.

    >>> import ullage
    >>> step = ullage.plan([5, 3, 9, 1], ranks=2, capacity=12)
    >>> batches = padded(step)
    >>> batches.num_batches, batches.num_slots, round(batches.padding_computed, 2)
    (3, 20, 0.1)
    """
    if plan.amounts or int(plan.degrees.max(initial=1)) > 1:
        return None
    placed = np.sort(plan.order)
    lengths, costs = plan.lengths[placed], plan.costs[placed]
    sizes, widths, prices = _batches(
        slots_of(lengths, plan.pad_to_multiple_of), costs, plan.capacity, plan.max_sequences
    )
    turns = -(-len(sizes) // plan.ranks)
    turns = -(-turns // plan.microbatch_multiple) * plan.microbatch_multiple
    loads = np.zeros(turns * plan.ranks)
    loads[: len(sizes)] = sizes * prices
    loads = loads.reshape(turns, plan.ranks) + plan.per_microbatch
    ideal = int(costs.sum()) / plan.ranks + plan.per_microbatch * turns
    tokens, slots, size = int(lengths.sum()), int((sizes * widths).sum()), turns * plan.ranks * plan.capacity
    return Padded(
        num_batches=len(sizes),
        num_microbatches=turns,
        num_slots=slots,
        padding_computed=1 - tokens / slots if slots else 0.0,
        ullage=1 - tokens / size if size else 0.0,
        rank_imbalance=float(loads.sum(axis=0).max(initial=0)) / ideal if ideal else 1.0,
        critical_path=float(loads.max(axis=1, initial=0).sum()) / ideal if ideal else 1.0,
    )


def _batches(slots: Int64, costs: Int64, capacity: int, most: int) -> tuple[Int64, Int64, Int64]:
    """Sequences, width in slots and cost of the most expensive sequence of each batch, int64 [batches]."""
    found: list[tuple[int, int, int]] = []
    count = width = price = 0
    for slot, cost in zip(slots.tolist(), costs.tolist(), strict=True):
        wider = max(width, slot)
        if count and ((count + 1) * wider > capacity or count == most):
            found.append((count, width, price))
            count, wider, price = 0, slot, 0
        count, width, price = count + 1, wider, max(price, cost)
    if count:
        found.append((count, width, price))
    sizes, widths, prices = np.array(found, np.int64).reshape(-1, 3).T
    return sizes, widths, prices
