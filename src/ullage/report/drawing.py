"""Pages and what is drawn on them: bars, and curves over steps. No network, no script; light and dark, wide and narrow.

Every page extends ``templates/base.html``, which holds the colours (CSS variables, so that a drawing follows the
reader's light or dark setting). A bar is an ``<svg>`` without a viewBox whose rectangles are placed in per cent, so
that it stretches to any width while hatching, outlines and text keep their size. A picture of curves has a viewBox, and
its lines keep their thickness; long curves are drawn as means of neighbouring points, so that a page has a bounded
size, and a value is read by pointing at its step: strips across the picture carry it as a tooltip.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ullage.core.display import size

#: Number of colours that ``base.html`` has: classes ``c0`` to ``c7``, and ``k0`` to ``k7`` of lines.
NUM_COLOURS = 8
#: Units of a picture of curves.
WIDTH, HEIGHT = 600, 220
#: Points of one curve, and strips with a tooltip, at the most.
MAX_POINTS, MAX_STRIPS = 600, 150
#: Intervals of an axis at the most.
_MAX_INTERVALS = 5
#: Width of a digit, and of a picture on a narrow page, in pixels.
_LETTER, _NARROW = 7, 290
#: What is nearer to zero is drawn as zero: its logarithm would say nothing.
_LEAST = 1e-290

Points = Sequence[tuple[float, float]]


def render(template: str, **values: Any) -> str:
    """Render ``templates/<template>`` with ``values``, each escaped; returns the page as text.

    Filters besides jinja's own: ``count`` (1234567 → 1,234,567), ``size`` (bytes → 1.23 GB), ``percent`` (0.125 →
    12.5 %). A name the template uses and ``values`` lack is an error.
    """
    import jinja2

    from ullage import __version__

    loader = jinja2.PackageLoader("ullage.report")
    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options)
    environment.filters.update(count=count, size=size, percent=percent)
    return environment.get_template(template).render(ullage_version=__version__, **values)


def count(number: float) -> str:
    """1234567 → ``1,234,567``; a fraction keeps one decimal."""
    return f"{int(number):,}" if float(number).is_integer() else f"{number:,.1f}"


def percent(part: float) -> str:
    """0.125 → ``12.5 %``; a part above 0 never reads 0.0 %."""
    return "< 0.1 %" if 0 < part < 0.0005 else f"{100 * part:.1f} %"


class Box(NamedTuple):
    """A rectangle of a bar. ``start`` and ``width`` in per cent; its CSS class, its tooltip, and the text in it."""

    start: float
    width: float
    style: str
    title: str
    text: str = ""


class Row(NamedTuple):
    """One bar, with its label on the left and ``number`` on the right. ``cuts``: vertical lines, in per cent.

    A row without boxes is a line of text in place of bars that are left out.
    """

    label: str
    boxes: tuple[Box, ...] = ()
    number: str = ""
    cuts: tuple[float, ...] = ()


class Series(NamedTuple):
    """Points (step, value) by rising step, with their name and a class of colour.

    As a curve of a picture, its points are those of a polyline; one that another would hide has the class ``under``.
    """

    label: str
    style: str
    points: Any


class Strip(NamedTuple):
    """A part of the width, in the picture's units, and what is read off there."""

    start: float
    width: float
    title: str


class Chart(NamedTuple):
    """A picture of curves: those of the series with a finite value, from the ``first`` to the ``last`` step.

    ``numbers`` and ``marks`` (steps) stand beside the axes, with their places in per cent from the top and the left;
    ``cuts`` are vertical lines, in the picture's units. A point of the longest curve is the mean of ``mean_of`` points.
    """

    curves: Sequence[Series]
    numbers: Sequence[tuple[str, float]]
    marks: Sequence[tuple[str, float]]
    first: int
    last: int
    cuts: Sequence[float]
    strips: Sequence[Strip]
    mean_of: int
    width: int = WIDTH
    height: int = HEIGHT


def chart(
    series: Sequence[Series], form: Callable[[float], str] = "{:,.5g}".format, cuts: Iterable[float] = ()
) -> Chart | None:
    """The picture of ``series``, on common axes; None if no value is finite.

    Of values that are not finite only the steps have their place. ``form`` is that of the numbers in tooltips, by
    default five digits; ``cuts`` are steps at which a vertical line stands.
    """
    finite = [each._replace(points=[p for p in each.points if math.isfinite(p[1])]) for each in series]
    finite = [each for each in finite if each.points]
    if not finite:
        return None
    thick = max(-(-len(each.points) // MAX_POINTS) for each in finite)
    drawn = [each._replace(points=_thinned(each.points)) for each in finite]
    steps = [x for each in series for x, _ in each.points]
    first, last = min(steps), max(steps)
    heights = [y for each in drawn for _, y in each.points]
    ticks = round_numbers(min(heights), max(heights))
    low, high = ticks[0], ticks[-1]

    def across(step: float) -> float:
        return WIDTH * (step - first) / (last - first or 1)

    def placed(points: Points) -> str:
        # The picture's y grows downwards.
        return " ".join(f"{across(x):.1f},{HEIGHT * (high - y) / (high - low):.1f}" for x, y in points)

    def style(k: int) -> str:
        # An earlier curve lies on top. It hides this one where they have the same places at a third of the steps.
        for above in drawn[:k]:
            values, unit = dict(above.points), (high - low) / HEIGHT
            same = sum(abs(y - values.get(x, math.inf)) < unit for x, y in drawn[k].points)
            if 3 * same >= min(len(values), len(drawn[k].points)):
                return drawn[k].style + " under"
        return drawn[k].style

    return Chart(
        [Series(each.label, style(k), placed(each.points)) for k, each in enumerate(drawn)],
        [(text, 100 * (high - tick) / (high - low)) for text, tick in zip(tick_texts(ticks), ticks)],
        [(f"{step:,}", across(step) * 100 / WIDTH) for step in step_marks(int(first), int(last))],
        int(first),
        int(last),
        [across(step) for step in cuts if first < step < last],
        _strips(drawn, across, form),
        thick,
    )


def _thinned(points: Points) -> Points:
    """At most :data:`MAX_POINTS` points: each the mean of as many neighbours, the last perhaps of fewer."""
    many = -(-len(points) // MAX_POINTS)
    if many <= 1:
        return points
    parts = (points[k : k + many] for k in range(0, len(points), many))
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _strips(series: Sequence[Series], across: Callable[[float], float], form: Callable[[float], str]) -> list[Strip]:
    """Strips between the middles of neighbouring steps, over the whole width."""
    by_step: dict[float, list[str]] = {}
    for each in series:
        for step, value in each.points:
            by_step.setdefault(step, []).append(f"{each.label}: {form(value)}")
    steps = sorted(by_step)[:: -(-len(by_step) // MAX_STRIPS)]
    edges = [0.0, *((across(a) + across(b)) / 2 for a, b in itertools.pairwise(steps)), float(WIDTH)]
    titles = [f"step {step:,.0f}\n" + "\n".join(by_step[step]) for step in steps]
    parts = zip(itertools.pairwise(edges), titles, strict=True)
    return [Strip(round(left, 1), round(right - left, 1), title) for (left, right), title in parts]


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
    room, span = (_LETTER * len(f"{last:,}") + 10) / _NARROW, last - first
    rounded = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    step = next(k for k in rounded if k >= max(room, 1 / _MAX_INTERVALS) * span)
    inner = range((first // step + 1) * step, last, step)
    return [first, *(k for k in inner if min(k - first, last - k) >= 1.5 * room * span), last]


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
