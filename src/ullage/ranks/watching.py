"""Notice of a lost rank: killed, stopped or unreachable, it ends the run on all others, which say what is saved.

A collective waits for a rank that does not come: gloo raises at once where a connection breaks, and waits for half an
hour where it does not, which is so for a stopped process, a frozen machine, a network that drops packets. NCCL waits on
the device. So the ranks watch each other beside their collectives:

- A thread of each rank beats in the store of the process group, by a client of its own, and reads the beats of all.
  It beats through a slow first step, a compilation, an evaluation or a long save: silence is that of the process or its
  machine. Ages are counted by the reader's clock, from the last beat that it saw; no two clocks are compared.
- A second thread, which never waits for anything, decides. Of processes on its own machine it sees at once that they
  have ended. Where the store itself does not answer, the machine that holds it is lost, or this one is cut off.
- A beat tells the step, and whether the rank is still drawing its batches, which is the one part of a step in which
  ranks work alone. Who draws while others wait in that step, for longer than any step took, hangs.

Whoever finds a rank lost says so in its own beat, and the others follow. A main thread whose collective broke asks
:meth:`RankWatch.on` for the reason and raises :class:`RankLost`; where it is stuck in a collective, the second thread
prints the line and ends the process, status 75. Checkpoints are whole or absent whenever a process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ullage.core.errors import DistributedError, UllageError, first_line, listed
from ullage.core.leaving import LOST, leave_at_once
from ullage.ranks.groups import PeerLost
from ullage.ranks.topology import Axis
from ullage.ranks.wire import gather_objects

#: Seconds above the longest step seen after which a silent rank is lost, unless a limit is given.
_ABOVE_LONGEST = 60.0
#: Seconds between two beats, at most; a quarter of a limit that is shorter. As many ranks as this double it.
_BEAT, _MANY = 2.0, 64
#: Beats that may be missed by a rank that lives, on a busy machine, before a broken collective is put down to it.
_MISSED = 3
#: Seconds between two looks of the thread that decides, once it suspects something.
_URGENT = 0.2
#: Seconds that the main thread gets to raise by itself, or to come out of what it is in once it has.
_TO_RAISE, _TO_LEAVE = 1.0, 15.0
#: Seconds for a save under way, and for the look at what is saved.
_TO_SETTLE, _TO_LOOK = 5.0, 3.0
#: Seconds for a last word to the store, which may not answer.
_LAST_WORD = 2.0
#: What broken connections are called by those who raise a plain RuntimeError.
_BROKEN = ("gloo", "nccl", "connection", "broken pipe", "timed out", "a collective failed")

#: What a rank tells in its beat: where it is. ``FAILED`` and ``GONE`` are its last.
_RUNS, _FAILED, _GONE = "runs", "failed", "gone"
#: Stands for the store among the ranks that are lost.
_STORE = -1


class RankLost(DistributedError):
    """Another rank has ended, is stopped, cannot be reached, or hangs."""

    exit_status = LOST


@dataclass
class _Rank:
    """What this rank knows of another one.

    Attributes:
        rank: its number.
        host: name of its machine.
        process: its number there.
        is_here: whether the process can be looked at from this one.
        started: when the process began, as its machine counts.
        beat: the last one that was read, and ``heard`` when, in seconds of ``time.monotonic()``.
        moved: when its place in the step was last seen to change.
    """

    rank: int
    host: str
    process: int
    is_here: bool
    started: str
    beat: dict[str, Any] = field(default_factory=dict)
    heard: float = 0.0
    moved: float = 0.0

    @property
    def place(self) -> tuple[int, bool]:
        """Its step, and whether it has drawn its batches: compares as ranks go through a step."""
        return self.beat.get("step", 0), self.beat.get("drawn", True)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, process {self.process}"


class RankWatch:
    """The watch over all ranks of the default process group, and over this rank for the others.

    Nothing is done on one process, with a limit of 0, or where the group has no store that could be read.

    Args:
        limit: called at the beginning of a watch; seconds after which a silent rank is lost, None for 60 s above the
            longest step seen, 0 for no watch.
        saved: says in a few words what is saved, from any thread.
        settle: called with seconds to wait for a save under way, before the process ends.
    """

    def __init__(
        self,
        limit: Callable[[], float | None] = lambda: None,
        saved: Callable[[], str] = lambda: "",
        settle: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._limit_given, self._saved, self._settle = limit, saved, settle
        self._limit: float | None = None
        self._longest, self._failure = 0.0, ""
        self._step, self._drawn, self._since = 0, True, 0.0
        self._threads: _Threads | None = None

    @property
    def limit(self) -> float:
        """Seconds of silence after which a rank is lost."""
        return self._limit if self._limit is not None else _ABOVE_LONGEST + self._longest

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch within the block, on every rank. Collective at both ends, at the second one unless an error leaves it.

        Raises :class:`RankLost` in the place of what a collective raises because a rank is lost. Within another such
        block it does nothing.
        """
        if self._threads is not None or not self._is_wanted():
            yield
            return
        self._failure = ""
        threads = self._threads = _Threads.started(self)
        if threads is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            lost = threads.reason_of(error)
            threads.end(_FAILED, first_line(error) if lost is None else "")
            if lost is not None:
                raise lost from error
            raise
        else:
            threads.part()
            threads.end(_GONE)
        finally:
            self._threads = None

    def _is_wanted(self) -> bool:
        self._limit = self._limit_given()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return several and self._limit != 0

    # Where the main thread is.

    def begin_step(self) -> None:
        """This rank begins a step: it draws its batches."""
        self._step, self._drawn, self._since = self._step + 1, False, time.monotonic()

    def end_drawing(self) -> None:
        """This rank has its batches, and is about to meet the others."""
        self._drawn = True

    def end_step(self) -> None:
        """The step has been taken: what follows, an evaluation or a save, is not part of its time."""
        if self._since:
            self._longest, self._since = max(self._longest, time.monotonic() - self._since), 0.0

    def tell_of(self, error: BaseException) -> None:
        """This rank has failed where the others may be waiting in a collective of somebody else's, such as an engine's.

        They end after the limit, unless all meet before that.
        """
        self._failure = first_line(error)

    def beat(self) -> dict[str, Any]:
        """What this rank tells the others."""
        failed = {"state": _FAILED, "error": self._failure} if self._failure else {"state": _RUNS}
        return {"step": self._step, "drawn": self._drawn, **failed}


class _Threads:
    """The threads of a watch that is on.

    Attributes:
        ranks: all of them, this one too.
        lost: those that were found lost, and why, by rank.
    """

    def __init__(self, watch: RankWatch, client: Any, key: str, ranks: list[_Rank]) -> None:
        self._watch, self._client, self._key, self.ranks = watch, client, key, ranks
        self._own = dist.get_rank()
        self._process = os.getpid()
        self.lost: dict[int, str] = {}
        self._last: dict[str, Any] = {}
        self._count = 0
        self._contact = time.monotonic()
        self._store_error = ""
        self._over, self._beat_now = threading.Event(), threading.Event()
        self._deadline: float | None = None
        self._changing = threading.Lock()
        self._suspects: dict[int, float] = {}
        limit = watch.limit
        self.interval = min(_BEAT, limit / 4) * max(1.0, len(ranks) / _MANY)
        self._beating = threading.Thread(target=self._beats, name="ullage beats", daemon=True)
        self._deciding = threading.Thread(target=self._decides, name="ullage watch", daemon=True)

    @classmethod
    def started(cls, watch: RankWatch) -> _Threads | None:
        """Start watching: all ranks tell each other who they are. Collective; None where there is no store."""
        try:
            client = _client()
            # A store in a file keeps every beat for ever.
            client = client if client.has_extended_api() else None
        except Exception:  # of a backend with a rendezvous of its own
            client = None
        here = _this_machine()
        mine = (client is not None, uuid.uuid4().hex, here, socket.gethostname(), os.getpid(), _start_of())
        told = gather_objects(mine, Axis.world())
        if not all(has_store for has_store, *_ in told):
            return None
        ranks = [
            _Rank(rank, host, process, here != "" and where == here, started)
            for rank, (_, _, where, host, process, started) in enumerate(told)
        ]
        threads = cls(watch, client, f"ullage_watch_{told[0][1]}", ranks)
        threads._begin()
        return threads

    def _begin(self) -> None:
        self._client.set(f"{self._key}/{self._own}", json.dumps(self._watch.beat()))
        gather_objects(None, Axis.world())  # now every rank's beat can be read
        now = time.monotonic()
        for rank in self.ranks:
            rank.heard = rank.moved = now
        self._contact = now
        self._beating.start()
        self._deciding.start()

    # The thread that beats: it may wait for the store.

    def _beats(self) -> None:
        names = [f"{self._key}/{rank.rank}" for rank in self.ranks]
        while True:
            is_last = self._over.is_set()
            try:
                self._count += 1
                mine = {**self._watch.beat(), **self._last, "beat": self._count, "lost": list(self.lost.items())}
                self._client.set(names[self._own], json.dumps(mine))
                if is_last:
                    return
                self._hear(self._client.multi_get(names), time.monotonic())
                self._store_error = ""
            except Exception as error:
                if is_last:
                    return
                self._store_error = first_line(error)
                with contextlib.suppress(Exception):  # a connection that broke is made anew
                    self._client = _client()
            self._beat_now.wait(self.interval)
            self._beat_now.clear()

    def _hear(self, beats: list[bytes], now: float) -> None:
        self._contact = now
        for rank, text in zip(self.ranks, beats, strict=True):
            beat = json.loads(text)
            if beat == rank.beat:
                continue
            before, rank.beat, rank.heard = (rank.place, rank.beat.get("state")), beat, now
            if (rank.place, beat.get("state")) != before:
                rank.moved = now

    # The thread that decides: it never waits for another process.

    def _decides(self) -> None:
        before, pause = time.monotonic(), self.interval
        while not self._over.wait(pause):
            now = time.monotonic()
            if now - before > 2 * self.interval + 2.0:
                # This process was stopped, or held up, itself: the others have had no chance to be heard.
                self._forgive(now - before)
            before = now
            found = self._find(now)
            if found:
                self._tell(found)
            if self._deadline is None and self.lost:
                # Where a connection broke, the main thread raises by itself. Who is silent breaks none.
                self._deadline = now + _TO_RAISE
            if self._deadline is not None and now > self._deadline:
                self._leave()
            urgent = self._suspects or self._deadline is not None
            pause = min(_URGENT, self.interval) if urgent else self.interval

    def _forgive(self, seconds: float) -> None:
        self._contact += seconds
        for rank in self.ranks:
            rank.heard += seconds
            rank.moved += seconds

    def _tell(self, found: dict[int, str]) -> None:
        self.lost.update({rank: why for rank, why in found.items() if rank not in self.lost})
        self._beat_now.set()  # and the others hear of it

    def _find(self, now: float) -> dict[int, str]:
        """The ranks that are lost by now, and why, in words that follow "found"."""
        limit, others = self._watch.limit, [rank for rank in self.ranks if rank.rank != self._own]
        if now - self._contact > limit:
            return {_STORE: f"no answer for {now - self._contact:.0f} s, {self._store_error}".removesuffix(", ")}
        found = self._ended(others)
        for rank in others:
            state = rank.beat.get("state", _RUNS)
            # What another rank has found, of ranks other than this one: it lives, and hears of itself below.
            found |= {which: why for which, why in rank.beat.get("lost", ()) if which not in (self._own, _STORE)}
            silent = now - rank.heard
            if state == _RUNS and silent > limit:
                found.setdefault(rank.rank, f"{self._state_of(rank)}no sign of life for {silent:.0f} s")
            elif state == _FAILED and now - rank.moved > limit and rank.beat.get("error"):
                found.setdefault(rank.rank, f"it failed {now - rank.moved:.0f} s ago: {rank.beat['error']}")
            elif state == _FAILED and self._own in dict(rank.beat.get("lost", ())):
                found.setdefault(self._own, f"the others have given it up, {dict(rank.beat['lost'])[self._own]}")
        return found | self._hanging(now, limit)

    def _hanging(self, now: float, limit: float) -> dict[int, str]:
        """The ranks that draw their batches while others wait for them in the same step, for longer than the limit."""
        running = [rank for rank in self.ranks if rank.beat.get("state", _RUNS) == _RUNS]
        furthest = max((rank.place for rank in running), default=(0, True))
        step, drawn = furthest
        if not drawn or step < 2:  # in the first step, workers start and files are opened
            return {}
        behind = [rank for rank in running if rank.place == (step, False) and now - rank.moved > limit]
        return {rank.rank: f"it has been drawing the batches of a step for {now - rank.moved:.0f} s" for rank in behind}

    def _ended(self, others: list[_Rank]) -> dict[int, str]:
        """The ranks on this machine whose processes have ended without a word."""
        found = {}
        for rank in others:
            if not rank.is_here or rank.beat.get("state", _RUNS) != _RUNS or not _has_ended(rank):
                self._suspects.pop(rank.rank, None)
                continue
            # Its last word may be on its way: one more look at the store comes first.
            since = self._suspects.setdefault(rank.rank, self._contact)
            self._beat_now.set()
            if self._contact > since or self._store_error:
                found[rank.rank] = "its process has ended"
        return found

    def _state_of(self, rank: _Rank) -> str:
        stopped = rank.is_here and _status_of(rank.process)[:1] == "T"
        return "its process is stopped, " if stopped else ""

    def error(self) -> RankLost:
        """The error that names the ranks which are lost."""
        lost = sorted(self.lost.items())
        saved = _within(_TO_LOOK, self._watch._saved) or ""
        if lost[0][0] == _STORE:
            where = f"rank {self._own} on {socket.gethostname()}"
            store, hint = _address_of_store(), "the machine that holds it is lost, or this one is cut off"
            return RankLost(
                "the store of the ranks cannot be reached",
                where=where,
                expected=f"an answer of {store} within {self._watch.limit:.0f} s",
                found=lost[0][1],
                hint=f"{hint}{saved and '; '}{saved}",
            )
        named = [f"{self.ranks[rank]}: {why}" for rank, why in lost]
        error = RankLost(
            "a rank is lost" if len(lost) == 1 else f"{len(lost)} ranks are lost",
            where=f"noticed by rank {self._own} on {socket.gethostname()}",
            found=listed(named, 8, "; "),
            hint=saved or None,
        )
        error.failures = tuple(lost)
        return error

    def _leave(self) -> None:
        with self._changing:
            if self._over.is_set():
                return
            error = self.error()
        # A last word, so that nobody takes this rank for one that is lost.
        self._last = {"state": _FAILED, "error": ""}
        self._beat_now.set()
        _within(_TO_SETTLE, lambda: self._watch._settle(_TO_SETTLE))
        # In one write, since the others write theirs to the same file now.
        sys.stderr.write(f"ullage (rank {self._own}): {error}\n")
        sys.stderr.flush()
        self._over.set()
        self._beat_now.set()
        self._beating.join(_LAST_WORD)
        leave_at_once(LOST)

    # The main thread.

    def reason_of(self, error: BaseException) -> RankLost | None:
        """The rank that ``error`` of a collective is due to, if one is lost; waits some beats to see who is silent."""
        if not _is_of_collective(error):
            return None
        self._deadline = time.monotonic() + _TO_LEAVE  # the other thread ends what is stuck
        patience = time.monotonic() + (_MISSED + 2) * self.interval
        self._beat_now.set()
        while not self.lost and time.monotonic() < patience:
            now, silence = time.monotonic(), _MISSED * self.interval
            found = self._find(now)
            for rank in self.ranks:
                is_silent = rank.beat.get("state", _RUNS) == _RUNS and now - rank.heard > silence
                if rank.rank != self._own and is_silent and now - self._contact < silence:
                    found.setdefault(rank.rank, f"{self._state_of(rank)}no sign of life for {now - rank.heard:.0f} s")
            if now - self._contact > silence:
                found[_STORE] = f"no answer for {now - self._contact:.0f} s"
            self._tell(found)
            if self._others_failed():
                break
            time.sleep(min(0.05, self.interval / 4))
        return self.error() if self.lost else None

    def _others_failed(self) -> bool:
        """Whether a rank has raised an error of its own, which is then the reason."""
        return any(rank.beat.get("state") == _FAILED and rank.beat.get("error") for rank in self.ranks)

    def part(self) -> None:
        """Wait until all ranks have come to the end: who leaves earlier may take the store with it."""
        self._last = {"state": _GONE}
        self._beat_now.set()
        with contextlib.suppress(Exception):
            client = _client()
            if client.add(f"{self._key}/left", 1) == len(self.ranks):
                client.set(f"{self._key}/all", "1")
            client.wait([f"{self._key}/all"])

    def end(self, state: str, error: str = "") -> None:
        """End the threads with a last word to the other ranks; waits shortly for a store that does not answer."""
        self._last = {"state": state, "error": error}
        with self._changing:
            self._over.set()
        self._beat_now.set()
        if self._process == os.getpid():
            self._beating.join(_LAST_WORD)
            self._deciding.join(_LAST_WORD)


def _is_of_collective(error: BaseException) -> bool:
    """Whether an error may be what a collective raises because a rank is gone."""
    if isinstance(error, (PeerLost, dist.DistError)):
        return True
    is_ours = isinstance(error, UllageError) and not isinstance(error, DistributedError)
    return isinstance(error, RuntimeError) and not is_ours and any(word in str(error).lower() for word in _BROKEN)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or None where it does not within ``seconds`` or raises: a disk may hang as well."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _client() -> Any:
    """A client of the store of the process group for a thread of ours: one that waits holds up only itself."""
    store: Any = c10d._get_default_store()
    return store.clone()


def _address_of_store() -> str:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if host else "rank 0"


# Processes of this machine, as Linux shows them.


def _this_machine() -> str:
    """What processes have in common that see each other under the numbers that they call themselves by."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if _status_of(os.getpid()) else ""
    except OSError:
        return ""


def _status_of(process: int) -> str:
    """State and further fields of a process; "" if there is none."""
    try:
        # The name in parentheses may hold anything.
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return ""


def _start_of() -> str:
    return _started(_status_of(os.getpid()))


def _started(status: str) -> str:
    fields = status.split()
    return fields[19] if len(fields) > 19 else ""


def _has_ended(rank: _Rank) -> bool:
    status = _status_of(rank.process)
    return status[:1] in ("", "Z", "X") or _started(status) != rank.started
