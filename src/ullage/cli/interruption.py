"""Ctrl-C from the first instant on: one line and exit status 130, never a traceback.

While libraries load there is nothing to clean up, and an exception there may be taken for a failed import or printed by
whatever it hits: the process leaves at once. From the verb's first line on, Ctrl-C is Python's ``KeyboardInterrupt``.
"""

from __future__ import annotations

# The module without its enumerations, which load longer than all that runs before this.
import _signal  # pyright: ignore[reportMissingImports]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The exit status of an interrupted command: 128 and the number of the signal.
STATUS = 130


def say() -> None:
    """Print the line, on one rank of a job."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"ullage: interrupted\n")  # a stream may be locked by what was interrupted


def becomes_exception() -> None:
    """Make Ctrl-C an exception again, if :class:`Handled` took it."""
    if _signal.getsignal(_signal.SIGINT) is _leave:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


class Handled:
    """Block in which Ctrl-C ends the process at once, until :func:`becomes_exception`."""

    def __init__(self) -> None:
        # A job in the background ignores Ctrl-C, a caller may have a handler of its own, and only the main thread may
        # set one: then all stays as it is.
        try:
            if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
                _signal.signal(_signal.SIGINT, _leave)
        except ValueError:
            pass

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: Any) -> None:
        becomes_exception()


def _leave(number: int, frame: Any) -> None:
    say()
    os._exit(STATUS)
