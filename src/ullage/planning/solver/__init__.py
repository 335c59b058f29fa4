"""The solver: kernels that place items into bins. Nothing outside ``planning`` imports it.

compiled: runs a kernel, as Python or compiled by numba, with the same result.
items: the data that kernels take: items, bins, and what a bin can hold.
ordering, bitset: radix sort and a set of small integers, in place of sorts that compare.
packing: as few bins as possible. It gives the number of microbatches, and whole datasets in a fraction of a second.
critical: the critical path, its lower bound, and the deal of bins to ranks.
placing: first placements. Filling steps up to the cost of the giant they hold is what a simple planner lacks: on six
    workloads of 512 and 4096 sequences heaviest-first without it is up to 12 % worse (chat), and under 2 % where there
    are no giants.
dividing, improving: pairs of bins divide their items again. On steps of 512 and more sequences this gains 0.13 % at the
    most. On steps of 16 to 256 sequences the median gain is 0, the mean 0.02 to 0.9 %, and the largest 5 % (16 % with
    ``sync="step"``): an insurance for small steps.
balancing: several first placements, the best two improved; the strategy "balanced".
totals: the same for ranks that meet once per step.
context: the number of ranks for each giant, with ``context_parallel="auto"``.
"""
