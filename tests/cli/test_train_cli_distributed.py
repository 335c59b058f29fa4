"""``ullage train`` and its checkpoints on two processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked, save_script
from tests.support.launch import environment, torchrun
from ullage.training.saving.checkpoints import checkpoints_in
from ullage.training.saving.staging import staging_of

pytestmark = pytest.mark.distributed


def ullage_train(
    processes: int, folder: Path, *arguments: object, start=forked.run
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] * (processes > 1)
    command = [sys.executable, *launcher, "-m", "ullage", "train", *map(str, arguments)]
    return start(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)


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
    arguments = ["--data", "a.jsonl", "--eval_data", "b.jsonl", "--model", "lstm-16", "--learning_rate", 0.02]
    arguments += ["--logging_steps", 1, "--save_steps", 3]
    # Real processes: what is printed depends on what is set before torch loads.
    arguments_of_two = [*arguments, "--per_device_train_batch_size", 4, "--output_dir", "two"]
    done = ullage_train(2, folder, *arguments_of_two, start=subprocess.run)
    return folder, arguments, done


def test_only_the_first_process_speaks(two):
    folder, _, done = two
    assert done.returncode == 0, done.stderr
    for line in ("texts to train on", "parameters", "padding avoided", "Load it and let it write"):
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
def test_a_run_without_deepspeed_goes_on_under_zero(two):
    """A transformers model: which parameter has which state follows from its class."""
    folder, _, _ = two
    arguments = ["--data", "a.jsonl", "--eval_data", "b.jsonl", "--model", "llama-32x1", "--learning_rate", 0.02]
    arguments += ["--logging_steps", 1, "--save_steps", 3, "--lr_scheduler_type", "constant"]
    done = ullage_train(1, folder, *arguments, "--per_device_train_batch_size", 8, "--output_dir", "plain")
    assert done.returncode == 0, done.stderr
    first = checkpoints_in(folder / "plain")[0]
    flags = [
        "--per_device_train_batch_size",
        4,
        "--output_dir",
        "sharded",
        "--zero",
        3,
        "--resume_from_checkpoint",
        first,
    ]
    done = ullage_train(2, folder, *arguments, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written by 1 process, without DeepSpeed; for 2 processes, ZeRO 3 each rank reads") == 1
    assert losses(folder / "sharded") == pytest.approx(losses(folder / "plain"), rel=2e-6)


@pytest.mark.slow
@pytest.mark.regression
def test_a_new_model_under_zero_3_begins_with_the_weights_of_its_seed(two):
    folder, *_ = two
    arguments = ["--data", "a.jsonl", "--held_out", 0, "--model", "llama-32x1", "--max_steps", 2, "--logging_steps", 1]
    for name, processes, batch, flags in (("drawn", 1, 8, []), ("drawn-3", 2, 4, ["--zero", 3])):
        flags = [*flags, "--per_device_train_batch_size", batch, "--output_dir", name, "--save_steps", 2]
        done = ullage_train(processes, folder, *arguments, *flags)
        assert done.returncode == 0, done.stderr
    assert losses(folder / "drawn-3") == pytest.approx(losses(folder / "drawn"), rel=2e-6)


@pytest.mark.slow
def test_a_mistake_is_said_once_and_no_process_hangs(two):
    folder, arguments, _ = two
    done = ullage_train(2, folder, *arguments, "--text_column", "body", "--output_dir", "bad")
    assert done.returncode != 0
    assert done.stderr.count("ullage: there is no column 'body'") == 1
    assert not (folder / "bad").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks of a Trainer said about saving and about damage, and the folder."""
    folder = tmp_path_factory.mktemp("saved")
    torchrun(2, save_script.__file__, folder)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_a_save_that_fails_on_one_rank_raises_on_both_and_renames_nothing(saved):
    folder, said = saved
    own = (
        f"TrainingError: this cannot be written ({folder}/out/checkpoint-4): found OSError: no space left on device. "
        "Make room, or give a folder that can be written to; what was there before is as it was"
    )
    assert [rank["full"] for rank in said] == [
        f"DistributedError: another rank failed while writing a checkpoint (rank 1): found {own}. "
        "The log of rank 1 has the whole error",
        own,
    ]
    assert [path.name for path in checkpoints_in(folder / "out")] == ["checkpoint-2"]
    assert (staging_of(folder / "out" / "checkpoint-4") / "checkpoint-4").is_dir()


def test_a_damaged_checkpoint_raises_the_same_line_on_every_rank(saved):
    folder, (first, second) = saved
    for name, found in (("deleted", "found no such file"), ("cut", "found 100")):
        message = first[name]["outcome"]
        assert message == second[name]["outcome"]
        assert message.startswith(
            f"CheckpointError: this checkpoint is damaged ({folder}/{name}/checkpoint-4/rng_state_1.pth): expected "
        )
        assert f"{found}. Take {folder}/{name}/checkpoint-2, the newest whole one before it" in message
        assert first[name]["losses"] == second[name]["losses"] == []


def test_a_bare_resume_passes_a_damaged_checkpoint_over_on_every_rank(saved):
    folder, (first, second) = saved
    for rank in (first, second):
        assert rank["bare"]["outcome"] == 6
        assert rank["bare"]["losses"] == first["losses"]
        assert rank["left"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    [line] = first["bare"]["said"]
    assert line.startswith(f"{folder}/bare/checkpoint-4 is damaged and left as it is: rng_state_1.pth: expected ")
    assert second["bare"]["said"] == []
    assert (folder / "bare" / "checkpoint-4.damaged" / "damaged.txt").is_file()


def test_random_states_that_are_not_there_are_said_once(saved):
    folder, (first, second) = saved
    ending = "what is drawn there, such as dropout, goes on from the seed"
    for name, held in (("older", "none for rank 1"), ("fewer", "not of 2")):
        checkpoint = folder / name / "checkpoint-4"
        assert first[name]["said"] == [
            f"{checkpoint} has no manifest.json, so its files are loaded unchecked",
            f"{checkpoint} holds random states of 1 process, {held}: {ending}",
        ]
        assert second[name]["said"] == []
        assert first[name]["outcome"] == second[name]["outcome"] == 6


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_said_in_one_line_by_one_rank(two):
    folder, arguments, _ = two
    (folder / "file").touch()
    done = ullage_train(2, folder, *arguments, "--output_dir", "file/out")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("ullage: ")]
    assert said == [f"ullage: the output folder cannot be made (file/out): found {folder / 'file'} is a file"]
    assert done.stderr.count("Traceback") <= 1  # torchrun's own, after both have ended


@pytest.mark.slow
def test_a_damaged_checkpoint_is_said_in_one_line_by_one_rank(two):
    folder, arguments, _ = two
    shutil.copytree(folder / "two", folder / "damaged")
    (folder / "damaged" / "checkpoint-8" / "rng_state_1.pth").unlink()
    arguments = [*arguments, "--per_device_train_batch_size", 4, "--output_dir", "damaged"]
    done = ullage_train(2, folder, *arguments, "--resume_from_checkpoint", "damaged/checkpoint-8")
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ullage: ")]
    assert line.startswith("ullage: this checkpoint is damaged (damaged/checkpoint-8/rng_state_1.pth): expected ")
    assert line.endswith("found no such file. Take damaged/checkpoint-6, the newest whole one before it")
