"""Conversions that are shared by processes, killed, resumed, and started anew when the source has changed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.checkpoint.test_zero_conversion import assert_is_the_truth
from tests.support import real_zero
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.errors import DistributedError

pytestmark = pytest.mark.distributed

#: files beyond the size of small ones (1 MiB), so that each is a unit of its own, with small files beside them
GROUPS = [{f"{n}.weight": (300 + i, 1100) for i, n in enumerate("abcdef")}, {f"n{i}": (50 + i,) for i in range(20)}]
HALF = 12 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return real_zero.write(tmp_path_factory.mktemp("written"), Recipe(stage=1, dp=2, groups=GROUPS))


def start(source, target, *, rank=None, world_size=None, kill_after=None):
    """One process that converts; with ``kill_after`` it kills itself once that many bytes are done."""
    code = (
        "import os, sys; from ullage import checkpoint\n"
        "limit = int(sys.argv[3])\n"
        "def progress(done, total):\n"
        "    if limit and done >= limit: os.kill(os.getpid(), 9)\n"
        "r = checkpoint.convert(sys.argv[1], sys.argv[2], progress=progress, workers=2)\n"
        "print(r.bytes_resumed, r.num_bytes)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    if rank is not None:
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": "1"}
    command = [sys.executable, "-c", code, str(source), str(target), str(kill_after or 0)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process, status=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    return out


def test_three_processes_share_one_conversion(written, tmp_path):
    target = tmp_path / "deep" / "out"
    for process in [start(written.folder, target, rank=r, world_size=3) for r in (2, 1, 0)]:
        finish(process)
    assert_is_the_truth(target, written)
    assert checkpoint.verify(written.folder, target) == []
    assert sorted(p.name for p in target.parent.iterdir()) == ["latest_universal", "out"]
    assert not (target / ".journal").exists()


def test_a_process_without_a_share_that_is_slow_to_start_neither_hangs_nor_disturbs(tmp_path):
    """One unit for two processes: the second one has nothing to do but to meet the first."""
    small = real_zero.write(tmp_path / "written", Recipe(stage=1, dp=1, groups=[{"a.weight": (3, 4)}]))
    code = (
        "import sys, time; from ullage import checkpoint; from ullage.checkpoint.conversion import meeting\n"
        "meeting.PATIENCE, sleep = 10.0, time.sleep\n"
        "time.sleep = lambda seconds: sleep(float(sys.argv[4]))\n"
        "checkpoint.convert(sys.argv[1], sys.argv[2], format='safetensors', rank=int(sys.argv[3]), world_size=2)\n"
    )
    target = tmp_path / "out"
    for process in [
        subprocess.Popen(
            [sys.executable, "-c", code, small.folder, target, str(rank), pause], stderr=subprocess.PIPE, text=True
        )
        for rank, pause in ((1, "3"), (0, "0.01"))
    ]:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert checkpoint.verify(small.folder, target) == []


def test_every_process_refuses_alike(written, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    for process in [start(written.folder, tmp_path / "out", rank=r, world_size=2) for r in (0, 1)]:
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "the target exists" in err


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


def test_a_conversion_killed_alone_is_resumed_by_several(written, tmp_path):
    finish(start(written.folder, tmp_path / "out", kill_after=HALF // 2), -signal.SIGKILL)
    for process in [start(written.folder, tmp_path / "out", rank=r, world_size=2) for r in (0, 1)]:
        finish(process)
    assert_is_the_truth(tmp_path / "out", written)


def test_a_source_that_changed_in_between_is_read_anew(tmp_path):
    first = real_zero.write(tmp_path / "run", Recipe(stage=1, dp=2, groups=GROUPS))
    finish(start(first.folder, tmp_path / "out", kill_after=HALF), -signal.SIGKILL)
    time.sleep(0.01)
    second = real_zero.write(tmp_path / "run", Recipe(stage=1, dp=2, groups=GROUPS, seed=1))
    report = checkpoint.convert(second.folder, tmp_path / "out")
    assert report.bytes_resumed == 0
    assert "a partial of another source or other options was removed" in report.notes
    assert_is_the_truth(tmp_path / "out", second)


def test_a_journal_that_was_torn_is_not_believed_beyond_the_tear(written, tmp_path):
    finish(start(written.folder, tmp_path / "out", kill_after=HALF), -signal.SIGKILL)
    (journal,) = (tmp_path / "out.partial" / ".journal").glob("*.jsonl")
    text = journal.read_bytes()
    journal.write_bytes(text[:-20])
    checkpoint.convert(written.folder, tmp_path / "out")
    assert_is_the_truth(tmp_path / "out", written)


def test_after_a_restart_of_the_machine_only_what_was_synced_is_believed(written, tmp_path):
    finish(start(written.folder, tmp_path / "out", kill_after=HALF), -signal.SIGKILL)
    (journal,) = (tmp_path / "out.partial" / ".journal").glob("*.jsonl")
    lines = journal.read_text().splitlines()
    lines[1] = '{"boot": "another"}'
    journal.write_text("\n".join(lines) + "\n")
    report = checkpoint.convert(written.folder, tmp_path / "out")
    assert report.bytes_resumed == 0
    assert_is_the_truth(tmp_path / "out", written)


#: what torchrun without ``--standalone`` gives to every launch alike
SAME_LAUNCH = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "29500"}


def launch(source, target, *, limited=()):
    """Two processes of one launch under the same values of torchrun; those in ``limited`` may write 64 kB per file."""
    code = (
        "import os, resource, signal, sys; from ullage import checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "if os.environ['RANK'] in sys.argv[3].split(','):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: checkpoint.convert(sys.argv[1], sys.argv[2], workers=1)\n"
        "except Exception as error: print(type(error).__name__, error); sys.exit(3)"
    )
    ranks = []
    for rank in (1, 0):
        environment = os.environ | SAME_LAUNCH | {"RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "-c", code, str(source), str(target), ",".join(map(str, limited))]
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    return {rank: (p.communicate(timeout=120)[0], p.returncode) for rank, p in zip((1, 0), ranks)}


def test_a_launch_is_not_stopped_by_the_failure_of_an_earlier_one(written, tmp_path):
    """Its file was named for values that torchrun gives to every launch: the second launch read it and gave up."""
    first = launch(written.folder, tmp_path / "out", limited=[1])
    assert {status for _, status in first.values()} == {3}
    assert first[1][0].startswith("InputError cannot write: File too large")
    assert first[0][0].startswith("DistributedError another process failed (process 1)")
    assert list((tmp_path / "out.partial" / ".journal").glob("failed-1-*"))
    second = launch(written.folder, tmp_path / "out")
    assert second == {0: ("", 0), 1: ("", 0)}
    assert_is_the_truth(tmp_path / "out", written)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest_universal", "out"]


def test_processes_begin_when_all_have_met_and_know_their_launch(tmp_path):
    """What an earlier launch left, words and failures, counts for nothing; process 0 may come last."""
    import threading

    from ullage.checkpoint.conversion.meeting import Meeting

    folder = tmp_path / "out.partial" / ".journal"
    folder.mkdir(parents=True)
    for name in ("failed-1-old", "here-1", "here-2", "launch.json"):
        (folder / name).write_text('{"name": "old", "words": ["old"]}')
    meetings = [Meeting(tmp_path / "out.partial", rank, 3) for rank in range(3)]
    others = [threading.Thread(target=m.begin) for m in meetings[1:]]
    for thread in others:
        thread.start()
    assert [m.name for m in meetings] == ["", "", ""]
    meetings[0].clear()
    meetings[0].begin()
    for thread in others:
        thread.join(20)
    (name,) = {m.name for m in meetings}
    assert name not in ("", "old")
    meetings[2].fail(ValueError("mine"))
    with pytest.raises(DistributedError, match=r"another process failed \(process 2\): found mine"):
        meetings[0].wait(lambda: False, "nobody")


def test_a_partial_of_another_conversion_is_replaced_while_others_begin(written, tmp_path):
    stale = tmp_path / "out.partial" / ".journal"
    stale.mkdir(parents=True)
    (stale / "0.jsonl").write_text('{"mark": "another"}\n')
    (tmp_path / "out.partial" / "leftover").write_text("")
    assert launch(written.folder, tmp_path / "out") == {0: ("", 0), 1: ("", 0)}
    assert not (tmp_path / "out" / "leftover").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest_universal", "out"]
