"""The run order of a recurrent layer: each token has one place, no cut is wasteful, and every way back is exact."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawing import lengths as drawn
from ullage.models import schedule as module
from ullage.models.schedule import RunOrder, Schedule

pytestmark = pytest.mark.property

CPU = torch.device("cpu")
LENGTHS = drawn(high=30, min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0)


ORDERS = st.sampled_from(["packed", "staircase"])


@given(LENGTHS, st.booleans(), ORDERS)
def test_place_and_take_undo_each_other(lengths: list[int], keep_state: bool, run_order: RunOrder) -> None:
    schedule = Schedule.ragged(np.array(lengths), 4, CPU, run_order, keep_state=keep_state)
    flat = torch.arange(1, sum(lengths) + 1)
    run = schedule.place(flat)
    assert run.shape == (schedule.size,)
    assert torch.equal(schedule.take(run.double()).long(), flat)
    assert int((run == 0).sum()) == schedule.size - len(flat)  # padding is zeros, and nothing else is
    assert schedule.keeps_state >= keep_state
    if keep_state or run_order == "packed":
        assert schedule.size == len(flat)
    if run_order == "staircase":
        assert sum(window.steps * window.rows for window in schedule.windows) == schedule.size
        assert sum(window.steps for window in schedule.windows) == max(lengths)


@given(LENGTHS, st.sampled_from(["flat", "packed", "staircase"]), st.booleans())
def test_the_last_value_of_a_sequence_without_tokens_is_what_was_before_it(lengths, run_order, given_before) -> None:
    """Wherever it stands: first, last, or between others, whose values are near."""
    schedule = Schedule.ragged(np.array(lengths), 4, CPU, run_order)
    flat = torch.arange(1.0, sum(lengths) + 1)[:, None]
    before = -torch.arange(1.0, len(lengths) + 1)[:, None] if given_before else None
    absent = torch.zeros(len(lengths), 1) if before is None else before
    wanted = [part[-1] if len(part) else absent[i] for i, part in enumerate(flat.split(lengths))]
    assert torch.equal(schedule.last(schedule.place(flat), before), torch.stack(wanted))


def _cost(cuts: tuple[int, ...], rows: np.ndarray) -> int:
    return sum((end - start) * int(rows[start]) + module.CALL_COST for start, end in pairwise(cuts))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_cuts_cost_least_of_all_choices(lengths: list[int]) -> None:
    points = np.unique([0, *lengths])
    rows = (np.array(lengths)[None] > np.arange(max(lengths))[:, None]).sum(1)
    inner = [int(point) for point in points[1:-1]]
    best = min(
        _cost((0, *chosen, int(points[-1])), rows)
        for size in range(len(inner) + 1)
        for chosen in combinations(inner, size)
    )
    chosen = module._cheapest_cuts(points, rows)
    assert _cost(tuple(int(cut) for cut in chosen), rows) == best


@pytest.mark.parametrize("batch", [64, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_lognormal_lengths_waste_little_in_few_calls(seed: int, batch: int) -> None:
    draws = np.random.default_rng(seed).lognormal(np.log(128) - 0.5, 1.0, batch)
    lengths = np.clip(draws, 1, 4096).astype(np.int64)
    schedule = Schedule.ragged(lengths, 256, CPU, keep_state=False)
    assert schedule.size < 1.12 * lengths.sum()
    calls = len({window.rows for window in schedule.windows})
    assert 4 <= calls <= 80


def test_large_rectangles_are_cut_in_time() -> None:
    schedule = Schedule.dense(64, 512, 256)
    assert len(schedule.windows) > 1
    assert all(window.steps * window.rows * 256 <= module.MAX_ELEMENTS for window in schedule.windows)
    assert sum(window.steps for window in schedule.windows) == 512
    assert Schedule.dense(64, 512, 256, "packed").rows == (64,) * 512
