"""``ullage quickstart`` on a small model: every layout, real processes, and what an interruption leaves."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support import forked
from tests.support.launch import environment
from ullage.cli.quickstart import compared, faster
from ullage.report.run import Run, read_run
from ullage.training.run.log_file import append

pytestmark = pytest.mark.distributed

COMMAND = [sys.executable, "-m", "ullage", "quickstart", "--steps", "12", "--model", "llama-64x2", "--json"]


@pytest.fixture
def quickstart(run, monkeypatch):
    """Calls the verb in this process, and the commands that it starts in forks: (status, output, errors)."""

    def call(folder: Path, **options: str) -> tuple[int, str, str]:
        started = []

        def start(command, **_) -> forked.Process:
            started.append(forked.Process(command, env=environment(**options), stderr=subprocess.STDOUT))
            return started[-1]

        monkeypatch.setattr("ullage.cli.quickstart.subprocess", SimpleNamespace(Popen=start))
        status, out, err = run(*COMMAND[3:], "--output_dir", folder)
        return status, out, err + "".join(process.printed()[0] for process in started)

    return call


def interrupted(folder: Path) -> int:
    """Ctrl-C in the first run, which is on two processes; the exit status."""
    process = subprocess.Popen(
        [*COMMAND, "--output_dir", str(folder)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )
    for _ in range(2400):
        if (folder / "padded").is_dir() or process.poll() is not None:
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
def test_every_change_of_layout_leaves_the_loss_as_it_was_and_an_interrupted_one_goes_on(quickstart, tmp_path):
    folder = tmp_path / "journey"
    assert interrupted(folder) == 130
    assert [process for process in psutil.process_iter() if str(folder) in " ".join(_command(process))] == []
    compiled = tmp_path / "extensions"
    status, out, err = quickstart(folder, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(compiled))
    assert status == 0, err[-3000:]
    assert not compiled.exists()
    changes = json.loads(out.splitlines()[-1])["changes"]
    layouts = ("1 process, ZeRO 1", "2 processes, ZeRO 3", "1 process")
    assert [(each["layout"], each["step"]) for each in changes] == [
        (layout, step) for layout, start in zip(layouts, (3, 6, 9), strict=True) for step in range(start, start + 4)
    ]
    for each in changes:
        assert abs(each["loss"] - each["uninterrupted"]) < 1e-5 * each["uninterrupted"]
        assert each["agrees"]
    assert "torchrun --standalone --nproc_per_node 2 -m ullage train" in err
    assert "each rank reads its part of it" in err  # by itself, after saying so
    assert "for 1 process, without DeepSpeed every process reads it whole" in err
    assert "2 processes, ZeRO 2, then on 1 process, ZeRO 1" in (folder / "quickstart.html").read_text()
    assert "Ranks against time" in (folder / "plan.html").read_text()
    # killed in the last leg: the rest is there, and the last leg alone is run again
    shutil.rmtree(folder / "run" / "checkpoint-12")
    record = json.loads((folder / "run" / "ullage_run.json").read_text())
    (folder / "run" / "ullage_run.json").write_text(json.dumps({**record, "summary": None}))
    status, out, err = quickstart(folder)
    assert status == 0, err[-3000:]
    assert err.count("(done before)") == 8
    assert json.loads(out.splitlines()[-1])["changes"] == changes


def run_of(folder: Path, spans: list[tuple[str, int, int]], loss=lambda step: 5.0 / step, speed: float = 1000.0) -> Run:
    """A run with a log of one row a step, on each layout from a step to another."""
    folder.mkdir()
    for layout, start, stop in spans:
        append(folder, "begin", start, layout=layout)
        for step in range(start + 1, stop + 1):
            append(folder, "log", step, values={"loss": loss(step), "tokens_per_second": speed})
    return read_run(folder)


def test_losses_beside_each_change_are_compared_and_a_difference_is_seen(tmp_path):
    whole = run_of(tmp_path / "whole", [("2 processes", 0, 12)])
    spans = [("2 processes", 0, 4), ("1 process", 4, 6), ("2 processes, ZeRO 3", 6, 12)]
    for name, error, differing in (("same", 1e-6, []), ("other", 1e-4, [5])):
        run = run_of(tmp_path / name, spans, lambda step, error=error: 5.0 / step * (1 + error * (step == 5)))
        changes = compared(run, whole)
        assert [each.step for each in changes] == [4, 5, 6, 6, 7, 8, 9]
        assert [each.step for each in changes if not each.agrees] == differing


def test_speeds_are_compared_over_the_steps_of_both_after_the_first(tmp_path):
    padded = run_of(tmp_path / "padded", [("2 processes", 0, 6)], speed=250.0)
    assert faster(run_of(tmp_path / "whole", [("2 processes", 0, 12)]), padded) == (4.0, 3, 6)


def test_what_is_missing_is_said_before_anything_is_written(quickstart, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = quickstart(tmp_path / "file" / "journey")
    assert (status, err.count("\n")) == (1, 1)
    assert "the folder cannot be written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
