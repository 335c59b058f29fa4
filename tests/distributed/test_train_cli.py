"""``ullage train`` and its checkpoints on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import save_script
from tests.launch import environment, torchrun
from ullage.training.saving import checkpoints_in
from ullage.training.staging import partial_of


def ullage_train(processes: int, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] * (processes > 1)
    command = [sys.executable, *launcher, "-m", "ullage", "train", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)


def losses(folder: Path) -> list[float]:
    history = json.loads((checkpoints_in(folder)[-1] / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


def summary(folder: Path) -> dict[str, float]:
    return json.loads((folder / "ullage_run.json").read_text())["summary"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """64 texts, so that two processes at batch 4 see the global batches of one process at batch 8."""
    folder = tmp_path_factory.mktemp("two")
    rows = [{"text": f"{i} " + "abc " * (i % 19 + 1)} for i in range(64)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::3]))
    arguments = ["--data", "a.jsonl", "--eval_data", "b.jsonl", "--hidden_size", 16, "--learning_rate", 0.02]
    arguments += ["--logging_steps", 1, "--save_steps", 3]
    done = ullage_train(2, folder, *arguments, "--per_device_train_batch_size", 4, "--output_dir", "two")
    return folder, arguments, done


def test_only_the_first_process_speaks(two):
    folder, _, done = two
    assert done.returncode == 0, done.stderr
    for line in ("texts to train on", "parameters", "ullage avoided", "Load it and let it write"):
        assert done.stdout.count(line) == 1
    assert "Traceback" not in done.stderr
    assert "warning" not in done.stderr.lower()
    assert (folder / "two" / "model.safetensors").is_file()
    assert not list((folder / "two").glob("_*"))


def test_two_processes_train_to_the_losses_of_one(two):
    folder, arguments, _ = two
    done = ullage_train(1, folder, *arguments, "--per_device_train_batch_size", 8, "--output_dir", "one")
    assert done.returncode == 0, done.stderr
    assert len(losses(folder / "one")) == 8
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)
    ours, theirs = summary(folder / "two"), summary(folder / "one")
    assert ours["tokens"] == theirs["tokens"]
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_resume_exactly(two):
    folder, arguments, _ = two
    first = checkpoints_in(folder / "two")[0]
    assert {path.name for path in first.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    flags = ["--per_device_train_batch_size", 4, "--output_dir", "again", "--resume_from_checkpoint", first]
    done = ullage_train(2, folder, *arguments, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("continues from") == 1
    assert losses(folder / "again") == losses(folder / "two")


@pytest.mark.slow
def test_a_mistake_is_said_once_and_no_process_hangs(two):
    folder, arguments, _ = two
    done = ullage_train(2, folder, *arguments, "--text_column", "body", "--output_dir", "bad")
    assert done.returncode != 0
    assert done.stderr.count("ullage: there is no column 'body'") == 1
    assert not (folder / "bad").exists()


def test_a_save_that_fails_on_one_rank_raises_on_both_and_renames_nothing(tmp_path):
    torchrun(2, save_script.__file__, tmp_path)
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert said == [
        "DistributedError: another rank failed while writing a checkpoint (rank 1): "
        f"found TrainingError: this cannot be written ({tmp_path}/out/checkpoint-4): found OSError: no space left on "
        "device. Make room, or give a folder that can be written to; what was there before is as it was",
        f"TrainingError: this cannot be written ({tmp_path}/out/checkpoint-4): found OSError: no space left on "
        "device. Make room, or give a folder that can be written to; what was there before is as it was",
    ]
    assert [path.name for path in checkpoints_in(tmp_path / "out")] == ["checkpoint-2"]
    assert (partial_of(tmp_path / "out" / "checkpoint-4") / "checkpoint-4").is_dir()
