"""The end of a command: its status is that of the work, whatever the ends of threads and of other ranks are like.

A command ends its process groups while Python lives, on every way out. Where it cannot, because a collective is under
way that no rank may ever join, it leaves without ending the interpreter.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

#: Seconds for threads to let go, after an error: the launcher waits for this process before it ends the others.
_AFTER_ERROR = 2.0
#: Seconds for standard output and error to take what is in their buffers.
_TO_FLUSH = 1.0


def can_leave(status: int) -> bool:
    """End the process groups. Returns whether the interpreter can end as well, with ``status`` as its status."""
    solver = sys.modules.get("ullage.planning.solver.compiled")
    if solver is not None and solver.is_busy():  # Ctrl-C in a plan: the interpreter would wait for its end
        return False
    # Looked up, not imported: a verb that never loaded torch must not load it in order to end.
    ending = sys.modules.get("ullage.ranks.ending")
    if ending is None:  # nothing of this process talked to another one
        return True
    return ending.end_groups() if status == 0 else ending.end_groups(_AFTER_ERROR)


def leave_at_once(status: int) -> NoReturn:
    """Exit with ``status`` from any thread, and wait for nothing but what was printed."""
    # ``os._exit`` runs no handlers, so workers of data loaders would outlive this process.
    processes = sys.modules.get("multiprocessing")
    if processes is not None:
        for child in processes.active_children():
            child.terminate()
    # The main thread may be stuck while it prints, with the stream's lock in its hands.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_TO_FLUSH)
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
