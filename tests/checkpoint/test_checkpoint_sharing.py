"""Conversions that are killed, resumed, and started anew when the source has changed."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.support import real_zero
from tests.support.checkpoints import assert_is_the_truth
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.conversion.copying import split
from ullage.checkpoint.conversion.journal import Journal, _boot
from ullage.core.errors import InputError

pytestmark = pytest.mark.distributed

#: files beyond the size of small ones (1 MiB), so that each is a unit of its own, with small files beside them
GROUPS = [{f"{n}.weight": (300 + i, 1100) for i, n in enumerate("abcdef")}, {f"n{i}": (50 + i,) for i in range(20)}]
RECIPE = Recipe(stage=1, dp=2, groups=GROUPS)
HALF = 12 << 20


def start(source, target, *, kill_after=None):
    """One process that converts; with ``kill_after`` it kills itself once that many bytes are done."""
    code = (
        "import os, sys; from ullage import checkpoint\n"
        "limit = int(sys.argv[3])\n"
        "def progress(done, total):\n"
        "    if limit and done >= limit: os.kill(os.getpid(), 9)\n"
        "r = checkpoint.convert(sys.argv[1], sys.argv[2], progress=progress, workers=2)\n"
        "print(r.bytes_resumed, r.num_bytes)"
    )
    command = [sys.executable, "-c", code, str(source), str(target), str(kill_after or 0)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, status=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    return out


@pytest.mark.slow
def test_a_killed_conversion_goes_on_where_it_was(written, tmp_path):
    killed = start(written.folder, tmp_path / "out", kill_after=HALF)
    finish(killed, -signal.SIGKILL)
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "out.partial").rglob("step.pt")}
    resumed, total = map(int, finish(start(written.folder, tmp_path / "out")).split())
    assert HALF - (2 << 20) < resumed < total
    assert_is_the_truth(tmp_path / "out", written)
    kept = [
        p
        for p, stamp in done.items()
        if (tmp_path / "out" / p.relative_to(tmp_path / "out.partial")).stat().st_mtime_ns == stamp
    ]
    assert len(kept) == len(done)
    torch.load(tmp_path / "out" / "zero" / "a.weight" / "exp_avg.pt", weights_only=True)
    import zipfile

    assert zipfile.ZipFile(tmp_path / "out" / "zero" / "a.weight" / "exp_avg.pt").testzip() is None  # checksums


@pytest.mark.slow
def test_a_source_that_changed_in_between_is_read_anew(tmp_path):
    first = real_zero.write(tmp_path / "run", RECIPE)
    finish(start(first.folder, tmp_path / "out", kill_after=HALF), -signal.SIGKILL)
    (tmp_path / "out.partial" / "zero" / "leftover").write_text("")
    time.sleep(0.01)
    second = real_zero.write(tmp_path / "run", replace(RECIPE, seed=1))
    report = checkpoint.convert(second.folder, tmp_path / "out")
    assert report.bytes_resumed == 0
    assert "a partial of another source or other options was removed" in report.notes
    assert_is_the_truth(tmp_path / "out", second)
    assert not list((tmp_path / "out").rglob("leftover"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest_universal", "out", "run"]


@pytest.mark.parametrize("damage", ["torn", "of another boot"])
def test_a_journal_is_believed_up_to_a_tear_and_after_a_restart_of_the_machine_to_what_was_synced(
    written, tmp_path, damage
):
    finish(start(written.folder, tmp_path / "out", kill_after=HALF), -signal.SIGKILL)
    (journal,) = (tmp_path / "out.partial" / ".journal").glob("*.jsonl")
    if damage == "torn":
        journal.write_bytes(journal.read_bytes()[:-20])
    else:
        head, *lines = map(json.loads, filter(None, journal.read_text().splitlines()))
        small = [line for line in lines if "boot" in line]
        assert small
        changed = [head, *(line | {"boot": "another"} if line in small else line for line in lines)]
        journal.write_text("".join(json.dumps(line) + "\n" for line in changed))
        files = split(checkpoint.targets(checkpoint.read(written.folder)))
        large = sum(files[line["files"]].num_bytes for line in lines if line not in small)
        assert large > 0
    report = checkpoint.convert(written.folder, tmp_path / "out")
    assert damage == "torn" or report.bytes_resumed == large
    assert_is_the_truth(tmp_path / "out", written)


def test_a_journal_of_another_version_is_not_followed(written, tmp_path):
    folder = tmp_path / "out.partial" / ".journal"
    folder.mkdir(parents=True)
    (folder.parent / "mine").write_text("")
    lines = [{"mark": "of another version"}, {"boot": _boot()}, {"unit": 0, "crc": 5}, {"synced": True}]
    (folder / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = checkpoint.convert(written.folder, tmp_path / "out")
    assert report.notes[0] == "a partial of another source or other options was removed"
    assert not (tmp_path / "out" / "mine").exists()
    assert_is_the_truth(tmp_path / "out", written)


def test_a_partial_that_another_process_writes_is_not_emptied(written, tmp_path):
    """Whatever its source: the second conversion is refused before it looks at what the first has done."""
    partial = tmp_path / "out.partial"
    journal = Journal(partial, "another")
    (partial / "mine").write_text("")
    with pytest.raises(InputError, match="another conversion is writing this target"):
        checkpoint.convert(written.folder, tmp_path / "out")
    assert (partial / "mine").exists()
    journal.close()
    assert "a partial of another source" in checkpoint.convert(written.folder, tmp_path / "out").notes[0]
