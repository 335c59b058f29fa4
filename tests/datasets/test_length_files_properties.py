"""Whatever the lengths: every format gives them back, and every plan has a page that counts them all."""

import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from ullage.datasets.files import read_stream
from ullage.report.plan import histogram, plan_page, token_label

pytestmark = pytest.mark.property

lengths_of = st.lists(st.integers(0, 10**9), min_size=1, max_size=30)


@settings(max_examples=15)
@given(lengths_of, st.sampled_from([" ", "\n", ", ", "\r\n"]))
def test_formats_on_a_stream_agree(lengths, between):
    array = io.BytesIO()
    np.save(array, np.array(lengths))
    rows = [json.dumps({"id": "x", "length": length}) for length in lengths]
    for data in (
        array.getvalue(),
        between.join(map(str, lengths)).encode(),
        ("length\n" + "\n".join(map(str, lengths))).encode(),
        ("\ufeffid,length\r\n" + "".join(f'"a,b",{length}\r\n' for length in lengths)).encode(),
        "\n".join(rows).encode(),
        json.dumps(lengths).encode(),
    ):
        np.testing.assert_array_equal(read_stream(data).lengths, lengths)


@given(lengths_of.map(np.array), st.integers(0, 3))
def test_a_histogram_counts_each_sequence_once_and_stays_in_its_box(lengths, power):
    picture = histogram(lengths, lengths**power)
    counts = [int(re.search(r": ([\d,]+) sequences?", bucket.title)[1].replace(",", "")) for bucket in picture.buckets]
    assert sum(counts) == len(lengths)
    ends = [bucket.start + bucket.width for bucket in picture.buckets]
    assert all(bucket.start >= end - 0.01 for bucket, end in zip(picture.buckets[1:], ends))
    assert picture.buckets[0].start >= 0
    assert ends[-1] <= 100.01
    assert all(-0.01 <= tick.place <= 100.01 for tick in picture.ticks)
    assert (token_label(512), token_label(131_072), token_label(1536)) == ("512", "128k", "1.5k")


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 300), max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["microbatch", "step"]),
    st.sampled_from([1, 2, "auto"]),
    st.sampled_from([1, 8]),
)
def test_bars_of_any_plan_are_whole(lengths, ranks, sync, context, pad_to_multiple_of):
    if context == 2 and ranks == 1:
        context = 1
    plan = ullage.plan(
        lengths, ranks=ranks, capacity=128, sync=sync, context_parallel=context,
        pad_to_multiple_of=pad_to_multiple_of, oversize="truncate",
    )  # fmt: skip
    page = plan_page(plan)
    bars = re.findall(r'<svg class="bar[^>]*>(.*?)</svg>', page, re.DOTALL)
    assert len(bars) == (2 * ranks if plan.num_microbatches else 0)
    for bar in bars:
        end = 0.0
        for x, width in re.findall(r'<rect class="[^"]*" x="([-\d.e]+)%" width="([-\d.e]+)%"', bar):
            assert float(x) >= end - 0.01
            assert float(width) >= 0
            end = float(x) + float(width)
        assert end <= 100.02
