"""The places in which checkpoints lie: folders of this machine, and URLs that fsspec knows (``s3://``, ``gs://``, ...).

Readers take a ``Path``. Of a URL they get a :class:`RemotePath`, which has those methods of ``Path`` that readers use
and answers them from listings of the store. Bytes come through :func:`opened`, by requests for ranges: no file is
fetched whole for its description. A folder of this machine is read as ever, by descriptors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial, total_ordering
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ullage.checkpoint.files.positions import read_at
from ullage.checkpoint.remote.store import Held, Store, merged
from ullage.errors import CheckpointError, InputError
from ullage.extras import needed_by

#: Bytes at the two ends of an archive that hold its description as a rule.
_HEAD_BYTES, _TAIL_BYTES = 8 << 10, 16 << 10
#: Most bytes that are fetched ahead for the description of one file.
_HELD_BYTES = 16 << 20
#: URLs of folders of this machine.
_LOCAL = ("file://", "local://")


def is_url(where: object) -> bool:
    """Whether ``where`` is a URL of a store; ``file://`` is a folder of this machine."""
    return isinstance(where, str) and "://" in where and not where.startswith(_LOCAL)


def is_remote(path: object) -> bool:
    """Whether a path that :func:`path_of` gave lies in a store."""
    return isinstance(path, RemotePath)


def path_of(where: str | Path, storage_options: dict[str, Any] | None = None) -> Path:
    """The path of a folder, from its name or URL. Of a URL a :class:`RemotePath`, which readers use like a ``Path``.

    ``storage_options`` are those of fsspec, for the URL's file system; a folder of this machine needs none.
    Raises ``InputError`` for a URL whose file system is not known, not installed, or refuses the options.
    """
    if is_remote(where):
        return cast(Any, where)
    if isinstance(where, str) and where.startswith(_LOCAL):
        return Path(where.partition("://")[2])
    if not is_url(where):
        return Path(where)
    url = str(where).rstrip("/")
    with needed_by("a checkpoint by URL"):
        from fsspec.core import url_to_fs
    try:
        system, key = url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        hint = 'pip install "ullage[remote]"' if url.startswith(("s3:", "s3a:")) else "install it with pip"
        raise InputError("the driver of this URL is not installed", where=url, found=str(error), hint=hint) from error
    except (ValueError, TypeError) as error:
        raise InputError("the URL cannot be opened", where=url, found=str(error)) from error
    return cast(Any, RemotePath(Store(system, url, key.rstrip("/")), key.rstrip("/")))


@dataclass(frozen=True)
class Status:
    """What ``Path.stat`` says of a file, as far as a store knows it."""

    st_size: int
    st_ino: int
    st_mtime_ns: int = 0


@total_ordering
class RemotePath:
    """A file or folder in a store, with the methods of ``Path`` that readers use; ``str`` of it is its URL."""

    __slots__ = ("key", "store")

    def __init__(self, store: Store, key: str) -> None:
        self.store, self.key = store, key

    def __str__(self) -> str:
        return self.store.url(self.key)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        raise InputError("this can be done with a folder of this machine only", where=str(self), hint="copy it first")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.key, str(self)) == (other.key, str(other))

    def __lt__(self, other: RemotePath) -> bool:
        return self.parts < other.parts

    def __hash__(self) -> int:
        return hash(self.key)

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        key = self.key
        for part in str(name).split("/"):
            if part == "..":
                key = key.rpartition("/")[0]
            elif part not in ("", "."):
                key = f"{key}/{part}"
        return RemotePath(self.store, key)

    @property
    def parts(self) -> tuple[str, ...]:
        """The components of the key."""
        return tuple(self.key.split("/"))

    @property
    def name(self) -> str:
        """The last component."""
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last component without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the last component."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder around it."""
        return RemotePath(self.store, self.key.rpartition("/")[0] or self.key)

    def with_name(self, name: str) -> RemotePath:
        """The neighbour of that name."""
        return self.parent / name

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        """The path within ``other``. Raises ``ValueError``."""
        if not self.is_relative_to(other):
            raise ValueError(f"{self} is not in {other}")
        return PurePosixPath(self.key[len(other.key) + 1 :] or ".")

    def is_relative_to(self, other: object) -> bool:
        """Whether it is ``other``, or lies in it."""
        return isinstance(other, RemotePath) and f"{self.key}/".startswith(f"{other.key}/")

    def resolve(self) -> RemotePath:
        """Itself: stores have no links."""
        return self

    def is_file(self) -> bool:
        """Whether it is a file."""
        entry = self.store.entry(self.key) if "/" in self.key else None
        return entry is not None and not entry.is_folder

    def is_dir(self) -> bool:
        """Whether there are files in it."""
        return bool(self.store.entries(self.key))

    def exists(self) -> bool:
        """Whether it is a file or a folder."""
        return self.is_file() or self.is_dir()

    def stat(self) -> Status:
        """Its size and version. Raises ``FileNotFoundError``."""
        entry = self.store.entry(self.key)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return Status(entry.num_bytes, entry.version)

    def iterdir(self) -> Iterator[RemotePath]:
        """What is in the folder."""
        return iter([RemotePath(self.store, f"{self.key}/{name}") for name in self.store.entries(self.key)])

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What matches in the folder and, by a pattern of several components, in folders of it."""
        steps = pattern.split("/")
        if len(steps) > 1 and self.key not in self.store._listed:
            self.store.tree(self.key)
        found = [self]
        for step in steps:
            found = [path for folder in found for path in folder.iterdir() if fnmatchcase(path.name, step)]
        return iter(found)

    def read_bytes(self) -> bytes:
        """The whole content, of a small file. Raises ``OSError``."""
        return self.store.read(self.key, 0, self.stat().st_size)

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole content as text."""
        return self.read_bytes().decode(encoding)


# Files


class LocalFile:
    """An open file of this machine."""

    #: bytes of the end of an archive that are read at once
    tail_bytes = 1 << 16

    def __init__(self, fd: int) -> None:
        self.pread: Callable[[int, int], bytes] = partial(read_at, fd)
        self.size = os.fstat(fd).st_size

    def hold(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: the system reads ahead."""


@dataclass
class RemoteFile:
    """A file in a store, read by ranges."""

    path: RemotePath
    tail_bytes: int = _TAIL_BYTES
    _held: Held = field(default_factory=Held)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """Bytes from ``offset`` on, fewer where the file ends."""
        stop = min(offset + num_bytes, self.size)
        held = self._held.find(self.path.key, offset, stop)
        return self.path.store.read(self.path.key, offset, stop) if held is None else bytes(held)

    def hold(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch (offset, bytes) that are about to be read."""
        size = self.size
        inside = [(self.path.key, at, min(at + n, size)) for at, n in ranges if 0 <= at < size]
        self._held.add(self.path.store, merged(inside), _HELD_BYTES)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[LocalFile | RemoteFile]:
    """A file to read ranges of: ``size``, ``pread(num_bytes, offset)``. Raises ``OSError``."""
    if isinstance(path, RemotePath):
        yield RemoteFile(path)
        return
    with open(path, "rb", buffering=0) as raw:
        yield LocalFile(raw.fileno())


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
        if not isinstance(path, RemotePath):
            return
        store, end = path.store, offset + size
        entry = store.entry(path.key)
        if entry is None or end > entry.num_bytes:
            continue  # a problem of that file, which its reader will find
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            ranges.append((path.key, offset, end))
        else:
            ranges += [(path.key, offset, offset + _HEAD_BYTES), (path.key, end - _TAIL_BYTES, end)]
    if store is not None:
        # What cannot be fetched now is asked for again by the reader of that file, whose error names it.
        with suppress(OSError):
            store.hold(ranges)


def let_go(path: Path) -> None:
    """Drop what :func:`hold_descriptions` has fetched."""
    if isinstance(path, RemotePath):
        path.store.let_go()


def look_again(path: Path) -> None:
    """Drop what is known of a store, so that sizes and names are those of now. Raises ``CheckpointError``."""
    if isinstance(path, RemotePath):
        with reached(path):
            path.store.forget()
            path.store.tree(path.key)


@contextmanager
def reached(path: Path) -> Iterator[None]:
    """A context in which the ``OSError`` of a store that cannot be asked is a ``CheckpointError`` that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror or error}", where=str(error.filename or path)) from error
