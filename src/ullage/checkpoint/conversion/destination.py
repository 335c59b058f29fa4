"""The target of a conversion: checks before anything is written, and the errors where it cannot be."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path

from ullage.checkpoint.conversion.journal import FOLDER, require_writing
from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import is_remote
from ullage.checkpoint.files.archive import Target
from ullage.core.errors import InputError
from ullage.core.replacing import replacing

#: Bytes of the longest path of a file.
_LONGEST_PATH = 4095
#: Bytes of the longest name of a file or folder.
_LONGEST_NAME = 255
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_of(target: Path) -> Path:
    """The folder in which a conversion to ``target`` works. Raises ``InputError`` for a target without a name."""
    if not target.name:
        raise InputError("the target is the root of the file system", where=str(target), hint="name a folder in it")
    return target.with_name(target.name + ".partial")


def require_paths(targets: list[Target], target: Path) -> None:
    """Raise ``InputError`` where the system writes no checkpoints, or for two files of one name or a path too long."""
    require_writing()
    names = {t.name for t in targets}
    folders = set()
    for folder in {os.path.dirname(name) for name in names}:
        while folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    clash = sorted(names & folders) or sorted(n for n, count in Counter(t.name for t in targets).items() if count > 1)
    if clash:
        raise InputError("two files of the target would have one name", where=clash[0])
    longest = max(names, key=lambda name: len(os.fsencode(name)), default="")
    target = partial_of(target)
    name = max(target.parts, key=lambda part: len(os.fsencode(part)))
    if len(os.fsencode(name)) > _LONGEST_NAME:
        expected = f"{_LONGEST_NAME} bytes, those of .partial among them"
        found = f"{len(os.fsencode(name))}"
        raise InputError("the name of the target would be too long", where=name[:80], expected=expected, found=found)
    size = len(os.fsencode(f"{target}/{longest}"))
    if size > _LONGEST_PATH:
        expected = f"{_LONGEST_PATH} bytes"
        raise InputError("a path would be too long", where=longest[:80], expected=expected, found=f"{size}")


def require_writable(inventory: Inventory, target: Path, partial: Path, num_bytes: int) -> None:
    """Raise ``InputError`` where the target exists, lies inside the source, cannot be written, or has no room."""
    if os.path.lexists(target):
        raise InputError("the target exists", where=str(target), hint="remove it, or name another")
    source = inventory.folder.resolve()
    if not is_remote(source) and target.resolve().is_relative_to(source):
        raise InputError("the target lies inside the source", where=str(target), hint="name a folder beside the source")
    if partial.exists() and not (partial / FOLDER).is_dir():
        raise InputError("a folder of this name is there, and it is not an interrupted conversion", where=str(partial))
    above = next(p for p in target.parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError("the target cannot be written", where=str(above), hint="name a folder that you may write to")
    # What an interrupted run has written already counts as free. In blocks: files are holes until units fill them.
    held = sum(p.stat().st_blocks * 512 for p in partial.rglob("*") if p.is_file()) if partial.exists() else 0
    free = shutil.disk_usage(above).free + held
    if free < num_bytes:
        expected = f"{num_bytes} bytes free"
        raise InputError(
            "the disk is full", where=str(above), expected=expected, found=f"{free}", hint="free some space"
        )


def point_to(target: Path, name: str) -> None:
    """Write the file ``name`` beside the target, with the target's name. A run's own ``latest`` is left as it is."""
    pointer = target.parent / name
    if name == "latest" and pointer.exists():
        return
    with replacing(pointer) as file:  # a loader never reads half a name
        file.write(target.name)


def disk_error(error: OSError, where: Path, advice: str) -> InputError:
    """The error to raise where the system refuses to write; ``advice`` has braces for what must be so first."""
    once = "there is room" if error.errno in _NO_ROOM else "it can be written"
    what, place = f"cannot write: {error.strerror or error}", str(error.filename or where)
    return InputError(what, where=place, hint=advice.replace("{}", once))
