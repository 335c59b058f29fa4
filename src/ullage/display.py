"""Display of objects: one line for ``repr``, a drawing in a notebook, a page in a browser or a file.

What draws lies far below what is drawn: pages need a template engine, and a plan does not. So the objects know only
that somebody draws them. The root package names that module (``_DRAWN_BY``), and it is loaded when something is shown.
It has three functions of an object: ``fragment`` (HTML for a notebook, None for a type that it does not know), ``page``
(a whole page) and ``text`` (for a terminal).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.errors import InputError
from ullage.replacing import replacing

#: Height in pixels of a page that is shown in a notebook.
_HEIGHT = 720


def counted(count: int, thing: str, things: str | None = None) -> str:
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

    def show(self) -> None:
        """Show the page: in the notebook, else in a browser, else print a table and where the page is."""
        show_page(self, page_of(self))


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


def show_page(value: object, page: str) -> None:
    """Show a page of ``value`` where one sits: see :meth:`Paged.show`."""
    # Imported here, because ``import ullage`` loads this module.
    import html
    import tempfile
    import webbrowser

    if _in_notebook():
        # In a frame, so that the styles of the page and of the notebook leave each other alone.
        frame = (
            f'<iframe srcdoc="{html.escape(page)}" width="100%" height="{_HEIGHT}" style="border: 0" sandbox></iframe>'
        )
        importlib.import_module("IPython.display").display(_Html(frame, repr(value)))
        return
    path = write_page(Path(tempfile.mkdtemp(prefix="ullage-")) / f"{type(value).__name__.lower()}.html", page)
    if _has_screen() and webbrowser.open(path.as_uri()):
        print(path)
    else:
        print(f"{_module().text(value)}\n{path}")


class _Html:
    """HTML for a notebook, and a line for what shows none."""

    def __init__(self, markup: str, line: str) -> None:
        self._markup, self._line = markup, line

    def __repr__(self) -> str:
        return self._line

    def _repr_html_(self) -> str:
        return self._markup


def _module() -> Any:
    return importlib.import_module(sys.modules["ullage"]._DRAWN_BY)


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this process, and not IPython in a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _has_screen() -> bool:
    """Whether a window can be opened. Without one, ``webbrowser`` would start a browser inside the terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
