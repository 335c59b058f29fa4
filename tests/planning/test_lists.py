"""``ullage.planning.lists``: partitions, bins and schedules against their invariants and brute force."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from ullage.planning.lists import bins, partitions, schedule


def check(found, lengths, cap, groups=None):
    """Every id once, ascending; no bin above the cap but one that holds a single item."""
    assert sorted(i for ids in found for i in ids) == list(range(len(lengths)))
    item = list(range(len(lengths))) if groups is None else groups
    for ids in found:
        assert ids == sorted(ids)
        assert sum(lengths[i] for i in ids) <= cap or len({item[i] for i in ids}) == 1
    home = {i: k for k, ids in enumerate(found) for i in ids}
    assert all(home[i] == home[j] for i in home for j in home if item[i] == item[j])


LENGTHS = st.lists(st.integers(0, 24), min_size=1, max_size=20)


@settings(max_examples=30, deadline=None)
@given(
    LENGTHS, st.integers(1, 3), st.integers(1, 2), st.integers(0, 5),
    st.sampled_from(["balanced", "fewest", "next_fit"]), st.integers(1, 3),
)  # fmt: skip
def test_every_sequence_has_a_bin_and_what_is_too_long_is_alone(lengths, ranks, multiple, least, order, size):
    groups = [i // size for i in range(len(lengths))]
    how = {"ranks": ranks, "multiple": multiple, "least": least, "order": order, "groups": groups}
    found = bins(lengths, 16, oversize="alone", fill=False, **how)
    check(found, lengths, 16, groups)
    assert len(found) % (ranks * multiple) == 0
    assert len(found) >= least
    number = len(set(groups))
    if number < len(found):
        with pytest.raises(ValueError, match=r"there are fewer (groups|sequences) than bins, and none may be empty"):
            bins(lengths, 16, oversize="alone", **how)
        return
    filled = bins(lengths, 16, oversize="alone", **how)
    check(filled, lengths, 16, groups)
    assert all(filled)
    assert len(filled) == len(found)


def fewest(lengths, cap):
    """The oracle: the least number of bins by trying every assignment."""
    for count in range(len(lengths) + 1):
        for homes in itertools.product(range(count), repeat=len(lengths)):
            sums, members = [0] * count, [0] * count
            for length, home in zip(lengths, homes):
                sums[home] += length
                members[home] += 1
            if all(total <= cap or many == 1 for total, many in zip(sums, members)):
                return count
    raise AssertionError


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5))
def test_bins_are_as_few_as_can_be_also_beside_what_is_too_long(lengths):
    for order in ("balanced", "fewest"):
        assert len(bins(lengths, 8, order=order, oversize="alone")) == fewest(lengths, 8)


def test_a_sequence_at_the_capacity_fits_and_an_empty_one_is_not_put_beside_what_does_not(caplog):
    assert bins([8, 0], 8) == [[0, 1]]
    assert not caplog.records
    assert bins([9, 0, 8], 8, oversize="alone") == [[0], [1, 2]]
    with caplog.at_level(logging.WARNING):
        bins([3, 9, 10, 11, 12, 13, 9], 8, oversize="alone")
    assert "above the capacity of 8 tokens, and therefore alone in a microbatch: sequence 1 (9 tokens)" in caplog.text
    assert "and 2 more" in caplog.text


def test_groups_are_named_with_their_rows(caplog):
    with pytest.raises(
        ValueError, match=r"a group .* does not fit .*\(sequences 2, 3\): expected at most 8 .* found 10"
    ):
        bins([1, 2, 5, 5], 8, groups=[0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"a sequence does not fit into a microbatch \(sequence 1\).* found 9"):
        bins([1, 9], 8, groups=[0, 0])
    with caplog.at_level(logging.WARNING):
        assert bins([1, 2, 5, 5], 8, groups=[0, 0, 1, 1], oversize="alone") == [[0, 1], [2, 3]]
    assert "the group of sequences 2, 3 (10 tokens)" in caplog.text


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_a_schedule_is_the_plan_dealt_to_the_ranks(ranks):
    lengths = np.random.default_rng(ranks).lognormal(5, 1, 60).astype(int).clip(1, 1024).tolist()
    dealt = schedule(lengths, ranks, 1024, multiple=2)
    assert len({len(mine) for mine in dealt}) == 1
    assert len(dealt[0]) % 2 == 0
    check([ids for mine in dealt for ids in mine], lengths, 1024)
    work = np.array([[sum(24576 * lengths[i] + lengths[i] ** 2 for i in ids) for ids in mine] for mine in dealt])
    made = ullage.plan(lengths, ranks=ranks, capacity=1024, microbatch_multiple=2)
    path = work.max(0).sum() / (work.sum() / ranks)
    assert path == pytest.approx(made.statistics().critical_path)


def test_work_of_any_size_is_planned():
    flops = [4.1e15, 7.7e16, 1.2e17, 3e15, 0, 9e16, 1e17, 2e17]
    scaled = schedule([1] * 8, 2, 8, work=flops)
    assert scaled == schedule([1] * 8, 2, 8, work=[value * 2**40 for value in flops])
    assert partitions([0, 225233911511016654358, 635405242110780250712], 2) in ([[2], [0, 1]], [[0, 1], [2]])


def test_work_may_be_numbers_or_a_model():
    lengths = [4, 4, 4, 4]
    assert sorted(schedule(lengths, 2, 8, work=[9.5, 1, 1, 9.5])) in ([[[0, 1]], [[2, 3]]], [[[0, 2]], [[1, 3]]])
    assert len(schedule(lengths, 2, 8, work=lambda n: n)) == 2
    with pytest.raises(ValueError, match="one number a sequence"):
        bins(lengths, 8, work=[1, 2])


def test_one_rank_has_even_bins_and_arguments_do_not_contradict():
    assert bins([8, 2, 2, 2, 1, 1], 16, least=2) == [[0], [1, 2, 3, 4, 5]]
    assert bins([], 8) == []
    assert bins([3, 3], 8, order="next_fit", least=2) == [[0], [1]]
    assert bins([1] * 5, 8, max_sequences=2, order="fewest") == [[0, 3], [1, 4], [2]]
    for how, words in (
        ({"groups": [0], "max_sequences": 2}, "groups and a limit of sequences"),
        ({"oversize": "drop"}, "oversize"),
        ({"order": "random"}, "order"),
        ({"cap": 0}, "the capacity must be an integer"),
    ):
        with pytest.raises(ValueError, match=words):
            bins([1], how.pop("cap", 8), **how)


def smallest_largest(values, k):
    """The oracle: the least largest sum of any division into k parts."""
    best = sum(values)
    for homes in itertools.product(range(k), repeat=len(values)):
        if len(set(homes)) == k:
            best = min(best, max(sum(v for v, h in zip(values, homes) if h == part) for part in range(k)))
    return best


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 2**70), st.floats(0, 1e30), st.integers(0, 9)), min_size=2, max_size=6),
    st.integers(1, 2),
)
def test_partitions_of_floats_and_of_integers_above_64_bits(values, k):
    parts = partitions(values, k)
    assert sorted(i for part in parts for i in part) == list(range(len(values)))
    assert all(parts)
    assert max(sum(values[i] for i in part) for part in parts) <= 1.34 * smallest_largest(values, k)


def test_partitions_keep_groups_and_take_every_kind_of_list():
    groups = [0, 0, 1, 1, 2, 3]
    parts = partitions([5, 5, 1, 1, 4, 4], 2, groups=groups, equal_size=True)
    assert [len({groups[i] for i in part}) for part in parts] == [2, 2]
    home = {i: k for k, part in enumerate(parts) for i in part}
    assert home[0] == home[1]
    assert home[2] == home[3]
    for kind in (tuple, np.asarray, torch.tensor, lambda v: torch.tensor(v, dtype=torch.bfloat16)):
        assert partitions(kind([8, 7, 6, 5, 4]), 2) == [[1, 3, 4], [0, 2]]
    assert partitions([3 * 10**30, 10**30, 2 * 10**30], 2) in ([[0], [1, 2]], [[1, 2], [0]])
    for bad, message in {
        (1.0, float("nan")): r"must be finite and not negative \(item 1\)",
        (-1, 2): "must be finite and not negative",
        ("a", "b"): "must be numbers",
        (True, False): "must be numbers",
    }.items():
        with pytest.raises(ValueError, match=message):
            partitions(list(bad), 1)
