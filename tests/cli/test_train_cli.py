"""``ullage train`` as a person runs it: on tiny sizes, in processes of its own where the process matters."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support import forked
from tests.support.launch import environment, full_disk
from ullage.cli.train.arguments import parse
from ullage.cli.train.verb import _run
from ullage.core.errors import CheckpointError, InputError, TrainingError, UsageError
from ullage.training.saving.checkpoints import checkpoints_in, require_checkpoint
from ullage.training.saving.staging import staging_of

TINY = ["--model", "lstm-16", "--per_device_train_batch_size", "4", "--logging_steps", "1", "--use_cpu"]

BEST = ["--load_best_model_at_end", "--save_steps", "0.5"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": f"{i} " + "abc " * draw.randint(1, 20), "number": i} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ullage_train(*arguments: object, start: list[str] | None = None, **options) -> subprocess.CompletedProcess[str]:
    command = [*(start or [sys.executable, "-m", "ullage"]), "train", *map(str, arguments)]
    extra = {"env": environment(COLUMNS="100"), "timeout": 240, **options}
    return subprocess.run(command, capture_output=True, text=True, **extra)


def here(*arguments: object) -> None:
    """The same in this process, which costs no start."""
    _run([*map(str, arguments)], first=True)


def losses(checkpoint: Path) -> list[tuple[int, float]]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [(row["step"], row["loss"]) for row in history if "loss" in row]


def files(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """One run of two epochs by the real command, and what it said."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    arguments = ["--data", data, "--output_dir", folder, *TINY, "--save_steps", 5, "--save_total_limit", 9]
    arguments += ["--dropout", 0.1, "--learning_rate", 0.02, "--num_train_epochs", 2]
    return folder, arguments, ullage_train(*arguments)


def test_a_run_says_what_it_did_and_the_loss_falls(run):
    folder, _, done = run
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tokenizer: bytes, for a new model (--tokenizer NAME takes another)\n")
    words = (
        "texts to train on",
        "texts to evaluate on",
        "parameters",
        "padding avoided",
        "tokens per second",
        str(folder),
    )
    for word in words:
        assert word in done.stdout
    assert "warn" not in done.stderr.lower()
    assert all(word in done.stderr for word in ("training:", "loss ", "tokens/s", "padding avoided"))
    steps = losses(checkpoints_in(folder)[-1])
    assert steps[-1][1] < steps[0][1] - 1.0
    record = json.loads((folder / "ullage_run.json").read_text())["summary"]
    assert record["tokens"] < record["num_padded_tokens"]
    assert record["padding_avoided"] == pytest.approx(1 - record["tokens"] / record["num_padded_tokens"])
    assert record["steps"] == steps[-1][0]
    assert record["eval_loss"] < steps[0][1]


def test_the_counts_are_those_of_the_data(run, data):
    from ullage.datasets import load_text, split_held_out

    folder, *_ = run
    training, _ = split_held_out(load_text(data))
    summary = json.loads((folder / "ullage_run.json").read_text())["summary"]
    assert summary["tokens"] == 2 * sum(len(text.encode()) + 1 for text in training)  # type: ignore[union-attr]


def test_the_lines_of_python_in_the_summary_run(run, data, tmp_path):
    """They begin with words of a sample that was held out."""
    from ullage.datasets import load_text, split_held_out

    _, _, done = run
    first = split_held_out(load_text(data))[1][0]
    assert isinstance(first, str)
    begin = " ".join(first.split()[:3])
    assert f"prompt = tokenizer({begin!r}, add_special_tokens=False, " in done.stdout
    script = done.stdout[done.stdout.index("import ullage.models") :]
    # The text is drawn, and a model of two epochs may draw its end at once; not from each of three seeds.
    for seed in range(3):
        seeded = f"import torch; torch.manual_seed({seed})\n{script}"
        written = forked.run(
            [sys.executable, "-c", seeded], capture_output=True, text=True, env=environment(), cwd=tmp_path
        )
        assert written.returncode == 0, written.stderr
        assert written.stdout.startswith(begin)
        if len(written.stdout) > len(begin) + 1:
            break
    assert len(written.stdout) > len(begin) + 1


def test_a_second_call_reports_the_finished_run_and_changes_nothing(run, capsys):
    folder, arguments, _ = run
    before = files(folder)
    here(*arguments)
    said = capsys.readouterr().out
    assert "holds this run, finished; --overwrite_output_dir starts over" in said
    assert "padding avoided" in said
    assert files(folder) == before


def test_a_call_with_other_settings_is_refused_and_changes_nothing(run):
    folder, arguments, _ = run
    before = files(folder)
    with pytest.raises(InputError) as error:
        here(*arguments, "--learning_rate", 0.5, "--seed", 7)
    assert str(error.value) == (
        f"the output folder holds a run with other settings ({folder}): found learning_rate 0.02 there, 0.5 here, "
        "seed 42 there, 7 here. Continue it with --resume_from_checkpoint, start over with --overwrite_output_dir, "
        "or give another --output_dir"
    )
    assert files(folder) == before


def test_resuming_continues_exactly(run, tmp_path):
    folder, arguments, _ = run
    whole = losses(checkpoints_in(folder)[-1])
    # From a checkpoint in the first epoch, and from one in the second; into another folder, to compare both.
    for step in (5, 20):
        other = tmp_path / str(step)
        here(*arguments, "--output_dir", other, "--resume_from_checkpoint", folder / f"checkpoint-{step}")
        resumed = losses(checkpoints_in(other)[-1])
        assert len(resumed) > step  # else it had nothing left to do
        assert resumed == whole


def test_a_run_stops_where_it_is_told_and_a_bare_resume_keeps_its_settings(run, tmp_path, capsys):
    folder, arguments, _ = run
    stopped = tmp_path / "stopped"
    here(*arguments, "--output_dir", stopped, "--stop_at_step", 7)
    said = capsys.readouterr().out
    assert f"stopped as asked; {stopped}/checkpoint-7 is whole; continue with the same command and --resume" in said
    assert [path.name for path in checkpoints_in(stopped)] == ["checkpoint-5", "checkpoint-7"]
    assert not (stopped / "model.safetensors").exists()
    here(*arguments, "--output_dir", stopped, "--stop_at_step", 7)
    assert "texts to train on" not in capsys.readouterr().out  # it was there already
    here("--output_dir", stopped, "--resume_from_checkpoint")
    said = capsys.readouterr().out
    assert "changed settings" not in said
    assert losses(checkpoints_in(stopped)[-1]) == losses(checkpoints_in(folder)[-1])


def test_a_resumed_run_keeps_its_global_batch(run, tmp_path):
    from ullage.cli.train.folder import taken_over

    folder, *_ = run
    record = json.loads((folder / "ullage_run.json").read_text())
    assert record["settings"]["per_device_train_batch_size"] == 4
    assert taken_over(folder, set(), 2)["per_device_train_batch_size"] == 2
    assert taken_over(folder, {"per_device_train_batch_size"}, 3).get("per_device_train_batch_size") is None
    assert taken_over(folder, {"learning_rate"}, 1).get("learning_rate") is None
    assert taken_over(folder, set(), 1)["learning_rate"] == 0.02
    assert taken_over(tmp_path, set(), 3) == {}
    with pytest.raises(UsageError, match=r"global batch of 4 does not divide over 3 processes .*ullage_run.json"):
        taken_over(folder, set(), 3)


def test_zero_is_a_plain_config_of_deepspeed(tmp_path):
    from ullage.cli.train.arguments import _zero

    (flag,) = _zero({"zero": 3})
    config = json.loads(flag.removeprefix("--deepspeed="))
    assert config["zero_optimization"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    assert config["train_batch_size"] == "auto"
    assert _zero({}) == []
    with pytest.raises(UsageError, match="two settings for DeepSpeed"):
        parse(["--zero", "2", "--deepspeed", "ds.json"])
    with pytest.raises(UsageError, match="invalid choice"):
        parse(["--zero", "4"])


def test_a_llama_by_name(tmp_path):
    from ullage.cli.train.model import Chosen, load_model
    from ullage.cli.train.summary import Voice
    from ullage.datasets.text import byte_tokenizer

    def config(*flags: str):
        command = parse(["--output_dir", str(tmp_path), *flags])
        return load_model(command, Chosen(None, byte_tokenizer()), None, Voice(False, False)).config

    llama = config("--model", "llama-192x2")
    sizes = (llama.hidden_size, llama.num_hidden_layers, llama.num_attention_heads, llama.intermediate_size)
    assert (llama.model_type, *sizes, llama.vocab_size) == ("llama", 192, 2, 3, 512, 259)
    assert config("--model", "llama-128x1").num_key_value_heads == 1
    assert config("--model", "llama-34x1").num_attention_heads == 1
    with pytest.raises(InputError, match=r"--dropout is for a new recurrent model"):
        config("--model", "llama", "--dropout", "0.1")
    with pytest.raises(InputError, match=r"hidden size must be even"):
        config("--model", "llama-33")


def test_a_busy_port_is_said_in_one_line(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = ullage_train(
            "--zero", 1, "--max_steps", 1, "--output_dir", "out", cwd=tmp_path, env={**environment(), **alone}
        )
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("ullage")]
    assert said == [
        f"ullage: the processes cannot meet: the port is in use (127.0.0.1:{port}). Start them with torchrun "
        "--standalone, which finds a free one, or set MASTER_PORT"
    ]
    assert "Traceback" not in done.stderr


def test_a_bare_resume_takes_the_last_checkpoint_and_a_bare_call_does_so_too(run, tmp_path, capsys):
    folder, arguments, _ = run
    whole = losses(checkpoints_in(folder)[-1])
    for name, flags in (("bare", ["--resume_from_checkpoint"]), ("none", [])):
        unfinished = tmp_path / name
        unfinished.mkdir()
        for checkpoint in checkpoints_in(folder)[:2]:
            (unfinished / checkpoint.name).symlink_to(checkpoint)
        record = json.loads((folder / "ullage_run.json").read_text())
        (unfinished / "ullage_run.json").write_text(json.dumps({**record, "summary": None}))
        here(*arguments, "--output_dir", unfinished, *flags)
        assert f"continues from {unfinished}/checkpoint-10" in capsys.readouterr().out
        assert losses(checkpoints_in(unfinished)[-1]) == whole


@pytest.fixture(scope="module")
def short(data, tmp_path_factory):
    """A finished run whose last step is inside its first epoch."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    arguments = ["--data", data, *TINY, "--max_steps", 6, "--save_steps", 2, "--save_total_limit", 3, "--seed", 3]
    arguments += ["--learning_rate", 0.02, "--eval_strategy", "no", "--disable_tqdm", "true"]
    here(*arguments, "--output_dir", folder)
    return folder, arguments


def unfinished(folder: Path, source: Path, *, model: bool = False) -> Path:
    """The folder as a run leaves it that was killed after its last checkpoint, before the model was saved."""
    shutil.copytree(source, folder)
    record = json.loads((folder / "ullage_run.json").read_text())
    (folder / "ullage_run.json").write_text(json.dumps({**record, "summary": None}))
    if not model:
        (folder / "model.safetensors").unlink()
    return folder


def test_going_on_from_the_last_checkpoint_trains_nothing(short, tmp_path, capsys):
    source, arguments = short
    folder = unfinished(tmp_path / "killed", source)
    here(*arguments, "--output_dir", folder)
    assert f"unfinished: continues from {folder}/checkpoint-6" in capsys.readouterr().out
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    before, after = (json.loads((path / "ullage_run.json").read_text())["summary"] for path in (source, folder))
    for name in ("steps", "first_loss", "last_loss", "eval_loss"):
        assert after[name] == before[name]


def test_resuming_a_finished_run_leaves_its_model_as_it_is(short, tmp_path, capsys):
    source, arguments = short
    folder = tmp_path / "finished"
    shutil.copytree(source, folder)
    before = files(folder)
    here(*arguments, "--output_dir", folder, "--resume_from_checkpoint")
    assert f"{folder} holds this run, finished" in capsys.readouterr().out
    assert files(folder) == before
    here(*arguments, "--output_dir", folder, "--resume_from_checkpoint", folder / "checkpoint-6")
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert checkpoints_in(folder)[-1].name == "checkpoint-6"


def test_a_damaged_checkpoint_is_passed_over_after_saying_so(short, tmp_path, capsys):
    source, arguments = short
    for name, flags in (("bare", ["--resume_from_checkpoint"]), ("none", [])):
        folder = unfinished(tmp_path / name, source)
        os.truncate(folder / "checkpoint-6" / "optimizer.pt", 100)
        here(*arguments, "--output_dir", folder, *flags)
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith(f"{folder}/checkpoint-6 is damaged and left as it is: optimizer.pt: expected ")
        assert said[1].endswith(f"continues from {folder}/checkpoint-4")
        left = sorted(path.name for path in folder.glob("checkpoint-*"))
        assert left == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-6.damaged"]
        assert losses(folder / "checkpoint-6") == losses(source / "checkpoint-6")
        assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_that_was_named_is_refused_and_one_changed_on_purpose_taken(short, tmp_path, capsys):
    source, arguments = short
    folder = unfinished(tmp_path / "changed", source, model=True)
    checkpoint = folder / "checkpoint-4"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    given = [*arguments, "--output_dir", folder, "--resume_from_checkpoint", checkpoint]
    with pytest.raises(CheckpointError) as error:
        here(*given)
    message = str(error.value)
    assert message.startswith(f"this checkpoint is damaged ({checkpoint}/trainer_state.json): expected ")
    assert f"Take {folder}/checkpoint-2, the newest whole one before it; if the file was changed on purpose" in message
    here(*given, "--allow_changed_checkpoint")
    assert f"{checkpoint}: taken as changed on purpose: trainer_state.json" in capsys.readouterr().out
    assert losses(folder / "checkpoint-6") == losses(source / "checkpoint-6")


def test_overwriting_starts_over(data, tmp_path):
    arguments = ["--data", data, "--output_dir", tmp_path, *TINY, "--max_steps", 4, "--save_steps", 2]
    here(*arguments)
    (tmp_path / "notes.txt").write_text("mine")
    here(*arguments, "--max_steps", 3, "--overwrite_output_dir")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_seed_decides_a_run(data, tmp_path):
    arguments = ["--data", data, *TINY, "--max_steps", 2, "--dropout", 0.1]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        here(*arguments, "--output_dir", tmp_path / name, "--seed", seed)
    a, b, c = (losses(checkpoints_in(tmp_path / name)[-1]) for name in "abc")
    assert a == b != c


def test_a_folder_of_anothers_model_is_left_alone(data, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(InputError, match=r"holds a model or checkpoints already .*found model.safetensors\. Continue"):
        here("--data", data, "--output_dir", tmp_path, *TINY)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_json_is_one_line_on_stdout(data, tmp_path, capsys):
    here("--data", data, "--output_dir", tmp_path / "out", *TINY, "--max_steps", 2, "--json")
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert summary["steps"] == 2
    assert "texts to train on" in said.err


def test_the_summary_tells_what_was_not_trained_on(data, tmp_path, capsys):
    """Texts above 60 tokens, in four steps; of a single text cut to one token no label counts."""
    common = ["--data", data, *TINY, "--held_out", 0, "--num_train_epochs", 1]
    here(*common, "--output_dir", tmp_path / "a", "--packing_capacity", 60, "--packing_oversize", "drop")
    told = capsys.readouterr().out
    summary = json.loads((tmp_path / "a" / "ullage_run.json").read_text())["summary"]
    lengths = [len(json.loads(line)["text"]) + 1 for line in data.read_text().splitlines()]
    dropped = [length for length in lengths if length > 60]
    assert 0 < len(dropped) < len(lengths)
    assert (summary["total_dropped_sequences"], summary["total_dropped_tokens"]) == (len(dropped), sum(dropped))
    assert summary["tokens"] == sum(lengths) - sum(dropped)
    assert f"sequences dropped {len(dropped)}" in " ".join(told.split())
    cut = ["--packing_capacity", 1, "--packing_oversize", "truncate", "--max_steps", 2]
    here(*common, *cut, "--output_dir", tmp_path / "b", "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["total_empty_steps"], said["total_truncated_sequences"], said["tokens"]) == (2, 8, 8)


def test_a_saved_model_is_trained_on_with_its_own_tokenizer(run, data, tmp_path):
    folder, *_ = run
    tiny = [flag for flag in TINY if flag not in ("--model", "lstm-16")]
    here("--data", data, "--output_dir", tmp_path, "--model", folder, *tiny, "--max_steps", 1)
    start = losses(checkpoints_in(tmp_path)[-1])[0][1]
    assert start < losses(checkpoints_in(folder)[-1])[0][1] - 1.0  # it did not begin anew


def test_workers_accumulation_and_grouping_by_length(data, tmp_path):
    arguments = ["--data", data, "--output_dir", tmp_path, *TINY, "--max_steps", 3, *BEST]
    arguments += ["--train_sampling_strategy", "group_by_length", "--gradient_accumulation_steps", 2]
    here(*arguments, "--dataloader_num_workers", 2)
    summary = json.loads((tmp_path / "ullage_run.json").read_text())["summary"]
    assert 0 < summary["tokens"] <= summary["num_padded_tokens"]
    assert summary["eval_loss"] > 0


def test_a_name_with_sizes_a_config_file_and_other_columns(data, tmp_path):
    from transformers import AutoConfig

    rows = [{"body": "x" * i, "n": i} for i in range(1, 9)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    common = ["--data", path, "--text_column", "body", "--max_steps", 1, "--use_cpu", "--held_out", 0]
    here(*common, "--model", "gru-24x2", "--output_dir", tmp_path / "gru")
    config = AutoConfig.from_pretrained(tmp_path / "gru")
    assert (config.cell, config.hidden_size, config.num_hidden_layers, config.vocab_size) == ("gru", 24, 2, 259)
    here(*common, "--model", tmp_path / "gru" / "config.json", "--output_dir", tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").cell == "gru"


# A config file


def test_a_config_file_gives_arguments_and_the_command_line_wins(tmp_path):
    settings = {
        "output_dir": "somewhere",
        "learning_rate": "1e-3",
        "max-steps": 7,
        "bf16": False,
        "label_names": ["labels"],
        "eval_data": None,
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "run_name": 5,
        "model": "gru-8",
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = parse(["--config", str(path), "--learning_rate", "0.5"])
    training = command.training
    assert (training.output_dir, training.learning_rate, training.max_steps) == ("somewhere", 0.5, 7)
    assert (training.label_names, training.run_name, command.model.model) == (["labels"], "5", "gru-8")
    assert training.lr_scheduler_kwargs == {"num_cycles": 2}
    assert parse([]).training.output_dir == "runs/train"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "learning_rat: 1\n",
            "unknown key 'learning_rat' (run.yaml). Did you mean learning_rate?",
        ),
        ("qqqq: 1\n", "unknown key 'qqqq' (run.yaml). See ullage train --help-all for all of them"),
        (
            "learning_rate: fast\n",
            "argument --learning_rate/--learning-rate: invalid float value: 'fast' (run.yaml). See ullage train --help",
        ),
        ("max_steps: [1, 2]\n", "max_steps takes one value, found a list (run.yaml). See ullage train --help"),
        (
            "- a\n- b\n",
            "the config file holds no settings (run.yaml): expected lines of `name: value`, found a list",
        ),
    ],
)
def test_a_wrong_config_file_is_said_so_in_one_line(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        parse(["--config", str(path)])
    assert str(error.value).replace(str(path), "run.yaml") == message


def test_a_config_file_that_is_none(tmp_path):
    with pytest.raises(UsageError, match=r"the config file cannot be read .*found No such file"):
        parse(["--config", str(tmp_path / "none.yaml")])
    (tmp_path / "a.yaml").write_text("a: [1\n")
    with pytest.raises(UsageError, match=r"the config file is not YAML .*expected ',' or ']'"):
        parse(["--config", str(tmp_path / "a.yaml")])


def test_wrong_flags_name_what_was_meant():
    with pytest.raises(UsageError, match=r"^unknown argument --max_step\. Did you mean max_steps or "):
        parse(["--max_step", "3"])
    with pytest.raises(UsageError, match=r"invalid choice: 'sometimes' .choose from 'no', 'steps', 'epoch'"):
        parse(["--eval_strategy", "sometimes"])
    with pytest.raises(UsageError, match="requires"):
        parse(["--load_best_model_at_end", "--eval_strategy", "no"])


# Bad input


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (["--data", "none.jsonl"], InputError, "the data file cannot be read (none.jsonl): expected a file"),
        (
            ["--text_column", "body"],
            InputError,
            "there is no column 'body' (DATA): expected one of 'text', 'number', found 'body'. Name one of them with",
        ),
        (
            ["--model", "lsmt"],
            InputError,
            "there is no such model here, and none from the hub (lsmt): found ",
        ),
        (["--dropout", "2"], InputError, "dropout must be a probability: expected 0 <= dropout < 1, found 2.0"),
        (["--held_out", "1"], UsageError, "this argument is out of range (--held_out)"),
        (["--max_length", "-1"], UsageError, "this argument is out of range (--max_length)"),
        (
            ["--tokenizer", "nowhere"],
            InputError,
            "there is no such tokenizer here, and none from the hub (nowhere): found ",
        ),
        (
            ["--resume_from_checkpoint", "nowhere"],
            CheckpointError,
            "this is no checkpoint (nowhere): expected a folder, found nothing there. Give the folder checkpoint-N",
        ),
        (
            ["--resume_from_checkpoint"],
            CheckpointError,
            "there is no checkpoint to continue from (out): expected a folder checkpoint-N, found no such folder. "
            "Start without",
        ),
        (
            ["--learning_rate", "1e38"],
            TrainingError,
            "the loss or its gradient is not a number (step ",
        ),
    ],
)
def test_bad_input_is_one_clear_error(data, tmp_path, monkeypatch, flags, kind, message):
    monkeypatch.chdir(tmp_path)
    tiny = [flag for flag in TINY if flag not in ("--model", "lstm-16")]
    with pytest.raises(kind) as error:
        here("--data", data, "--output_dir", "out", *tiny, "--max_steps", 3, *flags)
    assert "\n" not in str(error.value)
    assert str(error.value).replace(str(data), "DATA").startswith(message)
    if not issubclass(kind, TrainingError):
        assert not Path("out").exists()  # raised before any damage


def test_a_folder_that_cannot_be_written(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"the output folder cannot be made \(.*/file/a/b\): found .*/file is a file"):
        here("--data", data, "--output_dir", tmp_path / "file" / "a" / "b", *TINY)
    with pytest.raises(TrainingError, match=r"needs cannot be used \(/proc/none\): found .*No such file or directory"):
        here("--data", data, "--output_dir", "/proc/none", *TINY)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match=r"cannot be written \(.*/out\): found no permission in "):
        here("--data", data, "--output_dir", tmp_path / "out", *TINY)


def test_a_disk_that_is_full_and_a_file_that_cannot_be_read_are_told_apart(data, tmp_path, monkeypatch):
    arguments = ["--data", data, *TINY, "--max_steps", 2, "--save_steps", 1, "--disable_tqdm", "true"]
    with (
        full_disk(20_000),
        pytest.raises(TrainingError, match=r"this cannot be written \(.*/full/checkpoint-1\): found .* Make room"),
    ):
        here(*arguments, "--output_dir", tmp_path / "full", "--model", "lstm-64")

    def fail(self, *_: object) -> None:
        (tmp_path / "vanished").read_text()

    monkeypatch.setattr("ullage.training.Trainer.get_train_dataloader", fail)
    with pytest.raises(
        TrainingError, match=r"a file that the run needs cannot be used \(.*/vanished\): found .*No such"
    ):
        here(*arguments, "--output_dir", tmp_path / "read")


def test_nothing_to_choose_the_best_model_by(data, tmp_path):
    with pytest.raises(InputError, match=r"there is nothing to choose the best model by .*Give --eval_data"):
        here("--data", data, "--output_dir", tmp_path / "out", *TINY, "--held_out", 0, *BEST)
    assert not (tmp_path / "out").exists()


def test_ids_outside_the_vocabulary_are_named_before_training(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"ids": [5, 6]}\n{"ids": [7, 8, 400, 9]}\n')
    with pytest.raises(InputError) as error:
        here("--data", path, "--output_dir", tmp_path / "out", "--held_out", 0, *TINY)
    assert str(error.value).startswith(
        f"a token id is outside the vocabulary ({path}, sample 1, position 2): expected 0 to 258, found 400"
    )
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_none_and_one_of_another_model(run, data, tmp_path):
    folder, arguments, _ = run
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"this folder is no checkpoint .*found an empty folder"):
        here(*arguments, "--output_dir", tmp_path / "out", "--resume_from_checkpoint", tmp_path / "empty")
    with pytest.raises(
        CheckpointError,
        match=r"the checkpoint holds another model .*found model lstm-16 there, lstm-32 here\. Leave out",
    ):
        here(
            *arguments,
            *("--output_dir", tmp_path / "out", "--model", "lstm-32"),
            *("--resume_from_checkpoint", checkpoints_in(folder)[0]),
        )
    assert not (tmp_path / "out").exists()


def test_the_exit_status_says_whose_mistake_it_was(data, tmp_path):
    wrong = ullage_train("--no_such_flag", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.splitlines() == [
        "ullage: unknown argument --no_such_flag. See ullage train --help-all for all of them"
    ]
    bad = ullage_train("--data", data, "--learning_rate", "1e38", "--output_dir", "out", *TINY, cwd=tmp_path)
    assert bad.returncode == 1
    assert bad.stderr.splitlines()[-1].startswith("ullage: the loss or its gradient is not a number (step ")
    assert "Traceback" not in bad.stderr


# Interruption


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_and_says_how_to_continue(data, tmp_path):
    arguments = ["--data", str(data), "--output_dir", str(tmp_path / "out"), *TINY, "--max_steps", "60"]
    arguments += ["--save_steps", "5", "--save_total_limit", "20", "--dropout", "0.1", "--eval_strategy", "no"]
    here(*arguments, "--output_dir", tmp_path / "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "ullage", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_for(tmp_path / "out" / "checkpoint-5", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    last = checkpoints_in(tmp_path / "out")[-1]
    said = out.splitlines()[-1]
    assert said.startswith("interrupted at step ")
    assert said.endswith(f"{last} is whole; continue with the same command and --resume_from_checkpoint")
    step = int(said.removeprefix("interrupted at step ").split()[0])
    assert last.name == f"checkpoint-{step}"
    assert require_checkpoint(last) == last
    assert step < 60
    here(*arguments, "--resume_from_checkpoint")
    assert losses(tmp_path / "out" / "checkpoint-60") == losses(tmp_path / "whole" / "checkpoint-60")


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
    killed = ullage_train(*arguments, start=[sys.executable, "-c", KILLED])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2"]
    left = staging_of(tmp_path / "out" / "checkpoint-4")
    assert (left / "checkpoint-4" / "model.safetensors").exists()
    here(*arguments)
    here(*arguments, "--output_dir", tmp_path / "whole")
    assert not left.exists()
    assert losses(tmp_path / "out" / "checkpoint-6") == losses(tmp_path / "whole" / "checkpoint-6")


@pytest.mark.slow
def test_the_default_run_is_on_the_docstrings(tmp_path):
    done = ullage_train("--output_dir", "out", "--max_steps", 12, "--eval_strategy", "no", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the docstrings of the standard library" in done.stdout
    summary = json.loads((tmp_path / "out" / "ullage_run.json").read_text())["summary"]
    assert summary["eval_loss"] < summary["first_loss"] < 5.6
    assert summary["padding_avoided"] > 0.5
