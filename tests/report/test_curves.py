"""Curves: the axis covers the values with few round numbers, and what is drawn is where the values are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.core.display import duration, rate
from ullage.report.drawing import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    Series,
    chart,
    round_numbers,
    tick_texts,
)

FINITE = st.floats(-1e12, 1e12, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(FINITE, FINITE)
def test_round_numbers_cover_the_values_evenly(one, other):
    low, high = min(one, other), max(one, other)
    ticks = round_numbers(low, high)
    step = ticks[1] - ticks[0]
    room = 1e-6 * max(abs(low), abs(high), step)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + room
    assert ticks[-1] >= high - room
    assert all(math.isclose(b - a, step, rel_tol=1e-6, abs_tol=room) for a, b in itertools.pairwise(ticks))


def test_the_axis_reads_as_a_person_would_write_it():
    assert tick_texts(round_numbers(0.31, 5.57)) == ["0", "2", "4", "6"]
    assert tick_texts(round_numbers(12000, 18500)) == ["12,000", "14,000", "16,000", "18,000", "20,000"]
    assert tick_texts(round_numbers(5e-6, 2e-5)) == ["5e-6", "1e-5", "1.5e-5", "2e-5"]
    assert tick_texts(round_numbers(0, 2e-5)) == ["0", "5e-6", "1e-5", "1.5e-5", "2e-5"]
    assert tick_texts(round_numbers(1.0, 1.0)) == ["0.50", "0.75", "1.00", "1.25", "1.50"]


@pytest.mark.parametrize(("low", "high"), [(0.0, 5e-324), (0.0, 0.0), (-1e-300, 1e-300), (0.0, 1e300), (1e300, 1e300)])
def test_the_least_and_the_greatest_numbers_have_an_axis(low, high):
    drawn = chart([Series("a", "k0", [(1, low), (2, high)])])
    assert drawn is not None
    assert all(
        0 <= float(place) <= HEIGHT for point in drawn.curves[0].points.split() for place in point.split(",")[1:]
    )


def test_points_lie_where_their_values_are():
    drawn = chart([Series("a", "k0", [(1, 0.0), (3, 10.0), (5, 5.0)])], cuts=[1, 3, 5])
    assert drawn is not None
    assert drawn.curves[0].points == f"0.0,{HEIGHT}.0 {WIDTH / 2},0.0 {WIDTH}.0,{HEIGHT / 2}"
    assert (drawn.first, drawn.last) == (1, 5)
    assert drawn.cuts == [WIDTH / 2]  # none at the edges
    assert [(strip.title, strip.width) for strip in drawn.strips] == [
        ("step 1\na: 0", WIDTH / 4),
        ("step 3\na: 10", WIDTH / 2),
        ("step 5\na: 5", WIDTH / 4),
    ]


def test_one_point_is_a_picture_and_what_is_not_finite_a_gap():
    one = chart([Series("a", "k0", [(7, 2.0)])])
    assert one is not None
    assert one.curves[0].points.split() == [f"0.0,{HEIGHT / 2}"]  # which the page shows as a point
    late = chart([Series("a", "k0", [(1, 1.0), (2, 2.0), (3, math.nan)])])
    assert late is not None
    assert (late.first, late.last) == (1, 3)
    gap = chart([Series("a", "k0", [(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)]), Series("b", "k1", [])])
    assert gap is not None
    assert [len(curve.points.split()) for curve in gap.curves] == [2]
    assert chart([Series("a", "k0", [(1, math.nan)])]) is None
    assert chart([]) is None


@pytest.mark.parametrize(("number", "thick"), [(MAX_POINTS, 1), (MAX_POINTS + 1, 2), (10 * MAX_POINTS + 3, 11)])
def test_long_curves_are_drawn_as_means(number, thick):
    drawn = chart([Series("a", "k0", [(k, float(k)) for k in range(number)])])
    assert drawn is not None
    assert drawn.mean_of == thick
    points = [float(point.split(",")[0]) for point in drawn.curves[0].points.split()]
    assert len(points) == -(-number // thick) <= MAX_POINTS
    assert points == sorted(points)
    assert points[0] < 1.5
    assert points[-1] > WIDTH - 1.5


def test_rates_and_times_are_read_with_three_digits_in_their_unit():
    rates = {0.0: "0 FLOP/s", 999.6: "1 kFLOP/s", 1.516e7: "15.2 MFLOP/s", 9.89e14: "989 TFLOP/s"}
    assert {number: rate(number) for number in rates} == rates
    times = {8.1e-4: "810 µs", 0.9999: "1 s", 59.94: "59.9 s", 59.96: "1 min 00 s", 3599.6: "1 h 00 min"}
    assert {seconds: duration(seconds) for seconds in times} == times
    assert duration(math.nan) == "nan"
