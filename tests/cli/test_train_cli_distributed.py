"""``ullage train`` and its checkpoints on two processes."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.support.train_verb import jsonl, losses, texts, train_in

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """64 texts, so that two processes at batch 4 see the global batches of one process at batch 8."""
    folder = tmp_path_factory.mktemp("two")
    rows = [json.loads(line) for line in texts(folder, 64).read_text().splitlines()]
    jsonl(folder / "b.jsonl", rows[::3])
    arguments = ["--data", "texts.jsonl", "--eval_data", "b.jsonl", "--model", "lstm-16", "--learning_rate", 0.02]
    arguments += ["--logging_steps", 1, "--save_steps", 3]
    # Real processes: what is printed depends on what is set before torch loads.
    of_two = [*arguments, "--per_device_train_batch_size", 4, "--output_dir", "two"]
    return folder, arguments, train_in(2, folder, *of_two, start=subprocess.run)


def test_two_processes_train_to_the_losses_of_one_and_only_the_first_speaks(two):
    folder, arguments, done = two
    assert done.returncode == 0, done.stderr
    for line in ("sequences to train on", "parameters", "padding avoided", "from transformers import AutoModel"):
        assert done.stdout.count(line) == 1
    assert "Traceback" not in done.stderr
    assert "warning" not in done.stderr.lower()
    assert (folder / "two" / "model.safetensors").is_file()
    assert not list((folder / "two").glob("_*"))
    done = train_in(1, folder, *arguments, "--per_device_train_batch_size", 8, "--output_dir", "one")
    assert done.returncode == 0, done.stderr
    assert len(losses(folder / "one")) == 8
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)


@pytest.fixture(scope="module")
def plain(two):
    """A transformers model on one process: which parameter has which state follows from its class."""
    folder, _, _ = two
    arguments = ["--data", "texts.jsonl", "--held_out", 0, "--model", "llama-32x1", "--learning_rate", 0.02]
    arguments += ["--logging_steps", 1, "--save_steps", 3, "--save_total_limit", 9]
    arguments += ["--lr_scheduler_type", "constant", "--output_dir"]
    done = train_in(1, folder, *arguments, "plain", "--per_device_train_batch_size", 8)
    assert done.returncode == 0, done.stderr
    return folder, arguments


def test_a_run_without_deepspeed_goes_on_under_zero(plain):
    folder, arguments = plain
    zero = ["--zero", 3, "--per_device_train_batch_size", 4, "--resume_from_checkpoint", "plain/checkpoint-3"]
    done = train_in(2, folder, *arguments, "sharded", *zero)
    assert done.returncode == 0, done.stderr
    assert losses(folder / "sharded") == pytest.approx(losses(folder / "plain"), rel=2e-6)


@pytest.mark.regression
def test_a_new_model_under_zero_3_begins_with_the_weights_of_its_seed(plain):
    folder, arguments = plain
    done = train_in(2, folder, *arguments, "drawn", "--zero", 3, "--per_device_train_batch_size", 4, "--max_steps", 2)
    assert done.returncode == 0, done.stderr
    first, second = list(losses(folder / "plain").values())[:2]
    assert losses(folder / "drawn") == pytest.approx({1: first, 2: second}, rel=2e-6)


@pytest.mark.parametrize("mistake", ["data", "a checkpoint"])
def test_a_mistake_is_said_in_one_line_by_one_rank_and_no_process_hangs(two, mistake):
    folder, arguments, _ = two
    flags, message = ["--text_column", "body", "--output_dir", "bad"], "there is no column 'body' "
    if mistake == "a checkpoint":
        shutil.copytree(folder / "two", folder / "damaged")
        (folder / "damaged" / "checkpoint-8" / "rng_state_1.pth").unlink()
        flags = ["--output_dir", "damaged", "--resume_from_checkpoint", "damaged/checkpoint-8"]
        message = "this checkpoint is damaged (damaged/checkpoint-8/rng_state_1.pth): expected "
    done = train_in(2, folder, *arguments, "--per_device_train_batch_size", 4, *flags)
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ullage: ")]
    assert line.startswith(f"ullage: {message}")
    assert "Traceback" not in done.stderr
