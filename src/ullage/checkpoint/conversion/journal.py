"""The journal of a conversion: the files that are done, so that an interrupted one can go on.

Files are numbered, the same for the same source and options (``copying.split``). One that is done is a line of
``TARGET.partial/.journal/0.jsonl``, whose first line is a fingerprint of the plan and of the source files (names,
sizes, times): a journal of another source is not followed. A large file is synced before its line is written. The line
of small ones is believed until the machine is restarted, for what was written to files outlives the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import version_of
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats.locate import JOURNAL as FOLDER
from ullage.core.errors import InputError

#: Part of the fingerprint: a change of how files are numbered makes older journals those of another plan.
_VERSION = 4


def plan_of(targets: Iterable[Target]) -> str:
    """A digest that changes when any file of a target does, but for the bytes of its tensors."""
    names = [(t.name, t.num_bytes, hashlib.sha256(b"".join(x for _, x in t.texts)).hexdigest()) for t in targets]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def mark_of(inventory: Inventory, plan: str, options: dict[str, Any]) -> str:
    """A digest that changes when any source file, the plan, or any option does."""
    # Not by names and sizes alone: a file that was replaced by one of the same size is another source.
    files = [(file.name, *version_of(inventory.folder / file.name)) for file in inventory.files]
    text = json.dumps([_VERSION, options, str(inventory.folder), files, plan], default=str)
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


@dataclass
class Line:
    """What a journal keeps of files that are done.

    Attributes:
        runs: what was read, as (file, offset, bytes, crc).
        not_finite: (target, payload, elements that are NaN or Inf), where there are some.
    """

    runs: Any = field(default_factory=list)
    not_finite: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, target: int, payload: int, count: int) -> None:
        """Note elements that are not finite."""
        if count:
            self.not_finite.append((target, payload, count))

    def join(self, other: Line) -> None:
        """Add what another one keeps."""
        self.runs += other.runs
        self.not_finite += other.not_finite


class Journal:
    """The journal of one conversion, which holds the lock on its partial. ``add`` may be called by several threads.

    Attributes:
        done: lines by number of the files, of an earlier call with the same mark.
        removed_other: whether a partial of another plan or source was there, which was emptied.
    """

    def __init__(self, partial: Path, mark: str) -> None:
        folder = partial / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
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
        lines, self._boot, self._lock = self._stream.read().splitlines(), _boot(), threading.Lock()
        done = _believed(lines, mark, self._boot)
        self.done, self.removed_other = done or {}, bool(lines) and done is None
        if done is None:
            _empty(partial)
            self._stream.truncate(0)
        # A line that a killed process left half written must not swallow the next: begin on a new line.
        self._stream.write("\n" if done is not None else json.dumps({"mark": mark}) + "\n")
        self._stream.flush()

    def add(self, number: int, line: Line, *, synced: bool) -> None:
        """Record files that are done, by their number; ``synced``: they will be there after a restart too."""
        content = {"files": number, "runs": line.runs, "not_finite": line.not_finite}
        content |= {} if synced else {"boot": self._boot}
        text = json.dumps(content, separators=(",", ":")) + "\n"
        line.runs = np.array(line.runs, np.int64).reshape(-1, 4)  # 32 bytes a run, not 300
        with self._lock:
            self._stream.write(text)
            self._stream.flush()

    def close(self) -> None:
        """Close the file, which also gives its lock back."""
        self._stream.close()


def _empty(partial: Path) -> None:
    """Remove all files of a partial but its journal, which is locked."""
    for path in partial.iterdir():
        if path.name != FOLDER:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _believed(lines: list[str], mark: str, boot: str) -> dict[int, Line] | None:
    """The lines whose bytes must be in the files, by number; None where the journal is of another plan or source."""
    done: dict[int, Line] = {}
    is_same = False
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # empty, or half written
            continue
        if "mark" in line:
            if line["mark"] != mark:
                return None
            is_same = True
        elif "boot" not in line or (boot and line["boot"] == boot):
            runs = np.array(line["runs"], np.int64).reshape(-1, 4)
            done[line["files"]] = Line(runs, [(a, b, c) for a, b, c in line["not_finite"]])
    return done if is_same else None


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
