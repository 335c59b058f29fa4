"""Requests to a store of files that fsspec knows: listings, ranges of files, whole objects to write.

A driver repeats what it knows to be passing (s3fs: five times). What then still fails is asked for again here, for some
seconds in all, whatever the driver; what a store refuses for good (no such object, no permission) is an error at once.
All errors are ``OSError`` and name the URL. Listings are kept by the driver, until :meth:`Store.look`.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

#: Requests for the same thing, and the seconds before the second one; the pause doubles each time, to 6 s in all.
_ATTEMPTS, _PAUSE = 7, 0.1
#: Ranges of one file with at most so many bytes between them are one request; a longer one is cut.
_GAP_BYTES, _REQUEST_BYTES = 64 << 10, 8 << 20
#: Small objects that are written or removed at a time.
PARALLEL = 16
#: What a store says once and for all.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)

#: A range of a file: its key, the first byte, the byte after the last.
Range = tuple[str, int, int]


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
            found = self._tried(key, partial(self.system.find, key, detail=True))
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
                raise _named(error, self.system.unstrip_protocol(key))

        if ranges:
            self._tried(ranges[0][0], ask)
        return [found[whole] for whole in ranges]

    def read(self, key: str, start: int, stop: int) -> bytes:
        """The bytes of one range, perhaps of those that are held."""
        held = self.held.find(key, start, stop)
        return self.read_many([(key, start, stop)])[0] if held is None else held

    def write(self, key: str, data: bytes) -> None:
        """Write a small object whole."""
        self._tried(key, partial(self.system.pipe_file, key, data))

    def upload(self, local: Path, key: str) -> None:
        """Write a file of this machine as an object; a large one in parts, as the driver does it."""
        self._tried(key, partial(self.system.put_file, str(local), key))

    def remove(self, keys: list[str]) -> None:
        """Remove objects, those that are there."""

        def one(key: str) -> None:
            with suppress(FileNotFoundError):
                self._tried(key, partial(self.system.rm_file, key))

        # One by one: a list would be searched for wildcards, which names of parameters may contain.
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(one, keys))

    def _tried(self, key: str, request: Callable[[], _T]) -> _T:
        for attempt in range(_ATTEMPTS):
            try:
                return request()
            except Exception as error:
                if attempt == _ATTEMPTS - 1 or _is_final(error):
                    raise _named(error, self.system.unstrip_protocol(key)) from error
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


def _named(error: BaseException, url: str) -> OSError:
    """The error as an ``OSError`` of its kind that names the URL."""
    if isinstance(error, OSError) and "://" in str(error.filename):
        return error
    said = " ".join(str(error).split())[:300] or type(error).__name__
    code = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
    code = errno.EACCES if isinstance(error, PermissionError) else code
    made = OSError(code, said, url)  # Python makes it FileNotFoundError or PermissionError by the number
    made.__cause__ = error
    return made
