"""The solver: kernels that place items into bins. Nothing outside ``planning`` imports it.

compiled: runs a kernel, as Python or compiled by numba, with the same result.
items: the data that kernels take: items, bins, and what a bin can hold.
ordering, bitset: radix sort and a set of small integers, in place of sorts that compare.
packing: as few bins as possible. It gives the number of microbatches, and whole datasets in a fraction of a second.
critical: the critical path, its lower bound, and the deal of bins to ranks.
placing: first placements: heaviest first, and steps filled up to the cost of the giant they hold. On six workloads of
    512 and 4096 sequences a planner of 40 lines that places heaviest first alone is 0.1 to 12 % worse than this solver,
    most where there are giants (chat). That this is what filling steps buys follows from the code; no run isolated it.
dividing, improving: pairs of bins divide their items again. On steps of 512 and more sequences this gains 0.13 % at the
    most. On steps of 16 to 256 sequences the median gain is 0, the mean 0.02 to 0.9 %, and the largest of 48 draws 5 %
    (16 % with ``sync="step"``): an insurance for small steps.
balancing: several first placements, the best two improved; the strategy "balanced".
totals: the same for ranks that meet once per step.
context: the number of ranks for each giant, with ``context_parallel="auto"``.
"""
