"""Several capacities: no microbatch exceeds any of them, and one that never binds changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.planning.test_solver import in_both_forms
from ullage import InputError, MultimodalCost, TransformerCost

_COST = MultimodalCost(TransformerCost(linear=1000, quadratic=1), TransformerCost(linear=300, quadratic=0.5))


def mixed(seed: int, n: int) -> tuple[np.ndarray, list[list[int]]]:
    """Lengths, and the patches of the images of each sequence: some have none, some one, some many."""
    random = np.random.default_rng(seed)
    counts = random.choice([0, 1, 1, 2, 5], n)
    items = [(4 * random.integers(16, 500, count)).tolist() for count in counts]
    text = np.clip(random.lognormal(5.5, 1.0, n), 8, 4000).astype(np.int64)
    return text + np.array([sum(each) // 4 for each in items], np.int64), items


def request(seed: int) -> tuple[np.ndarray, dict]:
    random = np.random.default_rng(seed)
    lengths, items = mixed(seed, int(random.integers(0, 90)))
    options: dict = {
        "ranks": int(random.choice([1, 2, 4, 6])),
        "capacities": {"tokens": int(random.integers(7000, 20000)), "patches": int(random.integers(10000, 30000))},
        "amounts": {"patches": items},
        "cost": [None, _COST][random.integers(2)],
        "strategy": str(random.choice(["balanced", "balanced", "next_fit"])),
        "sync": str(random.choice(["microbatch", "step"])),
        "microbatch_multiple": int(random.choice([1, 1, 2])),
        "context_parallel": int(random.choice([1, 1, 2])) if random.random() < 0.5 else 1,
    }
    if options["ranks"] % options["context_parallel"]:
        options["context_parallel"] = 1
    if random.random() < 0.3:
        options["max_sequences"] = int(random.integers(1, 9))
    if random.random() < 0.4:  # a third resource works as the second
        options["capacities"]["images"] = int(random.integers(5, 12))
        options["amounts"]["images"] = [len(each) for each in items]
    if random.random() < 0.2 and len(lengths) > 4:
        options["keep_together"] = [[0, 3], [1, 2]]
        options["capacities"] |= {"tokens": 40000, "patches": 40000}
        options["capacities"] |= {"images": 20} if "images" in options["capacities"] else {}
        options["max_sequences"] = max(2, options.get("max_sequences", 2))
    return lengths, options


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_capacity_is_exceeded_and_every_sequence_is_placed_once(seed):
    lengths, options = request(seed)
    plan = ullage.plan(lengths, **options)
    assert plan.problems() == []
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    for microbatch, rank in np.ndindex(plan.degrees.shape):
        members = plan.members(microbatch, rank)
        for name, limit in plan.limits.items():
            assert plan.amounts[name][members].sum() <= limit
    found = plan.statistics()
    assert found.num_microbatches >= found.lower_bound >= max((each.lower_bound for each in found.resources), default=0)
    assert found.critical_path >= found.critical_path_bound * (1 - 1e-9)
    again = ullage.Plan.from_json(plan.to_json())
    assert (again, again.digest, again.capacities) == (plan, plan.digest, plan.capacities)
    assert ullage.plan(lengths, **options) == plan  # as every other rank finds it


@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_a_capacity_that_does_not_bind_changes_nothing(seed):
    lengths, options = request(seed)
    tokens = options["capacities"] = {"tokens": options["capacities"]["tokens"]}
    free = ullage.plan(lengths, **options)
    # Exactly what the fullest microbatch takes.
    most = max(1, int(free.held("patches").max(initial=1)))
    held = ullage.plan(lengths, **(options | {"capacities": tokens | {"patches": most}}))
    assert (held.order.tolist(), held.offsets.tolist()) == (free.order.tolist(), free.offsets.tolist())


def test_both_forms_of_the_solver_give_one_plan():
    def plans():
        for seed in range(12):
            lengths, options = request(seed)
            yield ullage.plan(lengths, **(options | {"sync": ["microbatch", "step"][seed % 2]}))

    fast, slow = in_both_forms(lambda: list(plans()))
    assert fast == slow


@pytest.mark.parametrize("capacities", [{"tokens": 16384, "patches": 9000}, {"tokens": 6000, "patches": 9000}])
def test_few_more_microbatches_than_any_plan_needs(capacities):
    needed = used = 0
    for seed in range(6):
        lengths, items = mixed(seed, 600)
        found = ullage.plan(
            np.minimum(lengths, 6000), ranks=1, capacities=capacities, amounts={"patches": items}, oversize="drop"
        ).statistics()
        needed, used = needed + found.lower_bound, used + found.num_microbatches
    assert needed <= used <= 1.03 * needed


def test_the_sum_of_both_costs_is_balanced():
    lengths, items = mixed(1, 256)
    whole = {"ranks": 8, "capacity": 32768, "amounts": {"patches": items}}
    both, text = ullage.plan(lengths, cost=_COST, **whole), ullage.plan(lengths, cost=_COST.text, **whole)
    squares = [sum(size**2 for size in each) for each in items]
    expected = _COST.text(lengths) + 300 * np.array([sum(each) for each in items]) + 0.5 * np.array(squares)
    assert np.array_equal(both.costs, expected)
    assert ullage.plan(lengths, cost=expected, **whole) == both  # one number per sequence is a cost too
    priced = ullage.plan(lengths, cost=expected, strategy="preassigned", assignment=_bins(text), **whole)
    assert both.statistics().critical_path < 1.01 < 1.05 < priced.statistics().critical_path


def _bins(plan: ullage.Plan) -> list[list[np.ndarray]]:
    return [[plan.members(m, r) for r in range(plan.ranks)] for m in range(plan.num_microbatches)]


def test_without_squares_a_sequence_has_one_image():
    cost = MultimodalCost(TransformerCost(1, 0), TransformerCost(0, 1))
    for amounts, expected in (({"patches": [4, 0]}, [21, 5]), ({"patches": [[2, 2], 0]}, [13, 5]), (None, [5, 5])):
        assert ullage.plan([5, 5], ranks=1, capacity=10, amounts=amounts, cost=cost).costs.tolist() == expected


@pytest.mark.parametrize(("options", "words"), [
    ({"capacities": {"patches": 5}}, "needs the capacity of tokens"),
    ({"capacity": 8, "capacities": {"tokens": 9}}, "two capacities of tokens"),
    ({"capacity": 8, "capacities": {"images": 5}}, "capacity of images, and no amounts of it.*amounts of patches"),
    ({"capacity": 8, "capacities": {"patches": 0}}, "the capacity of patches must be an integer.*'?0"),
    ({"capacity": 8, "capacities": 5}, "capacities must be a mapping"),
    ({"capacity": 8, "amounts": {"patches": [1, 2]}}, "one per sequence.*expected 3, found 2"),
    ({"capacity": 8, "amounts": {"patches": [1, 2, -1]}}, "amounts of patches must not be negative"),
    ({"capacity": 8, "amounts": {"tokens": [1, 2, 3]}}, "amounts of tokens are the lengths"),
    ({"capacity": 8, "capacities": {"patches": 4}}, r"sequence 2\): expected at most the capacity of 4 patches"),
    ({"capacity": 8, "capacities": {"patches": 4}, "oversize": "truncate"}, "patches cannot be truncated"),
    ({"capacity": 4, "capacities": {"patches": 9}, "oversize": "truncate"}, "with patches cannot be truncated"),
    ({"capacity": 8, "capacities": {"patches": 9}, "context_parallel": "auto"}, "capacity of patches cannot be"),
    ({"capacity": 8, "capacities": {"patches": 7}, "keep_together": [[0, 2]]}, "at most 7 patches, found 8"),
    ({"capacity": 8, "capacities": {"patches": 7}, "strategy": "preassigned", "assignment": [[[0, 2], [1]]]},
     "unsound plan: over capacity.*rank 0 holds 8 patches of 7: sequences 0, 2"),
])  # fmt: skip
def test_what_cannot_be_held_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        ullage.plan([3, 4, 5], **({"ranks": 2, "amounts": {"patches": [2, 0, 6]}} | options))


def test_what_is_too_large_is_dropped_whichever_capacity_it_exceeds():
    plan = ullage.plan(
        [3, 9, 5], ranks=1, capacities={"tokens": 8, "patches": 4}, amounts={"patches": [2, 0, 6]}, oversize="drop"
    )
    assert (plan.problems(), plan.order.tolist(), plan.statistics().num_dropped) == ([], [0], 2)
    (use,) = plan.statistics().resources
    assert (use.name, use.amount, use.capacity, use.largest, use.unused) == ("patches", 2, 4, 2, 0.5)


def test_one_capacity_is_the_same_by_either_name():
    plan = ullage.plan([5, 3, 4, 4], ranks=2, capacity=8)
    assert ullage.plan([5, 3, 4, 4], ranks=2, capacities={"tokens": 8}) == plan
    assert (plan.capacities, plan.limits, plan.statistics().resources) == ({"tokens": 8}, {}, ())
    assert "amounts" not in plan.to_json()
