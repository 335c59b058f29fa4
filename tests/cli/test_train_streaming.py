"""``ullage train --streaming``: rows that are read, tokenized and packed while the run trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.train_verb import jsonl, losses, texts, train
from ullage.cli.train import data as reading
from ullage.core.errors import InputError, UsageError

TINY = ["--model", "gru-16", "--use_cpu", "--logging_steps", 1, "--per_device_train_batch_size", 8, "--disable_tqdm"]


def rows_of(stream) -> list[list[int]]:
    return [row["input_ids"] for row in stream]


def streamed(*arguments: object):
    """What a run would train on, and the samples that it evaluates on."""
    from ullage.cli.train.arguments import parse
    from ullage.cli.train.summary import Voice
    from ullage.datasets.text import byte_tokenizer

    command = parse([*map(str, arguments), "--streaming", "--max_steps", "5"])
    samples = reading.read_samples(command, Voice(False, False))
    return reading.streamed_samples(samples, byte_tokenizer(), 259), samples[1].rows


def test_a_stream_trains_packed_and_continues_exactly(tmp_path, capsys):
    arguments = ["--data", texts(tmp_path, 200), "--streaming", "--max_steps", 6, "--packing_capacity", 256, *TINY]
    arguments += ["--save_steps", 3, "--sample_prompts", "abc", "5 "]
    train(*arguments, "--output_dir", tmp_path / "whole")
    said = capsys.readouterr().out
    assert "a stream, of which these are the first 200 rows; shuffled among 1,000 at a time" in said
    assert "step 6, 'abc': " in said
    train(*arguments, "--output_dir", tmp_path / "cut", "--stop_at_step", 3)
    train("--output_dir", tmp_path / "cut", "--resume_from_checkpoint", "--use_cpu")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert "step 6, '5 ': " in capsys.readouterr().out  # what the model is asked stays as it was
    written = [json.loads(line) for line in (tmp_path / "cut" / "ullage_log.jsonl").read_text().splitlines()]
    assert {row["step"] for row in written if row["event"] == "samples"} == {3, 6}
    page = (tmp_path / "cut" / "report.html").read_text()
    assert "What the model wrote" in page


def test_writing_changes_no_loss(tmp_path):
    arguments = ["--data", texts(tmp_path), "--max_steps", 4, "--eval_steps", 2, "--dropout", 0.2, *TINY]
    train(*arguments, "--output_dir", tmp_path / "silent")
    train(*arguments, "--output_dir", tmp_path / "writes", "--sample_prompts", "abc")
    assert losses(tmp_path / "silent") == losses(tmp_path / "writes")
    with pytest.raises(UsageError, match="spread over these axes writes no text"):
        train(*arguments, "--sample_prompts", "abc", "--dp", 1)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv", "txt"])
def test_a_stream_gives_every_row_but_those_held_out(tmp_path, monkeypatch, ending):
    """Rows behind those that were read ahead too, without empty ones, and none that equals one held out."""
    monkeypatch.setattr(reading, "_AHEAD", 50)
    from datasets import Dataset

    lines = [f"{i % 90} abc" if i % 7 else " " for i in range(120)]
    path = tmp_path / f"a.{ending}"
    if ending == "txt":
        path.write_text("\n".join(lines))
    else:
        getattr(Dataset.from_dict({"text": lines}), {"jsonl": "to_json"}.get(ending, f"to_{ending}"))(path)
    stream, held_out = streamed("--data", path, "--held_out", 0.3)
    assert len(held_out) > 3
    expected = [line for line in lines if line.strip() and line not in held_out]
    found = ["".join(chr(i - 3) for i in ids[:-1]) for ids in rows_of(stream)]
    assert sorted(found) == sorted(expected)
    assert found != expected  # in another order


def test_rows_of_a_stream_that_cannot_be_used_are_told_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_AHEAD", 20)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = jsonl(tmp_path / "a.jsonl", ({"messages": None if i == 33 else chat} for i in range(40)))
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    common = ["--data", path, "--chat_template", template, "--held_out", 0]
    monkeypatch.setattr("ullage.datasets.text.byte_tokenizer", _with(template))
    with pytest.raises(InputError, match=r"a row is no chat .*row 33 of the stream"):
        rows_of(streamed(*common)[0])
    assert len(rows_of(streamed(*common, "--skip_invalid")[0])) == 39


def _with(template: Path):
    from ullage.datasets import text

    make = text.byte_tokenizer

    def made():
        tokenizer = make()
        tokenizer.chat_template = template.read_text()
        return tokenizer

    return made


REFUSED = [
    (["--data", "a.jsonl"], UsageError, r"nobody knows where a stream ends .*--max_steps N"),
    (["--max_steps", 3], UsageError, "there is nothing to stream"),
    (["--data", "a.jsonl", "a.txt", "--max_steps", 3], InputError, r"one ending .*found \.jsonl, \.txt"),
    (["--data", "nowhere.jsonl", "--max_steps", 3], InputError, r"the data file cannot be read \(nowhere\.jsonl\)"),
    (["--data", "a.jsonl", "--max_steps", 3, "--data_split", "train[:10%]"], InputError, r"found train\[:10%\]"),
    (["--data", "torn.jsonl", "--max_steps", 3], InputError, r"the data cannot be streamed \(torn\.jsonl\)"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED)
def test_what_cannot_be_streamed_is_refused_in_one_line(tmp_path, monkeypatch, arguments, kind, message):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(kind, match=message) as error:
        train(*arguments, "--streaming", *TINY)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_stream(tmp_path, capsys):
    train("--data", texts(tmp_path), "--streaming", "--max_steps", 3, "--dry_run", *TINY)
    said = capsys.readouterr().out
    assert "steps           3\n" in said
