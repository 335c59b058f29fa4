"""``ullage train`` as a person runs it: on tiny sizes, in processes of its own where the process matters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.support import forked
from tests.support.launch import environment, full_disk
from tests.support.train_verb import losses, record, steps_saved, texts, train, train_in
from ullage.cli.train.arguments import _shared_batch, _zero, parse
from ullage.cli.train.folder import taken_over
from ullage.core.errors import CheckpointError, InputError, TrainingError
from ullage.datasets import load_text, split_held_out
from ullage.training.saving.checkpoints import require_checkpoint
from ullage.training.saving.staging import staging_of

COMMON = ["--per_device_train_batch_size", 4, "--logging_steps", 1, "--use_cpu"]
TINY = ["--model", "lstm-16", *COMMON]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return texts(tmp_path_factory.mktemp("data"))


def files(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """One run of two epochs by the real command, and what it said."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    arguments = ["--data", data, "--output_dir", folder, *TINY, "--save_steps", 5, "--save_total_limit", 9]
    arguments += ["--dropout", 0.1, "--learning_rate", 0.02, "--num_train_epochs", 2]
    return folder, arguments, train_in(1, folder.parent, *arguments, start=subprocess.run)


def test_a_run_says_what_it_did_and_the_loss_falls(run, data):
    folder, _, done = run
    assert done.returncode == 0, done.stderr
    first, *said = done.stdout.splitlines()
    assert (first, said[0]) == (
        "device: cpu, float32, 1 process",
        "tokenizer: bytes, for a new model (--tokenizer NAME takes another)",
    )
    assert any(line.startswith("a step: 4 sequences, about ") for line in said)
    assert any(line.startswith("nothing is packed, and nothing is padded: ") for line in said)
    for word in ("texts to train on", "texts to evaluate on", "parameters", "tokens per second", str(folder)):
        assert word in done.stdout
    assert "warn" not in done.stderr.lower()
    assert all(word in done.stderr for word in ("training:", "loss ", "tokens/s", "padding avoided"))
    steps = losses(folder)
    summary = record(folder)["summary"]
    assert steps[summary["steps"]] < steps[1] - 1.0
    assert summary["steps"] == max(steps)
    assert summary["eval_loss"] < steps[1]
    training, _ = split_held_out(load_text(data))
    assert summary["tokens"] == 2 * sum(len(text.encode()) + 1 for text in training)  # type: ignore[union-attr]
    assert summary["padding_avoided"] == pytest.approx(1 - summary["tokens"] / summary["num_padded_tokens"])
    assert summary["padding_avoided"] > 0


def test_the_lines_of_python_in_the_summary_run(run, data, capsys):
    """They begin with words of a sample that was held out."""
    said = run[2].stdout
    first = split_held_out(load_text(data))[1][0]
    begin = " ".join(first.split()[:3])  # type: ignore[union-attr]
    assert f"prompt = tokenizer({begin!r}, add_special_tokens=False, " in said
    script, written = said[said.index("import ullage.models") :], begin
    # The text is drawn, and a model of two epochs may draw its end at once; not from each of three seeds.
    for seed in range(3):
        torch.manual_seed(seed)
        exec(script, {})
        written = max(written, capsys.readouterr().out, key=len)
        assert written.startswith(begin)
    assert len(written) > len(begin) + 1


def test_a_second_call_reports_the_finished_run_and_changes_nothing(run, capsys):
    folder, arguments, _ = run
    before = files(folder)
    train(*arguments)
    said = capsys.readouterr().out
    assert "holds this run, finished; --overwrite_output_dir starts over" in said
    assert "padding avoided" in said
    assert files(folder) == before


def test_a_call_with_other_settings_is_refused_and_changes_nothing(run):
    folder, arguments, _ = run
    before = files(folder)
    with pytest.raises(InputError) as error:
        train(*arguments, "--learning_rate", 0.5, "--seed", 7)
    assert str(error.value) == (
        f"the output folder holds a run with other settings ({folder}): found learning_rate 0.02 there, 0.5 here, "
        "seed 42 there, 7 here. Continue it with --resume_from_checkpoint, start over with --overwrite_output_dir, "
        "or give another --output_dir"
    )
    assert files(folder) == before


def test_resuming_continues_exactly_in_the_second_epoch(run, tmp_path):
    folder, arguments, _ = run
    train(*arguments, "--output_dir", tmp_path, "--resume_from_checkpoint", folder / "checkpoint-20")
    assert max(losses(tmp_path)) > 20  # else it had nothing left to do
    assert losses(tmp_path) == losses(folder)


def test_a_run_stops_where_it_is_told_and_a_bare_resume_keeps_its_settings(run, tmp_path, capsys):
    folder, arguments, _ = run
    stopped = tmp_path / "stopped"
    train(*arguments, "--output_dir", stopped, "--stop_at_step", 7)
    said = capsys.readouterr().out
    assert f"stopped as asked; {stopped}/checkpoint-7 is whole; continue with the same command and --resume" in said
    assert steps_saved(stopped) == [5, 7]
    assert not (stopped / "model.safetensors").exists()
    train(*arguments, "--output_dir", stopped, "--stop_at_step", 7)
    assert "texts to train on" not in capsys.readouterr().out  # it was there already
    train("--output_dir", stopped, "--resume_from_checkpoint")
    assert "changed settings" not in capsys.readouterr().out
    assert losses(stopped) == losses(folder)


def test_a_run_keeps_its_global_batch_on_other_processes_unless_the_call_has_another(run, monkeypatch):
    folder, *_ = run
    assert record(folder)["settings"]["packing_global_batch_size"] == 4
    calls = [
        (3, {}, 4),
        (3, {"resume_from_checkpoint": "auto"}, 4),
        (3, {"resume_from_checkpoint": str(folder / "checkpoint-5"), "output_dir": "elsewhere"}, 4),
        (3, {"per_device_train_batch_size": 2}, 6),
        (2, {"gradient_accumulation_steps": 2}, 16),
        (3, {"overwrite_output_dir": True}, 12),
        (8, {"tp": 2}, 4),
    ]
    for processes, given, size in calls:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        flags, _ = _shared_batch({"per_device_train_batch_size": 4, "output_dir": str(folder), **given})
        assert flags == [f"--packing_global_batch_size={size}", "--gradient_accumulation_steps=1"]
    own = {"packing_global_batch_size": 5}, {"deepspeed": "file", "gradient_accumulation_steps": 2}
    assert [_shared_batch(given)[0] for given in own] == [[], []]
    settings = taken_over(folder, {"learning_rate"})
    assert settings["per_device_train_batch_size"] == 4
    assert not settings.keys() & {"learning_rate", "world_size", "packing_global_batch_size"}


@pytest.mark.parametrize("whole", [8, None])
def test_a_run_of_two_processes_is_the_same_run_on_one(run, tmp_path, capsys, whole):
    """Also one that was recorded before global batches were."""
    folder, arguments, _ = run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = {**record(folder)["settings"], "world_size": 2, "packing_global_batch_size": whole}
    record(tmp_path, settings=settings)
    train(*arguments, "--output_dir", tmp_path)
    assert "holds this run, finished" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"found packing_global_batch_size 8 there, 7 here\. Continue it with"):
        train(*arguments, "--output_dir", tmp_path, "--packing_global_batch_size", 7)


def test_a_call_that_resumes_begins_where_there_is_no_checkpoint(data, tmp_path, capsys):
    """Also where a run has been killed before its first; what its files left is no hindrance."""
    out = tmp_path / "out"
    arguments = ["--data", data, *TINY, "--max_steps", 2, "--output_dir", out, "--resume_from_checkpoint"]
    train(*arguments, "auto")
    assert steps_saved(out) == [1, 2]
    whole = losses(out)
    for path in (*out.glob("checkpoint-*"), out / "model.safetensors"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    record(out, summary=None)
    staging_of(out / "checkpoint-1").mkdir()
    for word in ("auto", "true"):
        shutil.copytree(out, tmp_path / word)
        train(*arguments[:-2], tmp_path / word, arguments[-1], word)
        assert losses(tmp_path / word) == whole
        assert not list((tmp_path / word).glob("_*"))
    assert "continues" not in capsys.readouterr().out


def test_zero_is_a_plain_config_of_deepspeed():
    (flag,) = _zero({"zero": 3})
    config = json.loads(flag.removeprefix("--deepspeed="))
    assert config["zero_optimization"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    assert config["train_batch_size"] == "auto"
    assert _zero({}) == []


@pytest.mark.slow
def test_a_busy_port_is_said_in_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = train_in(1, tmp_path, "--zero", 1, "--max_steps", 1, "--output_dir", "out", **alone)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("ullage")] == [
        f"ullage: the processes cannot meet: the port is in use (127.0.0.1:{port}). Start them with torchrun "
        "--standalone, which finds a free one, or set MASTER_PORT"
    ]
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def short(data, tmp_path_factory):
    """A finished run whose last step is inside its first epoch."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    arguments = ["--data", data, *TINY, "--max_steps", 6, "--save_steps", 2, "--save_total_limit", 3, "--seed", 3]
    arguments += ["--learning_rate", 0.02, "--eval_strategy", "no", "--disable_tqdm", "true"]
    train(*arguments, "--output_dir", folder)
    return folder, arguments


def unfinished(folder: Path, source: Path, *, model: bool = False) -> Path:
    """The folder as a run leaves it that was killed after its last checkpoint, before the model was saved."""
    shutil.copytree(source, folder)
    record(folder, summary=None)
    if not model:
        (folder / "model.safetensors").unlink()
    return folder


def test_going_on_from_the_last_checkpoint_trains_nothing(short, tmp_path, capsys):
    source, arguments = short
    folder = unfinished(tmp_path / "killed", source)
    train(*arguments, "--output_dir", folder)
    assert f"unfinished: continues from {folder}/checkpoint-6" in capsys.readouterr().out
    assert steps_saved(folder) == [2, 4, 6]
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    before, after = record(source)["summary"], record(folder)["summary"]
    for name in ("steps", "first_loss", "last_loss", "eval_loss"):
        assert after[name] == before[name]


def test_resuming_a_finished_run_leaves_its_model_as_it_is(short, tmp_path, capsys):
    source, arguments = short
    folder = tmp_path / "finished"
    shutil.copytree(source, folder)
    before = files(folder)
    train(*arguments, "--output_dir", folder, "--resume_from_checkpoint")
    assert f"{folder} holds this run, finished" in capsys.readouterr().out
    assert files(folder) == before
    train(*arguments, "--output_dir", folder, "--resume_from_checkpoint", folder / "checkpoint-6")
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert steps_saved(folder)[-1] == 6


@pytest.mark.parametrize("flags", [["--resume_from_checkpoint"], []], ids=["bare", "none"])
def test_a_damaged_checkpoint_is_passed_over_after_saying_so(short, tmp_path, capsys, flags):
    source, arguments = short
    folder = unfinished(tmp_path / "run", source)
    os.truncate(folder / "checkpoint-6" / "optimizer.pt", 100)
    train(*arguments, "--output_dir", folder, *flags)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{folder}/checkpoint-6 is damaged and left as it is: optimizer.pt: expected ")
    assert said[1].endswith(f"continues from {folder}/checkpoint-4")
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-6.damaged"]
    assert losses(folder) == losses(source)
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_that_was_named_is_refused_and_one_changed_on_purpose_taken(short, tmp_path, capsys):
    source, arguments = short
    folder = unfinished(tmp_path / "changed", source, model=True)
    state = folder / "checkpoint-4" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text())))
    given = [*arguments, "--output_dir", folder, "--resume_from_checkpoint", state.parent]
    with pytest.raises(CheckpointError) as error:
        train(*given)
    assert str(error.value).startswith(f"this checkpoint is damaged ({state}): expected ")
    take = f"Take {folder}/checkpoint-2, the newest whole one before it; if the file was changed on purpose"
    assert take in str(error.value)
    train(*given, "--allow_changed_checkpoint")
    assert f"{state.parent}: taken as changed on purpose: trainer_state.json" in capsys.readouterr().out
    assert losses(folder) == losses(source)


def test_overwriting_starts_over(data, tmp_path):
    arguments = ["--data", data, "--output_dir", tmp_path, *TINY, "--max_steps", 4, "--save_steps", 2]
    train(*arguments)
    (tmp_path / "notes.txt").write_text("mine")
    train(*arguments, "--max_steps", 3, "--overwrite_output_dir")
    assert steps_saved(tmp_path) == [2, 3]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_of_anothers_model_is_left_alone(data, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(InputError, match=r"holds a model or checkpoints already .*found model.safetensors\. Continue"):
        train("--data", data, "--output_dir", tmp_path, *TINY)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_the_summary_tells_what_was_not_trained_on(data, tmp_path, capsys):
    """Texts above 60 tokens, in four steps; of a single text cut to one token no label counts."""
    common = ["--data", data, *TINY, "--held_out", 0, "--num_train_epochs", 1]
    train(*common, "--output_dir", tmp_path / "a", "--packing_capacity", 60, "--packing_oversize", "drop")
    told = capsys.readouterr().out
    summary = record(tmp_path / "a")["summary"]
    lengths = [len(json.loads(line)["text"]) + 1 for line in data.read_text().splitlines()]
    dropped = [length for length in lengths if length > 60]
    assert 0 < len(dropped) < len(lengths)
    assert (summary["total_dropped_sequences"], summary["total_dropped_tokens"]) == (len(dropped), sum(dropped))
    assert summary["tokens"] == sum(lengths) - sum(dropped)
    assert f"sequences dropped {len(dropped)}" in " ".join(told.split())
    cut = ["--packing_capacity", 1, "--packing_oversize", "truncate", "--max_steps", 2]
    train(*common, *cut, "--output_dir", tmp_path / "b", "--json")
    told = capsys.readouterr()
    said = json.loads(told.out)  # and nothing else
    assert (said["total_empty_steps"], said["total_truncated_sequences"], said["tokens"]) == (2, 8, 8)
    assert "texts to train on" in told.err


def test_a_saved_model_is_trained_on_with_its_own_tokenizer(run, data, tmp_path):
    folder, *_ = run
    train("--data", data, "--output_dir", tmp_path, "--model", folder, *COMMON, "--max_steps", 1)
    assert losses(tmp_path)[1] < losses(folder)[1] - 1.0  # it did not begin anew


def test_workers_accumulation_and_grouping_by_length(data, tmp_path):
    arguments = ["--train_sampling_strategy", "group_by_length", "--gradient_accumulation_steps", 2]
    arguments += ["--dataloader_num_workers", 2, "--max_steps", 3, "--load_best_model_at_end", "--save_steps", 0.5]
    train("--data", data, "--output_dir", tmp_path, *TINY, *arguments)
    summary = record(tmp_path)["summary"]
    assert 0 < summary["tokens"] <= summary["num_padded_tokens"]
    assert summary["eval_loss"] > 0


def test_a_name_with_sizes_a_config_file_and_other_columns(tmp_path):
    from transformers import AutoConfig

    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"body": "x" * i, "n": i} for i in range(1, 9)]))
    common = ["--data", path, "--text_column", "body", "--max_steps", 1, "--use_cpu", "--held_out", 0]
    train(*common, "--model", "gru-24x2", "--output_dir", tmp_path / "gru")
    config = AutoConfig.from_pretrained(tmp_path / "gru")
    assert (config.cell, config.hidden_size, config.num_hidden_layers, config.vocab_size) == ("gru", 24, 2, 259)
    train(*common, "--model", tmp_path / "gru" / "config.json", "--output_dir", tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").cell == "gru"


def test_a_config_file_gives_arguments_and_the_command_line_wins(tmp_path):
    settings = {"output_dir": "somewhere", "learning_rate": "1e-3", "max-steps": 7, "bf16": False, "run_name": 5}
    settings |= {"label_names": ["labels"], "eval_data": None, "lr_scheduler_kwargs": {"num_cycles": 2}}
    settings |= {"model": "gru-8"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = parse(["--config", str(path), "--learning_rate", "0.5"])
    training = command.training
    assert (training.output_dir, training.learning_rate, training.max_steps) == ("somewhere", 0.5, 7)
    assert (training.label_names, training.run_name, command.model.model) == (["labels"], "5", "gru-8")
    assert training.lr_scheduler_kwargs == {"num_cycles": 2}
    assert parse([]).training.output_dir == "runs/train"


def test_a_folder_that_cannot_be_written(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"the output folder cannot be made \(.*/file/a/b\): found .*/file is a file"):
        train("--data", data, "--output_dir", tmp_path / "file" / "a" / "b", *TINY)
    with pytest.raises(TrainingError, match=r"needs cannot be used \(/proc/none\): found .*No such file or directory"):
        train("--data", data, "--output_dir", "/proc/none", *TINY)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match=r"cannot be written \(.*/out\): found no permission in "):
        train("--data", data, "--output_dir", tmp_path / "out", *TINY)


def test_a_disk_that_is_full_and_a_file_that_cannot_be_read_are_told_apart(data, tmp_path, monkeypatch):
    arguments = ["--data", data, *TINY, "--max_steps", 2, "--save_steps", 1, "--disable_tqdm", "true"]
    full = pytest.raises(TrainingError, match=r"this cannot be written \(.*/full/checkpoint-1\): found .* Make room")
    with full_disk(20_000), full:
        train(*arguments, "--output_dir", tmp_path / "full", "--model", "lstm-64")
    monkeypatch.setattr(
        "ullage.training.Trainer._get_train_sampler", lambda self, *_: (tmp_path / "vanished").read_text()
    )
    with pytest.raises(TrainingError, match=r"the run needs cannot be used \(.*/vanished\): found .*No such"):
        train(*arguments, "--output_dir", tmp_path / "read")


def test_a_checkpoint_that_is_none_and_one_of_another_model(run, tmp_path):
    folder, arguments, _ = run
    (tmp_path / "empty").mkdir()
    common = [*arguments, "--output_dir", tmp_path / "out", "--resume_from_checkpoint"]
    with pytest.raises(CheckpointError, match=r"this folder is no checkpoint .*found an empty folder"):
        train(*common, tmp_path / "empty")
    another = r"the checkpoint holds another model .*found model lstm-16 there, lstm-32 here\. Leave out"
    with pytest.raises(CheckpointError, match=another):
        train(*common, folder / "checkpoint-5", "--model", "lstm-32")
    assert not (tmp_path / "out").exists()


def test_the_exit_status_says_whose_mistake_it_was(data, tmp_path):
    wrong = train_in(1, tmp_path, "--no_such_flag")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "ullage: unknown argument --no_such_flag. See ullage train --help-all for all of them\n"
    bad = train_in(1, tmp_path, "--data", data, "--learning_rate", "1e38", "--output_dir", "out", *TINY)
    assert bad.returncode == 1
    assert bad.stderr.splitlines()[-1].startswith("ullage: the loss or its gradient is not a number (step ")
    assert "Traceback" not in bad.stderr


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_and_says_how_to_continue(data, tmp_path):
    arguments = ["--data", data, "--output_dir", tmp_path / "out", *TINY, "--max_steps", 40]
    arguments += ["--save_steps", 5, "--save_total_limit", 20, "--dropout", 0.1, "--eval_strategy", "no"]
    train(*arguments, "--output_dir", tmp_path / "whole")
    command = [sys.executable, "-m", "ullage", "train", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment())
    wait_for(tmp_path / "out" / "checkpoint-5", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    step = steps_saved(tmp_path / "out")[-1]
    last = tmp_path / "out" / f"checkpoint-{step}"
    said = out.splitlines()[-1]
    assert said.startswith(f"interrupted at step {step} ")
    assert said.endswith(f"{last} is whole; continue with the same command and --resume_from_checkpoint")
    assert require_checkpoint(last) == last
    assert step < 40
    train(*arguments, "--resume_from_checkpoint")
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


KILLED = """
import os, signal, sys
from transformers import Trainer
save = Trainer._save_optimizer_and_scheduler
def killed(self, folder):
    if self.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, folder)
Trainer._save_optimizer_and_scheduler = killed
from ullage.cli import main
main()
"""


@pytest.mark.slow
def test_sigkill_while_saving_leaves_a_run_that_the_same_call_continues(data, tmp_path):
    arguments = ["--data", data, "--output_dir", tmp_path / "out", *TINY, "--max_steps", 6, "--save_steps", 2]
    killed = forked.run([sys.executable, "-c", KILLED, "train", *map(str, arguments)], env=environment())
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps_saved(tmp_path / "out") == [2]
    left = staging_of(tmp_path / "out" / "checkpoint-4")
    assert (left / "checkpoint-4" / "model.safetensors").exists()
    train(*arguments)
    train(*arguments, "--output_dir", tmp_path / "whole")
    assert not left.exists()
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_the_default_run_is_on_the_docstrings(tmp_path):
    done = train_in(1, tmp_path, "--output_dir", "out", "--max_steps", 12, "--eval_strategy", "no")
    assert done.returncode == 0, done.stderr
    assert "the docstrings of the standard library" in done.stdout
    summary = record(tmp_path / "out")["summary"]
    assert summary["eval_loss"] < summary["first_loss"] < 5.6
    assert summary["padding_avoided"] > 0.5
