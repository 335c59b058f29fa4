"""Data of ``ullage train``, chats and names of data sets among them, and ``--dry_run``: told, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import torchrun
from ullage.cli.train.verb import _run
from ullage.core.errors import InputError

TINY = ["--model", "lstm-16", "--per_device_train_batch_size", "8", "--logging_steps", "1", "--use_cpu"]


def chat(i: int) -> dict:
    user, assistant = {"role": "user", "content": "q" * (i % 9)}, {"role": "assistant", "content": "a" * (1 + i % 5)}
    return {"messages": [user, assistant]}


def pair(i: int) -> dict:
    return {"prompt": "p" * (1 + i % 30), "completion": "c" * (i % 4), "text": "not this one"}


def text(i: int) -> dict:
    return {"text": "t" * (1 + i % 7)}


def mixed(i: int) -> dict:
    return {"text": i if i == 50 else "t"}


def write(path: Path, make, number: int = 60) -> Path:
    path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(number)))
    return path


def told(capsys, *arguments: object) -> dict:
    """What a dry run says as JSON."""
    capsys.readouterr()
    _run([*TINY, *map(str, arguments), "--dry_run", "--json"], first=True)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_a_dry_run_tells_what_a_run_would_be_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "chat.jsonl", chat)
    before = files(tmp_path)
    options = ["--data", data, "--chat_template", "chatml", "--held_out", 0.2, "--output_dir", tmp_path / "out"]
    found = told(capsys, *options, "--assistant_only_loss", "--num_train_epochs", 3)
    assert files(tmp_path) == before
    train, held_out = found["data"]["train"], found["data"]["eval"]
    assert train["sequences"] + held_out["sequences"] == 60
    # The letters and the end of a turn are trained on: <|im_end|> and a line's end.
    letters = sum(1 + i % 5 + len("<|im_end|>\n") for i in range(60))
    assert train["labels"] + held_out["labels"] == letters
    marks = 2 * len("<|im_start|>" + "\n" + "<|im_end|>\n") + len("user" + "assistant")
    lengths = sorted(marks + i % 9 + 1 + i % 5 for i in range(60))
    assert train["tokens"] + held_out["tokens"] == sum(lengths)
    assert min(train["shortest"], held_out["shortest"]) == lengths[0]
    assert max(train["longest"], held_out["longest"]) == lengths[-1]
    assert found["plan"]["steps_per_epoch"] == -(-train["sequences"] // 8)
    assert found["plan"]["steps"] == 3 * found["plan"]["steps_per_epoch"]
    assert found["plan"]["sequences_per_step"] == 8
    assert found["model"]["dtype"] == "float32"
    assert found["memory"] > 16 * found["model"]["parameters"]
    assert found["time"]["seconds"] == pytest.approx(found["time"]["seconds_per_step"] * found["plan"]["steps"])
    assert found["time"]["seconds_per_step"] > 0


def test_a_dry_run_looks_for_a_capacity_and_says_what_the_folder_holds(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl", text)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("")
    before = files(tmp_path)
    options = ["--data", data, "--output_dir", tmp_path / "out", "--model", "llama-16x1"]
    found = told(capsys, *options, "--packing_capacity", "auto")
    # A step of 8 sequences of 8 tokens at most fits into one row.
    assert found["plan"]["capacity"] == 64
    assert found["plan"]["rows_per_rank"] == 1
    assert found["notes"][0].startswith("a run would be refused: the output folder holds a model or checkpoints")
    assert files(tmp_path) == before


def test_a_dry_run_over_axes_plans_the_same_steps_and_keeps_nothing(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl", text)
    before = files(tmp_path)
    options = ["--data", data, "--output_dir", tmp_path / "out", "--model", "llama-16x1", "--held_out", 0]
    axes = told(capsys, *options, "--packing_capacity", 64, "--dp", 1)
    plain = told(capsys, *options, "--packing_capacity", 64)
    assert files(tmp_path) == before
    assert axes["plan"] == pytest.approx(plain["plan"])
    assert axes["time"]["seconds"] == pytest.approx(axes["time"]["seconds_per_step"] * axes["plan"]["steps"])


def test_a_packed_dry_run_tells_the_plan_of_the_run(tmp_path, capsys):
    from ullage.training.step.metering import TokenMeter

    data = write(tmp_path / "pairs.jsonl", pair)
    options = ["--data", data, "--model", "llama-16x1", "--packing_capacity", 64, "--max_steps", 2, "--held_out", 0]
    capsys.readouterr()
    arguments = [*map(str, options), "--per_device_train_batch_size", "8", "--use_cpu", "--logging_steps", "1"]
    _run([*arguments, "--dry_run", "--output_dir", str(tmp_path / "a"), "--json"], first=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    seen: list[tuple[float, int]] = []
    add = TokenMeter.add_packed

    def noting(self, microbatches, plan, flops):
        seen.append((plan.statistics().ullage, plan.num_microbatches))
        return add(self, microbatches, plan, flops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenMeter, "add_packed", noting)
        _run([*arguments, "--output_dir", str(tmp_path / "b"), "--json"], first=True)
    assert len(seen) == found["plan"]["planned"] == found["plan"]["steps"] == 2
    assert found["plan"]["capacity_unused"] == pytest.approx(sum(unused for unused, _ in seen) / 2)
    assert found["plan"]["rows_per_rank"] == sum(rows for _, rows in seen) / 2
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (chat, [], "the tokenizer has no chat template.*Give --chat_template a file, or chatml"),
        (chat, ["--chat_template", "nowhere"], "no such chat template"),
        (pair, ["--text_column", "text", "--completion_only_loss", "true"], "completion_only_loss is for chats and"),
        (pair, ["--data_split", "test"], "neither configurations nor splits"),
        (pair, ["--max_length", "1"], "no sequence has a token to train on"),
        (
            text,
            ["--max_length", "1"],
            "nothing to predict .*found 60 sequences of 1 tokens at most. Raise --max_length",
        ),
        (mixed, [], "the column 'text' holds no text .*found values of several kinds"),
    ],
)
def test_data_that_do_not_fit_the_call_are_refused_in_one_line(tmp_path, make, arguments, message):
    data = write(tmp_path / "a.jsonl", make)
    with pytest.raises(InputError, match=message) as error:
        _run(["--data", str(data), *arguments, *TINY, "--dry_run"], first=True)
    assert str(tmp_path) in str(error.value) or "nowhere" in str(error.value)


def test_an_error_names_the_row_of_the_file_and_comes_before_the_model_is_loaded(tmp_path, monkeypatch):
    """A part of the rows is held out, and rows without a label are left out: the others keep their numbers."""

    def loaded(*arguments):
        raise AssertionError("the model was loaded")

    def refused(make, *options):
        data = write(tmp_path / "a.jsonl", make)
        with pytest.raises(InputError) as error:
            _run(["--data", str(data), *options, *TINY, "--held_out", "0.3", "--dry_run"], first=True)
        return str(error.value)

    torn = lambda i: {"messages": [{"role": "user", **({} if i == 50 else {"content": f"{i}"})}]}  # noqa: E731
    assert "sample 50)" in refused(torn, "--chat_template", "chatml")
    outside = lambda i: {"input_ids": [1, 2], "labels": [-100, 999 if i == 50 else 2 if i % 2 else -100]}  # noqa: E731
    said = refused(outside)
    assert "a label is outside the vocabulary" in said
    assert "sample 50, position 1)" in said
    word = lambda i: {"messages": "a" if i == 50 else chat(i)["messages"]}  # noqa: E731
    assert "a row is no chat" in refused(word)
    monkeypatch.setattr("ullage.cli.train.model.load_model", loaded)
    assert "no chat template" in refused(chat)
    assert "there is no column 'texts'" in refused(text, "--text_column", "texts")


def test_prompts_come_before_text_and_what_is_left_out_is_said(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl", pair)
    _run(["--data", str(data), "--max_length", "12", *TINY, "--dry_run", "--held_out", "0"], first=True)
    said = capsys.readouterr().out
    assert "takes prompt and completion, not text; --text_column chooses another column" in said
    kept = sum(1 + i % 30 < 12 for i in range(60))
    assert f"{kept} prompts to train on" in said
    assert f"{60 - kept} without a token to train on left out" in said
    assert "dry run: nothing is written, and what was trained is thrown away" in said
    assert "per process at the peak of these steps" in said
    data = write(
        tmp_path / "b.jsonl", lambda i: {"text": "a", "input_ids": [5] * (i % 30 + 1), "labels": [5] * (i % 30 + 1)}
    )
    _run(["--data", str(data), *TINY, "--dry_run", "--held_out", "0"], first=True)
    assert "takes input_ids, not text; --text_column chooses another column" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_learns_completions_alone(tmp_path, capsys):
    """The prompt is noise: what is learned is the completion, and the loss counts nothing else."""
    import random

    draw = random.Random(0)
    rows = [{"prompt": f"{draw.getrandbits(60):015x}"[: draw.randint(1, 15)], "completion": "abc"} for _ in range(200)]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--data", str(data), *TINY, "--learning_rate", "0.03", "--num_train_epochs", "6", "--json"]
    losses = {}
    for name, more in {"completion": [], "all": ["--completion_only_loss", "false"]}.items():
        _run([*arguments, *more, "--output_dir", str(tmp_path / name)], first=True)
        losses[name] = json.loads(capsys.readouterr().out.splitlines()[-1])["eval_loss"]
    assert losses["completion"] < losses["all"] / 2


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_rehearse_together(tmp_path):
    data = write(tmp_path / "a.jsonl", pair)
    before = files(tmp_path)
    options = ["--data", data, "--model", "llama-16x1", "--packing_capacity", 64, "--per_device_train_batch_size", 4]
    options += ["--output_dir", tmp_path / "o", "--use_cpu", "--dry_run", "--json"]
    output = torchrun(2, "-m", "ullage", "train", *options, "--zero", 3)
    [line] = [line for line in output.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["processes"] == 2
    assert found["plan"]["sequences_per_step"] == 8
    assert found["time"]["tokens_per_second"] > 0
    assert files(tmp_path) == before


def test_a_data_set_of_the_hub_comes_from_the_cache_and_its_revision_is_written_down(tmp_path, monkeypatch, capsys):
    """What lies in the folder of the call wins; nothing is asked for that the cache holds."""
    from huggingface_hub import constants

    from tests.support.hub import COMMIT, put_in_cache

    def lines(number: int) -> bytes:
        return "".join(json.dumps(pair(i)) + "\n" for i in range(number)).encode()

    parts = {"data/train-00000-of-00002.jsonl": lines(9), "data/train-00001-of-00002.jsonl": lines(8)}
    put_in_cache(tmp_path / "hub", "org/pairs", {**parts, "data/test-00000-of-00001.jsonl": lines(5)}, kind="datasets")
    put_in_cache(tmp_path / "hub", "org/torn", dict([parts.popitem()]), kind="datasets")
    card = b"---\nconfigs:\n- config_name: one\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n"
    put_in_cache(
        tmp_path / "hub", "org/card", {"README.md": card, "a.jsonl": lines(7), "b.py": b"1/0"}, kind="datasets"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    options = ["--held_out", 0, "--output_dir", tmp_path / "out"]
    assert told(capsys, "--data", "org/pairs", *options)["data"]["train"]["sequences"] == 17
    both = told(capsys, "--dataset_name", "org/pairs", "--data_split", "train[:4]", "--eval_split", "test", *options)
    assert [both["data"][use]["sequences"] for use in ("train", "eval")] == [4, 5]
    assert told(capsys, "--data", f"org/card@{COMMIT}", *options)["data"]["train"]["sequences"] == 7
    for name, more, message in (
        ("org/torn", [], "a numbered file is missing"),
        ("org/none", [], "no such dataset here, and none from the hub"),
        ("org/card", ["--data_split", "test"], "no such split .*expected one of train, found test"),
        ("org/card", ["--data_config", "two"], "no such configuration.*expected one of one, found two"),
    ):
        with pytest.raises(InputError, match=message):
            told(capsys, "--data", name, *more, *options)
    _run([*map(str, ["--data", "org/pairs", *options, "--max_steps", 1]), *TINY], first=True)
    assert f"org/pairs, revision {COMMIT[:12]}" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "ullage_run.json").read_text())
    assert record["revisions"] == {"data": f"org/pairs@{COMMIT}"}
    (tmp_path / "org" / "pairs").mkdir(parents=True)
    (tmp_path / "org" / "pairs" / "mine.jsonl").write_bytes(lines(3))
    assert told(capsys, "--data", "org/pairs", *options)["data"]["train"]["sequences"] == 3
