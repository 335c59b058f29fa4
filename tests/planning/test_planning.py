"""``ullage.plan``: every option of the contract on small cases, and the text of every refusal."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import ullage
from ullage.planning import Assignment, RecurrentCost, Task, register_strategy, strategies, strategy_names

MIXED = [5, 3, 4, 4, 7, 1, 2, 6, 0, 8]


def _placed(plan: ullage.Plan) -> list[list[list[int]]]:
    return [[plan.members(m, r).tolist() for r in range(plan.ranks)] for m in range(plan.num_microbatches)]


def test_next_fit_keeps_arrival_order() -> None:
    plan = ullage.plan([5, 3, 4, 4, 7, 1], ranks=2, capacity=8, strategy="next_fit")
    assert _placed(plan) == [[[0, 1], [2, 3]], [[4, 5], []]]


def test_balance_is_by_cost_and_not_by_tokens() -> None:
    lengths = [8] + [1] * 8  # eight tokens each way, but one side's attention is eight times as dear
    plan = ullage.plan(lengths, ranks=2, capacity=16, cost=ullage.TransformerCost(linear=0, quadratic=1))
    assert sorted(map(len, _placed(plan)[0])) == [1, 8]
    linear = ullage.plan([8, 4, 4], ranks=2, capacity=16, cost=lambda length: length)
    assert linear.statistics().critical_path == 1.0


def test_statistics_conserve_tokens() -> None:
    plan = ullage.plan([9, 20, 3, 12], ranks=2, capacity=10, pad_to_multiple_of=4, oversize="truncate")
    found = plan.statistics()
    assert plan.lengths.tolist() == [8, 8, 3, 8]  # 8 is the longest slot of 4 within 10
    assert (found.tokens_in, found.num_tokens, found.truncated_tokens, found.dropped_tokens) == (44, 27, 17, 0)
    assert (found.num_truncated, found.num_dropped, found.num_padded_tokens) == (3, 0, 28)
    assert found.capacity_tokens == found.num_tokens + found.padding_tokens == plan.num_microbatches * 20
    assert found.sum_squared_lengths == 3 * 64 + 9
    assert found.ullage == 1 - 27 / found.capacity_tokens


def test_ranks_that_share_a_microbatch_carry_their_share_of_its_cost() -> None:
    """32 tokens do not fit into 8: four ranks share them, and each has a fourth of the work."""
    plan = ullage.plan([32, 4, 3, 2], ranks=4, capacity=8, context_parallel="auto", cost=lambda length: 10 * length)
    shared = int(plan.bins[0]) // 4
    assert plan.degrees[shared].tolist() == [4, 4, 4, 4]
    assert plan.loads[shared].tolist() == [80, 80, 80, 80]
    for microbatch, rank in np.ndindex(plan.loads.shape):
        tokens = plan.lengths[plan.members(microbatch, rank)].sum()
        assert plan.loads[microbatch, rank] == 10 * tokens / plan.degree(microbatch, rank)


@pytest.mark.parametrize("multiple", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["balanced", "next_fit"])
def test_microbatches_are_a_multiple(multiple: int, strategy: str) -> None:
    plan = ullage.plan([6] * 9, ranks=2, capacity=8, microbatch_multiple=multiple, strategy=strategy)
    assert plan.num_microbatches == plan.statistics().lower_bound == -(-5 // multiple) * multiple
    assert plan.problems() == []


def test_slots_limits_and_the_number_of_sequences_bound_the_microbatches() -> None:
    plan = ullage.plan([5, 5, 5, 5], ranks=1, capacity=12, pad_to_multiple_of=4)
    assert plan.num_microbatches == 4  # slots are aligned before they meet the capacity
    assert plan.layout(0, 0).slots.tolist() == [8]
    assert ullage.plan([5, 5, 5, 5], ranks=1, capacity=12).num_microbatches == 2
    plan = ullage.plan([1] * 20, ranks=2, capacity=100, max_sequences=3)
    assert plan.num_microbatches == plan.statistics().lower_bound == 4
    plan = ullage.plan([4, 4], ranks=5, capacity=8)
    assert (plan.num_microbatches, plan.statistics().num_empty) == (1, 3)
    nothing = ullage.plan([], ranks=3, capacity=8)
    assert (nothing.num_microbatches, nothing.problems(), nothing.statistics().critical_path) == (0, [], 1.0)
    plan = ullage.plan([4, 3, 4, 2, 5, 2, 2], ranks=2, capacity=8, keep_together=[[0, 2], [3, 5, 6]])
    assert plan.bins[0] == plan.bins[2]
    assert plan.bins[3] == plan.bins[5] == plan.bins[6]


@pytest.mark.parametrize("form", [[[[4, 0], [1]], [[], [3, 2]]], [[4, 0], [1], [], [3, 2]]])
@pytest.mark.parametrize("strategy", ["preassigned", "empty"])
def test_a_given_assignment_is_kept_in_its_order(form: list, strategy: str) -> None:
    plan = ullage.plan([2, 3, 4, 1, 5], ranks=2, capacity=8, strategy=strategy, assignment=form)
    assert _placed(plan) == [[[4, 0], [1]], [[], [3, 2]]]
    assert plan.strategy == "preassigned"


def test_a_fixed_degree_shares_every_microbatch() -> None:
    plan = ullage.plan([15, 9, 3, 3], ranks=4, capacity=8, context_parallel=2)
    assert plan.problems() == []
    assert plan.degrees.tolist() == [[2, 2, 2, 2]] * plan.num_microbatches
    assert plan.slot_multiple(0, 1) == 4
    for rank in (0, 2):
        assert plan.members(0, rank).tolist() == plan.members(0, rank + 1).tolist()


def test_a_giant_gets_the_least_ranks_that_hold_it() -> None:
    plan = ullage.plan([60] + [4] * 40, ranks=8, capacity=16, context_parallel="auto")
    assert plan.problems() == []
    microbatch, rank = divmod(int(plan.bins[0]), 8)
    assert plan.degree(microbatch, rank) in (4, 8)
    assert plan.statistics().num_shared >= 1
    small = ullage.plan([4] * 64, ranks=8, capacity=16, context_parallel="auto")
    assert small.degrees.max() == 1


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 12, 24, 768])
def test_a_sequence_may_fill_all_ranks_whatever_their_number(ranks: int) -> None:
    """One token more than the ranks hold together is too many; what they hold is shared by all of them."""
    capacity = 4 * ranks
    plan = ullage.plan([capacity * ranks, 5, 3], ranks=ranks, capacity=capacity, context_parallel="auto")
    assert plan.problems() == []
    assert plan.degrees[int(plan.bins[0]) // ranks].tolist() == [ranks] * ranks
    with pytest.raises(ullage.InputError, match=f"at most the capacity of {capacity * ranks} tokens"):
        ullage.plan([capacity * ranks + 1], ranks=ranks, capacity=capacity, context_parallel="auto")


@pytest.mark.parametrize(("ranks", "least", "degrees"), [
    (1, 1, [1]), (3, 1, [1, 3]), (6, 1, [1, 2, 6]), (7, 1, [1, 2, 7]), (8, 1, [1, 2, 4, 8]), (12, 4, [4, 12]),
    (24, 2, [2, 4, 8, 24]), (768, 64, [64, 128, 256, 768]), (6, 6, [6]),
])  # fmt: skip
def test_degrees_are_powers_of_two_and_all_ranks(ranks: int, least: int, degrees: list[int]) -> None:
    """Sequences that fill all ranks at one degree have that degree; blocks begin at multiples of it."""
    capacity = 4 * degrees[-1]
    wanted = [each for degree in degrees for each in [degree] * (ranks // degree) + [1] * (ranks % degree)]
    plan = ullage.plan(
        [capacity * degree for degree in wanted], ranks=ranks, capacity=capacity, cost=lambda length: length,
        context_parallel="auto", min_context_parallel=least,
    )  # fmt: skip
    assert plan.problems() == []
    found = plan.degrees.reshape(-1)[plan.bins]
    assert found.tolist() == wanted
    assert plan.num_microbatches == len(degrees)
    assert np.all(plan.bins % ranks % found == 0)


def test_upstream_names_are_aliases() -> None:
    for alias, name in strategies.ALIASES.items():
        assignment = [[0], [1]] if name == "preassigned" else None
        plan = ullage.plan([3, 4], ranks=2, capacity=8, strategy=alias, assignment=assignment)
        assert plan.strategy == name
    assert ullage.plan([30] + [1] * 9, ranks=4, capacity=8, strategy="default_dynamic_cp").degrees.max() == 4
    assert set(strategies.ALIASES) <= set(strategy_names())


def test_others_add_strategies_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_each(task: Task) -> Assignment:
        count = task.num_items
        return Assignment(np.arange(count) * task.ranks, count)

    def all_in_one(task: Task) -> Assignment:
        return Assignment(np.zeros(task.num_items, np.int64), 1)

    monkeypatch.setattr(strategies, "_REGISTERED", dict(strategies._REGISTERED))
    register_strategy("one_each", one_each)
    register_strategy("all_in_one", all_in_one)
    register_strategy("astray", lambda task: Assignment(np.full(task.num_items, 7), 1))
    assert ullage.plan([3, 4], ranks=2, capacity=8, strategy="one_each").num_microbatches == 2
    with pytest.raises(
        ullage.InputError, match=r"'all_in_one' gave an unsound plan: over capacity: microbatch 0, rank 0"
    ):
        ullage.plan([5, 4], ranks=2, capacity=8, strategy="all_in_one")
    with pytest.raises(ullage.InputError, match="a strategy must give each item a bin: expected 2 numbers from 0 to 1"):
        ullage.plan([5, 4], ranks=2, capacity=8, strategy="astray")
    with pytest.raises(ullage.InputError, match="taken: found 'dp_balanced'"):
        register_strategy("dp_balanced", one_each)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"lengths": [3, -1]}, r"lengths must not be negative \(item 1\): expected >= 0, found -1"),
    ({"ranks": 2.0}, r"ranks must be an integer: expected >= 1, found 2.0"),
    ({"ranks": "2"}, r"ranks must be an integer: expected >= 1, found '2'"),
    ({"ranks": True}, r"ranks must be an integer: expected >= 1, found True"),
    ({"capacity": -8}, r"capacity must be an integer: expected 1 to \d+, found -8"),
    ({"pad_to_multiple_of": 0}, r"pad_to_multiple_of must be an integer: expected >= 1, found 0"),
    ({"max_sequences": 0}, r"max_sequences must be an integer: expected >= 1, found 0"),
    ({"microbatch_multiple": 0}, r"microbatch_multiple must be an integer: expected >= 1, found 0"),
    ({"lengths": [3, 9, 8, 10]}, r"does not fit into a microbatch \(sequence 1 and 1 more\): expected at most the "
     r"capacity of 8 tokens, found 9\. Raise the capacity"),
    ({"lengths": [7], "pad_to_multiple_of": 5}, r"at most the capacity of 5 tokens at pad_to_multiple_of=5, found 7"),
    ({"lengths": [1], "pad_to_multiple_of": 9, "oversize": "drop"}, r"at most the capacity of 0 tokens at pad_to_multiple_of=9, found 1"),
    ({"oversize": "cut"}, r"no such oversize: expected 'error' or 'truncate' or 'drop', found 'cut'"),
    ({"sync": "never"}, r"no such sync: expected 'microbatch' or 'step', found 'never'"),
    ({"strategy": "best"}, r"no such strategy: expected .*'balanced'.*, found 'best'"),
    ({"strategy": None}, r"no such strategy: expected .*, found None"),
    ({"context_parallel": 3}, r"context_parallel must divide the ranks: expected a divisor of 2, found 3"),
    ({"context_parallel": "all"}, r"no such context_parallel: expected 'auto' or a degree, found 'all'"),
    ({"context_parallel": "auto", "strategy": "next_fit"}, r"'next_fit' gives every sequence one degree"),
    ({"context_parallel": "auto", "ranks": 10, "min_context_parallel": 4}, r"min_context_parallel must be a power of "
     r"two that divides the ranks, or all of them: expected 1 or 2 or 10, found 4"),
    ({"min_context_parallel": 2}, r"context_parallel is below min_context_parallel: expected at least 2, found 1"),
    ({"min_context_parallel": 0}, r"min_context_parallel must be an integer: expected >= 1, found 0"),
    ({"cost": lambda length: length * -1.0}, r"a cost must be a finite number \(sequence 0 of length 3\): expected "
     r">= 0, found -3.0"),
    ({"cost": lambda length: length * np.nan}, r"a cost must be a finite number \(sequence 0 of length 3\)"),
    ({"cost": lambda length: 1.0}, r"must return one number a sequence: expected shape \[2\], found shape \[\]"),
    ({"cost": lambda length: length.astype(str)}, r"the cost model must return numbers: found dtype"),
    ({"keep_together": [0]}, r"keep_together must be one integer per sequence, or lists of ids: expected 2 integers"),
    ({"keep_together": [0, 0]}, r"a group to keep together does not fit into a microbatch \(sequences 0, 1\): "
     r"expected at most 8 slots, found 10"),
    ({"keep_together": [[0, 0]]}, r"keep_together names a sequence twice \(group 0\): found 0"),
    ({"keep_together": [[2]]}, r"keep_together names a sequence that is not there \(group 0\): found 2"),
    ({"strategy": "preassigned"}, r'strategy "preassigned" needs an assignment'),
    ({"assignment": [[0], [1]]}, r"given to a strategy that makes its own: .*found 'balanced'"),
])  # fmt: skip
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    good = {"lengths": [3, 7], "ranks": 2, "capacity": 8}
    with pytest.raises(ullage.InputError, match=message):
        ullage.plan(**(good | arguments))


@pytest.mark.parametrize(("assignment", "multiple", "message"), [
    ([[0, 1], [1, 2]], 1, r"the assignment names sequences twice: found 1"),
    ([[0], [2]], 1, r"the assignment misses sequences: found 1"),
    ([[0, 1], [2, 3]], 1, r"names a sequence that is not there: expected ids below 3, found 3"),
    ([[0], [1], [2]], 1, r"bins are not a multiple of the ranks: expected a multiple of 2, found 3"),
    ([[[0, 1, 2]]], 1, r"must give every rank its ids \(microbatch 0\): expected 2 lists, found 1"),
    ([[0, 1], [2]], 2, r"not a multiple of microbatch_multiple: expected a multiple of 2, found 1"),
    ([[0, 1, 2], []], 1, r"unsound plan: over capacity: microbatch 0, rank 0 holds 9 slots of 8: sequences 0, 1, 2"),
    ([[0, -1], [1, 2]], 1, r"assignment must not be negative"),
])  # fmt: skip
def test_bad_assignments_are_refused(assignment: list, multiple: int, message: str) -> None:
    options = {"strategy": "preassigned", "assignment": assignment, "microbatch_multiple": multiple}
    with pytest.raises(ullage.InputError, match=message):
        ullage.plan([3, 3, 3], ranks=2, capacity=8, **options)


def _tampered(plan: ullage.Plan, **changes: object) -> ullage.Plan:
    record = json.loads(plan.to_json()) | changes
    return ullage.Plan.from_json(json.dumps(record))


def test_check_names_every_violation() -> None:
    plan = ullage.plan([3, 4, 5, 6], ranks=2, capacity=8, strategy="next_fit")
    assert plan.problems() == []
    twice = _tampered(plan, order=[0, 1, 1, 3])
    assert "duplicate: sequences 1 are placed more than once" in twice.problems()
    assert "missing: sequences 2 are placed nowhere" in twice.problems()
    full = _tampered(plan, capacity=6)
    assert "over capacity: microbatch 0, rank 0 holds 7 slots of 6: sequences 0, 1" in full.problems()
    crowded = _tampered(plan, max_sequences=1)
    assert crowded.problems() == ["crowded: microbatch 0, rank 0 holds 2 sequences of at most 1: 0, 1"]
    few = _tampered(plan, microbatch_multiple=3).problems()
    assert any(line.startswith("multiple: 2 microbatches") for line in few)
    mixed = _tampered(plan, degrees=[[2, 1], [1, 1]]).problems()
    assert "mixed: microbatch 0, rank 0 starts a group of degrees [2, 1]" in mixed
    lost = _tampered(plan, degrees=[[2, 2], [1, 1]], capacity=20).problems()
    assert lost == ["mixed: sequences 2 stand behind the first rank of microbatch 0, rank 0"]
    assert any("misaligned" in line for line in _tampered(plan, degrees=[[1, 2], [1, 1]]).problems())
    assert any("longer" in line for line in _tampered(plan, lengths=[3, 4, 5, 7]).problems())
    assert any("dropped" in line for line in _tampered(plan, lengths=[3, 4, 5, 0]).problems())


def test_json_round_trip_equality_and_digest() -> None:
    plan = ullage.plan(MIXED, ranks=2, capacity=10, pad_to_multiple_of=2, cost=ullage.TransformerCost(1, 1, 5, 2))
    again = ullage.Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.digest, hash(again)) == (plan.digest, hash(plan))
    assert again.statistics() == plan.statistics()
    other = ullage.plan(MIXED, ranks=2, capacity=11, pad_to_multiple_of=2)
    assert other != plan
    assert other.digest != plan.digest
    assert plan != "plan"
    with pytest.raises(ValueError, match="read-only"):
        plan.order[0] = 1


@pytest.mark.parametrize(("text", "message"), [
    ("{", "a plan must be JSON"),
    ("[]", "this JSON is not a plan: expected format 'ullage plan 1', found list"),
    ('{"format": "x"}', "not a plan: expected format 'ullage plan 1', found x"),
    ('{"format": "ullage plan 1"}', r"a plan lacks a field \(order\)"),
    ({"ranks": 0}, "a plan's ranks must be an integer: expected >= 1, found 0"),
    ({"offsets": [0, 2, 4]}, "offsets do not cut its order"),
    ({"offsets": [0, 3, 2, 3, 4]}, "offsets fall"),
    ({"order": [0, 1, 2, 9]}, "names a sequence that is not there"),
    ({"degrees": [[1], [1]]}, "degrees must be one per rank"),
    ({"costs": [1]}, "lengths and costs disagree: expected 4 each"),
])  # fmt: skip
def test_what_is_no_plan_or_does_not_hold_together_is_refused(text: str | dict, message: str) -> None:
    plan = ullage.plan([3, 4, 5, 6], ranks=2, capacity=8, strategy="next_fit")
    with pytest.raises(ullage.InputError, match=message):
        ullage.Plan.from_json(text) if isinstance(text, str) else _tampered(plan, **text)


def test_members_of_what_is_not_there_are_refused() -> None:
    plan = ullage.plan([3], ranks=2, capacity=8)
    with pytest.raises(ullage.InputError, match="no such microbatch: expected 0 to 0, found 1"):
        plan.members(1, 0)
    with pytest.raises(ullage.InputError, match="no such rank: expected 0 to 1, found -1"):
        plan.degree(0, -1)


def test_costs_in_any_unit_make_the_same_plan() -> None:
    lengths = np.random.default_rng(3).integers(1, 100, 60)
    plain = ullage.plan(lengths, ranks=4, capacity=256)
    for factor in (2.0**-40, 2.0**30):
        scaled = ullage.plan(lengths, ranks=4, capacity=256, cost=lambda x, f=factor: f * (24576.0 * x + x * x))
        assert np.array_equal(scaled.order, plain.order)
        assert scaled.statistics().critical_path == pytest.approx(plain.statistics().critical_path)
    free = ullage.plan(lengths, ranks=4, capacity=256, cost=lambda x: 0 * x)
    assert free.problems() == []
    assert free.statistics().critical_path == 1.0


def test_recurrent_cost() -> None:
    cost = RecurrentCost(step=10, row=2, rows=5)
    assert cost.batch([3, 7, 7]) == 10 * 7 + 2 * 17
    assert cost(np.array([3, 7])).tolist() == [12, 28]
    assert ullage.plan([3, 7, 7, 3], ranks=2, capacity=20, cost=cost).statistics().critical_path == 1.0
    with pytest.raises(ullage.InputError, match="a cost's row must be a finite number: expected >= 0, found -1"):
        RecurrentCost(row=-1)
    with pytest.raises(ullage.InputError, match="a cost's linear must be a finite number: expected >= 0, found nan"):
        ullage.TransformerCost(linear=float("nan"))


def test_planning_imports_no_torch_and_compiles_nothing_until_asked() -> None:
    code = (
        "import sys, ullage.planning; assert 'torch' not in sys.modules and 'numba' not in sys.modules;"
        "ullage.planning.plan([3], ranks=1, capacity=4); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pack_dataset() -> None:
    ids, cu_ids = ullage.pack_lengths([5, 3, 4, 4, 8, 0], 8)
    assert np.diff(cu_ids).min() > 0
    assert len(cu_ids) == 4
    assert sorted(ids.tolist()) == list(range(6))
    empty = ullage.pack_lengths([], 8)
    assert (empty.ids.tolist(), empty.cu_ids.tolist(), empty.num_bins) == ([], [0], 0)
    with pytest.raises(ullage.InputError, match=r"\(sequence 1\): expected at most the capacity of 8 tokens, found 9"):
        ullage.pack_lengths([1, 9], 8)
    with pytest.raises(ullage.InputError, match="capacity must be an integer"):
        ullage.pack_lengths([1, 9], 0)


@pytest.mark.parametrize(("multiple", "expected"), [(1, 3), (2, 4)])
def test_a_shared_plan_has_no_microbatch_without_a_sequence(multiple, expected):
    shared = ullage.plan([3, 7, 8], ranks=2, capacity=64, context_parallel="auto", microbatch_multiple=multiple)
    assert shared.problems() == []
    held = [sum(len(shared.members(m, r)) for r in range(2)) for m in range(shared.num_microbatches)]
    assert sorted(held, reverse=True) == held
    assert shared.num_microbatches <= expected
    assert held.count(0) < multiple
