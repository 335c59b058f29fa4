"""Curves over steps: lines in one picture with an axis of round numbers, drawn by ``templates/curves.html``.

A picture has a viewBox that stretches to any width; its lines keep their thickness. Long curves are drawn as means of
neighbouring points, so that a page has a bounded size. Without script, a value is read by pointing at its step: strips
across the picture carry it as a tooltip.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

#: Units of a picture.
WIDTH, HEIGHT = 600, 220
#: Points of one curve, and strips with a tooltip, at the most.
MAX_POINTS, MAX_STRIPS = 600, 150
#: Intervals of the axis at the most.
_MAX_INTERVALS = 5
#: Width of a digit, and of a picture on a narrow page, in pixels.
_LETTER, _NARROW = 7, 290
#: What is nearer to zero is drawn as zero: its logarithm would say nothing.
_LEAST = 1e-290
_BLOCKS = "▁▂▃▄▅▆▇█"

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points (step, value) by rising step, with their name and a class of colour."""

    label: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Curve:
    """A line in the picture's units, with a class of colour; one of a single point has the class ``dot`` too."""

    label: str
    style: str
    points: str


@dataclass(frozen=True)
class Strip:
    """A part of the width, in the picture's units, and what is read off there."""

    start: float
    width: float
    title: str


@dataclass(frozen=True)
class Chart:
    """A picture of curves.

    Attributes:
        curves: in the order of their series; a series without a finite value has none.
        numbers: beside the axis, with their places in per cent from the top.
        marks: steps beside the axis, with their places in per cent from the left; the first and the last among them.
        first: step at the left edge.
        last: step at the right edge.
        cuts: vertical lines, in the picture's units.
        strips: tooltips.
        mean_of: neighbouring points that one point of the longest curve stands for.
    """

    curves: Sequence[Curve]
    numbers: Sequence[tuple[str, float]]
    marks: Sequence[tuple[str, float]]
    first: int
    last: int
    cuts: Sequence[float] = ()
    strips: Sequence[Strip] = ()
    mean_of: int = 1
    width: int = WIDTH
    height: int = HEIGHT


def chart(
    series: Sequence[Series], form: Callable[[float], str] | None = None, cuts: Iterable[float] = ()
) -> Chart | None:
    """The picture of ``series``, on common axes; None if no value is finite.

    Args:
        series: the curves. Values that are not finite are left out; their steps have their place on the axis.
        form: of the numbers, in tooltips; by default five digits.
        cuts: steps at which a vertical line stands.
    """
    form = form or (lambda value: f"{value:,.5g}")
    finite = [Series(s.label, s.style, [p for p in s.points if math.isfinite(p[1])]) for s in series]
    finite = [s for s in finite if s.points]
    if not finite:
        return None
    thick = max(-(-len(s.points) // MAX_POINTS) for s in finite)
    drawn = [Series(s.label, s.style, thinned(s.points)) for s in finite]
    steps = [x for s in series for x, _ in s.points]
    first, last = min(steps), max(steps)
    ticks = round_numbers(min(y for s in drawn for _, y in s.points), max(y for s in drawn for _, y in s.points))
    low, high = ticks[0], ticks[-1]

    def across(step: float) -> float:
        return WIDTH * (step - first) / (last - first or 1)

    def placed(points: Sequence[Point]) -> str:
        # The picture's y grows downwards. A line of no length is drawn as a dot, by its round ends.
        places = [f"{across(x):.1f},{HEIGHT * (high - y) / (high - low):.1f}" for x, y in points]
        return " ".join(places * 2 if len(places) == 1 else places)

    curves = [Curve(s.label, s.style + " dot" * (len(s.points) == 1), placed(s.points)) for s in drawn]
    lines = [across(step) for step in cuts if first < step < last]
    numbers = [(text, 100 * (high - tick) / (high - low)) for text, tick in zip(tick_texts(ticks), ticks)]
    marks = [(f"{step:,}", across(step) * 100 / WIDTH) for step in step_marks(int(first), int(last))]
    return Chart(curves, numbers, marks, int(first), int(last), lines, _strips(drawn, across, form), thick)


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most :data:`MAX_POINTS` points: each the mean of as many neighbours, the last perhaps of fewer."""
    many = -(-len(points) // MAX_POINTS)
    if many <= 1:
        return points
    parts = (points[k : k + many] for k in range(0, len(points), many))
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def round_numbers(low: float, high: float) -> list[float]:
    """Two to six evenly spaced round numbers, the first not above ``low``, the last not below ``high``."""
    largest = max(abs(low), abs(high))
    if high - low <= 1e-9 * largest or largest < _LEAST:  # all the same: half as much room on either side
        room = 0.5 * largest if largest >= _LEAST else 1.0
        low, high = low - room, high + room
    # The least of 1, 2, 2.5 and 5 times a power of ten that covers the range in few enough intervals.
    power = 10.0 ** math.floor(math.log10((high - low) / _MAX_INTERVALS))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if stop - start <= _MAX_INTERVALS:
            break
    return [k * step for k in range(start, stop + 1)]


def step_marks(first: int, last: int) -> list[int]:
    """The first and the last step, and round ones between them where their numbers have room on a narrow page.

    >>> step_marks(1, 100), step_marks(10, 120_000)
    ([1, 20, 40, 60, 80, 100], [10, 50000, 120000])
    """
    if last <= first:
        return [first]
    # The share of the width that a number takes; those at the edges are written inwards.
    room = (_LETTER * len(f"{last:,}") + 10) / _NARROW
    step = next(k for k in _round_integers() if k >= max(room, 1 / _MAX_INTERVALS) * (last - first))
    inner = range((first // step + 1) * step, last, step)
    return [first, *(k for k in inner if min(k - first, last - k) >= 1.5 * room * (last - first)), last]


def _round_integers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    return (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks with as many decimals as they need, all alike; with powers of ten where they need more than four."""
    step = ticks[1] - ticks[0]
    decimals = next((d for d in range(5) if abs(round(step, d) - step) < 1e-6 * step), 5)
    if decimals == 5 or max(map(abs, ticks)) >= 1e7:
        return [short(tick) if abs(tick) > 1e-6 * step else "0" for tick in ticks]
    return [f"{tick + 0.0:,.{decimals}f}" for tick in ticks]


def short(value: float, digits: int = 3) -> str:
    """A number in as few letters as it is read in: a learning rate of 0.00002 is 2e-5.

    >>> short(0.00002), short(0.003), short(1.25e8)
    ('2e-5', '0.003', '1.25e8')
    """
    return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", f"{value:.{digits}g}")


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of text of at most ``width`` characters; gaps where values are not finite.

    Each character is the mean of as many values; the lowest is a low block, the highest a full one.
    """
    many = -(-len(values) // width) or 1
    parts = [[v for v in values[k : k + many] if math.isfinite(v)] for k in range(0, len(values), many)]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    last = len(_BLOCKS) - 1
    # What is all the same is drawn half as high as it could be.
    return "".join(" " if m is None else _BLOCKS[round(last * (m - low) / span) if span else last // 2] for m in means)


def _strips(series: Sequence[Series], across: Callable[[float], float], form: Callable[[float], str]) -> list[Strip]:
    """Strips between the middles of neighbouring steps, over the whole width."""
    by_step: dict[float, list[str]] = {}
    for each in series:
        for step, value in each.points:
            by_step.setdefault(step, []).append(f"{each.label}: {form(value)}")
    steps = sorted(by_step)
    steps = steps[:: -(-len(steps) // MAX_STRIPS)]
    middles = [(across(a) + across(b)) / 2 for a, b in itertools.pairwise(steps)]
    edges = [0.0, *middles, float(WIDTH)]
    return [
        Strip(round(left, 1), round(right - left, 1), f"step {step:,.0f}\n" + "\n".join(by_step[step]))
        for step, left, right in zip(steps, edges, edges[1:])
    ]
