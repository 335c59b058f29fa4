"""Names of parameters that are names of files too."""

from __future__ import annotations

import os

from ullage.errors import CheckpointError

#: Bytes of the longest name of a file on the file systems in use.
_LONGEST_NAME = 255


def safe_name(name: str) -> str:
    """``name`` as one component of a path. Raises ``CheckpointError`` for a name that cannot be one."""
    where = repr(name if len(name) <= 80 else f"{name[:80]}...")
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or "/" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError("a name that cannot be a file's", where=where)
    if len(encoded) > _LONGEST_NAME:
        found = f"{len(encoded)} bytes"
        raise CheckpointError("a name too long to be a file's", where=where, expected=f"{_LONGEST_NAME}", found=found)
    if name == "optimizer_state.pt":
        raise CheckpointError(
            "a parameter has the name of a file of the universal format", where=where, hint="rename the parameter"
        )
    return name
