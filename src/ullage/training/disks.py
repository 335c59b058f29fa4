"""Errors of disks that take no more, and of folders that are not ours, said in one line whatever library found them.

Torch and safetensors write files by themselves. What they raise where a disk is full names neither the disk nor its
room: "unexpected pos 204608 vs 204500".
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ullage.errors import TrainingError, UllageError

#: What libraries say when a file cannot be written, other than OSError.
_WRITE_FAILED = ("PytorchStreamWriter", "inline_container", "iostream error", "SafetensorError")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: A disk with fewer bytes free is full: what did not fit may have left a few blocks.
_FULL = 2**20


@contextmanager
def one_line(target: Path) -> Iterator[None]:
    """Turn what a full disk or a folder that is not ours raises in any library into one line that says what to do."""
    try:
        yield
    except UllageError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and not any(word in said for word in _WRITE_FAILED):
            raise
        words = _no_room(error, target)
        if words is not None:
            raise _disk_full(words, target) from error
        raise TrainingError(
            "this cannot be written",
            where=str(target),
            found=error.strerror if isinstance(error, OSError) and error.strerror else said,
            hint="make room, or give a folder that can be written to; what was there before is as it was",
        ) from error


def _no_room(error: Exception, target: Path) -> str | None:
    """The system's words for the want of room that an error is about; None if it is about something else."""
    for code in _NO_ROOM:
        words = os.strerror(code)
        if (isinstance(error, OSError) and error.errno == code) or words in str(error):
            return words
    # Torch says only how many bytes of how many it has written.
    free = None if isinstance(error, OSError) else _free_bytes(target)
    return os.strerror(errno.ENOSPC) if free is not None and free < _FULL else None


def _disk_full(words: str, target: Path) -> TrainingError:
    free, needed = _free_bytes(target), _size_of_one_before(target)
    return TrainingError(
        "the disk is full",
        where=str(target),
        expected=f"about {needed} bytes, the size of the one before" if needed else None,
        found=words if free is None else f"{words}, {free} bytes free beside what is written of it",
        hint="make room, or give a folder on another disk; what was there before is as it was",
    )


def _free_bytes(target: Path) -> int | None:
    with suppress(OSError, StopIteration):
        return shutil.disk_usage(next(path for path in (target, *target.parents) if path.exists())).free
    return None


def _size_of_one_before(target: Path) -> int:
    """Bytes of the newest folder beside ``target`` that differs from it in its number alone; 0 if there is none."""
    stem, _, number = target.name.rpartition("-")
    others = [path for path in target.parent.glob(f"{stem}-*") if path.name.rpartition("-")[2].isdecimal()]
    if not number.isdecimal() or not others:
        return 0
    newest = max(others, key=lambda path: path.stat().st_mtime)
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
