"""How good plans are: beside the optimum that an exact solver proves, beside bounds, and beside arrival order."""

from __future__ import annotations

import numpy as np
import pytest
from ortools.sat.python import cp_model

import ullage
from ullage.datasets.lengths import CAPACITIES, WORKLOADS

pytestmark = pytest.mark.property


def optimum(lengths: np.ndarray, ranks: int, capacity: int, microbatches: int, sync: str, seconds: float = 10) -> float:
    """A proven lower bound of the least critical path or dearest rank, as a ratio to the mean rank, by CP-SAT."""
    costs = (24576 * lengths + lengths * lengths) // 4096  # a coarser unit, rounded down: still a bound
    model = cp_model.CpModel()
    count = microbatches * ranks
    inside = [[model.new_bool_var(f"{i} in {k}") for k in range(count)] for i in range(len(lengths))]
    for row in inside:
        model.add_exactly_one(row)
    total = int(costs.sum())
    load = [model.new_int_var(0, total, f"load {k}") for k in range(count)]
    for k in range(count):
        model.add(sum(int(x) * row[k] for x, row in zip(lengths, inside)) <= capacity)
        model.add(load[k] == sum(int(c) * row[k] for c, row in zip(costs, inside)))
    if sync == "step":
        high = model.new_int_var(0, total, "dearest rank")
        for rank in range(ranks):
            model.add(sum(load[m * ranks + rank] for m in range(microbatches)) <= high)
        model.minimize(high)
    else:
        highs = [model.new_int_var(0, total, f"dearest of {m}") for m in range(microbatches)]
        for k in range(count):
            model.add(load[k] <= highs[k // ranks])
        for m in range(microbatches - 1):
            model.add(highs[m] >= highs[m + 1])
        model.minimize(sum(highs))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.solve(model)
    return solver.best_objective_bound * ranks / (float((24576 * lengths + lengths * lengths).sum()) / 4096)


SMALL = {
    "even": (lambda g: g.integers(1, 2000, 16), 4, 8000),
    "tight": (lambda g: g.integers(1, 4096, 14), 2, 8192),
    "heavy": (lambda g: np.minimum(64 * (1 + g.pareto(0.8, 16)), 8192).astype(int), 2, 8192),
    "two sizes": (lambda g: np.where(g.random(12) < 0.3, 6000, 900) + g.integers(0, 500, 12), 3, 12000),
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_small_plans_are_near_the_proven_optimum(name: str, sync: str) -> None:
    make, ranks, capacity = SMALL[name]
    ratios = []
    for seed in range(3):
        lengths = make(np.random.default_rng(seed))
        plan = ullage.plan(lengths, ranks=ranks, capacity=capacity, sync=sync)
        found = plan.statistics()
        reached = found.critical_path if sync == "microbatch" else found.rank_imbalance
        best = optimum(lengths, ranks, capacity, plan.num_microbatches, sync)
        assert found.critical_path_bound <= found.critical_path * (1 + 1e-9)
        assert reached >= best * 0.999
        ratios.append(reached / best)
    assert np.exp(np.mean(np.log(ratios))) <= 1.03, ratios


#: Name -> lengths by a generator and their number, and a capacity.
LOADS = {
    "lognormal": (lambda g, n: np.clip(g.lognormal(np.log(4096) - 1.1**2 / 2, 1.1, n), 1024, 8192), 8192),
    "uniform": (lambda g, n: g.integers(1, 8193, n), 8192),
    "chat": (lambda g, n: np.clip(g.lognormal(np.log(600), 1.2, n), 1, 32768), 32768),
    "pareto": (lambda g, n: np.minimum(1024 * (1 + g.pareto(1.0, n)), 131072), 131072),
    "bimodal": (lambda g, n: np.where(g.random(n) < 0.1, 16000, 512) * g.uniform(0.8, 1.2, n), 32768),
}


def lengths_of(name: str, n: int, seed: int) -> np.ndarray:
    return LOADS[name][0](np.random.default_rng(seed), n).astype(int)


SHAPES = [(512, 8, 1.010), (500, 3, 1.010), (700, 7, 1.012), (4096, 32, 1.008), (3000, 16, 1.010), (6000, 64, 1.015)]


@pytest.mark.matrix
@pytest.mark.parametrize(("n", "ranks", "most"), SHAPES)
def test_the_critical_path_is_near_its_bound_on_any_load(n: int, ranks: int, most: float) -> None:
    ratios, rows = [], []
    for name, (_, capacity) in LOADS.items():
        for seed in range(100, 103):
            lengths = lengths_of(name, n, seed)
            plan = ullage.plan(lengths, ranks=ranks, capacity=capacity)
            found = plan.statistics()
            assert plan.problems() == []
            assert found.num_microbatches <= found.lower_bound + 1
            ratios.append(found.critical_path / found.critical_path_bound)
            rows.append((name, seed, ratios[-1]))
            arrival = ullage.plan(lengths, ranks=ranks, capacity=capacity, strategy="next_fit").statistics()
            assert found.critical_path < arrival.critical_path
    assert np.exp(np.mean(np.log(ratios))) <= most, rows


@pytest.mark.parametrize(("n", "ranks", "most"), [(512, 8, 1.008), (4096, 32, 1.03)])
def test_the_critical_path_is_near_its_bound_on_the_workloads(n: int, ranks: int, most: float) -> None:
    ratios = []
    for name, draw in WORKLOADS.items():
        for seed in range(5):
            found = ullage.plan(draw(n, seed), ranks=ranks, capacity=CAPACITIES[name]).statistics()
            ratios.append(found.critical_path / found.critical_path_bound)
    assert len(ratios) >= 30
    assert np.exp(np.mean(np.log(ratios))) <= most, ratios


@pytest.mark.matrix
@pytest.mark.parametrize(("n", "ranks"), [(512, 8), (500, 3), (700, 7), (4096, 32), (3000, 16)])
def test_rank_totals_are_level_where_no_sequence_exceeds_the_mean(n: int, ranks: int) -> None:
    for name, (_, capacity) in LOADS.items():
        for seed in range(100, 103):
            lengths = lengths_of(name, n, seed)
            found = ullage.plan(lengths, ranks=ranks, capacity=capacity, sync="step").statistics()
            if found.rank_imbalance_bound == 1:
                assert found.rank_imbalance <= 1.002, (name, seed)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "n", "ranks", "capacity", "most"), [
    ("chat", 512, 8, 32768, 1.05), ("chat", 4096, 32, 32768, 1.05), ("pareto", 4096, 32, 131072, 1.15),
    ("pareto", 512, 8, 131072, 1.05), ("pareto", 1000, 12, 65536, 1.10),
])  # fmt: skip
def test_sharing_giants_lowers_the_floor_that_they_set(
    name: str, n: int, ranks: int, capacity: int, most: float
) -> None:
    for seed in range(100, 103):
        plan = ullage.plan(lengths_of(name, n, seed), ranks=ranks, capacity=capacity, context_parallel="auto")
        found = plan.statistics()
        assert plan.problems() == []
        assert found.critical_path <= most, seed


def test_many_ranks_with_few_microbatches_are_level_too() -> None:
    """Tens of thousands of sequences over thousands of ranks: the dearest of many packed bins is far above the mean."""
    lengths = WORKLOADS["megatron"](33_000, 3)
    statistics = ullage.plan(lengths, ranks=4125, capacity=8192).statistics()
    assert statistics.num_microbatches == statistics.lower_bound
    assert statistics.critical_path <= 1.05
