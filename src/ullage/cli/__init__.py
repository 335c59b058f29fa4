"""The command line: one file or folder per verb, loaded only when its verb is called.

Exit status 0 done, 1 a problem with the data (said in one line), 2 wrong usage, 130 interrupted, 143 terminated.

This module imports next to nothing, so that Ctrl-C is in hand before the libraries load, which takes seconds.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import atexit
import sys

from ullage.cli.interruption import Handled, can_leave
from ullage.cli.verbs import VERBS as VERBS

TYPE_CHECKING = False  # for type checkers it is true; that of typing takes as long to load as all of this
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Run the command line and exit with its status, once the process groups that it formed have ended."""
    with Handled():
        _main()


def _main() -> None:
    # Python gives Ctrl-C its deadly meaning back while it ends; the work is done then, and its status stands.
    atexit.register(_signal.signal, _signal.SIGINT, _signal.SIG_IGN)
    if sys.argv[1:] == ["--version"]:  # asked by scripts, and answered without a library
        from ullage import __version__

        print(__version__)
        sys.exit(0)
    from ullage.core.leaving import leave_at_once

    try:
        from ullage.cli.group import app

        app()
    except SystemExit as leaving:
        status = _status(leaving.code)
        # Ending the interpreter joins its threads, which may wait for a rank that never comes: then it is not ended.
        if can_leave(status):
            raise
        leave_at_once(status)
    except BaseException as error:
        if can_leave(1):
            raise
        # ``os._exit`` skips the interpreter's own report of the error, so it is printed first.
        sys.excepthook(type(error), error, error.__traceback__)
        leave_at_once(1)


def _status(code: Any) -> int:
    """The exit status that Python makes of what ``SystemExit`` holds; a message is printed."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
