"""Data of ``ullage train``, chats and names of data sets among them, and ``--dry_run``: told, and nothing written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from datasets import Dataset
from huggingface_hub import constants

from tests.support.hub import COMMIT, put_in_cache
from tests.support.launch import torchrun
from tests.support.train_verb import jsonl, record, train
from ullage.core.errors import InputError
from ullage.training.step.metering import TokenMeter

TINY = ["--model", "lstm-16", "--per_device_train_batch_size", 8, "--logging_steps", 1, "--use_cpu"]
PACKED = [*TINY, "--model", "llama-16x1", "--packing_capacity", 64]


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
    return jsonl(path, map(make, range(number)))


def said_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def told(capsys, *arguments: object) -> dict:
    """What a dry run says as JSON."""
    capsys.readouterr()
    train(*TINY, *arguments, "--dry_run", "--json")
    return said_json(capsys)


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
    # The letters and the end of a turn are trained on: <|im_end|>, which is one token, and a line's end.
    letters = sum(1 + i % 5 + 2 for i in range(60))
    assert train["labels"] + held_out["labels"] == letters
    marks = 2 * (1 + len("\n") + 1 + len("\n")) + len("user" + "assistant")
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
    found = told(capsys, "--data", data, "--output_dir", tmp_path / "out", *PACKED, "--packing_capacity", "auto")
    # A step of 8 sequences of 8 tokens at most fits into one row.
    assert found["plan"]["capacity"] == 64
    assert found["plan"]["rows_per_rank"] == 1
    assert found["notes"][0].startswith("a run would be refused: the output folder holds a model or checkpoints")
    assert files(tmp_path) == before


def test_a_dry_run_over_axes_plans_the_same_steps_and_keeps_nothing(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl", text)
    before = files(tmp_path)
    options = ["--data", data, "--output_dir", tmp_path / "out", *PACKED, "--held_out", 0]
    axes = told(capsys, *options, "--dp", 1)
    plain = told(capsys, *options)
    assert files(tmp_path) == before
    assert axes["plan"] == pytest.approx(plain["plan"])
    assert axes["time"]["seconds"] == pytest.approx(axes["time"]["seconds_per_step"] * axes["plan"]["steps"])


def test_a_packed_dry_run_tells_the_plan_of_the_run(tmp_path, capsys, monkeypatch):
    arguments = ["--data", write(tmp_path / "pairs.jsonl", pair), *PACKED, "--max_steps", 2, "--held_out", 0]
    found = told(capsys, *arguments, "--output_dir", tmp_path / "a")
    seen: list[tuple[float, int]] = []
    add = TokenMeter.add_packed

    def noting(self, microbatches, plan, flops):
        seen.append((plan.statistics().ullage, plan.num_microbatches))
        return add(self, microbatches, plan, flops)

    monkeypatch.setattr(TokenMeter, "add_packed", noting)
    train(*arguments, "--output_dir", tmp_path / "b")
    assert len(seen) == found["plan"]["planned"] == found["plan"]["steps"] == 2
    assert found["plan"]["capacity_unused"] == pytest.approx(sum(unused for unused, _ in seen) / 2)
    assert found["plan"]["rows_per_rank"] == sum(rows for _, rows in seen) / 2
    assert not (tmp_path / "a").exists()


#: Rows, flags, and words of the error.
REFUSED = [
    (chat, [], "the tokenizer has no chat template.*Give --chat_template a file, or chatml"),
    (chat, ["--chat_template", "nowhere"], "no such chat template"),
    (pair, ["--text_column", "text", "--completion_only_loss", "true"], "completion_only_loss is for chats and"),
    (pair, ["--data_split", "test"], "neither configurations nor splits"),
    (pair, ["--max_length", 1], "no sequence has a token to train on"),
    (text, ["--max_length", 1], "nothing to predict .*found 60 sequences of 1 tokens at most. Raise --max_length"),
    (text, ["--text_column", "texts"], "there is no column 'texts'"),
    (mixed, [], "a row holds no text .*, line 51, column 'text'.*expected a string, found 50. Mend it, or leave"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED)
def test_data_that_do_not_fit_the_call_are_refused_in_one_line(tmp_path, monkeypatch, make, arguments, message):
    def loaded(*_):
        raise AssertionError("the model was loaded")

    if "--max_length" not in arguments:  # whose cuts are looked at when the model has said what it can read
        monkeypatch.setattr("ullage.cli.train.model.load_model", loaded)
    with pytest.raises(InputError, match=message) as error:
        train("--data", write(tmp_path / "a.jsonl", make), *arguments, *TINY, "--dry_run")
    assert str(tmp_path) in str(error.value) or "nowhere" in str(error.value)
    assert "\n" not in str(error.value)


#: A row of another kind, flags, and how the error names it.
WRONG_ROWS = [
    ({"messages": [{"role": "user"}]}, chat, ["--chat_template", "chatml"], "sample 50)"),
    ({"messages": "a"}, chat, [], "a row is no chat"),
    (
        {"input_ids": [1, 2], "labels": [-100, 999]},
        lambda i: {"input_ids": [1, 2], "labels": [-100, 2 if i % 2 else -100]},
        [],
        "a label is outside the vocabulary (PATH, sample 50, position 1)",
    ),
]


@pytest.mark.parametrize(("row", "others", "flags", "message"), WRONG_ROWS)
def test_an_error_names_the_row_of_the_file(tmp_path, row, others, flags, message):
    """A part of the rows is held out, and rows without a label are left out: the others keep their numbers."""
    data = write(tmp_path / "a.jsonl", lambda i: row if i == 50 else others(i))
    with pytest.raises(InputError) as error:
        train("--data", data, *flags, *TINY, "--held_out", 0.3, "--dry_run")
    assert message in str(error.value).replace(str(data), "PATH")


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_empty_texts_are_left_out_and_counted_alike(tmp_path, capsys, ending, run):
    """Where one verb refused them, one skipped them and one counted them as sequences."""
    lines = ["", "one", "  ", "three words here", "", "two words"]
    data = tmp_path / f"a.{ending}"
    if ending == "txt":
        data.write_text("".join(f"{line}\n" for line in lines))
    elif ending == "jsonl":
        jsonl(data, ({"text": line} for line in lines))
    else:
        Dataset.from_dict({"text": lines}).to_parquet(data)
    train("--data", data, *TINY, "--dry_run", "--held_out", 0)
    assert f"{data}: 3 texts to train on, 31 tokens (3 empty left out)" in capsys.readouterr().out
    status, out, _ = run("plan", data, "--capacity", 100, "--column", "text")
    assert status == 0
    assert "3 sequences, 31 byte tokens, 4 to 17 long, median 10; 3 empty rows left out" in " ".join(out.split())
    status, out, _ = run("pack", data, tmp_path / "rows.parquet", "--capacity", 100)
    assert status == 0
    assert "3 sequences, 31 tokens in 1 rows" in out
    assert ("3 sequences empty, left out" in out) == (ending != "txt")  # whose blank lines are no rows


def test_rows_that_cannot_be_used_are_named_or_left_out_and_counted(tmp_path, capsys):
    data = tmp_path / "a.jsonl"
    rows = [{"text": "a"}, {"text": 5}, {"text": "b"}, {"text": None}, {"text": ""}, {"text": "c"}]
    jsonl(data, rows)
    arguments = ["--data", data, *TINY, "--dry_run", "--held_out", 0]
    with pytest.raises(InputError, match=r"a.jsonl, line 2, column 'text'\): expected a string, found 5\. Mend it, or"):
        train(*arguments)
    train(*arguments, "--skip_invalid")
    line = (
        f"{data}: 3 texts to train on, 6 tokens (1 empty left out; 2 that cannot be used left out, the first at line 2)"
    )
    assert line in capsys.readouterr().out
    refuses = tmp_path / "t.jinja"
    refuses.write_text(
        "{% for m in messages %}{{ raise_exception('no') if m.content == 'q' * 3 else m.content }}{% endfor %}"
    )
    data = write(tmp_path / "b.jsonl", lambda i: {"messages": None} if i == 9 else chat(i))
    arguments = ["--data", data, *TINY, "--chat_template", refuses, "--dry_run"]
    with pytest.raises(InputError, match=r"a row is no chat .*b\.jsonl, line 10, column 'messages'"):
        train(*arguments)
    train(*arguments, "--skip_invalid", "--held_out", 0)
    refused = sum(i % 9 == 3 for i in range(60))
    said = capsys.readouterr().out
    assert f"{data}: {59 - refused} chats to train on, " in said
    left = f"(1 that cannot be used left out, the first at line 10; {refused} that the chat template refuses left out)"
    assert left in said


def test_prompts_come_before_text_and_what_is_left_out_is_said(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl", pair)
    train("--data", data, "--max_length", 12, *TINY, "--dry_run", "--held_out", 0)
    said = capsys.readouterr().out
    assert "takes prompt and completion, not text; --text_column chooses another column" in said
    kept = sum(1 + i % 30 < 12 for i in range(60))
    assert f"{kept} prompts to train on" in said
    assert f"{60 - kept} without a token to train on left out" in said
    assert "dry run: nothing is written, and what was trained is thrown away" in said
    assert "per process at the peak of these steps" in said
    data = write(tmp_path / "b.jsonl", lambda i: {"text": "a", "input_ids": [5, 6], "labels": [5, 6]})
    train("--data", data, *TINY, "--dry_run", "--held_out", 0)
    assert "takes input_ids, not text; --text_column chooses another column" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_learns_completions_alone(tmp_path, capsys):
    """The prompt is noise: what is learned is the completion, and the loss counts nothing else."""
    draw = random.Random(0)
    rows = [{"prompt": f"{draw.getrandbits(60):015x}"[: draw.randint(1, 15)], "completion": "abc"} for _ in range(200)]
    data = jsonl(tmp_path / "a.jsonl", rows)
    losses = []
    for flag in ("true", "false"):
        arguments = [*TINY, "--learning_rate", 0.03, "--num_train_epochs", 6, "--completion_only_loss", flag]
        train("--data", data, *arguments, "--output_dir", tmp_path / flag, "--json")
        losses.append(said_json(capsys)["eval_loss"])
    assert losses[0] < losses[1] / 2


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_rehearse_together(tmp_path):
    data = write(tmp_path / "a.jsonl", pair)
    before = files(tmp_path)
    options = ["--data", data, *PACKED, "--per_device_train_batch_size", 4, "--output_dir", tmp_path / "o"]
    output = torchrun(2, "-m", "ullage", "train", *options, "--dry_run", "--json", "--zero", 3)
    [line] = [line for line in output.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["processes"] == 2
    assert found["plan"]["sequences_per_step"] == 8
    assert found["time"]["tokens_per_second"] > 0
    assert files(tmp_path) == before


def test_a_data_set_of_the_hub_comes_from_the_cache_and_its_revision_is_written_down(tmp_path, monkeypatch, capsys):
    """What lies in the folder of the call wins; nothing is asked for that the cache holds."""

    def lines(number: int) -> bytes:
        return "".join(json.dumps(pair(i)) + "\n" for i in range(number)).encode()

    parts = {"data/train-00000-of-00002.jsonl": lines(9), "data/train-00001-of-00002.jsonl": lines(8)}
    put_in_cache(tmp_path / "hub", "org/pairs", {**parts, "data/test-00000-of-00001.jsonl": lines(5)}, kind="datasets")
    put_in_cache(tmp_path / "hub", "org/torn", dict([parts.popitem()]), kind="datasets")
    card = b"---\nconfigs:\n- config_name: one\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n"
    carded = {"README.md": card, "a.jsonl": lines(7), "b.py": b"1/0"}
    put_in_cache(tmp_path / "hub", "org/card", carded, kind="datasets")
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
    train("--data", "org/pairs", *options, "--max_steps", 1, *TINY)
    assert f"org/pairs, revision {COMMIT[:12]}" in capsys.readouterr().out
    assert record(tmp_path / "out")["revisions"] == {"data": f"org/pairs@{COMMIT}"}
    (tmp_path / "org" / "pairs").mkdir(parents=True)
    (tmp_path / "org" / "pairs" / "mine.jsonl").write_bytes(lines(3))
    assert told(capsys, "--data", "org/pairs", *options)["data"]["train"]["sequences"] == 3
