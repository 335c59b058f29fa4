"""The end of a command: by Ctrl-C, from the first instant on, one line and exit status 130; by itself, its own status.

While libraries load there is nothing to clean up, and an exception there may be taken for a failed import or printed by
whatever it hits: the process leaves at once. From the verb's first line on, Ctrl-C is Python's ``KeyboardInterrupt``.

A command ends its process groups while Python lives, on every way out. Where it cannot, because a collective is under
way that no rank may ever join, it leaves without ending the interpreter.
"""

from __future__ import annotations

# The module without its enumerations, which load longer than all that runs before this.
import _signal  # pyright: ignore[reportMissingImports]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The exit status of an interrupted command: 128 and the number of the signal.
STATUS = 130
#: Seconds for threads to let go, after an error: the launcher waits for this process before it ends the others.
_AFTER_ERROR = 2.0


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


def can_leave(status: int) -> bool:
    """End the process groups. Returns whether the interpreter can end as well, with ``status`` as its status."""
    # The interpreter waits for the kernel that is compiled, for seconds: not where the command was interrupted.
    solver = sys.modules.get("ullage.planning.solver.compiled")
    is_late = status == STATUS and solver is not None and solver.is_compiling()
    # Looked up, not imported: a verb that never loaded torch must not load it in order to end.
    ending = sys.modules.get("ullage.ranks.ending")
    if ending is None:  # nothing of this process talked to another one
        return not is_late
    return (ending.end_groups() if status == 0 else ending.end_groups(_AFTER_ERROR)) and not is_late
