"""The end of a process whose ranks talked to each other: no thread of theirs may need Python while Python ends.

A collective of gloo is run by a thread of its group. The thread wakes the caller first and lets go of the collective's
tensors after that, for which it needs the interpreter's lock. If the interpreter has begun to end by then, CPython ends
the thread by unwinding it through frames that must not be unwound, and the process aborts: "terminate called without an
active exception", status -6 after a run in which everything went well.

So before the interpreter ends, :func:`end_groups` ends our own threads, leaves gloo's some time to let go, and destroys
the groups, which joins the threads of those that nobody else refers to. It runs at exit in every process in which
something of ours that talks between ranks was made (:func:`end_groups_at_exit`). After an error, where a collective may
be under way that no rank will ever join, nothing is destroyed.

Source: ``ProcessGroupGloo::runLoop`` of torch 2.13; ``take_gil`` of CPython 3.11.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

#: Seconds that a thread gets to let go: of a run that ended well, and after an error, when others wait for this rank.
_PATIENCE, _AFTER_ERROR = 10.0, 0.5
#: Seconds for gloo's threads, which let go within microseconds where they have a processor.
_TO_LET_GO = 0.15

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
    """End our threads, and destroy the process groups if there are any left.

    ``within``: seconds to wait in all. Returns whether the interpreter can end without harm, as far as this process can
    tell: False where a thread of ours is under way, or a collective of a group that is to be destroyed.
    """
    if _process != os.getpid():
        return True
    until = time.monotonic() + within
    ended = [let_go(until) for let_go in _let_go]  # all of them, also after one that could not
    if not all(ended):
        return False
    if not (dist.is_available() and dist.is_initialized()):
        return True
    time.sleep(_TO_LET_GO)  # without the interpreter's lock, which they need
    if not destroy:
        return True
    gc.collect()  # models in cycles, which refer to groups
    # It waits for a collective that is under way, which other ranks may never join.
    destroying = threading.Thread(target=_destroy, name="ullage ending", daemon=True)
    destroying.start()
    destroying.join(max(0.0, until - time.monotonic()))
    return not destroying.is_alive()


def _destroy() -> None:
    with suppress(Exception):  # the process is over: whatever a backend says now concerns nobody
        dist.destroy_process_group()


@atexit.register
def _at_exit() -> None:
    # What no code caught is kept in ``sys`` before the handlers run.
    failed = hasattr(sys, "last_type") or hasattr(sys, "last_exc")
    end_groups(_AFTER_ERROR if failed else _PATIENCE, destroy=not failed)
