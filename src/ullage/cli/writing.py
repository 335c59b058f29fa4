"""Files that a verb writes where its caller asks for it: whole or not at all, and never over what is not ours.

The same command run again replaces what it wrote. A file that it reads, or one that another program wrote, is refused:
a page drawn over the data would be the end of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from ullage.core.errors import InputError
from ullage.core.replacing import replacing

#: What each kind of file holds within its first bytes, and is known by.
_KNOWN_BY = {"page": b'<meta name="generator" content="ullage">', "plan": b'{"format": "ullage plan '}
_FIRST_BYTES = 4096


def write_output(
    kind: str, path: Path, fill: Callable[[IO[str]], object], inputs: Iterable[str] = (), *, hint: str | None = None
) -> str:
    """Write a file; returns the line that says so.

    Args:
        kind: ``page`` or ``plan``.
        path: where to; its folder is made.
        fill: writes into the file that it is given.
        inputs: what the verb reads, as it was typed.
        hint: what to do where the place cannot be written.

    Raises ``InputError`` as :func:`require_ours` does, and for a place that cannot be written.
    """
    require_ours(kind, path, inputs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            fill(file)
    except OSError as error:
        found = error.strerror or str(error)
        raise InputError("a file cannot be written", where=str(path), found=found, hint=hint) from error
    return f"{kind}: {path}"


def require_ours(kind: str, path: Path, inputs: Iterable[str] = ()) -> None:
    """Raise ``InputError`` where ``path`` is one of ``inputs``, or exists and is not empty and no ``kind`` of ours."""
    require_not_input(path, inputs)
    try:
        if not path.exists():
            return
        with path.open("rb") as file:
            first = file.read(_FIRST_BYTES)
    except OSError as error:
        raise InputError("a file cannot be written", where=str(path), found=error.strerror or str(error)) from error
    if first and _KNOWN_BY[kind] not in first:
        expected = f"a new name, or an earlier {kind} of ullage's"
        raise InputError("another file is there, and is kept", where=str(path), expected=expected)


def require_not_input(path: Path, inputs: Iterable[str]) -> None:
    """Raise ``InputError`` where ``path`` is one of ``inputs``, by whatever name."""
    for name in inputs:
        there = Path(name)
        try:
            same = path.exists() and there.exists() and path.samefile(there)
        except (OSError, ValueError):  # an input need not be a file: a distribution is JSON
            same = False
        if same:
            raise InputError("the output would replace the input", where=str(path), hint="give another name")
