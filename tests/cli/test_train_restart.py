"""One command line begins a run and goes on with it, whatever ended it and however many processes are left."""

from __future__ import annotations

import time

import pytest

from tests.support import forked
from tests.support.train_verb import losses, record, steps_saved, texts, train_in

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def killed_when(happened, processes, folder, *arguments):
    """The command, killed with all its processes once ``happened()``."""
    process = train_in(processes, folder, *arguments, start=lambda command, timeout, **o: forked.Process(command, **o))
    until = time.monotonic() + 200
    while not happened() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert happened(), process.printed()


def test_the_same_command_goes_on_after_kills_on_other_numbers_of_processes(tmp_path):
    """Killed before its first checkpoint on two, after its second on three, whose batches do not divide the 10."""
    out = tmp_path / "out"
    arguments = ["--data", texts(tmp_path, 64), "--held_out", 0, "--model", "llama-32x1", "--learning_rate", 0.02]
    arguments += ["--logging_steps", 1, "--save_steps", 2, "--save_total_limit", 9, "--zero", 2]
    command = [*arguments, "--per_device_train_batch_size", 5, "--output_dir", out]
    killed_when((out / "ullage_run.json").exists, 2, tmp_path, *command)
    assert record(out)["finished"] is False
    killed_when((out / "checkpoint-4").exists, 3, tmp_path, *command)
    done = train_in(1, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "goes on from " in done.stdout
    assert record(out)["batch"] == [5, 1, 10]
    one = train_in(1, tmp_path, *arguments, "--packing_global_batch_size", 10, "--output_dir", "one")
    assert one.returncode == 0, one.stderr
    assert losses(out) == pytest.approx(losses(tmp_path / "one"), abs=2e-6)
    assert len(losses(out)) == 7
    assert steps_saved(out)[-1] == 7
    assert not list(out.glob("_*"))
