"""RaggedBatch: what it refuses, and how it says so; what loops may ask of it."""

import pickle

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ullage import InputError, Layout, RaggedBatch


@pytest.mark.parametrize(("samples", "message"), [
    ([], "a batch needs at least one sample: found none"),
    ([{"a": [1, 2], "b": [1, 2]}, {"a": [1, 2], "b": [1]}],
     r"the fields of a sample disagree in length \(sample 1, field 'b'\): expected 2 as in 'a', found 1"),
    ([{"a": [1]}, {"a": 3}],
     r"not the same in all samples \(sample 1, field 'a'\): expected int64 per token, found int64 per sequence"),
    ([{"a": [1]}, {"a": []}], r"a sequence is empty \(sample 1\): expected at least one token, found 0"),
    ([{"a": [1], "b": 1}, {"a": [1]}],
     r"a sample lacks a field \(sample 1, field 'b'\): expected fields \['a', 'b'\], found fields \['a'\]"),
    ([{"a": [1]}, {"a": [1], "b": 2}],
     r"a field that others have not \(sample 1, field 'b'\): .* found fields \['a', 'b'\]"),
    ([{"a": [1], "text": "hello"}],
     r"neither a number nor an array of numbers \(sample 0, field 'text'\): found str"),
    ([{"id": 3}], r"no field is token-aligned \(sample 0\): expected at least one array or list, found \['id'\]"),
    ([{"a": np.zeros((2, 3))}, {"a": np.zeros((2, 4))}],
     r"not the same in all samples \(sample 1, field 'a'\): expected .* of shape \[3\], found .* of shape \[4\]"),
])  # fmt: skip
def test_bad_samples_are_named(samples, message):
    with pytest.raises(InputError, match=message):
        RaggedBatch.from_samples(samples)


def test_values_that_disagree_with_the_layout_are_named():
    with pytest.raises(ValueError, match=r"values and lengths disagree \(field 'x'\): expected 3 tokens .* \[4\]"):
        RaggedBatch({"x": torch.ones(4)}, Layout([1, 2]))


@pytest.mark.parametrize(("mask", "message"), [
    ([[1, 1, 0], [1, 0, 1]], r"attention_mask has holes \(row 1\): expected one run of ones, found 2 runs"),
    ([[1, 1, 0], [0, 0, 0]], r"a row of attention_mask is all padding \(row 1\)"),
    ([1, 1, 0], r"attention_mask must be \[N, L\]: found shape \[3\]"),
])  # fmt: skip
def test_bad_masks_are_named(mask, message):
    with pytest.raises(InputError, match=message):
        RaggedBatch.from_padded({"x": torch.ones(2, 3)}, torch.tensor(mask))


def test_a_padded_field_of_another_shape_is_named():
    with pytest.raises(InputError, match=r"values and attention_mask disagree \(field 'x'\): .* found shape \[2, 4\]"):
        RaggedBatch.from_padded({"x": torch.ones(2, 4)}, torch.ones(2, 3))
    batch = RaggedBatch.from_padded(
        {"y": torch.ones(2, 3), "x": torch.ones(2, 4)}, torch.ones(2, 3), per_sequence=["x"]
    )
    assert batch.per_sequence == ("x",)


def test_it_is_nothing_that_a_loop_takes_apart():
    batch = RaggedBatch.from_samples([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert not isinstance(batch, (tuple, list, dict))
    assert batch.numel() == 3
    assert len(batch) == 2
    assert "input_ids" in batch
    assert "labels" not in batch
    assert batch.get("labels") is None
    with pytest.raises(KeyError, match=r"no field 'labels' in this batch; there are \['input_ids'\]"):
        batch["labels"]
    assert repr(pickle.loads(pickle.dumps(batch))) == repr(batch)
    assert batch.to("meta").device.type == "meta"


def test_a_placeholder_counts_nowhere_and_has_the_lengths_and_values_that_are_asked_for():
    batch = RaggedBatch.from_samples([{"input_ids": [7, 8], "labels": [7, 8], "reward": 1.0}])
    placeholder = batch.placeholder()
    assert placeholder.numel() == 0
    assert placeholder.names == batch.names
    row = placeholder.to_flattened()
    assert row["input_ids"].shape == (1, 1)
    assert row["labels"].tolist() == [[-100]]
    assert row["cu_seq_lens_q"].tolist() == [0, 1]
    silent = batch.placeholder([2, 1], reward=3, absent=5)
    assert silent.layout.lengths.tolist() == [2, 1]
    assert silent["input_ids"].tolist() == [0, 0, 0]
    assert silent["labels"].tolist() == [-100, -100, -100]
    assert silent["reward"].tolist() == [3.0, 3.0]
    counted = batch.placeholder([2], counts=True)
    assert counted["labels"].tolist() == [0, 0]
    assert counted["reward"].tolist() == [0.0]


def test_source_samples_are_not_touched_and_not_shared():
    tokens = torch.tensor([1, 2, 3])
    batch = RaggedBatch.from_samples([{"input_ids": tokens}])
    batch["input_ids"].zero_()
    assert tokens.tolist() == [1, 2, 3]


def test_a_packed_sequence_of_any_order_is_read():
    packed = pack_sequence([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])], enforce_sorted=False)
    assert [s["x"].tolist() for s in RaggedBatch.from_packed_sequence(packed, "x").samples()] == [[1, 2], [3], [4, 5]]
    with pytest.raises(InputError, match=r"a PackedSequence holds no empty sequence \(sequence 1\)"):
        RaggedBatch({"x": torch.ones(2)}, Layout([2, 0])).to_packed_sequence("x")
    with pytest.raises(InputError, match=r"no such token-aligned field: expected one of \['x'\], found 'y'"):
        RaggedBatch({"x": torch.ones(2)}, Layout([2])).to_packed_sequence("y")


def test_the_slot_of_an_empty_sequence_takes_no_label_of_the_next():
    labels = torch.tensor([-100, -100, 5, 6, 7, -100])
    batch = RaggedBatch({"labels": labels}, Layout.from_slots([0, 3], [2, 4]))
    assert batch.with_shift_labels()["shift_labels"].tolist() == [-100, -100, 6, 7, -100, -100]
