"""Cuts of a packed row over ranks: every element once, equal shares of tokens and of work, and keys that suffice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.context_parallel import computed_pairs
from tests.support.drawing import lengths as drawn
from ullage import InputError, Layout, RaggedBatch
from ullage.attention import shard_batch
from ullage.attention.slices import Slices
from ullage.exchange import shard_index
from ullage.ranks import Axis, Topology

pytestmark = pytest.mark.property

LENGTHS = drawn(8, 12, 16, 24, high=40, min_size=1, max_size=12)
ORDER = st.sampled_from(["zigzag", "contiguous"])


@given(LENGTHS, st.integers(1, 9), ORDER)
def test_every_element_is_in_one_slice_and_slices_differ_by_two_at_most(lengths, size, order):
    slices = Slices.of(Layout(lengths), size, 0, order)
    assert sorted(np.concatenate(slices.indices).tolist()) == list(range(sum(lengths)))
    assert max(slices.lengths) - min(slices.lengths) <= 2
    assert all((np.diff(slices.layout.item_ids()[index]) >= 0).all() for index in slices.indices)


@given(LENGTHS, st.integers(1, 5))
def test_where_everything_divides_the_slices_are_those_of_the_exchange(lengths, size):
    layout = Layout(lengths, pad_to_multiple_of=2 * size)
    for order in ("zigzag", "contiguous"):
        for rank, index in enumerate(Slices.of(layout, size, 0, order).indices):
            assert np.array_equal(index, shard_index(layout, size, rank, order))


@given(LENGTHS, st.integers(1, 6), ORDER, st.one_of(st.none(), st.integers(1, 50)))
def test_pieces_see_exactly_the_keys_of_a_causal_window_within_their_sequence(lengths, size, order, window):
    layout = Layout(lengths)
    item, position = layout.item_ids(), layout.positions()
    far = position[:, None] - position[None]
    sees = (item[:, None] == item[None]) & (far >= 0) & (far < (window or layout.size + 1))
    total = 0
    for rank in range(size):
        slices = Slices.of(layout, size, rank, order)
        pieces = slices.runs(rank, window)
        assert sum(pieces.queries.tolist()) == len(slices.index)
        needed = np.zeros(layout.size, bool)
        for start, queries, key_start in zip(pieces.start, pieces.queries, pieces.key_start):
            seen = sees[start : start + queries].any(0)
            assert np.array_equal(np.flatnonzero(seen), np.arange(key_start, start + queries))
            needed |= seen
        assert np.array_equal(slices.needs(rank, window), np.flatnonzero(needed))
        assert pieces.pairs(window) == sees[slices.index].sum()
        assert pieces.pairs(window) <= computed_pairs(slices, window)
        total += pieces.pairs(window)
    assert total == sees.sum()


def drawn_rows():
    """Lengths of rows of 65,536 tokens, lognormal and Pareto, as long as the row at most."""
    random = np.random.default_rng(0)
    for draw in range(5):
        for name in ("lognormal", "pareto"):
            lengths = random.lognormal(6, 1.5, 4000) if name == "lognormal" else 256 * (1 + random.pareto(1.0, 4000))
            lengths = lengths.astype(int).clip(1, 65_536)
            yield f"{name} {draw}", lengths[np.cumsum(lengths) <= 65_536].tolist() or [65_536]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_busiest_rank_of_a_zigzag_has_two_percent_more_work_than_the_mean_at_most(size):
    worst = {"needed": 1.0, "computed": 1.0, "contiguous": 1.0}
    for _, lengths in drawn_rows():
        layout = Layout(lengths)
        rows = {
            order: [Slices.of(layout, size, rank, order) for rank in range(size)] for order in ("zigzag", "contiguous")
        }
        work = {
            "needed": [slices.runs(slices.rank).pairs() for slices in rows["zigzag"]],
            "computed": [computed_pairs(slices) for slices in rows["zigzag"]],
            "contiguous": [slices.runs(slices.rank).pairs() for slices in rows["contiguous"]],
        }
        assert sum(work["needed"]) == sum(n * (n + 1) // 2 for n in lengths)
        assert sum(work["computed"]) <= 1.10 * sum(work["needed"])
        worst = {name: max(worst[name], max(pairs) * size / sum(pairs)) for name, pairs in work.items()}
    assert worst["needed"] <= 1.02
    assert worst["computed"] <= 1.02
    assert worst["contiguous"] > 1.1  # there is something to balance


@given(drawn(4, 8, 12, low=1, high=30, min_size=1, max_size=6), st.integers(1, 7), ORDER)
def test_the_keywords_of_all_ranks_hold_every_token_and_every_label_once(lengths, size, order):
    rows = [torch.arange(100 * i + 1, 100 * i + 1 + n) for i, n in enumerate(lengths)]
    batch = RaggedBatch.from_samples([{"input_ids": row, "labels": row, "id": i} for i, row in enumerate(rows)])
    found, positions, longest = {}, {}, max(lengths)
    for rank in range(size):
        keywords = shard_batch(batch, Axis("cp", size, rank), order)
        assert keywords["num_items_in_batch"] == max(1, sum(n - 1 for n in lengths))
        assert keywords["max_length_q"] in (longest, max(longest, 2 * size))
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


def test_wrong_places_and_orders_are_refused():
    batch = RaggedBatch.from_samples([{"input_ids": [1, 2, 3]}])
    with pytest.raises(InputError, match="no such order of slices: expected 'zigzag' or 'contiguous'"):
        shard_batch(batch, Axis("cp", 2), order="striped")
    with pytest.raises(InputError, match="a rank does not lie on its cp axis: expected 0 to 1, found 2"):
        shard_batch(batch, Axis("cp", 2, 2))
    for other in (2, "world", None, Topology.single()):
        with pytest.raises(
            InputError, match=r"found \w+. Pass an axis such as topology.cp, or Axis.from_group\(group\)"
        ):
            shard_batch(batch, other)
    assert shard_batch(batch, Axis("cp", 3), num_items=7).get("num_items_in_batch") is None
