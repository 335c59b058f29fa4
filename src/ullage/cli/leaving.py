"""The end of a command: its status is that of the work, whatever the ends of threads and of other ranks are like.

A command ends its process groups while Python lives, on every way out. Where it cannot, because a collective is under
way that no rank may ever join, it leaves without ending the interpreter.
"""

from __future__ import annotations

import sys

#: Seconds for threads to let go, after an error: the launcher waits for this process before it ends the others.
_AFTER_ERROR = 2.0


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
