"""Units of the work of a conversion, and the journal of those that are done, so that an interrupted one can go on.

A conversion is a list of units, numbered, the same for the same source and options. As units are finished, lines are
appended to ``TARGET.partial/.journal/0.jsonl``. The first line is a fingerprint of the plan and of the source
files (names, sizes, times): a journal of another source is not followed. A line may be believed while the machine has
not been restarted, for what was written to files outlives the process; after a restart only lines before a mark
``synced`` count, which is written after the file system was synced.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.core.paths import version_of
from ullage.checkpoint.core.reading import row_elements
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats.locate import JOURNAL as FOLDER
from ullage.core.errors import InputError

#: Work that a restart of the machine may cost at most, by bytes written or by time, whichever comes first.
_SYNC_EVERY_BYTES = 8 << 30
_SYNC_EVERY_SECONDS = 30.0
#: Part of the fingerprint: a change of how units are cut or numbered makes older journals those of another plan.
_VERSION = 3


def mark_of(inventory: Inventory, targets: list[Target], options: dict[str, Any]) -> str:
    """A digest that changes when any source file, any target file, or any option does."""
    # Not by names and sizes alone: a file that was replaced by one of the same size is another source.
    files = [(file.name, *version_of(inventory.folder / file.name)) for file in inventory.files]
    names = [
        (t.name, t.num_bytes, t.texts and hashlib.sha256(b"".join(x for _, x in t.texts)).hexdigest()) for t in targets
    ]
    text = json.dumps([_VERSION, options, str(inventory.folder), files, names], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _boot() -> str:
    # A name of this run of the kernel, another one after each restart; empty where the system has none.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def sync_files(folder: Path) -> None:
    """Write what the file system of ``folder`` holds in memory to the disk, and wait for it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    except AttributeError:  # no syncfs on this system
        os.sync()
    finally:
        os.close(fd)


class Journal:
    """The journal of one conversion, which holds the lock on its partial. ``add`` may be called by several threads.

    Attributes:
        done: lines of finished units by number, of an earlier call with the same mark.
        removed_other: whether a partial of another plan or source was there, which was emptied.
    """

    def __init__(self, partial: Path, mark: str) -> None:
        folder = partial / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._partial = partial
        self._stream = open(folder / "0.jsonl", "a+", encoding="utf-8")  # noqa: SIM115
        try:
            # Held until the stream is closed or the process dies, so a killed conversion leaves no stale lock.
            lock(self._stream)
        except BlockingIOError:
            self._stream.close()
            raise InputError("another conversion is writing this target", where=str(partial)) from None
        except OSError:
            pass  # a file system without locks
        self._stream.seek(0)
        lines = self._stream.read().splitlines()
        done = _durable_lines(lines, mark) if lines else {}
        self.done, self.removed_other = done or {}, done is None
        if done is None:
            _empty(partial)
            self._stream.truncate(0)
        # A line that a killed process left half written must not swallow the next: begin on a new line.
        self._stream.write("\n" if lines and done is not None else json.dumps({"mark": mark}) + "\n")
        self._stream.write(json.dumps({"boot": _boot()}) + "\n")
        self._stream.flush()
        self._lock = threading.Lock()
        self._bytes, self._time = 0, time.monotonic()

    def add(self, line: dict[str, Any], num_bytes: int) -> None:
        """Record a finished unit; from time to time sync the files written, and record that too."""
        text = json.dumps(line, separators=(",", ":")) + "\n"
        with self._lock:
            self._stream.write(text)
            self._stream.flush()
            self._bytes += num_bytes
            # A sync covers all that this process has written before, so a mark vouches for all lines above it. The lock
            # keeps lines of later units from slipping in between.
            late = time.monotonic() - self._time > _SYNC_EVERY_SECONDS
            if self._bytes >= _SYNC_EVERY_BYTES or (late and self._bytes):
                sync_files(self._partial)
                self._stream.write('{"synced":true}\n')
                self._stream.flush()
                self._bytes, self._time = 0, time.monotonic()

    def close(self) -> None:
        """Close the file, which also gives its lock back."""
        self._stream.close()


def _empty(partial: Path) -> None:
    """Remove all files of a partial but its journal, which is locked."""
    for path in partial.iterdir():
        if path.name != FOLDER:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _durable_lines(lines: list[str], mark: str) -> dict[int, dict[str, Any]] | None:
    """Lines of finished units by number; None when the journal is of another plan or source.

    Only lines whose bytes must be in the files: those before a ``synced`` mark, and all since the machine started.
    """
    done: dict[int, dict[str, Any]] = {}
    pending: list[dict[str, Any]] = []  # not yet followed by a mark
    here, boot, seen_mark = _boot(), "", False
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # empty, or half written
            continue
        if "mark" in line:
            if line["mark"] != mark:
                return None
            seen_mark = True
        elif "boot" in line:
            if boot and boot != here:
                pending = []  # written before a restart and never synced
            boot = line["boot"]
        elif "synced" in line:
            done |= {unit["unit"]: unit for unit in pending}
            pending = []
        else:
            pending.append(line)
    # What this boot wrote need not be synced: a killed process leaves its pages to the kernel, a restart does not.
    if boot == here and here:
        done |= {unit["unit"]: unit for unit in pending}
    return done if seen_mark else None


# Units: a range of one large tensor, small tensors that lie side by side in a large file, or some small files.

#: Targets and tensors up to this size are composed in memory, many together, and written at once.
SMALL_BYTES = 1 << 20
#: Tensors that are composed together at most.
_TOGETHER = 2048
#: A unit of a large file, and of small files together.
UNIT_BYTES = 32 << 20


@dataclass(frozen=True)
class Unit:
    """Part of the work: small targets ``[first, last)`` whole, or a part of target ``first``.

    Attributes:
        number: place of the unit among all units; its name in the journal.
        first: number of the first target.
        last: number after that of the last target.
        payload: None for small targets, -1 for a plain copy, else number of the (first) payload of target ``first``.
        start: first of the range: a byte of a plain copy, an element of a payload.
        stop: end of the range, in the same unit.
        num_bytes: bytes that are written.
        neighbours: of small payloads, those, and where they lie.
    """

    number: int
    first: int
    last: int
    payload: int | None = None
    start: int = 0
    stop: int = 0
    num_bytes: int = 0
    neighbours: SideBySide | None = None


@dataclass(frozen=True)
class SideBySide:
    """Bytes ``[begin, end)`` of target number ``target``: payloads ``[first, last)`` and all texts between them."""

    target: int
    first: int
    last: int
    begin: int
    end: int


def neighbours_in(index: int, target: Target) -> list[SideBySide]:
    """The stretches of a large target in which small payloads lie side by side, in order."""
    found: list[SideBySide] = []
    first, begin, end = 0, 0, 0  # of the stretch that is being made; the end of the last payload

    def close(last: int) -> None:
        if last > first:
            found.append(SideBySide(index, first, last, begin, end))

    for number, payload in enumerate(target.payloads):
        size = payload.tensor.numel * ITEM_BYTES[payload.dtype]
        if size > SMALL_BYTES:
            close(number)
            first, begin = number + 1, payload.offset + size
        elif number > first and (payload.offset - begin > UNIT_BYTES // 4 or number - first >= _TOGETHER):
            close(number)
            first, begin = number, end
        end = payload.offset + size
    close(len(target.payloads))
    return found


def is_small(target: Target) -> bool:
    """Whether the target is composed in memory and written at once."""
    return target.num_bytes <= SMALL_BYTES and target.copy_of is None


def split(targets: list[Target]) -> list[Unit]:
    """The units of work for ``targets``; the same for the same targets."""
    units: list[Unit] = []
    first = held = 0

    def close(last: int) -> None:
        nonlocal first, held
        if last > first:
            units.append(Unit(len(units), first, last, num_bytes=held))
        first, held = last + 1, 0  # target ``last`` is a large one, with units of its own

    for index, target in enumerate(targets):
        # Small targets are gathered into a unit until it is worth a line in the journal.
        if is_small(target):
            held += target.num_bytes
            # At most 256 files: their time is that of opening them, not of their bytes.
            if held >= UNIT_BYTES // 4 or index - first >= 255:
                close(index + 1)
                first = index + 1  # no large target stands between
            continue
        # A large target closes the unit of small ones and is cut into ranges, at whole rows of each payload.
        close(index)
        if target.copy_of is not None:
            for start in range(0, max(1, target.num_bytes), UNIT_BYTES):
                stop = min(start + UNIT_BYTES, target.num_bytes)
                units.append(Unit(len(units), index, index + 1, -1, start, stop, stop - start))
        together = neighbours_in(index, target)
        for part in together:
            units.append(
                Unit(len(units), index, index + 1, part.first, num_bytes=part.end - part.begin, neighbours=part)
            )
        composed = {number for part in together for number in range(part.first, part.last)}
        for number, payload in enumerate(target.payloads):
            if number in composed:
                continue
            row = row_elements(payload.tensor)
            step = max(1, UNIT_BYTES // (row * ITEM_BYTES[payload.dtype])) * row
            for start in range(0, payload.tensor.numel, step):
                stop = min(start + step, payload.tensor.numel)
                size = (stop - start) * ITEM_BYTES[payload.dtype]
                units.append(Unit(len(units), index, index + 1, number, start, stop, size))
    close(len(targets))
    return units


# The lock

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
