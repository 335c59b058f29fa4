"""Locks of torch's folder of extensions that a killed test has left: the next one would wait for them forever."""

import os
import time
from pathlib import Path


def remove_abandoned_locks(folder: Path | None = None, grace: float = 0.5) -> list[Path]:
    """Remove the locks that no running process holds, and return them. Does nothing on systems without /proc.

    ``folder``: torch's folder of extensions, by default the usual one. ``grace``: seconds between two looks, because a
    lock that is just being released is held by nobody for a moment.

    torch compiles an extension under a lock: a file that exists while a process holds it open. Whoever is killed while
    it compiles leaves the file, and every later process waits for it without a word. DeepSpeed compiles its own
    optimizers when they are first used. Source: ``torch/utils/file_baton.py``.
    """
    if folder is None:
        folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    if not Path("/proc/self/fd").is_dir():
        return []
    abandoned = _unheld(_locks(folder))
    if abandoned:
        time.sleep(grace)
        abandoned = _unheld(abandoned)
    for lock in abandoned:
        lock.unlink(missing_ok=True)
    return abandoned


def _locks(folder: Path) -> list[Path]:
    # <folder>/<extension>/lock, or one level deeper: torch's default has a folder per Python and CUDA version.
    return [*folder.glob("*/lock"), *folder.glob("*/*/lock")]


def _unheld(locks: list[Path]) -> list[Path]:
    """Those that exist and that no process has open."""
    # By inode number without the device: a file of the same number elsewhere only keeps a lock that could have gone.
    wanted = {lock.stat().st_ino: lock for lock in locks if lock.exists()}
    if wanted:
        for handle in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                held = handle.stat()
            except OSError:  # gone, or somebody else's
                continue
            wanted.pop(held.st_ino, None)
    return list(wanted.values())
