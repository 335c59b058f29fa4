"""The places in which checkpoints lie: folders of this machine, and URLs that fsspec knows (``s3://``, ``gs://``, ...).

Of a URL readers get a ``UPath`` of universal_pathlib, and use it like a ``Path``; its driver keeps the listings. Bytes
come through :func:`opened`, by requests for ranges: no file is fetched whole for its description. A folder of this
machine is read as ever, by descriptors.

A driver repeats what it knows to be passing (s3fs: five times). What then still fails is asked for again here, for some
seconds in all, whatever the driver; what a store refuses for good (no such object, no permission) is an error at once.
All errors are ``OSError`` and name the URL. Listings are kept by the driver, until :meth:`Store.look`.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ullage.core.errors import CheckpointError, InputError
from ullage.core.extras import install_command, needed_by

_T = TypeVar("_T")

#: Requests for the same thing, and the seconds before the second one; the pause doubles each time, to 6 s in all.
_ATTEMPTS, _PAUSE = 7, 0.1
#: Ranges of one file with at most so many bytes between them are one request; a longer one is cut.
_GAP_BYTES, _REQUEST_BYTES = 64 << 10, 8 << 20
#: What a store says once and for all.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)

#: A range of a file: its key, the first byte, the byte after the last.
Range = tuple[str, int, int]


# Requests to a store: listings, ranges of files


class Held:
    """Ranges of files that were fetched before they are read. Not for several threads while it is filled."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def add(self, store: Store, ranges: Iterable[Range], limit: int) -> None:
        """Fetch ``ranges`` by parallel requests, neighbours of one file together, up to ``limit`` bytes."""
        from fsspec.caching import KnownPartsOfAFile
        from fsspec.utils import merge_offset_ranges

        cut = [
            (key, at, min(at + _REQUEST_BYTES, stop))
            for key, start, stop in ranges
            if self.find(key, start, stop) is None
            for at in range(start, stop, _REQUEST_BYTES)
        ]
        wanted: list[Any] = []
        whole: Any
        for whole in zip(*merge_offset_ranges(*_columns(cut), max_gap=_GAP_BYTES, max_block=_REQUEST_BYTES)):
            limit -= whole[2] - whole[1]
            if limit >= 0:
                wanted.append(whole)
        found: dict[str, dict[tuple[int, int], bytes]] = {}
        for (key, start, stop), data in zip(wanted, store.read_many(wanted)):
            found.setdefault(key, {})[start, stop] = data
        for key, parts in found.items():
            before = self._files[key].data if key in self._files else {}
            self._files[key] = KnownPartsOfAFile(0, lambda *_: b"", 0, before | parts, strict=True)

    def find(self, key: str, start: int, stop: int) -> bytes | None:
        """The bytes of a range, if all of them were fetched."""
        try:
            return self._files[key]._fetch(start, stop)
        except (KeyError, ValueError):
            return None


class Store:
    """A file system of fsspec. May be used by several threads. ``key`` is a path in it, without a slash at its end."""

    def __init__(self, system: Any) -> None:
        self.system = system
        #: descriptions of files that are about to be read
        self.held = Held()

    def look(self, key: str) -> dict[str, int]:
        """Bytes of all files below a folder by their path in it, as they are now; the driver then knows all folders."""
        self.system.invalidate_cache()
        try:
            found = self._retry(key, partial(self.system.find, key, detail=True))
        except FileNotFoundError:
            return {}
        files = {path.removeprefix(key).lstrip("/"): info for path, info in found.items() if not path.endswith("/")}
        return {name: int(info["size"] or 0) for name, info in files.items() if name and info["type"] != "directory"}

    def read_many(self, ranges: list[Range]) -> list[bytes]:
        """The bytes of each range, by parallel requests. Raises ``OSError``, also where a file ends first."""
        found: dict[Range, bytes] = {}

        def ask() -> None:
            waiting = [whole for whole in ranges if whole not in found]
            failed: dict[str, BaseException] = {}
            for whole, data in zip(waiting, self.system.cat_ranges(*_columns(waiting), on_error="return")):
                if isinstance(data, BaseException):
                    failed[whole[0]] = data
                elif len(data) != whole[2] - whole[1]:
                    failed[whole[0]] = EOFError("the answer is too short")
                else:
                    found[whole] = bytes(data)
            for key, error in failed.items():
                raise _error_of_url(error, self.system.unstrip_protocol(key))

        if ranges:
            self._retry(ranges[0][0], ask)
        return [found[whole] for whole in ranges]

    def read(self, key: str, start: int, stop: int) -> bytes:
        """The bytes of one range, perhaps of those that are held."""
        held = self.held.find(key, start, stop)
        return self.read_many([(key, start, stop)])[0] if held is None else held

    def _retry(self, key: str, request: Callable[[], _T]) -> _T:
        for attempt in range(_ATTEMPTS):
            try:
                return request()
            except Exception as error:
                if attempt == _ATTEMPTS - 1 or _is_final(error):
                    raise _error_of_url(error, self.system.unstrip_protocol(key)) from error
            # Drawn, so that requests that failed together do not come again together.
            time.sleep(_PAUSE * 2**attempt * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable")


@cache
def store_of(system: Any) -> Store:
    """The store of a file system: fsspec itself keeps one of each for its options."""
    return Store(system)


def _columns(ranges: list[Range]) -> list[Any]:
    """Keys, starts and stops."""
    return [[whole[column] for whole in ranges] for column in range(3)]


def _is_final(error: BaseException) -> bool:
    """Whether no repetition changes an error: what is not there, and a driver's about credentials or a name."""
    words = ("Credential", "ParamValidation", "ProfileNotFound")
    return isinstance(error, _FINAL) or any(word in type(error).__name__ for word in words)


def _error_of_url(error: BaseException, url: str) -> OSError:
    """The error as an ``OSError`` of its kind that names the URL."""
    if isinstance(error, OSError) and "://" in str(error.filename):
        return error
    said = " ".join(str(error).split())[:300] or type(error).__name__
    code = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
    code = errno.EACCES if isinstance(error, PermissionError) else code
    made = OSError(code, said, url)  # Python makes it FileNotFoundError or PermissionError by the number
    made.__cause__ = error
    return made


# Paths, in a store or not

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
    """Whether a path that :func:`checkpoint_path` gave lies in a store: it is no path of the operating system."""
    return not isinstance(path, (str, os.PathLike))


def checkpoint_path(where: str | Path, storage_options: dict[str, Any] | None = None) -> Path:
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
        hint = install_command("remote") if url.startswith(("s3:", "s3a:")) else "install it with pip"
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
def list_anew(path: Path) -> Iterator[None]:
    """As :func:`name_store_errors`, with a folder in a store listed anew, so that sizes and names are those of now."""
    with name_store_errors(path):
        if is_remote(path):
            store_at(path).look(key_of(path))
        yield


@contextmanager
def name_store_errors(path: Path) -> Iterator[None]:
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
