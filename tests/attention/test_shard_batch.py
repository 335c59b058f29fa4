"""Cuts of a packed row over ranks: every element once, and equal shares of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawing import lengths as drawn
from ullage import InputError, Layout, RaggedBatch
from ullage.attention import shard_batch
from ullage.attention.ulysses import Slices
from ullage.exchange import shard_index
from ullage.ranks import Axis, Topology

pytestmark = pytest.mark.property

LENGTHS = drawn(8, 12, 16, 24, high=40, min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 9))
def test_slices_are_equal_parts_of_the_row_in_its_order(lengths, size):
    slices = [Slices(Layout(lengths), size, rank) for rank in range(size)]
    assert np.concatenate([each.index for each in slices]).tolist() == list(range(sum(lengths)))
    assert [len(each.index) for each in slices] == slices[0].lengths
    assert max(slices[0].lengths) - min(slices[0].lengths) <= 1
    assert len({each.digest for each in slices}) == 1


@given(LENGTHS, st.integers(1, 5))
def test_where_everything_divides_the_slices_are_those_of_the_exchange(lengths, size):
    layout = Layout(lengths, pad_to_multiple_of=size)
    for rank in range(size):
        assert np.array_equal(Slices(layout, size, rank).index, shard_index(layout, size, rank, "contiguous"))


@given(drawn(4, 8, 12, low=1, high=30, min_size=1, max_size=6), st.integers(1, 7))
def test_the_keywords_of_all_ranks_hold_every_token_and_every_label_once(lengths, size):
    rows = [torch.arange(100 * i + 1, 100 * i + 1 + n) for i, n in enumerate(lengths)]
    batch = RaggedBatch.from_samples([{"input_ids": row, "labels": row, "id": i} for i, row in enumerate(rows)])
    found, positions, longest = {}, {}, max(lengths)
    for rank in range(size):
        keywords = shard_batch(batch, Axis("cp", size, rank))
        assert keywords["num_items_in_batch"] == max(1, sum(n - 1 for n in lengths))
        assert keywords["max_length_q"] in (longest, max(longest, size))
        assert keywords["cu_seq_lens_q"].tolist()[: len(lengths) + 1] == [0, *np.cumsum(lengths)]
        assert "id" not in keywords
        assert keywords["input_ids"].shape == keywords["shift_labels"].shape == keywords["position_ids"].shape
        assert keywords["input_ids"].shape[1] >= 1
        for token, label, place in zip(
            *(keywords[n][0].tolist() for n in ("input_ids", "shift_labels", "position_ids"))
        ):
            if token:
                assert token not in found
                found[token], positions[token] = label, place
            else:
                assert label == -100
    tokens = [token for row in rows for token in row.tolist()]
    assert sorted(found) == sorted(tokens)
    assert all(found[token] == (token + 1 if token + 1 in found else -100) for token in tokens)
    assert all(positions[token] == (token - 1) % 100 for token in tokens)


def test_wrong_places_are_refused():
    batch = RaggedBatch.from_samples([{"input_ids": [1, 2, 3]}])
    with pytest.raises(InputError, match="a rank does not lie on its cp axis: expected 0 to 1, found 2"):
        shard_batch(batch, Axis("cp", 2, 2))
    for other in (2, "world", None, Topology.single()):
        with pytest.raises(
            InputError, match=r"found \w+. Pass an axis such as topology.cp, or Axis.from_group\(group\)"
        ):
            shard_batch(batch, other)
    assert shard_batch(batch, Axis("cp", 3), num_items=7).get("num_items_in_batch") is None
