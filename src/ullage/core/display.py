"""Display of objects: one line for ``repr``, a drawing in a notebook, a page in a file.

What draws lies far below what is drawn: pages need a template engine, and a plan does not. So the objects know only
that somebody draws them. The root package names that module (``_DRAWN_BY``), and it is loaded when something is shown.
It has two functions of an object: ``fragment`` (HTML for a notebook, None for a type that it does not know), and
``page`` (a whole page).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError
from ullage.core.replacing import replacing


def quantity(count: int, thing: str, things: str | None = None) -> str:
    """``1 sequence``, ``1,200 sequences``."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


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
