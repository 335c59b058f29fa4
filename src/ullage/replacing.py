"""Files that take the place of others whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file in UTF-8 that takes the place of ``path`` when the block ends; an error leaves ``path`` as it is.

    It is written beside its place and renamed, so that no half file stands under the name. Raises ``OSError`` as
    opening, writing and renaming do.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
