"""Files that take the place of others whole or not at all; attributes that stand for something else for a while."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file in UTF-8 that takes the place of ``path`` when the block ends; an error leaves ``path`` as it is.

    It is written beside its place and renamed, so that no half file stands under the name. Raises ``OSError`` as
    opening, writing and renaming do.
    """
    # Hosts that share a disk may have processes of one number.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` within; after it the object, module or class is as it was.

    On an instance it shadows the class, which is not touched.
    """
    missing = object()  # for "no attribute of its own": None may be a value
    own = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
