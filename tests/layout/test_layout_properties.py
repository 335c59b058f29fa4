"""Pieces tile every item exactly once, whatever the lengths, slots and cuts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawing import lengths as drawn
from ullage import InputError, Layout
from ullage.core.layout import counting, ranges, starts_of

pytestmark = pytest.mark.property

lengths = drawn(4, 8, high=12, max_size=12)


@st.composite
def layouts_and_cuts(draw):
    items = draw(lengths)
    slots = [n + draw(st.integers(0, 5)) for n in items]
    layout = Layout.from_slots(items, slots)
    edges = [*layout.starts.tolist(), *(layout.starts + layout.lengths).tolist(), layout.size]
    inner = draw(st.lists(st.one_of(st.sampled_from(edges), st.integers(0, layout.size + 6)), max_size=8))
    return layout, np.array(sorted([0, *inner, layout.size + draw(st.integers(0, 6))]))


@given(layouts_and_cuts())
def test_pieces_tile_every_item_exactly_once(case):
    layout, cuts = case
    pieces = layout.pieces(cuts)
    covered = [[0] * n for n in layout.lengths]
    for item, shard, item_start, shard_start, length in zip(
        pieces.item, pieces.shard, pieces.item_start, pieces.shard_start, pieces.length
    ):
        assert length > 0
        assert 0 <= shard_start <= shard_start + length <= cuts[shard + 1] - cuts[shard]
        assert layout.starts[item] + item_start == cuts[shard] + shard_start
        for k in range(item_start, item_start + length):
            covered[item][k] += 1
    assert covered == [[1] * n for n in layout.lengths]
    keys = list(zip(pieces.item.tolist(), pieces.shard.tolist()))
    assert keys == sorted(set(keys))


@given(layouts_and_cuts(), st.integers(0, 8), st.integers(0, 8))
def test_cuts_that_leave_out_an_end_give_the_pieces_within(case, skip, drop):
    layout, cuts = case
    window = cuts[min(skip, len(cuts) - 1) : max(len(cuts) - drop, skip + 1)]
    if len(window) == 0:
        return
    inside = layout.pieces(window)
    real = layout.token_index()
    expected = int(((real >= window[0]) & (real < window[-1])).sum())
    assert int(inside.length.sum()) == expected


@given(lengths, st.integers(1, 8))
def test_time_major_visits_every_token_once_in_order_of_time(items, pad_to_multiple_of):
    layout = Layout(items, pad_to_multiple_of=pad_to_multiple_of)
    turned = layout.time_major()
    assert sorted(turned.index.tolist()) == layout.token_index().tolist()
    times = layout.positions()[turned.index]
    assert (np.diff(times) >= 0).all()
    assert turned.batch_sizes.tolist() == [sum(n > t for n in items) for t in range(max(items, default=0))]
    assert turned.order[turned.inverse].tolist() == list(range(len(items)))


@given(lengths, st.integers(1, 3), st.integers(1, 5))
def test_the_zigzag_cut_is_that_of_a_loop_over_chunks(items, pad, size):
    """Each slot in 2·size chunks, the odd elements one each to the chunks whose turn it is, slot after slot."""
    layout = Layout(items, pad_to_multiple_of=pad)
    shares, turn = [[] for _ in range(size)], 0
    for start, slot in zip(layout.starts.tolist(), layout.slots.tolist()):
        sizes = [slot // (2 * size)] * (2 * size)
        for _ in range(slot % (2 * size)):
            sizes[turn % (2 * size)] += 1
            turn += 1
        ends = np.cumsum([start, *sizes]).tolist()
        for rank, share in enumerate(shares):
            for chunk in (rank, 2 * size - 1 - rank):
                share.extend(range(ends[chunk], ends[chunk + 1]))
    assert [layout.cut(size, rank).tolist() for rank in range(size)] == shares


@given(lengths)
def test_ranges_and_counting_are_those_of_a_loop(items):
    sizes, starts = np.array(items, np.int64), np.array([7 * n % 5 for n in items], np.int64)
    assert ranges(starts, sizes).tolist() == [s + k for s, n in zip(starts.tolist(), items) for k in range(n)]
    assert counting(sizes).tolist() == [k for n in items for k in range(n)]
    assert starts_of(sizes).tolist() == [sum(items[:i]) for i in range(len(items))]


@pytest.mark.parametrize(("size", "rank", "order", "message"), [
    (2, 2, "zigzag", "no such context-parallel rank: expected 0 to 1, found 2"),
    (0, 0, "zigzag", "no such context-parallel rank"),
    (2, 0, "zagzig", "no such order of slices: expected 'zigzag' or 'contiguous', found 'zagzig'"),
])  # fmt: skip
def test_a_rank_or_an_order_that_does_not_exist_cuts_nothing(size, rank, order, message):
    with pytest.raises(InputError, match=message):
        Layout([4, 8]).cut(size, rank, order)
