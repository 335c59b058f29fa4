"""Other frameworks' planners, as functions from lengths to the ids of each microbatch of each rank.

Code of slime and prime-rl is read from a checkout, one source file each, and run without what that file imports from
its framework; transformers' sampler is the installed one. torchtitan packs by a class of grain, which is written down
here by its documented rule and named so. Costs are the ones that ``ullage.plan`` uses, also where a framework would
estimate its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from checkouts import read

import ullage

#: Ids by rank and microbatch.
Rows = list[list[list[int]]]
#: Lengths, ranks and capacity -> ids.
Planner = Callable[[np.ndarray, int, int], Rows]
PRIME_RL, REBALANCE = "prime-rl prepare_batch", "transformers batch_rebalance, packed"
#: Rows that torchtitan keeps open, by default.
_OPEN_ROWS = 8


def as_plan(lengths: np.ndarray, ranks: int, capacity: int, rows: Rows) -> ullage.Plan:
    """The plan that ``rows`` are. Bins above the capacity are its problems; a rank with fewer rows gets empty ones."""
    count = max(map(len, rows))
    filled = [mine + [[]] * (count - len(mine)) for mine in rows]
    assignment = [[filled[rank][microbatch] for rank in range(ranks)] for microbatch in range(count)]
    held = max(int(lengths[ids].sum()) for part in assignment for ids in part)
    made = ullage.plan(
        lengths, ranks=ranks, capacity=max(held, capacity), strategy="preassigned", assignment=assignment
    )
    return replace(made, capacity=capacity)


def _costs(lengths: Sequence[int]) -> list[int]:
    return [int(cost) for cost in ullage.TransformerCost()(np.asarray(lengths, np.int64))]


def slime(tree: Path) -> Planner:
    """``build_dp_schedule``: first fit in arrival order, largest bins split, bins dealt to ranks by differencing."""
    logging.getLogger(__name__).setLevel(logging.ERROR)
    balancing = read(tree / "slime/utils/seqlen_balancing.py")
    names = ("expand_bins_by_splitting", "first_fit_pack", "get_seqlen_balanced_partitions")
    code = read(
        tree / "slime/utils/dp_schedule.py",
        calculate_fwd_flops=lambda lengths, args: sum(_costs(lengths)),
        **{name: getattr(balancing, name) for name in names},
    )

    def call(lengths: np.ndarray, ranks: int, capacity: int) -> Rows:
        options = SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=capacity, balance_data=True, balance_by_flops=False
        )
        config = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        n = len(lengths)
        parts, rows, _, _ = code.build_dp_schedule(
            options, config, lengths.tolist(), global_batch_size=n, rollout_indices=list(range(n))
        )
        return [[[part[i] for i in row] for row in mine] for part, mine in zip(parts, rows)]

    return call


def prime_rl(tree: Path) -> Planner:
    """``prepare_batch``: first fit decreasing, most expensive bins split, differencing, then swaps between ranks."""
    code = read(
        tree / "src/prime_rl/trainer/batch.py",
        # Its samples are records of token lists: here only their number of tokens counts.
        prepare_sample=lambda sample, most: sample,
        pad_micro_batch=lambda microbatch, multiple: microbatch,
        _assert_token_arrays_aligned=lambda microbatch: None,
        _make_dummy_batch=lambda microbatch: SimpleNamespace(
            ids=[], sequence_lengths=microbatch.sequence_lengths, mm_kwargs=None
        ),
        _materialize_bin=lambda made: SimpleNamespace(
            ids=[sample.i for sample in made.samples],
            sequence_lengths=[len(sample.input_ids) for sample in made.samples],
            mm_kwargs=None,
        ),
    )

    def call(lengths: np.ndarray, ranks: int, capacity: int) -> Rows:
        samples = [
            SimpleNamespace(i=i, input_ids=range(n), mm_kwargs=None, routed_experts=None)
            for i, n in enumerate(lengths.tolist())
        ]
        cost = dict(zip(lengths.tolist(), _costs(lengths)))
        made = code.prepare_batch(samples, capacity, ranks, lambda each: sum(cost[n] for n in each))
        return [[part.ids for part in mine] for mine in made]

    return call


def torchtitan(lengths: np.ndarray, ranks: int, capacity: int) -> Rows:
    """``FirstFitPackingConfig`` by grain's documented rule: every rank fills eight open rows from its own documents,
    first fit, and emits all eight when a document fits in none."""
    by_rank = []
    for rank in range(ranks):
        rows: list[list[int]] = []
        opened: list[list[int]] = []
        for i in range(rank, len(lengths), ranks):
            fits = [row for row in opened if lengths[row].sum() + lengths[i] <= capacity]
            if fits:
                fits[0].append(i)
            elif len(opened) < _OPEN_ROWS:
                opened.append([i])
            else:
                rows += opened
                opened = [[i]]
        by_rank.append(rows + opened)
    return by_rank


def batch_rebalance(lengths: np.ndarray, ranks: int, capacity: int) -> Rows:
    """transformers' ``BatchRebalanceSampler`` with as many batches as the plan has, which it must be told; its padding
    is not counted."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    count = ullage.plan(lengths, ranks=ranks, capacity=capacity).num_microbatches
    sampler = BatchRebalanceSampler(
        lengths.tolist(), effective_batch_size=len(lengths), dp_size=ranks, grad_accum=count
    )
    return sampler._assign(list(range(len(lengths))), lengths.tolist())


#: Those that need a checkout, and what to call them in a table.
FROM_CHECKOUT: dict[str, tuple[str, Callable[[Path], Planner]]] = {
    "slime": ("slime build_dp_schedule", slime),
    "prime-rl": (PRIME_RL, prime_rl),
}
ALWAYS: dict[str, Planner] = {
    "torchtitan first fit (grain's rule)": torchtitan,
    REBALANCE: batch_rebalance,
}
