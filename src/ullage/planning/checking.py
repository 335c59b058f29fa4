"""The violations of a plan, each by sequence id, microbatch and rank."""

from __future__ import annotations

import numpy as np

from ullage.layout import Int64
from ullage.planning.placement import Placement, slots_of

#: Ids that one line names before it only counts.
_NAMED = 8


def violations(plan: Placement) -> list[str]:
    """All violations of ``plan`` as lines; ``[]`` if it is sound."""
    return [*_membership(plan), *_degrees(plan), *_sizes(plan)]


def _ids(ids: Int64) -> str:
    shown = ", ".join(str(i) for i in ids[:_NAMED].tolist())
    return f"{shown} and {len(ids) - _NAMED} more" if len(ids) > _NAMED else shown


def _membership(plan: Placement) -> list[str]:
    problems = []
    n = plan.num_sequences
    # Ids first: the counts below are of ids that exist.
    unknown = np.unique(plan.order[(plan.order < 0) | (plan.order >= n)])
    if len(unknown):
        problems.append(f"unknown: sequences {_ids(unknown)} are placed, but there are only {n}")
    times = np.bincount(plan.order[(plan.order >= 0) & (plan.order < n)], minlength=n)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        problems.append(f"duplicate: sequences {_ids(twice)} are placed more than once")
    # A sequence kept at 0 tokens that had some was dropped on purpose; every other one must be placed.
    dropped = (plan.lengths == 0) & (plan.original_lengths > 0)
    missing = np.flatnonzero((times == 0) & ~dropped)
    if len(missing):
        problems.append(f"missing: sequences {_ids(missing)} are placed nowhere")
    ghosts = np.flatnonzero((times > 0) & dropped)
    if len(ghosts):
        problems.append(f"dropped: sequences {_ids(ghosts)} are dropped and placed all the same")
    longer = np.flatnonzero(plan.lengths > plan.original_lengths)
    if len(longer):
        problems.append(f"longer: sequences {_ids(longer)} are planned longer than they are")
    if plan.num_microbatches % plan.microbatch_multiple:
        problems.append(
            f"multiple: {plan.num_microbatches} microbatches are not a multiple of {plan.microbatch_multiple}"
        )
    return problems


def _degrees(plan: Placement) -> list[str]:
    problems = []
    for microbatch, row in enumerate(plan.degrees.tolist()):
        if max(row) == 1 == min(row):
            continue
        # From group to group. A group begins at a multiple of its degree, all its ranks name that degree, and its
        # sequences stand at its first rank. After a bad one the walk goes on with the next rank, so that one mistake
        # does not hide others.
        rank = 0
        while rank < plan.ranks:
            degree = row[rank]
            where = f"microbatch {microbatch}, rank {rank}"
            if degree < 1:
                problems.append(f"degree: {where} has degree {degree}")
                degree = 1
            elif rank % degree or rank + degree > plan.ranks:
                problems.append(f"misaligned: {where} starts a group of {degree} ranks, of {plan.ranks}")
                degree = 1
            elif row[rank : rank + degree] != [degree] * degree:
                problems.append(f"mixed: {where} starts a group of degrees {row[rank : rank + degree]}")
                degree = 1
            else:
                # Where the bins behind the first rank begin and end in ``order``: all of them must be empty.
                cuts = plan.offsets[microbatch * plan.ranks + rank + 1 : microbatch * plan.ranks + rank + degree + 1]
                if cuts[0] != cuts[-1]:
                    lost = plan.order[cuts[0] : cuts[-1]]
                    problems.append(f"mixed: sequences {_ids(lost)} stand behind the first rank of {where}")
            rank += degree
    return problems


def _sizes(plan: Placement) -> list[str]:
    problems = []
    count = plan.num_microbatches * plan.ranks
    known = (plan.order >= 0) & (plan.order < plan.num_sequences)
    bins = np.repeat(np.arange(count), np.diff(plan.offsets))[known]
    order = plan.order[known]
    degrees = np.maximum(plan.degrees.reshape(-1), 1)
    # Slots per bin, at the degree of the bin. Ids that do not exist were reported above and are left out.
    held = np.zeros(count, np.int64)
    np.add.at(held, bins, slots_of(plan.lengths[order], plan.pad_to_multiple_of, degrees[bins]))
    for k in np.flatnonzero(held > plan.capacity * degrees).tolist():
        microbatch, rank = divmod(k, plan.ranks)
        problems.append(
            f"over capacity: microbatch {microbatch}, rank {rank} holds {held[k]} slots of"
            f" {plan.capacity * degrees[k]}: sequences {_ids(order[bins == k])}"
        )
    num_sequences = np.bincount(bins, minlength=count)
    for k in np.flatnonzero(num_sequences > plan.max_sequences).tolist():
        microbatch, rank = divmod(k, plan.ranks)
        problems.append(
            f"crowded: microbatch {microbatch}, rank {rank} holds {num_sequences[k]} sequences of at most"
            f" {plan.max_sequences}: {_ids(order[bins == k])}"
        )
    return problems
