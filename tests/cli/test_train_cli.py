"""``ullage train`` as a person runs it: on tiny sizes, in processes of its own where the process matters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.train_verb import base_model, jsonl, losses, record, steps_saved, texts, train, train_in
from ullage.cli.train import Parser, decided, settings_of
from ullage.core.errors import InputError, UsageError
from ullage.datasets import split_held_out
from ullage.datasets.text import read_samples
from ullage.report.run import read_run
from ullage.training.saving.staging import staging_of

COMMON = ["--per_device_train_batch_size", 4, "--logging_steps", 1, "--use_cpu", "--disable_tqdm", "true"]
TINY = ["--model", "lstm-16", *COMMON]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return texts(tmp_path_factory.mktemp("data"))


def files(folder: Path) -> dict[str, float]:
    """When each file was written, but for the page, which is drawn again."""
    return {
        str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix != ".html" and path.is_file()
    }


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """One run of two epochs by the real command, and what it said."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    arguments = ["--data", data, "--output_dir", folder, *TINY, "--save_steps", 5, "--save_total_limit", 9]
    arguments += ["--learning_rate", 0.02, "--num_train_epochs", 2]
    return folder, arguments, train_in(1, folder.parent, *arguments, start=subprocess.run)


def test_a_run_says_what_it_did_its_last_lines_load_the_model_and_the_loss_falls(run, data):
    folder, _, done = run
    assert done.returncode == 0, done.stderr
    first, *said = done.stdout.splitlines()
    assert first == "device: cpu; processes: 1"
    assert any(line.startswith("nothing is packed, and nothing is padded: ") for line in said)
    for word in ("to evaluate on", "parameters", "a step: 4 sequences", "real tokens per second"):
        assert word in done.stdout
    assert f"report: {folder}/report.html" in said
    assert (folder / "report.html").is_file()
    assert "warn" not in done.stderr.lower()
    steps, shown = losses(folder), read_run(folder)
    assert steps[max(steps)] < steps[1] - 1.0
    assert shown.values("eval_loss")[-1][1] < steps[1]
    training, _ = split_held_out(read_samples([str(data)])[0])
    assert f"{len(training)} sequences to train on, {sum(len(text.encode()) + 1 for text in training):,} tokens" in said
    names: dict = {}
    exec("import ullage.models" + done.stdout.rpartition("import ullage.models")[2], names)  # load the model
    assert names["model"].config.cell == "lstm"
    assert names["tokenizer"]("ab")["input_ids"] == [100, 101]


def test_a_second_call_reports_the_finished_run_and_changes_nothing(run, capsys):
    folder, arguments, _ = run
    before = files(folder)
    train(*arguments)
    said = capsys.readouterr().out
    assert "holds this run, finished; --overwrite_output_dir starts over" in said
    assert "real tokens per second" in said
    assert files(folder) == before


def test_a_call_with_other_settings_is_refused_and_changes_nothing(run):
    folder, arguments, _ = run
    before = files(folder)
    with pytest.raises(InputError) as error:
        train(*arguments, "--learning_rate", 0.5, "--seed", 7)
    assert str(error.value) == (
        f"the output folder holds another run ({folder}): found learning_rate 0.02 there, 0.5 here; "
        "seed None there, 7 here. Go on with --resume_from_checkpoint, start over with --overwrite_output_dir, "
        "or name another folder"
    )
    assert files(folder) == before


def test_resuming_continues_exactly_in_the_second_epoch(run, tmp_path):
    folder, arguments, _ = run
    train(*arguments, "--output_dir", tmp_path, "--resume_from_checkpoint", folder / "checkpoint-20")
    assert max(losses(tmp_path)) > 20  # else it had nothing left to do
    assert losses(tmp_path) == losses(folder)


@pytest.mark.slow
def test_a_run_stops_where_it_is_told_and_a_bare_resume_keeps_its_settings(run, tmp_path, capsys):
    folder, arguments, _ = run
    stopped = tmp_path / "stopped"
    train(*arguments, "--output_dir", stopped, "--stop_at_step", 7)
    assert "stopped at step 7 of " in capsys.readouterr().out
    assert steps_saved(stopped) == [5, 7]
    assert not (stopped / "model.safetensors").exists()
    train("--output_dir", stopped, "--resume_from_checkpoint")
    assert f"goes on from {stopped}/checkpoint-7" in capsys.readouterr().out
    assert losses(stopped) == losses(folder)


def test_a_run_that_has_reached_the_step_where_it_stops_trains_no_further(run, tmp_path, capsys):
    _, arguments, _ = run
    call = [*arguments, "--output_dir", tmp_path / "stopped", "--stop_at_step", 2]
    for _ in range(2):
        train(*call)
        assert "stopped at step 2 of " in capsys.readouterr().out
        assert steps_saved(tmp_path / "stopped") == [2]


def test_what_a_run_does_not_use_is_said(tmp_path, capsys):
    path = jsonl(tmp_path / "l.jsonl", [{"text": "ab", "label": 1}, {"text": "cd", "label": 0}])
    train("--data", path, "--output_dir", tmp_path / "out", *TINY, "--held_out", 0, "--max_steps", 1)
    said = capsys.readouterr().out
    assert f"{path}: the column 'label' is not used" in said
    assert "\nno sequence is held out to evaluate on\n" in said
    held = jsonl(tmp_path / "one.jsonl", [{"text": "ab"}])
    train("--data", path, "--eval_data", held, "--output_dir", tmp_path / "two", *TINY, "--max_steps", 1)
    assert "\n1 sequence to evaluate on, 3 tokens\n" in capsys.readouterr().out


def test_data_that_are_not_there_are_said_before_a_folder_that_holds_another_run(run, tmp_path):
    folder, _, _ = run
    with pytest.raises(InputError, match="there is no such data file here"):
        train("--data", tmp_path / "nothere.jsonl", "--output_dir", folder)


def test_a_run_keeps_its_global_batch_on_other_processes_unless_the_call_has_another(monkeypatch):
    before = {"batch": [4, 1, 4]}
    monkeypatch.setenv("RANK", "0")
    calls = [
        (3, before, {}, 4),
        (3, before, {"per_device_train_batch_size": 2}, 6),
        (2, before, {"gradient_accumulation_steps": 2}, 16),
        (3, {}, {}, 12),
        (8, {}, {"tp": 2}, 16),
        (3, {}, {"packing_global_batch_size": 5}, 5),
    ]
    for processes, recorded, given, size in calls:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        settings = settings_of({"per_device_train_batch_size": 4, **given}, kept := dict(recorded))
        assert settings["packing_global_batch_size"] == kept["batch"][2] == size
        assert settings.get("gradient_accumulation_steps", 1) == 1
    assert "packing_global_batch_size" not in settings_of({"deepspeed": "file"}, {})
    # ZeRO is a plain config of DeepSpeed.
    monkeypatch.setenv("RANK", "0")
    config = settings_of({"zero": 3}, {})["deepspeed"]
    assert config["zero_optimization"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    assert config["train_batch_size"] == "auto"
    with pytest.raises(UsageError, match="two settings for DeepSpeed"):
        settings_of({"zero": 3, "deepspeed": "file"}, {})


def test_layout_folders_and_logs_do_not_decide_a_run():
    said = {"seed": 3, "zero": 2, "dp": 2, "output_dir": "a", "save_steps": 2, "logging_steps": 1, "use_cpu": True}
    assert decided({**said, "stop_at_step": 4, "resume_from_checkpoint": "auto"}) == {
        "data": None, "model": "lstm", "seed": 3
    }  # fmt: skip


def test_a_call_that_resumes_begins_where_there_is_no_checkpoint(data, tmp_path, capsys):
    """Also where a run has been killed before its first; what its files left is no hindrance."""
    out = tmp_path / "out"
    arguments = ["--data", data, *TINY, "--max_steps", 2, "--output_dir", out, "--resume_from_checkpoint"]
    train(*arguments, "auto")
    assert steps_saved(out) == [1, 2]
    whole = losses(out)
    for path in (*out.glob("checkpoint-*"), out / "model.safetensors"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    record(out, finished=False)
    staging_of(out / "checkpoint-1").mkdir()
    train(*arguments, "true")
    assert losses(out) == whole
    assert not list(out.glob("_*"))
    assert "goes on" not in capsys.readouterr().out


def test_overwriting_starts_over_and_a_folder_of_anothers_model_is_left_alone(data, tmp_path):
    arguments = ["--data", data, "--output_dir", tmp_path, *TINY, "--max_steps", 4, "--save_steps", 2]
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(InputError, match=r"holds another run .*found model.safetensors\. Go on"):
        train(*arguments)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    train(*arguments)
    (tmp_path / "notes.txt").write_text("mine")
    train(*arguments, "--max_steps", 3, "--overwrite_output_dir")
    assert steps_saved(tmp_path) == [2, 3]
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.regression
def test_a_checkpoint_without_a_record_is_not_continued_on_the_default_data(data, tmp_path):
    arguments = ["--data", data, *TINY, "--max_steps", 4, "--output_dir", tmp_path]
    train(*arguments, "--stop_at_step", 2)
    (tmp_path / "ullage_run.json").unlink()
    with pytest.raises(InputError, match=r"the settings of this run are not known .*at least --data"):
        train("--output_dir", tmp_path, "--resume_from_checkpoint", "--max_steps", 4)
    train(*arguments, "--resume_from_checkpoint")
    assert steps_saved(tmp_path)[-1] == 4


def test_a_model_with_weights_is_trained_with_its_own_tokenizer(data, tmp_path):
    base_model(tmp_path / "base")
    train("--data", data, "--model", tmp_path / "base", *COMMON, "--max_steps", 1, "--output_dir", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 257
    os.remove(tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "model.safetensors").write_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match="the run cannot begin: found "):
        train("--data", data, "--model", tmp_path / "base", *COMMON, "--output_dir", tmp_path / "no")


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


@pytest.mark.slow
def test_a_stream_trains_packed_and_continues_exactly(data, tmp_path):
    arguments = ["--data", data, "--streaming", "--model", "llama-16x1", *COMMON, "--packing_capacity", 256]
    arguments += ["--max_steps", 6, "--save_steps", 3, "--save_total_limit", 3]
    train(*arguments, "--output_dir", tmp_path / "whole")
    train(*arguments, "--output_dir", tmp_path / "run", "--stop_at_step", 3)
    train(*arguments, "--output_dir", tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    with pytest.raises(UsageError, match="a stream has no end"):
        train("--data", data, "--streaming", *TINY, "--output_dir", tmp_path / "no")
    bad = jsonl(tmp_path / "bad.jsonl", [*[{"text": "abc"}] * 9, {"text": None}])
    with pytest.raises(InputError, match=r"a row cannot be used \(row 9 of the stream\)"):
        train(*arguments, "--data", bad, "--output_dir", tmp_path / "bad")


def test_a_config_file_gives_arguments_and_the_command_line_wins(tmp_path):
    settings = {"output_dir": "somewhere", "learning_rate": "1e-3", "max-steps": 7, "bf16": False, "run_name": 5}
    settings |= {"label_names": ["labels"], "eval_data": None, "lr_scheduler_kwargs": {"num_cycles": 2}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    said = Parser().said(["--config", str(path), "--learning_rate", "0.5"])
    assert said == {
        "output_dir": "somewhere", "learning_rate": 0.5, "max_steps": 7, "bf16": False, "run_name": "5",
        "label_names": ["labels"], "lr_scheduler_kwargs": '{"num_cycles": 2}',
    }  # fmt: skip
    path.write_text("learning_rat: 1")
    with pytest.raises(UsageError, match=r"unknown key 'learning_rat' \(.*run.yaml\)\. Did you mean learning_rate"):
        Parser().said(["--config", str(path)])


def test_help_is_short_and_has_the_rest_when_asked(capsys):
    train("--help")
    short = capsys.readouterr().out
    assert "--data" in short
    assert "--packing_capacity" in short
    assert "--adam_beta1" not in short
    assert len(short.splitlines()) < 120
    train("--help-all")
    assert "--adam_beta1" in capsys.readouterr().out


@pytest.mark.slow
def test_the_exit_status_says_whose_mistake_it_was(data, tmp_path):
    wrong = train_in(1, tmp_path, "--no_such_flag")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "ullage: unknown argument --no_such_flag. ullage train --help-all lists all of them\n"
    bad = train_in(1, tmp_path, "--data", data, "--learning_rate", "1e38", "--output_dir", "out", *TINY)
    assert bad.returncode == 1
    assert bad.stderr.splitlines()[-1].startswith("ullage: the loss or its gradient is not a number (step ")
    assert "Traceback" not in bad.stderr


@pytest.mark.long
@pytest.mark.slow
def test_the_default_run_is_on_the_docstrings(tmp_path):
    done = train_in(1, tmp_path, "--output_dir", "out", "--max_steps", 12, "--eval_strategy", "no")
    assert done.returncode == 0, done.stderr
    shown = read_run(tmp_path / "out")
    assert shown.values("eval_loss")[-1][1] < shown.values("loss")[0][1] < 5.6
