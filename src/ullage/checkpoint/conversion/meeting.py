"""Meeting of the processes that share a conversion, through files: there is no process group.

A launch begins when all of its processes have met: process 0 removes what an earlier launch left, each other process
writes a word of its own, and process 0 repeats them all in one file. A process that finds its word there knows that
process 0 of this launch is alive, and has a name for the launch. A failure is reported under that name, so one that an
earlier launch left is ignored, whatever ports and numbers torchrun gave it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ullage.checkpoint.conversion.journal import FOLDER
from ullage.errors import DistributedError

#: Seconds without any progress of any process after which a process gives up waiting.
PATIENCE = 900.0
_LAUNCH = "launch.json"


@dataclass
class Meeting:
    """The processes of one launch, around the folder ``partial``.

    Attributes:
        partial: the folder that they write into; the files by which they meet are in its journal's folder.
        rank: this process.
        world_size: number of processes.
        name: of this launch, once all have met.
    """

    partial: Path
    rank: int
    world_size: int
    name: str = ""
    _word: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def _folder(self) -> Path:
        return self.partial / FOLDER

    def clear(self) -> None:
        """Remove the files of earlier launches. Process 0 calls it before any other process begins."""
        for pattern in (_LAUNCH, "failed-*", "here-*", "done-*"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)

    def begin(self) -> None:
        """Wait until all processes of the launch are there. Process 0 has called :meth:`clear` before."""
        if self.world_size == 1:
            return
        if self.rank == 0:
            words: dict[int, str] = {}
            self._wait(lambda: self._all_here(words), "the other processes to begin", failures=False)
            self.name = self._word  # unique to this launch, and known to those that read the answer
            self._write(_LAUNCH, json.dumps({"name": self.name, "words": sorted(words.values())}))
            return
        self._wait(self._answered, "process 0 to begin", failures=False)

    def _all_here(self, words: dict[int, str]) -> bool:
        for rank in set(range(1, self.world_size)) - set(words):
            with suppress(OSError):
                words[rank] = (self._folder / f"here-{rank}").read_text()
        return len(words) == self.world_size - 1

    def _answered(self) -> bool:
        """Whether process 0 has repeated this process's word, which it may have removed: then it is written again."""
        with suppress(OSError, ValueError):
            said = json.loads((self._folder / _LAUNCH).read_text())
            if self._word in said["words"]:
                self.name = said["name"]
                return True
        with suppress(FileNotFoundError):  # the folder comes with process 0
            if not (self._folder / f"here-{self.rank}").exists():
                self._write(f"here-{self.rank}", self._word)
        return False

    def _write(self, name: str, text: str) -> None:
        """Write a file that others see whole or not at all."""
        new = self._folder / f".{name}.{self._word}"
        new.write_text(text)
        os.replace(new, self._folder / name)

    def finish_share(self) -> None:
        """Report to process 0 that this process writes to ``partial`` no more."""
        self._write(f"done-{self.rank}-{self.name}", "")

    def shares_finished(self) -> bool:
        """Whether every other process of the launch has reported that it writes no more."""
        others = range(1, self.world_size)
        return all((self._folder / f"done-{rank}-{self.name}").exists() for rank in others)

    def fail(self, error: Exception) -> None:
        """Report to the others of the launch that this process has failed."""
        if self.name:
            with suppress(OSError):
                self._write(f"failed-{self.rank}-{self.name}", str(error))

    def wait(self, ready: Callable[[], bool], whom: str) -> None:
        """Wait until ``ready()``. Raises ``DistributedError`` when another process fails, or none makes progress."""
        self._wait(ready, whom, failures=True)

    def _wait(self, ready: Callable[[], bool], whom: str, *, failures: bool) -> None:
        pause, last, seen = 0.01, time.monotonic(), -1
        while not ready():
            # Only failures under the name of this launch: before it has one, any that are there are of earlier ones.
            for path in self._folder.glob(f"failed-*-{self.name}") if failures else ():
                rank = path.name.split("-")[1]
                raise DistributedError("another process failed", where=f"process {rank}", found=path.read_text()[:300])
            # A journal that grows is progress of some process, however long one unit takes.
            size = sum(p.stat().st_size for p in self._folder.glob("*.jsonl") if p.exists())
            if size != seen:
                seen, last = size, time.monotonic()
            if time.monotonic() - last > PATIENCE:
                raise DistributedError(
                    f"waited {PATIENCE:.0f} s for {whom}",
                    where=str(self.partial),
                    hint="call convert on every process of torchrun, or with world_size=1 on one",
                )
            time.sleep(pause)
            # Polls of a file system that many machines may share: frequent at first, then twice a second.
            pause = min(0.5, pause * 1.5)


def remove_other(partial: Path) -> None:
    """Remove a partial of another conversion at once, although other processes may be writing to it."""
    aside = partial.with_name(f"{partial.name}.{uuid.uuid4().hex[:8]}.old")
    # A rename is atomic, and open files follow it: what others still write goes to the old folder, and is removed too.
    os.rename(partial, aside)
    shutil.rmtree(aside)
