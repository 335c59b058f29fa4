"""The end of a process at once, from any of its threads, whatever the others wait for."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

#: Exit status of a process that ends because another rank is lost: a failure that passes (``EX_TEMPFAIL``).
LOST = 75
#: Seconds for standard output and error to take what is in their buffers.
_TO_FLUSH = 1.0


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
