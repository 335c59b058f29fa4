"""RaggedBatch goes to every form and comes back exactly, whatever the lengths."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from tests.support.drawing import lengths as drawn
from ullage import RaggedBatch
from ullage.models.sequences import Sequences

pytestmark = pytest.mark.property

lengths = drawn(4, 5, 8, low=1, high=9, min_size=1, max_size=8)  # of which some fill slots of 2, 4 or 5 exactly
slots = st.sampled_from([1, 2, 3, 4, 5])


def make(lengths, pad_to_multiple_of=1):
    generator = np.random.default_rng(sum(lengths))
    samples = [
        {
            "input_ids": generator.integers(1, 50, n).tolist(),
            "labels": generator.integers(1, 50, n),
            "features": torch.from_numpy(generator.normal(size=(n, 3))),
            "reward": float(i),
            "id": i,
        }
        for i, n in enumerate(lengths)
    ]
    return samples, RaggedBatch.from_samples(samples, pad_to_multiple_of=pad_to_multiple_of)


def assert_equal(left, right):
    assert left.layout.lengths.tolist() == right.layout.lengths.tolist()
    for a, b in zip(left.samples(), right.samples()):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


@pytest.mark.slow
@given(lengths, slots)
def test_samples_come_back(lengths, pad_to_multiple_of):
    samples, batch = make(lengths, pad_to_multiple_of)
    assert batch.per_sequence == ("reward", "id")
    assert batch.numel() == sum(lengths)
    for sample, back in zip(samples, batch.samples(), strict=True):
        assert back["input_ids"].tolist() == sample["input_ids"]
        assert back["labels"].tolist() == sample["labels"].tolist()
        assert torch.equal(back["features"], sample["features"])
        assert (back["reward"].item(), back["id"].item()) == (sample["reward"], sample["id"])
    assert_equal(RaggedBatch.from_samples(batch.samples()), batch)
    outside = torch.ones(batch.layout.size, dtype=torch.bool).index_fill(
        0, torch.from_numpy(batch.layout.token_index()), 0
    )
    assert (batch["labels"][outside] == -100).all()
    assert (batch["input_ids"][outside] == 0).all()


@given(lengths, slots, st.sampled_from(["right", "left"]))
def test_padded_and_back(lengths, pad_to_multiple_of, side):
    _, batch = make(lengths, pad_to_multiple_of)
    padded = batch.to_padded(side=side)
    mask = padded.pop("attention_mask")
    assert mask.sum(1).tolist() == lengths
    assert padded["input_ids"].shape == (len(lengths), max(lengths))
    assert (padded["labels"][mask == 0] == -100).all()
    edge = mask[:, 0] if side == "right" else mask[:, -1]
    assert edge.all()
    assert_equal(RaggedBatch.from_padded(padded, mask), batch)


@given(lengths, slots)
def test_packed_sequence_and_back_is_what_torch_packs(lengths, pad_to_multiple_of):
    _, batch = make(lengths, pad_to_multiple_of)
    packed = batch.to_packed_sequence("features")
    theirs = pack_sequence([s["features"] for s in batch.samples()], enforce_sorted=False)
    assert packed.batch_sizes.tolist() == theirs.batch_sizes.tolist()
    for mine, their in zip(pad_packed_sequence(packed), pad_packed_sequence(theirs)):
        assert torch.equal(mine, their)
    for form in (packed, theirs):
        back = RaggedBatch.from_packed_sequence(form, "features")
        assert [s["features"].tolist() for s in back.samples()] == [s["features"].tolist() for s in batch.samples()]


@given(lengths, slots)
def test_nested_has_the_same_rows(lengths, pad_to_multiple_of):
    _, batch = make(lengths, pad_to_multiple_of)
    for row, sample in zip(batch.to_nested("features").unbind(), batch.samples(), strict=True):
        assert torch.equal(row, sample["features"])


@given(lengths, slots)
def test_shift_labels_never_cross_a_boundary(lengths, pad_to_multiple_of):
    _, batch = make(lengths, pad_to_multiple_of)
    shifted = batch.with_shift_labels()
    for sample in shifted.samples():
        assert sample["shift_labels"].tolist() == [*sample["labels"][1:].tolist(), -100]
    assert int((shifted["shift_labels"] != -100).sum()) == sum(lengths) - len(lengths)
    flattened = batch.to_flattened()
    assert int((flattened["labels"][:, 1:] != -100).sum()) == sum(lengths) - len(lengths)


@given(lengths)
def test_flattened_has_exactly_the_keywords_of_the_field(lengths):
    _, batch = make(lengths)
    row = batch.to_flattened()
    assert set(row) == {
        "input_ids", "labels", "features", "position_ids",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    }  # fmt: skip
    assert row["input_ids"].shape == (1, sum(lengths))
    assert row["position_ids"][0].tolist() == [t for n in lengths for t in range(n)]
    assert row["cu_seq_lens_q"].tolist() == np.cumsum([0, *lengths]).tolist()
    assert row["cu_seq_lens_q"].dtype == torch.int32
    assert row["max_length_q"] == max(lengths)


@given(lengths, slots)
def test_flattened_positions_tell_tokens_from_padding(lengths, pad_to_multiple_of):
    _, batch = make(lengths, pad_to_multiple_of)
    row = batch.to_flattened()
    longest = max(-(-n // pad_to_multiple_of) * pad_to_multiple_of for n in lengths)
    assert row["max_length_q"] == row["max_length_k"] == longest, "a kernel reads as many rows as the longest slot has"
    told = [t if t < n else 0 for n, slot in zip(lengths, batch.layout.slots) for t in range(slot)]
    assert row["position_ids"][0].tolist() == told
    cu, positions = row["cu_seq_lens_q"], row["position_ids"]
    assert _lengths(cu, positions) == lengths
    assert _lengths(cu.tolist(), positions) == lengths
    assert _lengths(cu, positions + (positions > 0) * 7) == lengths, "positions may go on from an earlier part"
    assert _lengths(cu, positions, input_lengths=batch.layout.slots.tolist()) == batch.layout.slots.tolist()
    assert _lengths(cu, None) == batch.layout.slots.tolist()


def _lengths(cu_seq_lens, position_ids, input_lengths=None):
    """The lengths that a recurrent model reads."""
    rows = torch.zeros(1, int(cu_seq_lens[-1]))
    found = Sequences.read(rows, cu_seq_lens=cu_seq_lens, position_ids=position_ids, input_lengths=input_lengths)
    return [found.length] * found.num_sequences if found.lengths is None else found.lengths.tolist()


@given(lengths, slots)
def test_a_batch_is_a_pytree_node(lengths, pad_to_multiple_of):
    _, batch = make(lengths, pad_to_multiple_of)
    moved = pytree.tree_map(lambda tensor: tensor + 0, batch)
    assert isinstance(moved, RaggedBatch)
    assert_equal(moved, batch)


@given(lengths, slots, st.sampled_from([torch.uint8, torch.bool, torch.int16]))
def test_no_padding_of_labels_counts_whatever_their_dtype(lengths, pad_to_multiple_of, dtype):
    """-100 would be 156 in uint8 and True in bool: a label that a loss counts."""
    rows = [torch.arange(n).to(dtype) for n in lengths]
    samples = [{"input_ids": torch.ones(n), "labels": row} for n, row in zip(lengths, rows)]
    batch = RaggedBatch.from_samples(samples, pad_to_multiple_of=pad_to_multiple_of)
    assert [sample["labels"].tolist() for sample in batch.samples()] == [row.tolist() for row in rows]
    padded = batch.to_padded()
    assert ((padded["labels"] == -100) == (padded["attention_mask"] == 0)).all()
    targets = [int(label) for row in rows for label in row[1:]]
    for found in (batch.to_flattened()["labels"][0], batch.with_shift_labels()["shift_labels"]):
        assert found[found != -100].tolist() == targets
    assert batch.placeholder().to_flattened()["labels"].tolist() == [[-100]]


def test_gradients_pass_through_packing():
    values = torch.randn(6, 2, requires_grad=True)
    batch = RaggedBatch.from_samples([{"x": values[:2]}, {"x": values[2:]}])
    packed = batch.to_packed_sequence("x")
    (packed.data * torch.arange(12.0).view(6, 2)).sum().backward()
    assert values.grad is not None
    assert sorted(values.grad.flatten().tolist()) == pytest.approx(list(range(12)))
