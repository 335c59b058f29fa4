"""The steps of the exchange in one process: materialize, the single topology, headers, samples that are not touched."""

import copy
import json

import numpy as np
import pytest
import torch

import ullage
from ullage.datasets import MockSamples
from ullage.exchange import Lengths, PackedIterator, exchange, gather_lengths, materialize, shard, share
from ullage.exchange.sharing import share_or_fail
from ullage.exchange.source import Stream
from ullage.ranks import Topology
from ullage.ranks.topology import Axis


def samples_of(lengths):
    return [{"input_ids": torch.arange(n) + 100 * i, "labels": torch.arange(n), "id": i} for i, n in enumerate(lengths)]


def test_one_process_needs_no_process_group():
    samples = samples_of([5, 9, 3, 7])
    topology = Topology.single()
    gathered = gather_lengths([len(s["input_ids"]) for s in samples], topology)
    plan = ullage.plan(gathered.lengths, ranks=1, capacity=16, pad_to_multiple_of=4)
    for got, want in zip(exchange(plan, samples, topology, gathered), materialize(plan, samples, 0), strict=True):
        assert got.layout == want.layout
        assert torch.equal(got["input_ids"], want["input_ids"])
        # Padding is zeros, and -100 in labels.
        padding = np.setdiff1d(np.arange(got.layout.size), got.layout.token_index())
        assert got["input_ids"][padding].tolist() == [0] * len(padding)
        assert got["labels"][padding].tolist() == [-100] * len(padding)


def test_materialize_of_all_ranks_is_the_global_batch_and_fields_need_not_be_signed():
    samples = [{**s, "labels": s["labels"].to(torch.uint8)} for s in samples_of([5, 9, 3, 7, 1, 2])]
    plan = ullage.plan([len(s["input_ids"]) for s in samples], ranks=4, capacity=16, pad_to_multiple_of=8)
    batches = [batch for rank in range(4) for batch in materialize(plan, samples, rank)]
    assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(6))
    for batch in batches:
        assert batch["labels"].dtype == torch.uint8
        assert not batch["labels"][batch.layout.padding_mask()].any(), "-100 would be 156"


def test_samples_are_not_touched_and_results_share_no_memory_with_them():
    samples = samples_of([5, 9, 3])
    before = copy.deepcopy(samples)
    plan = ullage.plan([5, 9, 3], ranks=1, capacity=32)
    for batch in materialize(plan, samples, 0):
        batch["input_ids"].fill_(-1)
        batch["id"].fill_(-1)
    for sample, old in zip(samples, before, strict=True):
        assert list(sample) == list(old)
        assert torch.equal(sample["input_ids"], old["input_ids"])
        assert sample["id"] == old["id"]


def test_sequences_cut_short_arrive_cut_and_dropped_ones_not():
    samples = samples_of([5, 40, 3])
    lengths = Lengths([5, 40, 3], [3])
    cut = ullage.plan(lengths.lengths, ranks=1, capacity=16, oversize="truncate")
    got = {
        int(s["id"]): s["input_ids"].tolist()
        for b in exchange(cut, samples, Topology.single(), lengths)
        for s in b.samples()
    }
    assert got[1] == list(range(100, 116))
    drop = ullage.plan(lengths.lengths, ranks=1, capacity=16, oversize="drop")
    assert sorted(int(i) for b in materialize(drop, samples, 0) for i in b["id"]) == [0, 2]


def test_a_microbatch_without_sequences_still_knows_its_fields():
    samples = samples_of([5])
    plan = ullage.plan([5], ranks=3, capacity=8, microbatch_multiple=2)
    batches = [batch for rank in range(3) for batch in materialize(plan, samples, rank)]
    assert sorted(len(batch) for batch in batches) == [0, 0, 0, 0, 0, 1]
    for batch in batches:
        assert batch.names == ("input_ids", "labels", "id")
        assert batch.placeholder()["labels"].tolist() == [-100]


@pytest.mark.parametrize(("change", "words"), [
    (lambda s, p: materialize(p, s, 2), "no such rank in the plan"),
    (lambda s, p: materialize(p, s[:2], 0), "expected 3 samples, found 2"),
    (lambda s, p: materialize(p, [s[0], s[0], s[2]], 0), "not as long as planned (sample 1)"),
    (lambda s, p: materialize(p, s, 0, fields=["input_ids", "mask"]), "field 'mask'"),
    (lambda s, p: materialize(p, s, 0, per_sequence=["labels"]), "field 'labels'"),
    (lambda s, p: materialize(p, s, 0, fields=["id"]), "no field is token-aligned"),
    (lambda s, p: exchange(p, s, Topology.single(), Lengths([5, 9, 4], [3])), "other lengths than were gathered"),
    (lambda s, p: exchange(p, s, Topology.single(), Lengths([5, 9, 3], [1, 2])), "another number of ranks"),
    (lambda s, p: share(None, Axis("tp")), "must have microbatches"),
    (lambda s, p: share([], Axis("tp"), source=1), "no such source"),
    (lambda s, p: Lengths([1, 2], [1]), "counts and lengths disagree"),
    (lambda s, p: shard(ullage.RaggedBatch.from_samples(s[:2], pad_to_multiple_of=4), 3, 0, "contiguous"), "cp = 3"),
])  # fmt: skip
def test_what_does_not_fit_together_is_an_error(change, words):
    samples = samples_of([5, 9, 3])
    plan = ullage.plan([5, 9, 3], ranks=1, capacity=32)
    with pytest.raises(ullage.InputError) as caught:
        change(samples, plan)
    assert words in str(caught.value)


def test_sharing_with_oneself_is_the_identity_and_a_failure_stays_one():
    batch = ullage.RaggedBatch.from_samples(samples_of([2, 3]))
    assert share([batch], Axis("tp"), fields=["labels"])[0].names == ("labels",)
    with pytest.raises(ZeroDivisionError):
        share_or_fail(None, ZeroDivisionError(), Axis("tp"))


def test_the_state_is_plain_numbers_and_stays_behind_what_is_made_ahead():
    data = samples_of(range(1, 20))
    with PackedIterator(data, global_batch_size=4, capacity=32, prefetch=3) as steps:
        start = steps.state_dict()
        assert start["position"] == 0
        first = next(steps).num_tokens
        state = json.loads(json.dumps(steps.state_dict()))
        next(steps)
        steps.load_state_dict(start)  # in the middle, it forgets what was made ahead
        assert next(steps).num_tokens == first
    assert state["position"] == 4
    with PackedIterator(data, global_batch_size=4, capacity=32) as again:
        again.load_state_dict(state)
        rest = [int(i) for step in again for batch in step.microbatches for i in batch["id"]]
        assert sorted(rest) == list(range(4, 19))
        assert again.state_dict()["position"] == 19


STREAM = {"format": "ullage stream 1", "kind": "map", "given": [3], "size": 19}


@pytest.mark.parametrize(("state", "words"), [
    ({}, "not the state of a PackedIterator"),
    ([], "not the state of a PackedIterator"),
    ({**STREAM, "kind": "iterable", "size": 0}, "another source"),
    ({**STREAM, "size": 7}, "another source"),
    ({**STREAM, "given": [30]}, "behind the end"),
])  # fmt: skip
def test_a_state_of_something_else_is_an_error(state, words):
    steps = PackedIterator(samples_of(range(1, 20)), global_batch_size=4, capacity=32)
    with steps, pytest.raises(ullage.InputError, match=words):
        steps.load_state_dict(state)


def test_an_iterable_that_ends_before_the_state_is_an_error():
    steps = PackedIterator(iter(samples_of([1, 2])), global_batch_size=4, capacity=32)
    steps.load_state_dict({**STREAM, "kind": "iterable", "given": [30], "size": 0})
    with steps, pytest.raises(ullage.InputError, match="end before the state"):
        next(steps)


OWN, INDEX = {"shared": False}, {"shared": True}


@pytest.mark.parametrize(("wrote", "given", "reads", "expected"), [
    (Stream("iterable", 2, **OWN), [5, 3], Stream("iterable", 2, ranks=7), [5, 3]),  # files of ranks, now shards
    (Stream("iterable", 3, ranks=2), [4, 0, 9], Stream("iterable", 3, ranks=5), [4, 0, 9]),
    (Stream("iterable", 1), [8], Stream("iterable", 3, **INDEX), [3, 3, 2]),
    (Stream("iterable", 3, **INDEX), [3, 3, 2], Stream("iterable", 1), [8]),
    (Stream("iterable", 2, **OWN), [0, 0], Stream("iterable", 3, **OWN), [0, 0, 0]),
    (Stream("iterable", 2, **OWN), [5, 3], Stream("iterable", 3, **OWN), "datasets.IterableDataset whose 2 shards"),
    (Stream("iterable", 2, **OWN), [4, 4], Stream("iterable", 2, **INDEX), "read in another way"),
    (Stream("iterable", 2, **INDEX), [4, 4], Stream("iterable", 2, **OWN), "as a whole on every rank, with shared"),
    (Stream("iterable", 2, ranks=2), [4, 4], Stream("iterable", 3, ranks=2), "expected 2 shards of an iterable"),
    (Stream("map", 3, (5, 0, 3), **OWN), [5, 0, 1], Stream("map", 2, (4, 4), **OWN), "the whole dataset, and shared"),
])  # fmt: skip
def test_a_state_is_loaded_by_other_readers_of_the_same_stream_or_refused_with_what_to_do(
    wrote, given, reads, expected
):
    state = wrote.state(np.array(given))
    if isinstance(expected, list):
        assert reads.restore(state).tolist() == expected
        return
    with pytest.raises(ullage.InputError) as caught:
        reads.restore(state)
    assert expected in str(caught.value)


def test_what_is_divided_already_is_not_shared_and_a_stream_is_gone_on_with_in_any_epoch():
    import datasets
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_list([{"input_ids": [i]} for i in range(20)]).to_iterable_dataset(4)
    with pytest.raises(ullage.InputError, match="divided already"):
        PackedIterator(split_dataset_by_node(stream, 0, 2), global_batch_size=4, capacity=32, shared=True)
    state = {**STREAM, "kind": "iterable", "given": [18], "size": 0}
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        whole = [sample["input_ids"][0] for sample in stream]
        with PackedIterator(stream, global_batch_size=4, capacity=32) as steps:
            steps.load_state_dict(state)
            rest = [int(s["input_ids"][0]) for step in steps for batch in step.microbatches for s in batch.samples()]
        assert sorted(rest) == sorted(whole[18:])


def test_fields_that_are_named_are_carried_and_required():
    data = samples_of([3, 4])
    with PackedIterator(data, global_batch_size=4, capacity=32, fields=["labels"]) as steps:
        assert next(steps).microbatches[0].names == ("labels",)
    with PackedIterator(data, global_batch_size=4, capacity=32, fields=["labels", "mask"]) as steps:
        with pytest.raises(ullage.InputError, match="field 'mask'"):
            next(steps)
        with pytest.raises(ullage.InputError, match="field 'mask'"):
            next(steps)  # it stays where it failed


def test_mock_samples_are_what_megatron_s_dataset_gives():
    config = {"mode": "distribution", "type": "lognormal", "min_seq_len": 3, "max_seq_len": 50}
    config |= {"mean_seq_len": 20, "lognormal_sigma": 1.1}
    data = MockSamples(config, n=40, pad_to_multiple_of=8)
    assert len(data) == 40 == len(list(data))
    for i, sample in enumerate(data):
        length = int(data.lengths[i])
        text = [*range(1, length), 0]
        padded = -(-length // 8) * 8
        assert sample["tokens"].tolist() == text + [0] * (padded - length)
        assert sample["labels"].tolist() == text[1:] + [0] * (padded - length + 1)
        assert sample["loss_mask"].tolist() == [1.0] * (length - 1) + [0.0] * (padded - length + 1)
        assert sample["position_ids"].tolist() == list(range(padded))
        assert (int(sample["original_seq_len"]), int(sample["padded_seq_len"])) == (length, padded)
        assert sample["original_seq_len"].dtype == torch.int32
    drawn = MockSamples(config, n=40, seed=3, vocab_size=11)
    assert torch.equal(drawn[7]["tokens"], MockSamples(config, n=8, seed=3, vocab_size=11)[7]["tokens"])
    assert int(drawn[7]["tokens"].max()) < 11
    assert max(MockSamples(config, n=40, max_length=9).lengths) == 9
    with pytest.raises(IndexError):
        data[40]
    with pytest.raises(ullage.InputError, match="not read from data"):
        MockSamples({"mode": "verification", "data_path": "x"})
