"""The lock on a target that is being written, and what a system must have for writing one."""

from __future__ import annotations

import os
from typing import IO, Any

from ullage.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def lock(stream: IO[Any]) -> None:
    """Lock an open file for this process alone, until it is closed or the process dies.

    Raises ``BlockingIOError`` if another process has locked it, another ``OSError`` where there are no locks.
    """
    if fcntl is None:
        raise OSError("this system has no locks of files")
    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def require_writing() -> None:
    """Raise ``InputError`` on a system on which checkpoints are read and not written."""
    if fcntl is None or not hasattr(os, "pwrite"):
        raise InputError(
            "checkpoints cannot be written on this system",
            expected="a system with pwrite and flock, such as Linux or macOS",
            found=os.name,
            hint="inspect and verify read them here; convert them on Linux",
        )
