"""The end of a process whose ranks talked to each other: no thread of theirs may need Python while Python ends.

A collective of gloo is run by a thread of its group. The thread wakes the caller first and lets go of the collective's
tensors after that, for which it needs the interpreter's lock. If the interpreter has begun to end by then, CPython ends
the thread by unwinding it through frames that must not be unwound, and the process aborts: "terminate called without an
active exception", status -6 after a run in which everything went well. ``destroy_process_group`` joins the threads of
those groups that nobody else refers to; a DistributedDataParallel model, an engine or a variable of the caller's script
is enough to keep the others running.

So before the interpreter ends, :func:`end_groups` ends our own threads, waits until every thread of gloo has let go of
what it ran and sleeps, and destroys the groups then. It runs at exit in every process in which something of ours that
talks between ranks was made (:func:`end_groups_at_exit`). Threads that sleep have no collective under way, so
destroying the groups waits for no other rank. After an error, where one may be under way that no rank will ever join,
nothing is destroyed.

Source: ``ProcessGroupGloo::runLoop`` of torch 2.13; ``take_gil`` of CPython 3.11.
"""

from __future__ import annotations

import atexit
import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

#: Seconds that a thread gets to let go: of a run that ended well, and after an error, when others wait for this rank.
_PATIENCE, _AFTER_ERROR = 10.0, 0.5
#: The name that torch gives gloo's threads, as Linux cuts it.
_WORKER = "pt_gloo_runloop"
_THREADS = Path("/proc/self/task")
#: The number of the system call futex.
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
_FUTEX_WAIT_BITSET, _COMMAND = 9, 0x7F

LetGo = Callable[[float], bool]

_let_go: list[LetGo] = []
_process: int | None = None


def before_the_end(let_go: LetGo) -> LetGo:
    """Have ``let_go(until)`` called before groups end: it drops what refers to a group and ends what uses one.

    It returns by ``until`` of ``time.monotonic()``, and says whether it could.
    """
    _let_go.append(let_go)
    return let_go


def end_groups_at_exit() -> None:
    """From now on the process groups of this process end before its interpreter does; may be called often.

    The handler itself is registered when this module is imported, early, so that it runs after those of the caller's
    script: they may still use the groups. It does nothing in a process that was forked from this one.
    """
    global _process
    _process = os.getpid()


def end_groups(within: float = _PATIENCE, *, destroy: bool = True) -> bool:
    """End our threads, wait for gloo's, and destroy the process groups if there are any left.

    ``within``: seconds to wait in all; nothing is waited for where every thread sleeps. Returns whether the interpreter
    can end without harm, as far as this process can tell: False where a collective is under way, and then nothing is
    destroyed, since that would wait for ranks that may never come.
    """
    if _process != os.getpid():
        return True
    until = time.monotonic() + within
    ended = [let_go(until) for let_go in _let_go]  # all of them, also after one that could not
    asleep = _workers_sleep(until)
    if not all(ended) or asleep is False:
        return False
    if destroy and dist.is_available() and dist.is_initialized():
        with suppress(Exception):  # the process is over: whatever a backend says now concerns nobody
            dist.destroy_process_group()
        if asleep is None:  # it cannot be seen: what lies in cycles is freed while there is an interpreter to do it
            gc.collect()
    return True


def _workers_sleep(until: float) -> bool | None:
    """Wait until all of gloo's threads wait for work; whether they do. None where the system does not tell."""
    before: list[str] | None = None
    while True:
        states = _states_of_workers()
        if states is None:
            return None
        if all(map(waits_for_work, states)):
            # Twice alike: a thread may have been seen before another one gave it something to do.
            if not states or states == before:
                return True
            before = states
        else:
            before = None
        if time.monotonic() > until:
            return False
        time.sleep(0.001)  # without the interpreter's lock, which they need


def _states_of_workers() -> list[str] | None:
    """The system call in which each of gloo's threads is, as Linux writes it; None where it does not."""
    if _FUTEX is None or not (_THREADS / str(os.getpid()) / "syscall").is_file():
        return None
    states = []
    for thread in os.listdir(_THREADS):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if (_THREADS / thread / "comm").read_text().strip() == _WORKER:
                states.append(f"{thread} {(_THREADS / thread / 'syscall').read_text()}")
    return states


def waits_for_work(state: str, futex: str | None = _FUTEX) -> bool:
    """Whether a thread sleeps on a condition variable without a limit, as gloo's do between two collectives.

    ``state``: the thread and what ``/proc/self/task/*/syscall`` holds. ``futex``: the number of that system call.

    A thread that waits for the interpreter's lock, or for another rank, has a limit; one that waits for a mutex uses
    another operation.
    """
    fields = state.split()
    if len(fields) < 6 or fields[1] != futex:
        return False
    operation, timeout = int(fields[3], 16), int(fields[5], 16)
    return operation & _COMMAND == _FUTEX_WAIT_BITSET and timeout == 0


@atexit.register
def _at_exit() -> None:
    # What no code caught is kept in ``sys`` before the handlers run.
    failed = hasattr(sys, "last_type") or hasattr(sys, "last_exc")
    end_groups(_AFTER_ERROR if failed else _PATIENCE, destroy=not failed)
