"""The story of end-to-end support for the THD format in Megatron-Core.

Symptom: a global batch with fewer sequences than ranks is an AssertionError; a sequence longer than the capacity passes
silently into an empty pack; ranks disagree on Σlength², and the statistics count padding; a rank that sends nothing
breaks the all-to-all; a replay fails because samples were changed; metadata with a zero in it is cut in the wrong
place; a middle pipeline stage has no ``total_tokens``; a framework whose ranks all hold the data, or whose ranks are in
another order, cannot use any of it.
Cause: one function that schedules, fetches, communicates and packs; sums of squares in float32, exact to 2**24 only;
boundaries found by looking for zeros; ranks computed from global ids; field names fixed in the code.
Strategy: a pure plan; steps that stand alone; integers as int64; explicit counts in a header; who owns data as a value.
"""

import copy

import numpy as np
import pytest
import torch

import ullage
from tests.support import exchange_cases as cases
from tests.support.processes import run, values
from ullage.datasets import MockSamples
from ullage.exchange import Lengths, PackedIterator, exchange, materialize, route, shard
from ullage.ranks import Topology

pytestmark = pytest.mark.regression


def test_fewer_sequences_than_ranks_give_empty_microbatches():
    plan = ullage.plan([7, 5], ranks=8, capacity=16)
    samples = [{"tokens": torch.arange(n)} for n in (7, 5)]
    held = [materialize(plan, samples, rank) for rank in range(8)]
    assert sorted(batch.layout.num_tokens for batches in held for batch in batches) == [0] * 6 + [5, 7]
    assert all(batch.placeholder()["tokens"].shape == (1,) for batches in held for batch in batches)


def test_an_oversize_sequence_is_an_error_that_names_it_and_never_an_empty_pack():
    samples = [{"tokens": torch.arange(n)} for n in (5, 40, 6)]
    steps = PackedIterator(samples, global_batch_size=3, capacity=32)
    with steps, pytest.raises(ullage.InputError, match=r"does not fit.*sequence 1.*found 40"):
        next(steps)


def test_sums_are_exact_beyond_float32_and_count_real_tokens():
    lengths = [8193] * 5 + [1]
    assert sum(n * n for n in lengths) > 2**24
    assert float(np.float32(sum(n * n for n in lengths))) != sum(n * n for n in lengths)
    samples = [{"tokens": torch.zeros(n, dtype=torch.int8)} for n in lengths]
    with PackedIterator(samples, global_batch_size=6, capacity=10_240, pad_to_multiple_of=1024) as steps:
        step = next(steps)
    assert step.num_tokens == sum(lengths)
    assert step.sum_squared_lengths == sum(n * n for n in lengths)
    assert sum(batch.layout.size for batch in step.microbatches) == 5 * 9216 + 1024


def test_286_real_tokens_are_286_and_not_336():
    lengths = [33, 65, 7, 90, 91]
    assert sum(lengths) == 286
    samples = [{"tokens": torch.arange(n)} for n in lengths]
    with PackedIterator(samples, global_batch_size=5, capacity=128, pad_to_multiple_of=16) as steps:
        step = next(steps)
    assert sum(batch.layout.size for batch in step.microbatches) == 336 > step.num_tokens == 286


def test_an_empty_send_is_empty():
    lengths = Lengths([4, 4], [2, 0, 0])
    plan = ullage.plan(lengths.lengths, ranks=3, capacity=4)
    routes = [route(plan, lengths, rank) for rank in range(3)]
    assert [len(path.sends) for path in routes] == [2, 0, 0]
    assert sorted(len(path.receives) for path in routes) == [0, 1, 1]


def test_samples_may_be_read_again():
    samples = [MockSamples(n=4, max_length=20)[i] for i in range(4)]
    before = copy.deepcopy(samples)
    for _ in range(2):
        with PackedIterator(samples, global_batch_size=4, capacity=64, pad_to_multiple_of=8) as steps:
            next(steps)
    for sample, old in zip(samples, before, strict=True):
        assert list(sample) == list(old)
        assert all(torch.equal(sample[name], old[name]) for name in old)


def test_both_cu_seqlens_are_there_and_neither_replaces_the_other():
    [batch] = materialize(
        ullage.plan([5, 3], ranks=1, capacity=16, pad_to_multiple_of=4),
        [{"tokens": torch.arange(n)} for n in (5, 3)],
        0,
    )
    order = batch.layout.lengths.tolist()
    assert batch.layout.cu_seqlens.tolist() == [0, order[0], 8]
    assert batch.layout.cu_seqlens_padded.tolist() == [0, -(-order[0] // 4) * 4, 12]


def test_every_rank_that_holds_the_data_needs_no_group_at_all():
    samples = [{"tokens": torch.arange(n), "advantage": torch.rand(n, dtype=torch.float64)} for n in (5, 9, 3, 8)]
    plan = ullage.plan([5, 9, 3, 8], ranks=2, capacity=16)
    rewards = [torch.cat([b["advantage"] for b in materialize(plan, samples, rank)]) for rank in range(2)]
    assert sorted(torch.cat(rewards).tolist()) == sorted(torch.cat([s["advantage"] for s in samples]).tolist())
    # Outputs go back to the order the samples came in.
    outputs = torch.tensor([int(i) for m in range(plan.num_microbatches) for r in range(2) for i in plan.members(m, r)])
    assert outputs[torch.from_numpy(plan.inverse)].tolist() == [0, 1, 2, 3]


def test_slicing_needs_no_broadcast_and_keeps_megatron_s_labels_as_they_are():
    data = MockSamples(
        {
            "mode": "distribution",
            "type": "lognormal",
            "min_seq_len": 8,
            "max_seq_len": 24,
            "mean_seq_len": 16,
            "lognormal_sigma": 1.0,
        },
        n=3,
    )
    [batch] = exchange(
        ullage.plan(data.lengths, ranks=1, capacity=96, pad_to_multiple_of=8),
        list(data),
        Topology.single(),
        Lengths(data.lengths, [3]),
    )
    for rank in range(4):
        part = shard(batch, 4, rank)
        assert "shift_labels" not in part.batch
        real = part["loss_mask"] == 1
        assert torch.equal(part["labels"][real], part["tokens"][real] + 1) or (part["labels"][real] == 0).any()
        assert torch.equal(part.position_ids[real], part["tokens"][real] - 1)


def test_a_middle_stage_knows_every_length_and_the_totals():
    ranks = values(run(cases.whole_topology, 4, {"pp": 4}, "ends", "zigzag"))
    first, second, third, last = sorted(ranks, key=lambda rank: rank["place"][3])
    for stage in (second, third, last):
        assert [step[1:3] for step in stage["steps"]] == [step[1:3] for step in first["steps"]]
    assert second["fields"] == ["id"]  # what a multi-token-prediction stage asks for
    assert third["fields"] == []  # and one that asks for nothing still has the layouts: checked on the ranks
