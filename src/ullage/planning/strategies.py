"""The strategies by name. Others register theirs under the entry-point group ``ullage.strategies``."""

from __future__ import annotations

import heapq

import numpy as np

from ullage.errors import InputError
from ullage.planning.bounds import microbatches_for
from ullage.planning.problem import Assignment, Problem, Strategy


def next_fit(problem: Problem) -> Assignment:
    """Arrival order: a bin is closed when the next item does not fit."""
    bins, current, room, left = np.empty(problem.num_items, np.int64), -1, -1, 0
    for i, (slot, count) in enumerate(zip(problem.slots.tolist(), problem.counts.tolist())):
        if slot > room or count > left:
            current, room, left = current + 1, problem.capacity, problem.max_sequences
        bins[i], room, left = current, room - slot, left - count
    return Assignment(bins, microbatches_for(current + 1, problem.ranks, problem.microbatch_multiple))


def balanced(problem: Problem) -> Assignment:
    """Longest processing time first, the capacity as a constraint."""
    microbatches = problem.least_microbatches()
    order = np.argsort(-problem.costs, kind="stable").tolist()
    while True:
        count = microbatches * problem.ranks
        heap = [(0, k) for k in range(count)]
        room, left = [problem.capacity] * count, [problem.max_sequences] * count
        bins = np.empty(problem.num_items, np.int64)
        for i in order:
            slot, items, tried = problem.slots[i], problem.counts[i], []
            while heap and (room[heap[0][1]] < slot or left[heap[0][1]] < items):
                tried.append(heapq.heappop(heap))
            if not heap:
                break
            load, k = heap[0]
            bins[i], room[k], left[k] = k, room[k] - slot, left[k] - items
            heapq.heapreplace(heap, (load + problem.costs[i], k))
            for entry in tried:
                heapq.heappush(heap, entry)
        else:
            return Assignment(bins, microbatches)
        microbatches += problem.microbatch_multiple


_STRATEGIES: dict[str, Strategy] = {"balanced": balanced, "next_fit": next_fit}


def find_strategy(name: str) -> Strategy:
    """The strategy of this name. Raises ``InputError`` that lists the names."""
    if name not in _STRATEGIES:
        raise InputError("no such strategy", expected=" or ".join(map(repr, _STRATEGIES)), found=repr(name))
    return _STRATEGIES[name]
