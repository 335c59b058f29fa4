"""Requests to a store of files that fsspec knows: listings, ranges of files, whole objects to write.

Every request is repeated where it fails for a passing reason, for some seconds in all. What a store refuses for good
(no such object, no permission) is an error at once. All errors are ``OSError`` and name the URL.
"""

from __future__ import annotations

import errno
import random
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

#: Requests for the same thing, and the seconds before the second one; the pause doubles each time, to 6 s in all.
_ATTEMPTS, _PAUSE = 7, 0.1
#: Ranges of one file with at most so many bytes between them are one request; a longer one is cut.
_GAP_BYTES, _REQUEST_BYTES = 64 << 10, 8 << 20
#: Most bytes that are kept of files whose descriptions are about to be read.
_HELD_BYTES = 64 << 20
#: Small objects that are written or removed at a time.
PARALLEL = 16
#: What a store says once and for all.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)

#: Words by which drivers tell one version of a file from another.
_VERSION_WORDS = ("ETag", "etag", "md5Hash", "VersionId", "LastModified", "mtime", "updated", "created")

#: A range of a file: its key, the first byte, the byte after the last.
Range = tuple[str, int, int]


@dataclass(frozen=True)
class Entry:
    """A file or folder in a store; ``version`` changes when the file does, as far as the store tells."""

    name: str
    num_bytes: int
    is_folder: bool
    version: int = 0


class Held:
    """Ranges of files that were fetched before they are read. Not for several threads while it is filled."""

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}
        self._data: dict[str, list[memoryview]] = {}

    def add(self, store: Store, ranges: list[Range], limit: int) -> None:
        """Fetch ``ranges``, as :func:`merged` gives them, up to ``limit`` bytes."""
        wanted = []
        for whole in ranges:
            if self.find(*whole) is not None:
                continue
            limit -= whole[2] - whole[1]
            if limit >= 0:
                wanted.append(whole)
        for (key, start, _), data in zip(wanted, store.read_many(wanted)):
            starts, held = self._starts.setdefault(key, []), self._data.setdefault(key, [])
            at = bisect_right(starts, start)
            starts.insert(at, start)
            held.insert(at, memoryview(data))

    def find(self, key: str, start: int, stop: int) -> memoryview | None:
        """The bytes of a range, if they are all in one that was fetched."""
        at = bisect_right(self._starts.get(key, ()), start) - 1
        if at < 0:
            return None
        low, data = self._starts[key][at], self._data[key][at]
        return data[start - low : stop - low] if stop <= low + len(data) else None


class Store:
    """A file system of fsspec, with its listings kept. May be used by several threads.

    ``key`` is a path in the file system, without a slash at its end.
    """

    def __init__(self, system: Any, url: str, root: str) -> None:
        self.system, self._url, self.root = system, url, root
        self._listed: dict[str, dict[str, Entry]] = {}
        self._alone: dict[str, Entry | None] = {}
        self._held = Held()
        self._lock = threading.Lock()
        self.forget()

    def url(self, key: str) -> str:
        """The URL of a key, as the user wrote its beginning."""
        if key == self.root or key.startswith(self.root + "/"):
            return self._url + key[len(self.root) :]
        return self.system.unstrip_protocol(key)

    def forget(self) -> None:
        """Drop what is known of the store, so that the next question is asked anew."""
        with self._lock:
            self._listed, self._alone = {}, {}
        self.system.invalidate_cache()

    # What is there

    def entries(self, key: str) -> dict[str, Entry]:
        """Files and folders in a folder by name; none where there is no such folder."""
        found = self._listed.get(key)
        if found is not None:
            return found
        outer, _, name = key.rpartition("/")
        above = self._listed.get(outer)
        if above is not None and (name not in above or not above[name].is_folder):
            return {}
        try:
            infos = self._tried(key, partial(self.system.ls, key, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            infos = []
        made = {}
        for info in infos:
            place = info["name"].rstrip("/")
            if place != key:  # a file is listed as itself, and so is the mark of an empty folder
                entry = _entry(place.rpartition("/")[2], info)
                made[entry.name] = entry
        with self._lock:
            self._listed[key] = made
        return made

    def tree(self, key: str) -> dict[str, Entry]:
        """All files below a folder by their path in it, in one listing; the folders within are then known too."""
        try:
            infos = self._tried(key, partial(self.system.find, key, detail=True))
        except FileNotFoundError:
            infos = {}
        found: dict[str, Entry] = {}
        listed: dict[str, dict[str, Entry]] = {key: {}}
        for path, info in infos.items():
            inner = path.rstrip("/")[len(key) + 1 :]
            if not inner or path.endswith("/") or info.get("type") == "directory":
                continue
            found[inner] = entry = _entry(inner.rpartition("/")[2], info)
            folder = f"{key}/{inner}".rpartition("/")[0]
            listed.setdefault(folder, {})[entry.name] = entry
            while folder != key:
                outer, _, name = folder.rpartition("/")
                listed.setdefault(outer, {}).setdefault(name, Entry(name, 0, True))
                folder = outer
        with self._lock:
            self._listed |= listed
        return found

    def entry(self, key: str) -> Entry | None:
        """The file or folder of that key; None where there is none."""
        outer, _, name = key.rpartition("/")
        # What lies above the folder that was named is not listed: it may be a whole bucket, or not be ours to list.
        if key.startswith(self.root + "/"):
            return self.entries(outer).get(name)
        if key not in self._alone:
            try:
                found = _entry(name, self._tried(key, partial(self.system.info, key)))
            except (FileNotFoundError, PermissionError):
                found = None
            self._alone[key] = found
        return self._alone[key]

    # Reading

    def read_many(self, ranges: list[Range]) -> list[bytes]:
        """The bytes of each range, by parallel requests. Raises ``OSError``, also where a file ends first."""
        owners = [(i, piece) for i, whole in enumerate(ranges) for piece in _cut(whole)]
        parts: list[list[bytes]] = [[] for _ in ranges]
        for (i, _), data in zip(owners, self._fetch([piece for _, piece in owners])):
            parts[i].append(data)
        return [own[0] if len(own) == 1 else b"".join(own) for own in parts]

    def read(self, key: str, start: int, stop: int) -> bytes:
        """The bytes of one range, which :meth:`hold` may have fetched before."""
        held = self._held.find(key, start, stop)
        return self.read_many([(key, start, stop)])[0] if held is None else bytes(held)

    def _fetch(self, ranges: list[Range]) -> list[bytes]:
        found: list[bytes] = [b""] * len(ranges)
        waiting = list(range(len(ranges)))
        failed: BaseException = EOFError("the answer is too short")
        for attempt in range(_ATTEMPTS):
            if not waiting:
                return found
            if attempt:
                _pause(attempt)
            keys, starts, stops = ([ranges[i][column] for i in waiting] for column in range(3))
            try:
                got = self.system.cat_ranges(keys, starts, stops, on_error="return")
            except Exception as error:
                got = [error] * len(waiting)
            again = []
            for i, data in zip(waiting, got):
                if isinstance(data, BaseException):
                    failed = data
                    if isinstance(data, _FINAL) or _is_final(data):
                        raise _named(data, self.url(ranges[i][0]))
                    again.append(i)
                elif len(data) != ranges[i][2] - ranges[i][1]:
                    again.append(i)
                else:
                    found[i] = bytes(data)
            waiting = again
        if waiting:
            raise _named(failed, self.url(ranges[waiting[0]][0]))
        return found

    def hold(self, ranges: Iterable[Range]) -> None:
        """Fetch ranges that are about to be read, many at a time, up to a bound; the rest is read when asked for."""
        self._held.add(self, merged(ranges), _HELD_BYTES)

    def let_go(self) -> None:
        """Drop what :meth:`hold` fetched."""
        self._held = Held()

    # Writing

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
                if isinstance(error, _FINAL) or attempt == _ATTEMPTS - 1 or _is_final(error):
                    raise _named(error, self.url(key)) from error
            _pause(attempt + 1)
        raise AssertionError("unreachable")


def _pause(attempt: int) -> None:
    # Drawn, so that requests that failed together do not come again together.
    time.sleep(_PAUSE * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))


def _is_final(error: BaseException) -> bool:
    """Whether an error of a driver is about credentials or a name, which no repetition changes."""
    return any(word in type(error).__name__ for word in ("Credential", "ParamValidation", "ProfileNotFound"))


def _named(error: BaseException, url: str) -> OSError:
    """The error as an ``OSError`` of its kind that names the URL."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    code = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
    code = errno.EACCES if isinstance(error, PermissionError) else code
    made = OSError(code, said, url)  # Python makes it FileNotFoundError or PermissionError by the number
    made.__cause__ = error
    return made


def _entry(name: str, info: dict[str, Any]) -> Entry:
    told = [
        info.get(k) for k in ("ETag", "etag", "md5Hash", "VersionId", "LastModified", "mtime", "updated", "created")
    ]
    size = info.get("size")
    return Entry(name, int(size or 0), info.get("type") == "directory", zlib.crc32(repr(told).encode()))


def _cut(whole: Range) -> list[Range]:
    """A range as requests of bounded size."""
    key, start, stop = whole
    return [(key, at, min(at + _REQUEST_BYTES, stop)) for at in range(start, stop, _REQUEST_BYTES)]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, neighbours of one file joined: what is worth one request each."""
    joined: list[Range] = []
    for key, start, stop in sorted(r for r in ranges if r[2] > r[1]):
        if joined and joined[-1][0] == key and start <= joined[-1][2] + _GAP_BYTES:
            joined[-1] = (key, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((key, start, stop))
    return joined
