"""Cases in forks of one process that has imported what they need, a few at a time, on one rank or several.

An import of torch, transformers and an engine takes seconds, a fork milliseconds. A fork leaves what it found in a file
and ends at once; where it dies or does not end, that is what was found.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.unchanged.records import said

#: Seconds after which a case is ended: wide, since other work may hold the cores.
LIMIT = 1200.0


@dataclass
class Task:
    """``call(rank)`` on each of ``ranks`` processes, in the folder ``place``; what each returns is JSON.

    ``launched``: a single process too has the environment that a launcher gives to ranks, as DeepSpeed needs it.
    """

    name: str
    call: Callable[[int], Any]
    place: Path
    ranks: int = 1
    launched: bool = False


@dataclass
class _Running:
    task: Task
    #: process id -> rank
    alive: dict[int, int]
    until: float


def run_all(tasks: Iterable[Task], jobs: int, title: str) -> dict[str, list[Any]]:
    """What each rank of each task returned, ``{"error": ...}`` where it raised or died; at most ``jobs`` processes."""
    waiting: list[Task] = list(tasks)[::-1]
    running: list[_Running] = []
    try:
        return _run_all(waiting, running, jobs, title)
    finally:
        for child in (child for each in running for child in each.alive):
            os.kill(child, signal.SIGKILL)


def _run_all(waiting: list[Task], running: list[_Running], jobs: int, title: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    with tqdm(total=len(waiting), desc=title, unit="case", leave=True) as bar:
        while waiting or running:
            busy = sum(len(each.alive) for each in running)
            while waiting and (not running or busy + waiting[-1].ranks <= jobs):
                running.append(_start(waiting.pop()))
                busy += running[-1].task.ranks
            time.sleep(0.003)
            for each in list(running):
                _look_after(each)
                if not each.alive:
                    running.remove(each)
                    found[each.task.name] = [_left(each.task, rank) for rank in range(each.task.ranks)]
                    bar.update()
    return found


def _start(task: Task) -> _Running:
    task.place.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    alive = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(task.ranks):
        child = os.fork()
        if child == 0:
            _be(task, rank, port)
        alive[child] = rank
    return _Running(task, alive, time.monotonic() + LIMIT)


def _be(task: Task, rank: int, port: str) -> None:
    """The fork, which never returns."""
    try:
        if task.ranks > 1 or task.launched:
            world = str(task.ranks)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
        os.chdir(task.place)
        log = os.open(task.place / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        try:
            value = task.call(rank)
        except Exception as error:
            import traceback

            traceback.print_exc()
            value = {"error": said(error)}
        part = task.place / f".part{rank}"
        part.write_text(json.dumps(value))
        part.rename(task.place / f".value{rank}")
        if task.ranks > 1:  # a rank that ends closes its connections: not before the others have read from them
            _meet(task)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _meet(task: Task) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if all((task.place / f".value{rank}").exists() for rank in range(task.ranks)):
            return
        time.sleep(0.01)


def _look_after(running: _Running) -> None:
    for child, rank in list(running.alive.items()):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            del running.alive[child]
            (running.task.place / f".status{rank}").write_text(str(os.waitstatus_to_exitcode(status)))
        elif time.monotonic() > running.until:
            os.kill(child, signal.SIGKILL)


def status_of(task: Task, rank: int = 0) -> int:
    """With which status a rank of a task that has run left."""
    return int((task.place / f".status{rank}").read_text())


def _left(task: Task, rank: int) -> Any:
    path = task.place / f".value{rank}"
    if path.exists():
        return json.loads(path.read_text())
    return {"error": f"left with status {status_of(task, rank)}, nothing found"}
