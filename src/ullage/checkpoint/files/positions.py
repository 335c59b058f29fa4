"""Reads at a position of an open file, on every system: Windows has neither ``pread`` nor ``preadv``."""

from __future__ import annotations

import os
import threading

# A position that is set and a read that follows it belong together, whichever thread they are of.
_LOCK = threading.Lock()


def open_to_read(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file, which no child process inherits."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))


def read_at(fd: int, num_bytes: int, offset: int) -> bytes:
    """Bytes from ``offset`` on: at most ``num_bytes``, none at the end of the file."""
    if hasattr(os, "pread"):
        return os.pread(fd, num_bytes, offset)
    with _LOCK:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, num_bytes)


def read_into(fd: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` from ``offset`` on; returns the number of bytes read, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    got = read_at(fd, len(into), offset)
    into[: len(got)] = got
    return len(got)
