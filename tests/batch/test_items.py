"""Images beside tokens: each sequence's rows come back from every form, nothing is padded, and text is as before."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import ullage
from tests.support.item_cases import equal_batches, equal_samples, pictured
from ullage import InputError, Layout, RaggedBatch
from ullage.core.columns import Columns
from ullage.core.items import UnequalRows, padded_items
from ullage.exchange import exchange, gather_lengths, materialize, shard, unshard
from ullage.ranks import Topology
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.batches.reading import as_ragged

size = st.integers(1, 4)
image = st.tuples(size, size)
kinds = st.tuples(st.integers(1, 9), st.lists(image, max_size=3), st.integers(0, 2))
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8])
drawn = st.builds(
    lambda each, dtype: [pictured(i, *kind, dtype) for i, kind in enumerate(each)],
    st.lists(kinds, min_size=1, max_size=6),
    dtypes,
)


def comes_back(batch, samples):
    for got, want in zip(batch.samples(), samples, strict=True):
        equal_samples(got, want)


@pytest.mark.slow
@given(drawn, st.sampled_from([1, 4]))
def test_samples_come_back_without_a_hole_between_items(samples, pad_to_multiple_of):
    batch = RaggedBatch.from_samples(samples, pad_to_multiple_of)
    comes_back(batch, samples)
    assert set(batch.per_item) == {name for sample in samples for name in sample} - {"input_ids", "labels", "id"}
    for name in batch.per_item:
        assert batch[name].numel() == sum(sample[name].numel() for sample in samples if name in sample)
        assert batch.items[name].lengths.tolist() == [len(sample.get(name, ())) for sample in samples]
        dims = {sample[name].shape[1:] for sample in samples if name in sample}
        assert isinstance(batch.items[name], UnequalRows) == (len(dims) > 1)
    for again in (
        RaggedBatch.from_samples(batch.samples(), pad_to_multiple_of),
        pickle.loads(pickle.dumps(batch)),
        pytree.tree_map(torch.clone, batch),
        batch.to("cpu"),
        ullage.to_device(batch, "cpu"),
        unshard([shard(batch, 1, 0)]),
    ):
        equal_batches(again, batch)
    halves = [RaggedBatch.from_samples(half) for half in (samples[:2], samples[2:]) if half]
    joined = Columns.join([half.columns() for half in halves])
    whole = Columns.read(samples)
    assert {
        name: [v.tolist() for v in each if len(v)] for name, each in joined.values.items() if name in batch.items
    } == {name: [v.tolist() for v in each if len(v)] for name, each in whole.values.items() if name in batch.items}
    assert not batch.placeholder().items


@given(drawn)
def test_a_model_s_row_holds_all_rows_in_order_and_zeros_behind_the_smaller(samples):
    batch = RaggedBatch.from_samples(samples)
    row = batch.to_flattened()
    assert set(row.get("cu_seq_items", {})) == set(batch.per_item)
    for name, bounds in row.get("cu_seq_items", {}).items():
        assert (bounds.dtype, bounds.device.type) == (torch.int32, "cpu")
        total = 0
        for i, sample in enumerate(samples):
            part = row[name][bounds[i] : bounds[i + 1]]
            if name not in sample:
                assert not len(part)
                continue
            inside = (slice(None), *(slice(length) for length in sample[name].shape[1:]))
            assert torch.equal(part[inside], sample[name])
            part = part.clone()
            part[inside] = 0
            assert not part.any()
            total += len(part)
        assert total == len(row[name]) == bounds[-1]
    padded = batch.to_padded()
    mask = padded.pop("attention_mask")
    for name in batch.per_item:
        assert torch.equal(padded[name], row[name])
    back = RaggedBatch.from_padded(padded, mask, items=batch.items | {n: r.lengths for n, r in batch.items.items()})
    assert [set(sample) for sample in back.samples()] == [set(sample) for sample in samples]
    for name in batch.per_item:
        assert torch.equal(padded_items(back[name], back.items[name]), row[name])
        assert back.items[name].lengths.tolist() == batch.items[name].lengths.tolist()
    flattened = {name: value for name, value in row.items() if name != "id"}
    read = as_ragged(flattened)
    assert [set(sample) | {"id"} for sample in read.samples()] == [set(sample) for sample in samples]


@pytest.mark.slow
@given(drawn, st.integers(1, 3))
def test_what_is_planned_for_ranks_arrives_whole(samples, ranks):
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    plan = ullage.plan(lengths, ranks=ranks, capacity=16)
    batch = RaggedBatch.from_samples(samples)
    seen = []
    for rank in range(ranks):
        made = materialize(plan, batch, rank)
        for got, again in zip(made, materialize(plan, samples, rank), strict=True):
            equal_batches(got, again)
        seen += [sample for microbatch in made for sample in microbatch.samples()]
        # A packed step as one row.
        step = PackedBatch(tuple(made), plan)
        expected = [sample["pixel_values"] for each in made for sample in each.samples() if "pixel_values" in sample]
        assert ("pixel_values" in step) == bool(expected)
        assert not expected or torch.equal(step["pixel_values"], torch.cat(expected))
    for got in seen:
        equal_samples(got, samples[int(got["id"])])
    assert len(seen) == len(samples)
    if ranks == 1:
        topology = Topology.single()
        exchanged = exchange(plan, samples, topology, gather_lengths(lengths, topology))
        for got, want in zip(exchanged, materialize(plan, samples, 0), strict=True):
            equal_batches(got, want)


def test_samples_may_lack_images_in_any_way():
    pixels = torch.rand(2, 3)
    samples = [
        {"input_ids": [1], "pixel_values": None},
        {"input_ids": [2], "pixel_values": [torch.ones(3), torch.zeros(3)], "frames": np.ones((4, 2), np.float16)},
        {"input_ids": [3], "pixel_values": torch.empty(0, 3)},
        {"input_ids": [4], "pixel_values": []},
        {"input_ids": [5], "frames": None, "pixel_values": pixels},
    ]
    batch = RaggedBatch.from_samples(samples, per_item=["frames"])
    assert {name: rows.lengths.tolist() for name, rows in batch.items.items()} == {
        "pixel_values": [0, 2, 0, 0, 2],
        "frames": [0, 4, 0, 0, 0],
    }
    assert (batch["frames"].dtype, batch["pixel_values"].dtype) == (torch.float16, torch.float32)
    assert RaggedBatch.from_samples(samples[:1]).names == ("input_ids",)
    # A number for each sample is one per sequence whatever its name, and so is what is declared so.
    numbers = [
        {"input_ids": [1], "image_id": 4, "image_sizes": [3, 4]},
        {"input_ids": [2], "image_id": 5, "image_sizes": [1, 2]},
    ]
    found = RaggedBatch.from_samples(numbers, per_sequence=["image_sizes"]).per_sequence
    assert set(found) == {"image_id", "image_sizes"}
    text = RaggedBatch.from_samples([{"input_ids": [1], "id": 0}])
    assert (text.items, text.per_item, text.schema.per_item, "cu_seq_items" in text.to_flattened()) == (
        {},
        (),
        (),
        False,
    )
    # Fields may be asked for that only some batches have.
    assert batch.select(["input_ids", "image_sizes"]).names == ("input_ids",)
    assert batch.placeholder().select(["frames", "input_ids"], per_item=["frames"]).names == ("input_ids",)


def test_floats_alone_are_cast_on_the_way_to_a_device():
    batch = RaggedBatch.from_samples([pictured(0, 4, [(2, 3)]), pictured(1, 2, [(1, 1)], clip=1)])
    moved = ullage.to_device(batch, "cpu", float_dtype=torch.float16)
    kinds = {name: moved[name].dtype for name in moved.items}
    assert kinds == {
        "pixel_values": torch.float16,
        "image_grid_thw": torch.int64,
        "pixel_attention_mask": torch.uint8,
        "image_sizes": torch.int64,
        "pixel_values_videos": torch.float16,
    }
    assert moved.items == batch.items
    # A batch shows its items beside its sequences.
    assert "6 rows of pixel_values, 1 row of image_grid_thw" in repr(
        RaggedBatch.from_samples([pictured(0, 4, [(2, 3)])])
    )
    assert "sequence 0: 6 rows" in batch._repr_html_()


ROWS = torch.rand(3, 2)
PADDED = {"input_ids": torch.ones(2, 2), "pixel_values": ROWS}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RaggedBatch({"pixel_values": ROWS}, Layout([1, 1]), items={"pixel_values": Layout([1, 1])}), "2 rows"),
        (lambda: RaggedBatch({"pixel_values": ROWS}, Layout([1]), items={"pixel_values": Layout([1, 2])}), "sequences"),
        (
            lambda: RaggedBatch({"p": ROWS}, Layout([1, 1]), items={"p": Layout.from_slots([1, 1], [2, 1])}),
            "rows of items are padded",
        ),
        (
            lambda: RaggedBatch({"p": ROWS.flatten()}, Layout([1]), items={"p": UnequalRows([2], [(2,)])}),
            "expected 4 elements",
        ),
        (lambda: RaggedBatch.from_samples([{"input_ids": [1], "image_x": [torch.ones(2), torch.ones(3)]}]), "[3]"),
        (lambda: RaggedBatch.from_padded(PADDED, torch.ones(2, 2)), "items={'pixel_values': [rows of each of the 2 "),
        (lambda: as_ragged({**PADDED, "attention_mask": torch.ones(2, 2)}), "nobody says which images"),
        (lambda: shard(RaggedBatch.from_samples([pictured(0, 4, [(1, 1)])]), 2, 0), "context parallel"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_to_do(make, words):
    with pytest.raises(InputError) as raised:
        make()
    assert words in str(raised.value)


def test_a_sequence_whose_images_would_be_cut_is_an_error_and_text_behind_them_is_not():
    samples = [pictured(0, 3), pictured(1, 9, [(2, 2)])]
    plan = ullage.plan([3, 9], ranks=1, capacity=6, oversize="truncate")
    for held in (samples, RaggedBatch.from_samples(samples)):
        with pytest.raises(InputError, match=r"an image cannot be cut \(sample 1, field '\w+'\): expected at most 6"):
            materialize(plan, held, 0)
    for sample, kinds in zip(samples, ([0] * 3, [0, 1, 1, 1, 1, 0, 0, 0, 0])):
        sample["mm_token_type_ids"] = kinds
    cut = [sample for batch in materialize(plan, samples, 0) for sample in batch.samples()]
    assert sorted(len(sample["input_ids"]) for sample in cut) == [3, 6]
    assert [len(sample["pixel_values"]) for sample in cut if "pixel_values" in sample] == [4]
