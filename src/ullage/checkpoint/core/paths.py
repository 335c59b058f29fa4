"""The places in which checkpoints lie: folders of this machine, and URLs that fsspec knows (``s3://``, ``gs://``, ...).

Of a URL readers get a ``UPath`` of universal_pathlib, and use it like a ``Path``; its driver keeps the listings. Bytes
come through :func:`opened`, by requests for ranges: no file is fetched whole for its description. A folder of this
machine is read as ever, by descriptors.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from ullage.checkpoint.core.store import Held, Store, store_of
from ullage.core.errors import CheckpointError, InputError
from ullage.core.extras import needed_by

#: Bytes at the two ends of an archive that hold its description as a rule.
_HEAD_BYTES, _TAIL_BYTES = 8 << 10, 16 << 10
#: Most bytes that are fetched ahead: for the description of one file, and for those of all files.
_HELD_BYTES, _ALL_HELD_BYTES = 16 << 20, 64 << 20
#: URLs of folders of this machine.
_LOCAL = ("file://", "local://")


def is_url(where: object) -> bool:
    """Whether ``where`` is a URL of a store; ``file://`` is a folder of this machine."""
    return isinstance(where, str) and "://" in where and not where.startswith(_LOCAL)


def is_remote(path: object) -> bool:
    """Whether a path that :func:`path_of` gave lies in a store: it is no path of the operating system."""
    return not isinstance(path, (str, os.PathLike))


def path_of(where: str | Path, storage_options: dict[str, Any] | None = None) -> Path:
    """The path of a folder, from its name or URL. Of a URL a ``UPath``, which readers use like a ``Path``.

    ``storage_options`` are those of fsspec, for the URL's file system; a folder of this machine needs none.
    Raises ``InputError`` for a URL whose file system is not known, not installed, or refuses the options.
    """
    if is_remote(where):
        return cast(Path, where)
    if isinstance(where, str) and where.startswith(_LOCAL):
        return Path(where.partition("://")[2])
    if not is_url(where):
        return Path(where)
    url = str(where).rstrip("/")
    with needed_by("a checkpoint by URL"):
        from fsspec.core import url_to_fs
    try:
        system, _ = url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        hint = 'pip install "ullage[remote]"' if url.startswith(("s3:", "s3a:")) else "install it with pip"
        raise InputError("the driver of this URL is not installed", where=url, found=str(error), hint=hint) from error
    except (ValueError, TypeError) as error:
        raise InputError("the URL cannot be opened", where=url, found=str(error)) from error
    system.invalidate_cache()
    with needed_by("a checkpoint by URL"), warnings.catch_warnings():
        from upath import UPath

        warnings.simplefilter("ignore", UserWarning)  # a driver that it has no class for
        return cast(Any, UPath(url, **(storage_options or {})))


def key_of(path: Path) -> str:
    """The path in the file system of a store."""
    return cast(Any, path).path


def store_at(path: Path) -> Store:
    """The store that a path lies in."""
    return store_of(cast(Any, path).fs)


def version_of(path: Path) -> list[Any]:
    """What changes when a file does: its size, and its time and inode or what a store tells."""
    status = path.stat()
    if is_remote(path):
        return [status.st_size, cast(Any, path).fs.ukey(key_of(path))]
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _nothing_ahead(ranges: Iterable[tuple[int, int]]) -> None:
    """The system reads ahead."""


@dataclass(frozen=True)
class OpenFile:
    """A file that ranges are read of.

    Attributes:
        size: bytes of the file.
        pread: bytes by number and offset, fewer where the file ends.
        tail_bytes: bytes of the end of an archive that are read at once.
        hold: fetches (offset, bytes) that are about to be read.
    """

    size: int
    pread: Callable[[int, int], bytes]
    tail_bytes: int = 1 << 16
    hold: Callable[[Iterable[tuple[int, int]]], None] = _nothing_ahead


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[OpenFile]:
    """A file to read ranges of. Raises ``OSError``."""
    if is_remote(path):
        yield _open_remote(cast(Any, path))
        return
    with open(path, "rb", buffering=0) as raw:
        yield OpenFile(os.fstat(raw.fileno()).st_size, partial(read_at, raw.fileno()))


def _open_remote(path: Path) -> OpenFile:
    store, key, size, held = store_at(path), key_of(path), path.stat().st_size, Held()

    def pread(num_bytes: int, offset: int) -> bytes:
        stop = min(offset + num_bytes, size)
        found = held.find(key, offset, stop)
        return store.read(key, offset, stop) if found is None else found

    def hold(ranges: Iterable[tuple[int, int]]) -> None:
        held.add(store, [(key, at, min(at + n, size)) for at, n in ranges if 0 <= at < size], _HELD_BYTES)

    return OpenFile(size, pread, _TAIL_BYTES, hold)


def read_start(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file, at most ``num_bytes``."""
    with opened(path) as file:
        return file.pread(min(num_bytes, file.size), 0)


def hold_descriptions(archives: Iterable[tuple[Path, int, int]]) -> None:
    """Fetch the two ends of archives whose descriptions are about to be read, by parallel requests.

    ``archives`` are (file, offset, bytes) of each. Nothing is done for files of this machine.
    """
    ranges, store = [], None
    for path, offset, size in archives:
        if not is_remote(path):
            return
        store, key, end = store_at(path), key_of(path), offset + size
        if not path.is_file() or end > path.stat().st_size:
            continue  # a problem of that file, which its reader will find
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            ranges.append((key, offset, end))
        else:
            ranges += [(key, offset, offset + _HEAD_BYTES), (key, end - _TAIL_BYTES, end)]
    if store is not None:
        # What cannot be fetched now is asked for again by the reader of that file, whose error names it.
        with suppress(OSError):
            store.held.add(store, ranges, _ALL_HELD_BYTES)


def let_go(path: Path) -> None:
    """Drop what :func:`hold_descriptions` has fetched."""
    if is_remote(path):
        store_at(path).held = Held()


@contextmanager
def looked_at(path: Path) -> Iterator[None]:
    """As :func:`reached`, with a folder in a store listed anew, so that sizes and names are those of now."""
    with reached(path):
        if is_remote(path):
            store_at(path).look(key_of(path))
        yield


@contextmanager
def reached(path: Path) -> Iterator[None]:
    """A context in which the ``OSError`` of a store that cannot be asked is a ``CheckpointError`` that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror or error}", where=str(error.filename or path)) from error


# Reads at a position of an open file, on every system: Windows has neither ``pread`` nor ``preadv``.

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
