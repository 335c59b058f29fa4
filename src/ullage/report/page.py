"""Rendering of one HTML page from one template: no network, no script, light and dark, wide and narrow.

Every page extends ``templates/base.html``, which holds the colours (CSS variables, so that a drawing follows the
reader's light or dark setting) and the shapes that pages share: facts, tables, and drawings made of bars. A bar is
an ``<svg>`` without a viewBox whose rectangles are placed in per cent, so that it stretches to any width while
hatching, outlines and text keep their size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ullage.core.display import size

#: Number of colours that ``base.html`` has: classes ``c0`` to ``c7``.
NUM_COLOURS = 8


def render(template: str, **values: Any) -> str:
    """Render ``templates/<template>`` with ``values``, each escaped; returns the page as text.

    Filters besides jinja's own: ``count`` (1234567 → 1,234,567), ``size`` (bytes → 1.23 GB), ``percent`` (0.125 →
    12.5 %). A name the template uses and ``values`` lack is an error.
    """
    import jinja2

    from ullage import __version__

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ullage.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, size=size, percent=percent)
    return environment.get_template(template).render(ullage_version=__version__, **values)


def count(number: float) -> str:
    """1234567 → ``1,234,567``; a fraction keeps one decimal."""
    return f"{int(number):,}" if float(number).is_integer() else f"{number:,.1f}"


def percent(part: float) -> str:
    """0.125 → ``12.5 %``; a part above 0 never reads 0.0 %."""
    if 0 < part < 0.0005:
        return "< 0.1 %"
    return f"{100 * part:.1f} %"


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
