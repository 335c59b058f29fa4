"""A lock that a killed process left is removed; one that is held is not."""

from __future__ import annotations

import subprocess
import sys

from torch.utils.file_baton import FileBaton

from ullage.training.extensions import remove_abandoned_locks


def test_only_locks_that_nobody_holds_are_removed(tmp_path):
    for name in ("held", "left"):
        (tmp_path / name).mkdir()
    held = FileBaton(str(tmp_path / "held" / "lock"))
    assert held.try_acquire()
    script = "import os, sys; from torch.utils.file_baton import FileBaton; FileBaton(sys.argv[1]).try_acquire(); os._exit(9)"
    left = tmp_path / "left" / "lock"
    assert subprocess.run([sys.executable, "-c", script, str(left)], check=False).returncode == 9
    assert left.exists()
    assert remove_abandoned_locks(tmp_path, grace=0.01) == [left]
    assert not left.exists()
    assert (tmp_path / "held" / "lock").exists()
    held.release()
    assert remove_abandoned_locks(tmp_path, grace=0.01) == []
