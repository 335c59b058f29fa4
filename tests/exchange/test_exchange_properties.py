"""Routes, streams and slices, for whatever sizes hypothesis thinks of: nothing is lost and nothing comes twice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ullage
from tests.support.drawing import lengths as drawn
from ullage import InputError, RaggedBatch
from ullage.exchange import Lengths, materialize, route, shard, shard_index, unshard
from ullage.exchange.source import Stream, deal, regular_counts

pytestmark = pytest.mark.property


@given(
    st.lists(drawn(32, low=1, high=52, max_size=8), min_size=1, max_size=9),  # 32 and 52: exactly the capacity
    st.sampled_from([1, 4]),
    st.integers(1, 3),
    st.sampled_from(["error", "drop", "truncate"]),
)
def test_what_a_rank_receives_is_what_the_others_send_it(rows, pad_to_multiple_of, multiple, oversize):
    gathered = Lengths([length for row in rows for length in row], [len(row) for row in rows])
    ranks = len(rows)
    capacity = 52 if oversize == "error" else 32
    plan = ullage.plan(
        gathered.lengths, ranks=ranks, capacity=capacity, pad_to_multiple_of=pad_to_multiple_of,
        microbatch_multiple=multiple, oversize=oversize,
    )  # fmt: skip
    routes = [route(plan, gathered, rank) for rank in range(ranks)]
    if oversize == "drop":
        assert sorted(plan.order.tolist()) == np.flatnonzero(gathered.lengths <= capacity).tolist()
    arrived = np.concatenate([path.receives for path in routes])
    assert sorted(arrived.tolist()) == sorted(plan.order.tolist())
    for source, sender in enumerate(routes):
        for destination, receiver in enumerate(routes):
            sent = sender.sends[sender.send_cuts[destination] : sender.send_cuts[destination + 1]]
            got = receiver.receives[receiver.receive_cuts[source] : receiver.receive_cuts[source + 1]]
            assert sent.tolist() == got.tolist()


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 40), st.integers(1, 9))
def test_a_shared_dataset_is_dealt_in_order_and_resumes_with_any_number_of_readers(count, streams, size, later):
    def sizes(n):
        return tuple(len(range(k, count, n)) for k in range(n))

    stream, given_so_far, position = Stream("map", streams, sizes(streams)), np.zeros(streams, np.int64), 0
    while position < count:
        quota = stream.quotas(given_so_far, size)
        ids = [k * streams + r for r in range(streams) for k in range(given_so_far[r], given_so_far[r] + quota[r])]
        assert sorted(ids) == list(range(position, min(position + size, count)))
        given_so_far = given_so_far + quota
        position += len(ids)
        other = Stream("map", later, sizes(later))
        assert other.restore(stream.state(given_so_far)).tolist() == regular_counts(position, later).tolist()
    assert not stream.quotas(given_so_far, size).any()


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=9), st.integers(0, 50))
def test_dealing_gives_all_that_is_wanted_to_those_who_live_and_first_to_those_behind(readers, wanted):
    given_so_far, live = np.array([n for n, _ in readers]), np.array([alive for _, alive in readers])
    quota = deal(given_so_far, live, wanted)
    assert quota.sum() == (wanted if live.any() else 0)
    assert (quota >= 0).all()
    assert not quota[~live].any()
    after = (given_so_far + quota)[live]
    for before, now, more in zip(given_so_far[live], after, quota[live]):
        assert now == before or now <= after.min() + 1, (before, now, more)


@given(
    drawn(4, 8, 16, low=1, high=40, min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["zigzag", "contiguous"]),
    st.randoms(use_true_random=False),
)
def test_slices_put_together_are_the_microbatch(lengths, cp, order, random):
    samples = [
        {"input_ids": torch.arange(n) + 100 * i, "labels": torch.arange(n) + 1, "h": torch.rand(n, 2), "id": i}
        for i, n in enumerate(lengths)
    ]
    batch = ullage.RaggedBatch.from_samples(samples, pad_to_multiple_of=2 * cp)
    shards = [shard(batch, cp, rank, order) for rank in range(cp)]
    index = np.concatenate([part.index for part in shards])
    assert np.array_equal(np.sort(index), np.arange(batch.layout.size))
    for part in shards:
        assert torch.equal(part.position_ids, batch.position_ids[torch.from_numpy(part.index)])
        assert torch.equal(
            part["shift_labels"], batch.with_shift_labels()["shift_labels"][torch.from_numpy(part.index)]
        )
        assert part.batch.layout.num_tokens == int(np.isin(part.index, batch.layout.token_index()).sum())
        # Tokens stand before padding in the slice's own layout too: its samples are the real elements.
        mine = [s["input_ids"] for s in part.batch.samples()]
        real = np.isin(part.index, batch.layout.token_index())
        assert torch.equal(torch.cat(mine), part["input_ids"][torch.from_numpy(real)])
    random.shuffle(shards)
    whole = unshard(shards)
    assert whole.layout == batch.layout
    assert whole.names == batch.names
    assert all(torch.equal(whole[name], batch[name]) for name in batch.names)
    if order == "zigzag" and cp > 1:
        # Every rank has the same part of each sequence, and under a causal mask as many pairs.
        pairs = [int((part.position_ids + 1).sum()) for part in shards]
        assert len({len(part.position_ids) for part in shards}) == 1
        assert len(set(pairs)) == 1


@given(
    drawn(4, 8, 16, low=0, high=40, min_size=1, max_size=6), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 3, 4])
)
def test_a_slot_that_2_cp_does_not_divide_is_refused_and_never_cut_short(lengths, cp, multiple):
    """A slot of cp elements divides by cp and not into 2·cp chunks."""
    layout = ullage.Layout(lengths, pad_to_multiple_of=multiple * cp)
    odd = np.flatnonzero(layout.slots % (2 * cp))
    if len(odd):
        expected = f"equal chunks .sequence {odd[0]} of the microbatch.: expected a multiple of 2·cp = {2 * cp}, found {layout.slots[odd[0]]}"
        with pytest.raises(InputError, match=expected):
            shard_index(layout, cp, 0)
        return
    index = np.concatenate([shard_index(layout, cp, rank) for rank in range(cp)])
    assert sorted(index.tolist()) == list(range(layout.size))


def test_the_zigzag_is_transformer_engine_s():
    layout = ullage.Layout([8, 16])
    assert shard_index(layout, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert shard_index(layout, 2, 1).tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]


_KINDS = st.sampled_from([
    list, np.float64, np.int32, np.uint8, np.bool_, torch.float16, torch.bfloat16, torch.float32, torch.int64
])  # fmt: skip


def _typed(values, kind):
    if kind is list:
        return list(map(float, values))
    return torch.tensor(values).to(kind) if isinstance(kind, torch.dtype) else np.array(values).astype(kind)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 5), _KINDS, _KINDS), min_size=1, max_size=6), st.sampled_from([1, 4]))
def test_samples_are_read_alike_for_a_batch_and_for_the_exchange_whatever_their_dtypes(drawn_samples, pad):
    samples = [
        {"x": _typed(range(length), kind), "y": [7] * length, "id": _typed([i], other)[0]}
        for i, (length, kind, other) in enumerate(drawn_samples)
    ]
    lengths = [length for length, _, _ in drawn_samples]
    plan = ullage.plan(lengths, ranks=1, capacity=8 * len(samples), pad_to_multiple_of=pad)
    members = plan.members(0, 0).tolist()
    want = RaggedBatch.from_samples([samples[i] for i in members], pad_to_multiple_of=pad)
    batches = [RaggedBatch.from_samples(part, pad_to_multiple_of=2) for part in (samples[:1], samples[1:]) if part]
    for given_as in (samples, RaggedBatch.from_samples(samples, pad_to_multiple_of=3), batches):
        [got] = materialize(plan, given_as, 0)
        assert got.schema == want.schema
        assert got.layout == want.layout
        assert all(torch.equal(got[name], want[name]) for name in want.names)


@pytest.mark.parametrize(
    "samples",
    [
        [{"x": [1], "y": [1]}, {"x": [1]}], [{"x": [1]}, {"x": [1], "y": [1]}],
        [{"x": [1, 2], "y": [1, 2]}, {"x": [1, 2], "y": [1]}], [{"x": [1]}, {"x": 1}], [{"x": [1]}, {"x": []}],
        [{"x": [1]}, {"x": "one"}], [{"x": np.zeros((1, 2))}, {"x": np.zeros((1, 3))}], [{"x": 1}, {"x": 2}],
        [{"x": np.zeros(1, np.uint64)}, {"x": np.zeros(1, np.int64)}], [{"x": [1]}, [1]],
    ],
)  # fmt: skip
def test_a_batch_and_the_exchange_refuse_the_same_samples_in_the_same_words(samples):
    messages = []
    for read in (RaggedBatch.from_samples, lambda s: materialize(ullage.plan([1, 1], ranks=1, capacity=8), s, 0)):
        with pytest.raises(InputError) as caught:
            read(samples)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
