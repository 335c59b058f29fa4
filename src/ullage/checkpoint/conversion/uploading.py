"""Conversion to a target in a store of objects, which can be written whole and in order only, and not be renamed.

The target is made in a spool first, a folder of this machine, by the code of a local conversion and with its journal.
Then its files are uploaded. From the beginning on the store holds ``.journal/mark``, the fingerprint of source, plan
and options. At the end all sizes are compared with a fresh listing, and then come ``ullage.json``, the mark of a
complete target, the pointer beside it, and the removal of the journal, in this order. A target with a journal and
without ``ullage.json`` is refused by readers.

A conversion that was interrupted is gone on with by the same command: on this machine from the spool, on any other from
the files in the store that have their size, which need not be uploaded again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ullage.checkpoint.conversion.destination import disk_error
from ullage.checkpoint.conversion.journal import lock
from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import PARALLEL, Store, is_remote, key_of, store_at
from ullage.checkpoint.formats.locate import COMPLETE, JOURNAL
from ullage.core.errors import InputError

#: A file up to this size is read and written by one request, many at a time; larger ones are left to the driver.
_SMALL_BYTES = 8 << 20
_MARK = f"{JOURNAL}/mark"


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
        name = hashlib.sha256(f"{self.inventory.folder}\n{self.target}".encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"ullage-{os.getuid()}-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.getuid():
            raise InputError("a folder of this name is there, of another user", where=str(folder), hint="set TMPDIR")
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
            self._store.write(self._key(_MARK), self.mark.encode())
        elif _MARK not in there or self._store.read(self._key(_MARK), 0, there[_MARK]) != self.mark.encode():
            raise InputError("the target exists", where=str(self.target), hint="remove it, or name another")
        return COMPLETE in there

    def withdraw(self) -> None:
        """Remove the mark of a conversion of which nothing was uploaded."""
        self._store.remove([self._key(_MARK)])

    def send(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Upload the files of ``folder``, but those that are there at their size, and compare all sizes at the end.

        ``progress``: called with the bytes of each file that is in the store, never by two threads at once.
        """
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        summary = paths.pop(COMPLETE)
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        there, turn = self._store.look(key_of(self.target)), threading.Lock()

        def one(name: str) -> None:
            if there.get(name) != sizes[name]:
                if sizes[name] <= _SMALL_BYTES:
                    self._store.write(self._key(name), paths[name].read_bytes())
                else:
                    self._store.upload(paths[name], self._key(name))
            with turn:
                progress(sizes[name])

        with ThreadPoolExecutor(PARALLEL) as pool:
            small = pool.map(one, [name for name, size in sizes.items() if size <= _SMALL_BYTES])
            # Large ones one after the other: the driver sends several parts of one at a time, each held in memory.
            for name, size in sizes.items():
                if size > _SMALL_BYTES:
                    one(name)
            list(small)
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
