"""The solver: kernels that place items into bins. Nothing outside ``planning`` imports it.

compiled: runs a kernel, as Python or compiled by numba, with the same result.
items: the data that kernels take: items, bins, and what a bin can hold; a radix sort, and a set of small integers.
packing: few bins, as full as they go, of whole datasets too, in a fraction of a second.
critical: the critical path, its lower bound, and the deal of bins to ranks.
placing: heaviest first, and steps filled up to the cost of the giant they hold. On six workloads of 512 and 4096
    sequences heaviest first alone is 0.1 to 12 % worse than this solver, most where there are giants (chat).
balancing: the best of several placements; the strategy "balanced", also for ranks that meet once per step.
context: the number of ranks for each giant, with ``context_parallel="auto"``.
"""
