"""``ullage quickstart`` on a small model: every layout, real processes, and what an interruption leaves."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launch import environment

pytestmark = pytest.mark.distributed

COMMAND = [sys.executable, "-m", "ullage", "quickstart", "--steps", "16", "--model", "llama-64x2", "--json"]


def quickstart(folder: Path, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--output_dir", str(folder), *map(str, arguments)]
    return subprocess.run(command, env=environment(**options), capture_output=True, text=True, timeout=900)


def interrupted(folder: Path) -> int:
    """Ctrl-C in the middle of a run on two processes; the exit status."""
    process = subprocess.Popen(
        [*COMMAND, "--output_dir", str(folder)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )
    for _ in range(2400):  # until a step of the uninterrupted run is saved
        if (folder / "whole" / "checkpoint-4").is_dir() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    return process.wait(60)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
def test_every_change_of_layout_leaves_the_loss_as_it_was_and_an_interrupted_one_goes_on(tmp_path):
    folder = tmp_path / "journey"
    assert interrupted(folder) == 130
    assert [process for process in psutil.process_iter() if str(folder) in " ".join(_command(process))] == []
    compiled = tmp_path / "extensions"
    done = quickstart(folder, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(compiled))
    assert done.returncode == 0, done.stderr[-3000:]
    assert not compiled.exists()
    table = json.loads(done.stdout.splitlines()[-1])
    assert table["agrees"]
    assert [row["layout"] for row in table["rows"]] == [
        "2 processes, ZeRO 2",
        "2 processes, ZeRO 2",
        "2 processes, ZeRO 2",
        "1 process, ZeRO 1",
        "2 processes, ZeRO 3",
        "1 process",
    ]
    for row in table["rows"][3:]:
        pairs = [pair.split(", ") for pair in row["losses before and after: here, uninterrupted"].split("; ")]
        assert len(pairs) == 4
        assert all(abs(float(ours) - float(theirs)) < 2e-5 * float(theirs) for ours, theirs in pairs)
    assert "torchrun --standalone --nproc_per_node 2 -m ullage train" in done.stderr
    assert "each rank reads its part of it" in done.stderr  # by itself, after saying so
    assert "for 1 process, without DeepSpeed every process reads it whole" in done.stderr
    page = (folder / "quickstart.html").read_text()
    assert page.count("<polyline") == 5
    assert "http" not in page.replace("http://www.w3.org", "")
    # killed in the last leg: the rest is there, and the last leg alone is run again
    shutil.rmtree(folder / "run" / "checkpoint-16")
    record = json.loads((folder / "run" / "ullage_run.json").read_text())
    (folder / "run" / "ullage_run.json").write_text(json.dumps({**record, "summary": None}))
    again = quickstart(folder)
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stderr.count("(done before)") == 8
    assert json.loads(again.stdout.splitlines()[-1])["rows"][-1]["steps"] == "13 to 16"


def test_what_is_missing_is_said_before_anything_is_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = quickstart(tmp_path / "file" / "journey")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the folder cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
