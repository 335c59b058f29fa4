"""``ullage.engines.nemo_rl``: NeMo-RL's signatures and contract, its own examples, and what its packers do not give."""

from __future__ import annotations

import enum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from ullage.engines.frameworks import NEMO_RL, get_packer


def critical_path(bins, lengths, ranks):
    """As NeMo-RL deals them: bin k to shard k mod ranks; the dearest shard of each microbatch, over the mean."""
    cost = [sum(24576 * lengths[i] + lengths[i] ** 2 for i in ids) for ids in bins]
    rows = [cost[k : k + ranks] for k in range(0, len(cost), ranks)]
    return sum(map(max, rows)) / max(1e-9, sum(cost) / ranks)


def first_fit_decreasing(lengths, capacity, multiple):
    """The oracle: NeMo-RL's FFD, with its way to reach a number of bins (one sequence at a time, fullest bins first)."""
    bins, room = [], []
    for length, i in sorted(((length, i) for i, length in enumerate(lengths)), reverse=True):
        k = next((k for k, left in enumerate(room) if left >= length), None)
        if k is None:
            bins.append([])
            room.append(capacity)
            k = len(bins) - 1
        bins[k].append(i)
        room[k] -= length
    sources = sorted(range(len(bins)), key=lambda k: (len(bins[k]), k), reverse=True)
    for _ in range(-len(bins) % multiple):
        source = next(k for k in sources if len(bins[k]) > 1)
        bins.append([bins[source].pop()])
    return bins


@pytest.mark.parametrize("algorithm", NEMO_RL)
@pytest.mark.parametrize("lengths", [[50], [30] * 5, [100] * 3, [10, 50, 100, 20, 80, 30, 70, 40, 60, 90]])
def test_upstreams_edge_cases(algorithm, lengths):
    bins = get_packer(algorithm, 100).pack(lengths)
    assert sorted(i for ids in bins for i in ids) == list(range(len(lengths)))
    assert all(ids and sum(lengths[i] for i in ids) <= 100 for ids in bins)
    assert get_packer(algorithm.lower(), 100).pack([]) == []


def test_upstreams_example_of_arrival_order():
    lengths = [4, 1, 3, 2, 1, 3, 4, 5]
    assert get_packer("concatenative", 5).pack(lengths) == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert get_packer("concatenative", 8).pack(lengths) == [[0, 1, 2], [3, 4, 5], [6], [7]]


def test_an_enum_names_an_algorithm():
    algorithm = enum.Enum("PackingAlgorithm", {"MODIFIED_FIRST_FIT_DECREASING": "modified_first_fit_decreasing"})
    assert get_packer(algorithm.MODIFIED_FIRST_FIT_DECREASING, 8).pack([8, 8]) == [[0], [1]]
    with pytest.raises(ValueError, match=r"Unknown packing algorithm: expected CONCATENATIVE or .* found best_fit"):
        get_packer("best_fit", 8)


@pytest.mark.parametrize("least", [None, 0, 5, 7])
@pytest.mark.parametrize("multiple", [None, 2, 4])
def test_the_number_of_bins_in_the_order_of_arrival_is_what_was_asked_for(least, multiple):
    lengths = [10, 50, 100, 20, 80, 30, 70, 40, 60, 90]
    bins = get_packer("concatenative", 200, min_bin_count=least, bin_count_multiple=multiple).pack(lengths)
    assert len(bins) >= (least or 0)
    assert len(bins) % (multiple or 1) == 0
    assert all(bins)
    assert sorted(i for ids in bins for i in ids) == list(range(10))
    needed = len(get_packer("concatenative", 200).pack(lengths))
    assert len(bins) < max(needed, least or 0) + (multiple or 1)  # and no more than that


def test_what_cannot_be_packed_is_said():
    with pytest.raises(ValueError, match=r"does not fit .*sequence 1.*at most the capacity of 100 tokens, found 150"):
        get_packer("balanced", 100).pack([50, 150, 70])
    with pytest.raises(ValueError, match=r"fewer sequences than bins.*at least 4 sequences, found 3"):
        get_packer("balanced", 100, min_bin_count=4, bin_count_multiple=4).pack([50, 50, 70])
    with pytest.raises(ValueError, match="min_bin_count must be nonnegative"):
        get_packer("balanced", 8, min_bin_count=-1)
    with pytest.raises(ValueError, match="bin_count_multiple must be positive"):
        get_packer("balanced", 8, bin_count_multiple=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 5), st.integers(0, 12))
def test_every_sequence_once_within_the_capacity(lengths, multiple, least):
    packer = get_packer("balanced", 100, min_bin_count=least, bin_count_multiple=multiple)
    needed = ullage.plan(lengths, ranks=multiple, capacity=100).num_microbatches
    count = max(needed, -(-least // multiple)) * multiple
    if len(lengths) < count:
        with pytest.raises(ValueError, match="fewer sequences than bins"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert sorted(i for ids in bins for i in ids) == list(range(len(lengths)))
    assert all(ids for ids in bins)
    assert all(sum(lengths[i] for i in ids) <= 100 for ids in bins)
    assert len(bins) == count


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_plan_survives_the_dealing_and_beats_first_fit_decreasing(ranks, seed):
    lengths = np.random.default_rng(seed).lognormal(6, 1.1, 256).astype(int).clip(1, 8192).tolist()
    ours = get_packer("modified_first_fit_decreasing", 8192, min_bin_count=ranks, bin_count_multiple=ranks)
    theirs = first_fit_decreasing(lengths, 8192, ranks)
    bins = ours.pack(lengths)
    assert len(bins) <= len(theirs)
    planned = ullage.plan(lengths, ranks=ranks, capacity=8192).statistics().critical_path
    assert critical_path(bins, lengths, ranks) == pytest.approx(planned)
    assert critical_path(bins, lengths, ranks) <= critical_path(theirs, lengths, ranks)
