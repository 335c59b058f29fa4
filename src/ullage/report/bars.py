"""Bars, of which every drawing of a page is made: a row is one bar, and its boxes are placed in per cent of it."""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of a bar. ``start`` and ``width`` in per cent; its CSS class, its tooltip, and the text in it.

    ``anchor``: what a link on the page calls it, if anything.
    """

    start: float
    width: float
    style: str
    title: str
    text: str = ""
    anchor: str = ""


class Row(NamedTuple):
    """One bar, with its label on the left and ``number`` on the right. ``cuts``: vertical lines, in per cent.

    A row without boxes is a line of text in place of bars that are left out.
    """

    label: str
    boxes: tuple[Box, ...] = ()
    number: str = ""
    cuts: tuple[float, ...] = ()
