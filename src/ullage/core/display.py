"""Display for people: numbers in units that are read, and of objects a line, a drawing in a notebook, a page.

What draws lies far below what is drawn: pages need a template engine, and a plan does not. So the objects know only
that somebody draws them. The root package names that module (``_DRAWN_BY``), and it is loaded when something is shown.
It has two functions of an object: ``fragment`` (HTML for a notebook, None for a type that it does not know), and
``page`` (a whole page).
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError
from ullage.core.replacing import replacing

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def quantity(count: int, thing: str, things: str | None = None) -> str:
    """``1 sequence``, ``1,200 sequences``."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def prefix_of(largest: float) -> tuple[float, str]:
    """What numbers up to ``largest`` are divided by to be read, and the prefix of their unit: 1.5e7 → (1e6, "M")."""
    power = 0
    # From 999.5 on, three digits would read 1e+03: the next prefix is taken.
    while power < len(_PREFIXES) - 1 and abs(largest) / 1000.0**power >= 999.5:
        power += 1
    return 1000.0**power, _PREFIXES[power]


def rate(number: float, unit: str = "FLOP/s") -> str:
    """1.5e7 → ``15 MFLOP/s``, with three digits."""
    divisor, prefix = prefix_of(number)
    return f"{number / divisor:.3g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """0.00081 → ``0.81 ms``, 12.34 → ``12.3 s``, 4321 → ``1 h 12 min``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if 0 < seconds < 0.9995:
        divisor, unit = (1e-3, "ms") if seconds >= 0.9995e-3 else (1e-6, "µs")
        return f"{seconds / divisor:.3g} {unit}"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def size(num_bytes: float) -> str:
    """Bytes of files in decimal units with three digits: 1234567 → ``1.23 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes:,.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        num_bytes /= 1000
        # From 999.5 on, three digits would read 1e+03: the next unit is taken.
        if num_bytes < 999.5 or unit == "TB":
            break
    return f"{num_bytes:.3g} {unit}"


def memory_size(num_bytes: float) -> str:
    """Bytes of a device's memory in binary units, as devices are sold.

    >>> memory_size(3 * 1024**3), memory_size(float("inf"))
    ('3.00 GiB', 'more than there is')
    """
    if num_bytes == float("inf"):
        return "more than there is"
    return f"{num_bytes / 1024**3:.2f} GiB" if abs(num_bytes) >= 1024**3 else f"{num_bytes / 1024**2:.1f} MiB"


def in_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Rows of cells as lines with their columns below each other, at the right in those of ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    placed = [[c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(r, widths))] for r in rows]
    return ["  ".join(row).rstrip() for row in placed]


class Shown:
    """Base, without fields, of objects that say themselves in one line and are drawn in a notebook."""

    __slots__ = ()

    def _facts(self) -> Iterator[str]:
        """The facts of the line, in order."""
        yield from ()

    def __repr__(self) -> str:
        said: list[str] = []
        # A debugger shows objects that are half made: what can be said before the first error is said.
        try:
            for fact in self._facts():
                said.append(" ".join(fact.split()))  # noqa: PERF401
        except Exception:
            said.append("...")
        return f"{type(self).__name__}({', '.join(said)})"

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None, so that the notebook prints the ``repr``, for what cannot be drawn."""
        try:
            return _module().fragment(self)
        except Exception:  # without jinja2, or of an object that is half made
            return None


class Paged(Shown):
    """Base, without fields, of objects that have a page."""

    __slots__ = ()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of this object, self-contained, and return its path. A file that is there is replaced.

        Raises ``InputError`` for a file that cannot be written.
        """
        return write_page(path, page_of(self))


def page_of(value: object, **facts: Any) -> str:
    """The page of an object as HTML. ``facts``: what its page takes besides."""
    return _module().page(value, **facts)


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page whole or not at all, and return its path. Raises ``InputError`` if it cannot be written."""
    path = Path(path)
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        raise InputError("a page cannot be written", where=str(path), found=error.strerror) from error
    return path


def _module() -> Any:
    return importlib.import_module(sys.modules["ullage"]._DRAWN_BY)
