"""Conversion to a target in a store of objects, which can be written whole and in order only, and not be renamed.

The files of the target are made in batches in a spool, a folder of this machine, by the same code as a local target.
While one batch is made, the one before is uploaded; then its part of the spool is removed. So the spool holds two
batches: each is 512 MiB of files, or one file that is larger.

What is done is noted in the target itself, in objects under ``.journal/``: ``plan.json`` first, with the fingerprint of
source, plan and options and the names of all files; one object per batch, once all of its files are there. A conversion
that was interrupted is gone on with from these by the same command, on any machine. At the end all sizes are compared
with a fresh listing, and then come ``ullage.json``, the mark of a complete target, the pointer beside it, and the
removal of the journal, in this order. A target with a journal and without ``ullage.json`` is refused by readers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.conversion import checksums, copying
from ullage.checkpoint.conversion.destination import disk_error, require_room
from ullage.checkpoint.conversion.journal import lock, split
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats.locate import COMPLETE, JOURNAL
from ullage.checkpoint.inventory import Inventory
from ullage.checkpoint.reading import Unreadable
from ullage.checkpoint.remote.paths import is_remote, key_of, store_at
from ullage.checkpoint.remote.store import PARALLEL, Store
from ullage.core.errors import CheckpointError, InputError

#: A batch is closed once it holds so many bytes or files.
BATCH_BYTES, BATCH_FILES = 512 << 20, 2000
#: A file up to this size is read and written by one request, many at a time; larger ones are left to the driver.
_SMALL_BYTES = 8 << 20
_PLAN = f"{JOURNAL}/plan.json"


@dataclass(frozen=True)
class Batch:
    """Targets ``[first, last)``, which are made, uploaded and noted together."""

    number: int
    first: int
    last: int
    num_bytes: int

    @property
    def note(self) -> str:
        """The object of the journal that says that the batch is in the store."""
        return f"{JOURNAL}/batch-{self.number:06d}.json"


def require_writable(inventory: Inventory, target: Path) -> None:
    """Raise ``InputError`` for a target in a store that is not possible whatever lies there."""
    if not target.name or key_of(target).strip("/") == target.name:
        raise InputError("the target is a whole bucket", where=str(target), hint="name a folder in it")
    if is_remote(inventory.folder) and target.is_relative_to(inventory.folder):
        raise InputError("the target lies inside the source", where=str(target), hint="name a folder beside the source")


@dataclass
class Upload:
    """One conversion to a store.

    Attributes:
        inventory: the source.
        targets: all files of the target.
        target: the folder in the store.
        mark: fingerprint of source, plan and options.
        workers: threads that make files.
        progress: called with all bytes that are in the store so far, never by two threads at once.
        notes: lines for the report.
    """

    inventory: Inventory
    targets: list[Target]
    target: Path
    mark: str
    workers: int
    progress: Callable[[int], None]
    notes: list[str] = field(default_factory=list)
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def _store(self) -> Store:
        return store_at(self.target)

    def _key(self, name: str) -> str:
        return f"{key_of(self.target)}/{name}"

    def run(self, judged: Callable[[dict[int, dict[str, Any]]], str], *, pointer: str | None) -> int:
        """Convert, or go on; returns the bytes that an earlier call had done.

        ``judged`` compares the source's checksums with the journal's lines and returns the text of ``ullage.json``.
        ``pointer``: name of the file beside the target that names it, where the format has one.

        Raises ``InputError`` for a target that exists or cannot be written, ``CheckpointError`` for a source that is
        damaged; then nothing is left in the store.
        """
        batches = batches_of(self.targets)
        with _spool(str(self.inventory.folder), str(self.target)) as spool, self._errors(spool):
            there = self._begin()
            if COMPLETE in there:  # all but the last steps
                self.notes.append("every file was there already, of an interrupted run")
                self._end(pointer=pointer)
                return sum(b.num_bytes for b in batches)
            found = self._noted(batches, there)
            resumed = self._done = sum(batches[number].num_bytes for number in found)
            try:
                found |= self._convert([b for b in batches if b.number not in found], spool)
                every = (line for number in sorted(found) for line in found[number].values())
                self._finish(judged(dict(enumerate(every))), pointer=pointer)
            except CheckpointError as error:
                if not isinstance(error, Unreadable):  # refused now, refused later: nothing is kept
                    with suppress(OSError):
                        self._remove([t.name for t in self.targets])
                raise
        return resumed

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

    # What is there already

    def _begin(self) -> dict[str, int]:
        """Names and sizes of what lies in the target, which is of this conversion; writes the plan if there is none."""
        there = self._store.look(key_of(self.target))
        plan = self._plan(there[_PLAN]) if _PLAN in there else None
        if there and plan is None:
            raise InputError("the target exists", where=str(self.target), hint="remove it, or name another")
        if plan is not None and plan["mark"] != self.mark:
            if COMPLETE in there:
                raise InputError("the target exists", where=str(self.target), hint="remove it, or name another")
            self._remove(plan["names"])
            self.notes.append("an interrupted conversion of another source or other options was removed")
            there, plan = {}, None
        if plan is None:
            text = json.dumps({"mark": self.mark, "names": [t.name for t in self.targets]})
            self._store.write(self._key(_PLAN), text.encode())
        return there

    def _plan(self, num_bytes: int) -> dict[str, Any] | None:
        try:
            plan = json.loads(self._store.read(self._key(_PLAN), 0, num_bytes))
            names, _ = plan["names"], plan["mark"]
            # What is removed by this list must be in the target.
            return plan if all(".." not in name.split("/") for name in names) else None
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def _noted(self, batches: list[Batch], there: dict[str, int]) -> dict[int, dict[int, dict[str, Any]]]:
        """The journal's lines of each batch whose files are all there at their sizes, by number."""
        noted = [b for b in batches if b.note in there]
        noted = [b for b in noted if all(there.get(t.name) == t.num_bytes for t in self.targets[b.first : b.last])]
        texts = self._store.read_many([(self._key(b.note), 0, there[b.note]) for b in noted])
        found = {}
        for batch, text in zip(noted, texts):
            said = json.loads(text)
            if said["batch"] == [batch.first, batch.last]:
                found[batch.number] = {line["unit"]: line for line in said["lines"]}
        return found

    # Making and uploading

    def _convert(self, batches: list[Batch], spool: Path) -> dict[int, dict[int, dict[str, Any]]]:
        """Make and upload batches; returns their lines. One is made while the one before is uploaded."""
        # So two neighbouring ones must fit into the spool.
        sizes = [batch.num_bytes for batch in batches]
        needed = max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)
        require_room(spool, needed, hint="free some space, or set TMPDIR to a folder with more of it")
        found, waiting = {}, None
        with ThreadPoolExecutor(1) as sender:
            for batch in batches:
                folder = spool / str(batch.number)
                lines = found[batch.number] = self._make(batch, folder)
                if waiting is not None:
                    waiting.result()
                waiting = sender.submit(self._send, batch, folder, lines)
            if waiting is not None:
                waiting.result()
        return found

    def _make(self, batch: Batch, folder: Path) -> dict[int, dict[str, Any]]:
        """Make the files of a batch in the spool; returns the lines of its units."""
        targets = self.targets[batch.first : batch.last]
        units = split(targets)
        copying.prepare(folder, targets)
        lines = copying.run_units(self.inventory, targets, folder, units, None, self.workers, None)
        checksums.fill_checksums(targets, folder, units, lines)
        # Targets are numbered within the batch so far, and through all of them in the journal.
        for line in lines.values():
            if "not_finite" in line:
                line["not_finite"] = [(batch.first + i, number, count) for i, number, count in line["not_finite"]]
        return lines

    def _send(self, batch: Batch, folder: Path, lines: dict[int, dict[str, Any]]) -> None:
        """Upload a batch, note it, and free its part of the spool."""
        targets = self.targets[batch.first : batch.last]

        def one(target: Target) -> None:
            if target.num_bytes <= _SMALL_BYTES:
                self._store.write(self._key(target.name), (folder / target.name).read_bytes())
            else:
                self._store.upload(folder / target.name, self._key(target.name))
            with self._lock:
                self._done += target.num_bytes
                self.progress(self._done)

        with ThreadPoolExecutor(PARALLEL) as pool:
            small = pool.map(one, [target for target in targets if target.num_bytes <= _SMALL_BYTES])
            # Large ones one after the other: the driver sends several parts of one at a time, each held in memory.
            for target in targets:
                if target.num_bytes > _SMALL_BYTES:
                    one(target)
            list(small)
        said = {"batch": [batch.first, batch.last], "lines": list(lines.values())}
        text = json.dumps(said, separators=(",", ":"), default=np.ndarray.tolist)
        self._store.write(self._key(batch.note), text.encode())
        shutil.rmtree(folder)

    def _finish(self, summary: str, *, pointer: str | None) -> None:
        """Compare all sizes with what the store lists, then mark the target as complete."""
        there = self._store.look(key_of(self.target))
        for target in self.targets:
            size = there.get(target.name)
            if size != target.num_bytes:
                where, found = str(self.target / target.name), "no object" if size is None else f"{size} bytes"
                hint = "another program writes there; run the same command again"
                raise InputError(
                    "an object is not what was uploaded", where=where, expected=target.num_bytes, found=found, hint=hint
                )
        self._store.write(self._key(COMPLETE), summary.encode())
        self._end(pointer=pointer)

    def _end(self, *, pointer: str | None) -> None:
        """What follows the mark: the pointer beside the target, and the removal of the journal."""
        if pointer:
            self._store.write(key_of(self.target.with_name(pointer)), self.target.name.encode())
        self._remove([])

    def _remove(self, names: list[str]) -> None:
        """Remove files of that name, and the journal."""
        there = self._store.look(key_of(self.target))
        notes = [n for n in there if n.startswith(f"{JOURNAL}/") and n != _PLAN]
        self._store.remove([self._key(n) for n in [*notes, *names] if n in there])
        # The plan last: as long as it is there, the same command ends what is left to do.
        self._store.remove([self._key(_PLAN)])


def batches_of(targets: list[Target]) -> list[Batch]:
    """The batches of a conversion, the same for the same targets."""
    batches: list[Batch] = []
    first = held = 0
    for index, target in enumerate(targets):
        # A file that would overfill a batch begins the next one, so that a spool holds no more than it must.
        if index > first and (held + target.num_bytes > BATCH_BYTES or index - first >= BATCH_FILES):
            batches.append(Batch(len(batches), first, index, held))
            first, held = index, 0
        held += target.num_bytes
    if targets:
        batches.append(Batch(len(batches), first, len(targets), held))
    return batches


@contextmanager
def _spool(source: str, target: str) -> Iterator[Path]:
    """The folder of this conversion's files on their way, empty and locked; removed at the end.

    Its name is that of source and target, so what a killed process left is found by the next call, and removed.
    """
    name = hashlib.sha256(f"{source}\n{target}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ullage-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise InputError("a folder of this name is there, of another user", where=str(folder), hint="set TMPDIR")
    with open(folder / "lock", "wb") as held:
        try:
            lock(held)
        except BlockingIOError:
            raise InputError("another conversion is writing this target", where=target) from None
        inner = folder / "files"
        shutil.rmtree(inner, ignore_errors=True)
        inner.mkdir()
        try:
            yield inner
        finally:
            shutil.rmtree(folder, ignore_errors=True)
