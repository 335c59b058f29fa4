"""The target of a conversion: checks before anything is written, the errors where it cannot be, and its upload."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ullage.checkpoint.conversion.journal import FOLDER, lock, require_writing
from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import PARALLEL, Store, is_remote, key_of, store_at
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats.locate import COMPLETE, JOURNAL
from ullage.core.errors import InputError
from ullage.core.replacing import replacing

#: Bytes of the longest path of a file.
_LONGEST_PATH = 4095
#: Bytes of the longest name of a file or folder.
_LONGEST_NAME = 255
#: Bytes of the longest key of an object in the stores in use.
_LONGEST_KEY = 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_of(target: Path) -> Path:
    """The folder in which a conversion to ``target`` works. Raises ``InputError`` for a target without a name."""
    if not target.name:
        raise InputError("the target is the root of the file system", where=str(target), hint="name a folder in it")
    return target.with_name(target.name + ".partial")


def require_paths(targets: list[Target], target: Path) -> None:
    """Raise ``InputError`` where the system writes no checkpoints, or for two files of one name or a path too long."""
    require_writing()
    names = {t.name for t in targets}
    folders = set()
    for folder in {os.path.dirname(name) for name in names}:
        while folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    clash = sorted(names & folders) or sorted(n for n, count in Counter(t.name for t in targets).items() if count > 1)
    if clash:
        raise InputError("two files of the target would have one name", where=clash[0])
    longest = max(names, key=lambda name: len(os.fsencode(name)), default="")
    limit = _LONGEST_KEY if is_remote(target) else _LONGEST_PATH
    if not is_remote(target):
        target = partial_of(target)
        name = max(target.parts, key=lambda part: len(os.fsencode(part)))
        if len(os.fsencode(name)) > _LONGEST_NAME:
            expected = f"{_LONGEST_NAME} bytes, those of .partial among them"
            found = f"{len(os.fsencode(name))}"
            raise InputError(
                "the name of the target would be too long", where=name[:80], expected=expected, found=found
            )
    size = len(os.fsencode(f"{target}/{longest}"))
    if size > limit:
        raise InputError("a path would be too long", where=longest[:80], expected=f"{limit} bytes", found=f"{size}")


def require_writable(
    inventory: Inventory, target: Path, partial: Path, num_bytes: int, hint: str = "free some space"
) -> None:
    """Raise ``InputError`` where the target exists, lies inside the source, cannot be written, or has no room.

    ``hint``: what to do where there is no room.
    """
    if os.path.lexists(target):
        raise InputError("the target exists", where=str(target), hint="remove it, or name another")
    source = inventory.folder.resolve()
    if not is_remote(source) and target.resolve().is_relative_to(source):
        raise InputError("the target lies inside the source", where=str(target), hint="name a folder beside the source")
    if partial.exists() and not (partial / FOLDER).is_dir():
        raise InputError("a folder of this name is there, and it is not an interrupted conversion", where=str(partial))
    above = next(p for p in target.parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError("the target cannot be written", where=str(above), hint="name a folder that you may write to")
    # What an interrupted run has written already counts as free. In blocks: files are holes until units fill them.
    held = sum(p.stat().st_blocks * 512 for p in partial.rglob("*") if p.is_file()) if partial.exists() else 0
    free = shutil.disk_usage(above).free + held
    if free < num_bytes:
        expected = f"{num_bytes} bytes free"
        raise InputError("the disk is full", where=str(above), expected=expected, found=f"{free}", hint=hint)


def point_to(target: Path, name: str) -> None:
    """Write the file ``name`` beside the target, with the target's name. A run's own ``latest`` is left as it is."""
    pointer = target.parent / name
    if name == "latest" and pointer.exists():
        return
    with replacing(pointer) as file:  # a loader never reads half a name
        file.write(target.name)


def disk_error(error: OSError, where: Path, advice: str) -> InputError:
    """The error to raise where the system refuses to write; ``advice`` has braces for what must be so first."""
    once = "there is room" if error.errno in _NO_ROOM else "it can be written"
    what, place = f"cannot write: {error.strerror or error}", str(error.filename or where)
    return InputError(what, where=place, hint=advice.replace("{}", once))


# Conversion to a target in a store of objects, which can be written whole and in order only, and not be renamed.
#
# The target is made in a spool first, a folder of this machine, by the code of a local conversion and with its journal.
# Then its files are uploaded. From the beginning on the store holds ``.journal/mark``, the fingerprint of source, plan
# and options. At the end all sizes are compared with a fresh listing, and then come ``ullage.json``, the mark of a
# complete target, the pointer beside it, and the removal of the journal, in this order. A target with a journal and
# without ``ullage.json`` is refused by readers.
#
# A conversion that was interrupted is gone on with by the same command: on this machine from the spool, on any other
# from the files in the store that have their size, which need not be uploaded again.

#: A file up to this size is read and written by one request, many at a time; larger ones are left to the driver.
_SMALL_BYTES = 8 << 20
#: The object in a folder of a store that says that it is not finished.
MARK = f"{JOURNAL}/mark"


def spool_of(*places: object) -> Path:
    """The folder of this machine for files on their way between ``places``, which is found again by their names."""
    name = hashlib.sha256("\n".join(map(str, places)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ullage-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise InputError("a folder of this name is there, of another user", where=str(folder), hint="set TMPDIR")
    return folder


def send_files(target: Path, paths: dict[str, Path], progress: Callable[[str], None] = lambda name: None) -> None:
    """Upload files into a folder of a store, by their names there.

    ``progress``: called with each name when its object is there, never by two threads at once.
    """
    store, turn = store_at(target), threading.Lock()
    small = {name for name, path in paths.items() if path.stat().st_size <= _SMALL_BYTES}

    def one(name: str) -> None:
        key = f"{key_of(target)}/{name}"
        if name in small:
            store.write(key, paths[name].read_bytes())
        else:
            store.upload(paths[name], key)
        with turn:
            progress(name)

    with ThreadPoolExecutor(PARALLEL) as pool:
        sent = pool.map(one, sorted(small))
        # Large ones one after the other: the driver sends several parts of one at a time, each held in memory.
        for name in paths:
            if name not in small:
                one(name)
        list(sent)


@dataclass
class Upload:
    """One conversion to a store.

    Attributes:
        inventory: the source.
        target: the folder in the store.
        mark: fingerprint of source, plan and options.
    """

    inventory: Inventory
    target: Path
    mark: str

    def require_possible(self) -> None:
        """Raise ``InputError`` for a target in a store that is not possible whatever lies there."""
        source = self.inventory.folder
        if not self.target.name or key_of(self.target).strip("/") == self.target.name:
            raise InputError("the target is a whole bucket", where=str(self.target), hint="name a folder in it")
        if is_remote(source) and self.target.is_relative_to(source):
            hint = "name a folder beside the source"
            raise InputError("the target lies inside the source", where=str(self.target), hint=hint)

    @property
    def _store(self) -> Store:
        return store_at(self.target)

    def _key(self, name: str) -> str:
        return f"{key_of(self.target)}/{name}"

    @contextmanager
    def spool(self) -> Iterator[Path]:
        """The folder of this conversion's files on their way, locked; removed once they are in the store.

        Its name is that of source and target, so what an interrupted call left is found by the next one. An error of
        the disk or of the store in the context is an ``InputError``.
        """
        folder = spool_of(self.inventory.folder, self.target)
        with open(folder / "lock", "wb") as held:
            try:
                lock(held)
            except BlockingIOError:
                raise InputError("another conversion is writing this target", where=str(self.target)) from None
            with self._errors(folder):
                yield folder
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _errors(self, spool: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            url = str(error.filename)
            if "://" not in url:
                advice = "what is done is kept: run the same command again once {}"
                raise disk_error(error, spool, advice) from error
            hint = "what is done is kept: run the same command again"
            what = {FileNotFoundError: "the bucket is not there", PermissionError: "writing is not permitted"}
            hint = {FileNotFoundError: "make it", PermissionError: "look at the credentials"}.get(type(error), hint)
            what = what.get(type(error), "cannot write to the store")
            raise InputError(what, where=url, found=error.strerror, hint=hint) from error

    def begin(self) -> bool:
        """Mark the target as unfinished; returns whether all files are there already, of an interrupted call.

        Raises ``InputError`` where anything else lies there, such as files of another conversion.
        """
        there = self._store.look(key_of(self.target))
        if not there:
            self._store.write(self._key(MARK), self.mark.encode())
        elif MARK not in there or self._store.read(self._key(MARK), 0, there[MARK]) != self.mark.encode():
            raise InputError("the target exists", where=str(self.target), hint="remove it, or name another")
        return COMPLETE in there

    def withdraw(self) -> None:
        """Remove the mark of a conversion of which nothing was uploaded."""
        self._store.remove([self._key(MARK)])

    def send(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Upload the files of ``folder``, but those that are there at their size, and compare all sizes at the end.

        ``progress``: called with the bytes of each file that is in the store, never by two threads at once.
        """
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        summary = paths.pop(COMPLETE)
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        there = self._store.look(key_of(self.target))
        for name in sizes.keys() & there.keys():
            if there[name] == sizes[name]:
                del paths[name]
                progress(sizes[name])
        send_files(self.target, paths, lambda name: progress(sizes[name]))
        there = self._store.look(key_of(self.target))
        for name, size in sizes.items():
            if there.get(name) != size:
                where, found = str(self.target / name), f"{there[name]} bytes" if name in there else "no object"
                hint = "another program writes there; run the same command again"
                what = "an object is not what was uploaded"
                raise InputError(what, where=where, expected=size, found=found, hint=hint)
        self._store.write(self._key(COMPLETE), summary.read_bytes())

    def end(self, pointer: str | None) -> None:
        """Write the pointer beside a complete target, where its format has one, and remove the journal."""
        if pointer:
            self._store.write(key_of(self.target.with_name(pointer)), self.target.name.encode())
        self.withdraw()
