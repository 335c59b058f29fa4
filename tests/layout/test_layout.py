"""Layout: slots, cu_seqlens and the errors that name the bad item."""

import numpy as np
import pytest

from ullage import InputError, Layout


def test_slots_are_lengths_rounded_up():
    layout = Layout([3, 0, 8, 9], pad_to_multiple_of=8)
    assert layout.slots.tolist() == [8, 0, 8, 16]
    assert layout.starts.tolist() == [0, 8, 8, 16]
    assert (layout.num_items, layout.num_tokens, layout.size) == (4, 20, 32)
    assert layout.ullage == pytest.approx(12 / 32)
    assert layout.cu_seqlens.tolist() == [0, 3, 3, 11, 20]
    assert layout.cu_seqlens_padded.tolist() == [0, 8, 8, 16, 32]
    assert layout.cu_seqlens.dtype == np.int32


def test_an_empty_layout_has_no_ullage():
    layout = Layout([])
    assert (layout.size, layout.ullage, layout.max_seqlen) == (0, 0.0, 0)
    assert layout.cu_seqlens.tolist() == [0]
    assert len(layout.pieces([0, 4])) == 0


def test_the_padding_of_the_story_is_what_no_piece_covers():
    """266,240 elements on 768 ranks: shards of 348, of which the last three hold the padding of 1,024 elements."""
    pieces = Layout([266_240]).pieces(np.arange(769) * 348)
    assert len(pieces) == 766
    assert pieces.length.sum() == 266_240
    assert pieces.length[-1] == 266_240 - 765 * 348


def test_cu_seqlens_refuses_what_int32_cannot_count():
    layout = Layout([2**30, 2**30])
    with pytest.raises(InputError, match=r"int32: expected fewer than 2147483648, found 2147483648"):
        _ = layout.cu_seqlens


@pytest.mark.parametrize(("lengths", "message"), [
    ([3, -1], r"lengths must not be negative \(item 1\): expected >= 0, found -1"),
    ([3, 1.5], r"lengths must be integers \(item 1\): found 1.5"),
    ([3, float("nan")], r"lengths must be integers \(item 1\): found nan"),
    ([[3], [4]], r"lengths must have one dimension: expected \[n\], found shape \[2, 1\]"),
    ([[3], [4, 5]], "lengths are not a flat list of integers"),
    (["a"], "lengths must be integers: found dtype"),
])  # fmt: skip
def test_bad_lengths_are_named(lengths, message):
    with pytest.raises(ValueError, match=message):
        Layout(lengths)


def test_bad_cuts_and_slots_are_named():
    with pytest.raises(InputError, match=r"cuts must not fall \(cut 2\): expected >= 5, found 4"):
        Layout([3]).pieces([0, 5, 4])
    with pytest.raises(InputError, match=r"pad_to_multiple_of must be an integer: expected >= 1, found 0"):
        Layout([3], pad_to_multiple_of=0)
    with pytest.raises(InputError, match=r"a slot is smaller than its item \(item 1\): expected at least 4, found 3"):
        Layout.from_slots([1, 4], [1, 3])


def test_layouts_compare_and_cannot_be_changed():
    assert Layout([3, 5]) == Layout([3, 5])
    assert Layout([3, 5]) != Layout([3, 5], pad_to_multiple_of=4)
    assert len({Layout([3]), Layout([3]), Layout([4])}) == 2
    with pytest.raises(ValueError, match="read-only"):
        Layout([3]).lengths[0] = 4
