"""``ullage.engines.verl``: verl's signatures and contract, its own examples, and what its balancing does not give."""

from __future__ import annotations

import heapq
import random
from itertools import count

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.support.processes import run, values
from ullage.engines.verl import get_seqlen_balanced_partitions, rearrange_micro_batches


def karmarkar_karp(values, k, equal_size):
    """The oracle: verl's differencing, its order of ties included."""
    order, number = sorted((value, i) for i, value in enumerate(values)), count()
    size = k if equal_size else 1

    def key(division):  # the widest spread first, then the larger largest part
        (total, many, items), last = division[0], division[-1]
        return (last[0] - total, -total, -many, [(-i, -value) for i, value in items])

    heap = []
    for begin in range(0, len(order), size):
        division = sorted(((v, 1, [(i, v)]) for v, i in order[begin : begin + size]), reverse=True)
        division += [(0, 0, [])] * (k - len(division))
        division.sort(reverse=True)
        heapq.heappush(heap, (key(division), next(number), division))
    while len(heap) > 1:
        a, b = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(x[0] + y[0], x[1] + y[1], x[2] + y[2]) for x, y in zip(a, b[::-1])]
        joined.sort(reverse=True)
        heapq.heappush(heap, (key(joined), next(number), joined))
    return [[i for i, _ in items] for _, _, items in heap[0][2]]


def largest(values, parts):
    return max(sum(values[i] for i in part) for part in parts)


def check_partitions(parts, n, k):
    assert len(parts) == k
    assert all(part and part == sorted(part) for part in parts)
    assert sorted(i for part in parts for i in part) == list(range(n))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 7), st.booleans(), st.sampled_from([9, 1000, 10**12]))
def test_partitions_are_no_less_even_than_differencing(data, k, equal_size, most):
    n = data.draw(st.integers(1, 6)) * k if equal_size else data.draw(st.integers(k, 30))
    values = data.draw(st.lists(st.integers(0, most), min_size=n, max_size=n))
    parts = get_seqlen_balanced_partitions(values, k, equal_size)
    check_partitions(parts, n, k)
    if equal_size:
        assert {len(part) for part in parts} == {n // k}
    if min(values) > 0:  # differencing may leave a part empty where items cost nothing
        assert largest(values, parts) <= largest(values, karmarkar_karp(values, k, equal_size))


def test_large_batches_by_workload():
    lengths = np.random.default_rng(0).lognormal(6.5, 1.1, 2048).astype(np.int64) + 1
    values = (24576 * lengths + lengths**2).tolist()
    parts = get_seqlen_balanced_partitions(values, 16, False)
    check_partitions(parts, 2048, 16)
    assert largest(values, parts) <= 1.0002 * max(max(values), sum(values) / 16)


def test_partitions_that_cannot_be():
    for numbers, k, equal, words in (
        ([1, 2], 3, False, "fewer items than partitions: expected at least 3, found 2"),
        ([1, 2, 3], 2, True, "equal_size must divide the items: expected a multiple of 2, found 3"),
        ([1, 2, 3], 0, False, "k_partitions must be an integer"),
    ):
        with pytest.raises(ValueError, match=words):
            get_seqlen_balanced_partitions(numbers, k, equal)


def padded(lengths, width=None):
    width = width or max([1, *lengths])
    ids = torch.full((len(lengths), width), -7)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, :length] = torch.arange(length) + 1000 * i
        mask[i, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "name": [f"row {i}" for i in range(len(lengths))], "step": 3}


def nested(lengths):
    ids = torch.nested.as_nested_tensor(
        [torch.arange(n) + 1000 * i for i, n in enumerate(lengths)], layout=torch.jagged
    )
    return {"input_ids": ids, "reward": torch.arange(len(lengths)) / 2, "uid": np.arange(len(lengths))}


def check_rearranged(parts, lengths, capacity, group=1):
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= capacity for part in parts)
    assert all(parts)
    home = {i: k for k, part in enumerate(parts) for i in part}
    assert all(home[i] == home[i - i % group] for i in home)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=24), st.integers(1, 3), st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 4)), st.booleans(),
)  # fmt: skip
def test_no_microbatch_is_over_its_cap(lengths, group, multiple, least, balance):
    lengths = lengths * group
    how = {"num_batches_divided_by": multiple, "min_num_micro_batch": least, "use_dynamic_bsz_balance": balance}
    tokens = [sum(lengths[i : i + group]) for i in range(0, len(lengths), group)]
    needed = max(least or 0, ullage.plan(tokens, ranks=1, capacity=64 * group).num_microbatches)
    if -(-needed // multiple) * multiple > len(tokens):
        with pytest.raises(ValueError, match="fewer rows than microbatches"):
            rearrange_micro_batches(padded(lengths), 64 * group, force_group_size=group, **how)
        return
    _, parts = rearrange_micro_batches(padded(lengths), 64 * group, force_group_size=group, **how)
    check_rearranged(parts, lengths, 64 * group, group)
    assert len(parts) == -(-needed // multiple) * multiple


@pytest.mark.parametrize("make", [padded, nested])
def test_rows_go_and_come_back(make):
    rng = random.Random(0)
    lengths = [rng.randint(50, 90) for _ in range(20)]
    batch = make(lengths)
    micro, parts = rearrange_micro_batches(batch, 300)
    check_rearranged(parts, lengths, 300)
    work = [sum(24576 * lengths[i] + lengths[i] ** 2 for i in part) for part in parts]
    peak = work.index(max(work))
    assert work[:peak] == sorted(work[:peak])  # light ones at both ends
    assert work[peak:] == sorted(work[peak:], reverse=True)
    outputs = [row for part in micro for row in part["input_ids"].unbind()]
    order = [i for part in parts for i in part]
    assert all(torch.equal(row, batch["input_ids"][i]) for i, row in zip(order, outputs, strict=True))
    if make is nested:
        assert [m["uid"].tolist() for m in micro] == parts
    else:
        assert [m["name"] for m in micro] == [[f"row {i}" for i in part] for part in parts]
        assert {m["step"] for m in micro} == {3}


def test_what_cannot_be_rearranged_and_a_padded_width_that_is_no_length():
    for lengths, how, words in (
        ([3, 65], {}, r"does not fit into a microbatch \(sequence 1\).* found 65"),
        ([3, 6], {"num_batches_divided_by": 4}, "fewer rows than microbatches: expected at least 4, found 2"),
        ([3, 6, 4], {"force_group_size": 2}, "force_group_size must divide the batch"),
    ):
        with pytest.raises(ValueError, match=words):
            rearrange_micro_batches(padded(lengths), 64, **how)
    assert rearrange_micro_batches(padded([]), 64) == ([], [])
    _, parts = rearrange_micro_batches(padded([30, 10, 20], width=100), 40)
    check_rearranged(parts, [30, 10, 20], 40)
    assert len(parts) == 2


def _on_each_rank(rank, world):
    outcome = {}
    lengths = [40] * (6 + 4 * rank)
    for name, how in {
        "same": {"dp_group": dist.group.WORLD},
        "staged": {"dp_group": dist.group.WORLD, "num_batches_divided_by": 3},
        "own": {"dp_group": dist.group.WORLD, "same_micro_num_in_dp": False},
        "alone": {},
    }.items():
        _, parts = rearrange_micro_batches(padded(lengths), 100, **how)
        check_rearranged(parts, lengths, 100)
        outcome[name] = len(parts)
    for name, mine in {"oversize": [[3], [3, 200]], "few": [[3], [90] * 5]}.items():
        try:
            rearrange_micro_batches(padded(mine[rank]), 100, dist.group.WORLD)
        except Exception as error:
            outcome[name] = str(error)
    return outcome


@pytest.mark.slow
def test_ranks_agree_on_the_number_of_microbatches_and_on_errors():
    first, second = values(run(_on_each_rank, 2))
    assert [first[name] for name in ("same", "staged", "own", "alone")] == [5, 6, 3, 3]
    assert [second[name] for name in ("same", "staged", "own", "alone")] == [5, 6, 5, 5]
    assert "another rank failed while reading the rows of its batch (rank 1)" in first["oversize"]
    assert "InputError: a sequence does not fit into a microbatch" in first["oversize"]
    assert "sequence 1" in second["oversize"]
    assert first["few"] == second["few"]
    assert "fewer rows than microbatches (on some rank): expected at least 5, found 1" in first["few"]
