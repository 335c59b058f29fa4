"""The story of end-to-end support for the THD format in Megatron-Core.

Symptom: a global batch with fewer sequences than ranks is an AssertionError; a sequence longer than the capacity passes
silently into an empty pack; ranks disagree on Σlength², and the statistics count padding; a rank that sends nothing
breaks the all-to-all; a replay fails because samples were changed; metadata with a zero in it is cut in the wrong
place; a middle pipeline stage has no ``total_tokens``; a framework whose ranks all hold the data, or whose ranks are in
another order, cannot use any of it.
Cause: one function that schedules, fetches, communicates and packs; sums of squares in float32, exact to 2**24 only;
boundaries found by looking for zeros; ranks computed from global ids; field names fixed in the code.
Strategy: a pure plan; steps that stand alone; integers as int64; explicit counts in a header; who owns data as a value.
The first of these symptoms are those of ``test_exchange.py`` and ``test_packed_iterator.py``.
"""

import numpy as np
import pytest
import torch

import ullage
from ullage.datasets import MockSamples
from ullage.exchange import Lengths, PackedIterator, exchange, shard
from ullage.ranks import Topology

pytestmark = pytest.mark.regression


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


def test_slicing_needs_no_broadcast_and_keeps_megatron_s_labels_as_they_are():
    config = {"mode": "distribution", "type": "lognormal", "min_seq_len": 8, "max_seq_len": 24}
    data = MockSamples({**config, "mean_seq_len": 16, "lognormal_sigma": 1.0}, n=3)
    plan = ullage.plan(data.lengths, ranks=1, capacity=96, pad_to_multiple_of=8)
    [batch] = exchange(plan, list(data), Topology.single(), Lengths(data.lengths, [3]))
    for rank in range(4):
        part = shard(batch, 4, rank)
        assert "shift_labels" not in part.batch
        real = part["loss_mask"] == 1
        assert torch.equal(part["labels"][real], part["tokens"][real] + 1) or (part["labels"][real] == 0).any()
        assert torch.equal(part.position_ids[real], part["tokens"][real] - 1)
