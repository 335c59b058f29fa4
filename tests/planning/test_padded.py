"""Padded batches against a direct count, over random lengths and on every boundary."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from ullage.planning.padded import padded


def batches(lengths, capacity, multiple=1, most=None):
    """The batches one by one, as the definition says."""
    found, batch = [], []
    for length in lengths:
        wide = -(-max([*batch, length]) // multiple) * multiple
        if batch and (wide * (len(batch) + 1) > capacity or len(batch) == most):
            found.append(batch)
            batch = []
        batch = [*batch, length]
    return [*found, batch] if batch else found


@given(
    st.lists(st.integers(1, 16), max_size=40), st.integers(1, 5), st.sampled_from([16, 17, 31, 64]),
    st.sampled_from([1, 4]), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_against_a_direct_count(lengths, ranks, capacity, multiple, most, of):
    plan = ullage.plan(
        lengths, ranks=ranks, capacity=capacity, pad_to_multiple_of=multiple, max_sequences=most, microbatch_multiple=of
    )
    found, expected = padded(plan), batches(lengths, capacity, multiple, most)
    assert found is not None
    assert found.num_batches == len(expected)
    assert found.num_slots == sum(len(batch) * (-(-max(batch) // multiple) * multiple) for batch in expected)
    assert found.num_slots <= len(expected) * capacity
    turns = math.ceil(math.ceil(len(expected) / ranks) / of) * of
    assert found.num_microbatches == turns >= plan.statistics().lower_bound
    cost = ullage.TransformerCost()
    work = np.zeros(turns * ranks)
    work[: len(expected)] = [len(batch) * int(cost(np.array([max(batch)]))[0]) for batch in expected]
    work = work.reshape(turns, ranks)
    ideal = plan.costs.sum() / ranks
    if lengths:
        assert found.critical_path == pytest.approx(work.max(axis=1).sum() / ideal)
        assert found.rank_imbalance == pytest.approx(work.sum(axis=0).max() / ideal)
        assert found.critical_path >= plan.statistics().critical_path_bound - 1e-9
        assert found.padding_computed == pytest.approx(1 - sum(lengths) / found.num_slots)


def test_equal_lengths_have_no_padding_and_what_was_dropped_is_not_counted():
    found = padded(ullage.plan([8] * 8, ranks=2, capacity=16))
    assert found is not None
    assert (found.num_batches, found.num_slots, found.padding_computed, found.ullage) == (4, 64, 0.0, 0.0)
    assert (found.critical_path, found.rank_imbalance) == (1.0, 1.0)
    dropped = padded(ullage.plan([8, 100, 8], ranks=1, capacity=16, oversize="drop"))
    assert dropped is not None
    assert (dropped.num_batches, dropped.num_slots) == (1, 16)
    assert padded(ullage.plan([100, 1], ranks=2, capacity=64, context_parallel="auto")) is None
