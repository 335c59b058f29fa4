"""What holds for every plan: each sequence once, nothing over capacity, never below the bound, the same everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.support.drawing import lengths as drawn
from ullage.planning.bounds import bin_bound
from ullage.planning.placement import free_degrees, slots_of

pytestmark = pytest.mark.property

_SHAPES = ("uniform", "small", "heavy", "equal", "two", "zeros", "edges")


def _lengths(generator: np.random.Generator, shape: str, n: int, capacity: int) -> np.ndarray:
    if shape == "uniform":
        return generator.integers(0, capacity + 1, n)
    if shape == "small":
        return generator.integers(0, max(1, capacity // 8) + 1, n)
    if shape == "heavy":
        return np.minimum(1 + capacity / 40 * generator.pareto(1.0, n), capacity).astype(np.int64)
    if shape == "equal":
        return np.full(n, generator.integers(1, capacity + 1))
    if shape == "two":
        return np.where(generator.random(n) < 0.2, capacity // 2 + 1, capacity // 9 + 1)
    if shape == "edges":
        edges = np.array([0, 1, capacity // 2, capacity // 2 + 1, capacity - 1, capacity, capacity + 1])
        return generator.choice(edges, n)
    return generator.integers(0, 2, n)


def instance(seed: int) -> tuple[np.ndarray, dict]:
    """Lengths and options of a random request that can be met."""
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(4, 4000))
    options: dict = {
        "ranks": int(generator.choice([1, 2, 3, 4, 7, 8, 16])),
        "capacity": capacity,
        "strategy": str(generator.choice(["balanced", "balanced", "balanced", "next_fit"])),
        "sync": str(generator.choice(["microbatch", "step"])),
        "microbatch_multiple": int(generator.choice([1, 1, 2, 3])),
        "pad_to_multiple_of": int(generator.choice([1, 1, 2, 4])),
        "oversize": str(generator.choice(["truncate", "drop"])),
    }
    lengths = _lengths(generator, str(generator.choice(_SHAPES)), int(generator.integers(0, 120)), capacity)
    if generator.random() < 0.2:
        options["max_sequences"] = int(generator.integers(1, 9))
    if generator.random() < 0.2:
        options["cost"] = [ullage.TransformerCost(1, 0), lambda x: np.sqrt(x), lambda x: 0 * x][generator.integers(3)]
    if generator.random() < 0.2 and options["strategy"] == "balanced":
        options["context_parallel"] = "auto"
        options["ranks"] = ranks = int(generator.integers(1, 49))
        options["min_context_parallel"] = int(generator.choice([d for d in free_degrees(ranks) if ranks % d == 0]))
        lengths = lengths * int(generator.integers(1, 3))
    if generator.random() < 0.15 and "max_sequences" not in options:
        lengths = np.minimum(lengths, capacity // 3)
        groups = generator.integers(-6, max(1, len(lengths) // 2), len(lengths))
        least = options.get("min_context_parallel", 1)
        slots = slots_of(lengths, options["pad_to_multiple_of"], least)
        fits = np.bincount(groups + 6, weights=slots) <= capacity * least
        options["keep_together"] = np.where(fits[groups + 6], groups, -1)
    return lengths, options


def check_instance(lengths: np.ndarray, options: dict) -> ullage.Plan:
    plan = ullage.plan(lengths, **options)
    assert plan.problems() == []
    held = [plan.members(m, r) for m, r in np.ndindex(plan.degrees.shape) if r % plan.degree(m, r) == 0]
    placed = np.sort(np.concatenate([np.zeros(0, np.int64), *held]))
    assert np.array_equal(placed, np.flatnonzero(plan.bins >= 0))
    assert np.array_equal(plan.order[plan.inverse[placed]], placed)
    found = plan.statistics()
    assert found.tokens_in == int(lengths.sum()) == found.num_tokens + found.truncated_tokens + found.dropped_tokens
    assert found.num_microbatches >= found.lower_bound
    assert found.critical_path >= found.critical_path_bound * (1 - 1e-9)
    assert found.rank_imbalance >= found.rank_imbalance_bound * (1 - 1e-9)
    assert found.critical_path >= found.rank_imbalance * (1 - 1e-9)
    assert ullage.Plan.from_json(plan.to_json()) == plan
    if "context_parallel" in options:
        allowed = free_degrees(plan.ranks, options["min_context_parallel"])
        assert set(plan.degrees.reshape(-1).tolist()) <= set(allowed)
        assert np.all(plan.bins[plan.bins >= 0] % plan.ranks % plan.degrees.reshape(-1)[plan.bins[plan.bins >= 0]] == 0)
    else:
        longest = options["capacity"] // options["pad_to_multiple_of"] * options["pad_to_multiple_of"]
        if options["oversize"] == "drop":
            assert np.array_equal(plan.bins >= 0, lengths <= longest), "one exactly as long as the capacity is kept"
        assert np.array_equal(plan.lengths[plan.order], np.minimum(lengths, longest)[plan.order])
    groups = options.get("keep_together")
    if groups is not None:
        for group in np.unique(groups[groups >= 0]):
            assert len(np.unique(plan.bins[(groups == group) & (plan.bins >= 0)])) <= 1
    return plan


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_request_that_can_be_met_is_met(seed: int) -> None:
    check_instance(*instance(seed))


def check_degrees(seed: int) -> None:
    """Any number of ranks shares as its groups allow, and few sequences keep all of them busy."""
    generator = np.random.default_rng(seed)
    ranks, capacity = int(generator.integers(1, 49)), int(generator.integers(256, 5000))
    # Lengths of which all ranks together hold at least as many as there are, their padding to twice the ranks included.
    n = int(generator.integers(1, 2 * ranks + 1))
    longest = ranks * capacity // n - 2 * ranks
    lengths = generator.integers(1, max(2, longest * generator.choice([0.01, 0.3, 1.0])), n)
    options = {"ranks": ranks, "capacity": capacity, "context_parallel": "auto", "min_context_parallel": 1}
    found = check_instance(lengths, options | {"pad_to_multiple_of": 1, "oversize": "error"}).statistics()
    if slots_of(lengths, 1, ranks).sum() <= capacity * ranks:
        # A rank waits for at most a twentieth of a microbatch, whatever the number of ranks.
        assert found.critical_path <= 1 / 0.95 + 1e-3, (seed, found.critical_path)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_few_sequences_keep_any_number_of_ranks_busy(seed: int) -> None:
    check_degrees(seed)


@pytest.mark.long
@pytest.mark.slow
def test_four_thousand_requests() -> None:
    for seed in range(4_000):
        try:
            check_instance(*instance(1_000_000 + seed))
            if seed < 500:
                check_degrees(2_000_000 + seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@settings(max_examples=100, deadline=None)
@given(drawn(150, high=300, max_size=200), st.sampled_from([300, 301, 450, 599, 600, 900]))
def test_pack_dataset_fills_bins_that_hold_everything_once(lengths: list[int], capacity: int) -> None:
    ids, cu_ids = ullage.pack_lengths(lengths, capacity)
    assert sorted(ids.tolist()) == list(range(len(lengths)))
    held = [sum(lengths[i] for i in ids[a:b]) for a, b in itertools.pairwise(cu_ids)]
    assert max(held, default=0) <= capacity
    assert len(held) >= bin_bound(np.array(lengths, np.int64), capacity)
    # Best fit never leaves two bins that would fit into one.
    assert all(a + b > capacity for a, b in itertools.pairwise(sorted(held)))


def test_order_of_arrival_does_not_change_the_quality() -> None:
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, 500, 200)
    first = ullage.plan(lengths, ranks=4, capacity=1000).statistics()
    again = ullage.plan(lengths[generator.permutation(200)], ranks=4, capacity=1000).statistics()
    assert first.critical_path == again.critical_path


def test_no_plan_is_below_its_bound_whatever_a_sequence_costs():
    """Also where short sequences cost more than long ones, so that the most expensive one leads no bin by its size."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        lengths = generator.integers(1, 11, generator.integers(1, 9))
        costs = generator.integers(1, 100, 11)
        options = {"ranks": int(generator.integers(1, 4)), "capacity": 10, "cost": lambda n, costs=costs: costs[n]}
        found = ullage.plan(lengths, **options).statistics()
        assert found.critical_path >= found.critical_path_bound - 1e-9, (lengths, costs)
        assert found.rank_imbalance >= found.rank_imbalance_bound - 1e-9, (lengths, costs)
