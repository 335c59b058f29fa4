"""``ullage pack`` on files: every token is counted, nothing half-written stays, and mistakes are said in a line."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import ByT5Tokenizer

from ullage.core.errors import InputError
from ullage.datasets.files import read_lengths
from ullage.datasets.packing import pack_file


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sequences(path):
    """Every sequence of a packed file, as (tokens, labels), in the file's order."""
    found = []
    for row in pq.read_table(path).to_pylist():
        cuts = np.cumsum([0, *row["seq_lengths"]])
        assert cuts[-1] == len(row["input_ids"]) == len(row["labels"]) == len(row["position_ids"])
        for a, b in pairwise(cuts):
            assert row["position_ids"][a:b] == list(range(b - a))
            assert row["labels"][a] == -100
            found.append((row["input_ids"][a:b], row["labels"][a:b]))
    return found


def test_counts_are_conserved_over_batches_and_row_groups(tmp_path, run):
    generator = np.random.default_rng(1)
    rows = [{"input_ids": generator.integers(0, 300, n).tolist()} for n in generator.integers(0, 90, 2500)]
    source = write(tmp_path / "in.jsonl", rows)
    status, out, err = run("pack", source, tmp_path / "out.parquet", "-c", 70, "--oversize", "truncate", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    lengths = np.array([len(row["input_ids"]) for row in rows])
    assert report["tokens_in"] == lengths.sum()
    assert report["num_tokens"] == np.minimum(lengths, 70).sum()
    assert report["tokens_in"] == report["num_tokens"] + report["truncated_tokens"] + report["dropped_tokens"]
    assert report["capacity_tokens"] == report["num_tokens"] + report["padding_tokens"] == 70 * report["num_rows"]
    assert report["num_empty"] == (lengths == 0).sum() > 0
    assert report["num_truncated"] == (lengths > 70).sum() > 0
    assert report["lower_bound"] <= report["num_rows"] <= report["lower_bound"] * 1.02 + 1
    expected = [row["input_ids"][:70] for row in rows if row["input_ids"]]
    found = sequences(tmp_path / "out.parquet")
    assert sorted(ids for ids, _ in found) == sorted(expected)
    assert all(labels == [-100, *ids[1:]] for ids, labels in found)
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == report["num_rows"]


def test_text_becomes_byt5_tokens(tmp_path):
    texts = ["hello", "Grüße", "a much longer sentence"]
    pack_file(write(tmp_path / "in.jsonl", [{"text": text, "id": 1} for text in texts]), tmp_path / "out.parquet", 32)
    expected = ByT5Tokenizer()(texts)["input_ids"]
    assert sorted(ids for ids, _ in sequences(tmp_path / "out.parquet")) == sorted(expected)


def test_text_that_looks_like_a_special_token_is_packed_as_it_is_measured(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a </s> b<pad><extra_id_3>"}])
    report = pack_file(source, tmp_path / "out.parquet", 64)
    assert report.num_tokens == read_lengths(source).lengths.sum() == 26


def test_rows_are_shuffled_by_the_seed(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"input_ids": [i] * 5} for i in range(200)])
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        pack_file(source, tmp_path / f"{name}.parquet", 5, seed=seed)
    a, b, c = (sequences(tmp_path / f"{name}.parquet") for name in "abc")
    assert a == b
    assert a != c
    assert sorted(a) == sorted(c)
    assert a != sorted(a)


def test_a_mistake_leaves_what_stood_there(tmp_path, run):
    target = tmp_path / "out.parquet"
    target.write_text("older")
    source = write(tmp_path / "in.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3, 4]}])
    status, out, err = run("pack", source, target, "-c", 3, "--overwrite")
    assert (status, out) == (1, "")
    assert "a sequence is longer than the capacity (sequence 1): expected at most 3 tokens, found 4" in err
    assert err.count("\n") == 1
    assert target.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet"]
    status, out, err = run("pack", source, target, "-c", 3, "--oversize", "drop")
    assert (status, out) == (1, "")
    assert err == f"ullage: the output exists ({target}). Give another name, or --overwrite\n"
    assert target.read_text() == "older"
    status, out, _ = run("pack", source, target, "-c", 3, "--oversize", "drop", "--overwrite")
    assert status == 0
    assert "1 sequence dropped, with 4 tokens" in out
    assert [ids for ids, _ in sequences(target)] == [[1, 2]]


def test_the_input_is_never_replaced(tmp_path, run):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]]}), source)
    (tmp_path / "link.parquet").symlink_to(source)
    before = source.read_bytes()
    for target in (source, tmp_path / "link.parquet"):
        status, out, err = run("pack", source, target, "-c", 8, "--overwrite")
        assert (status, out) == (1, "")
        assert "the output would replace the input" in err
    assert source.read_bytes() == before


#: What a file holds, and words of the error.
BAD = [
    ('{"input_ids": [1.5]}\n', "expected strings, or lists of token ids, found list"),
    ('{"input_ids": [1, null]}\n', "row 0): expected lists of integers, found None"),
    ('{"input_ids": [1]}\n{"input_ids": null}\n', "a value is missing"),
    ('{"input_ids": [5000000000]}\n', "out of range"),
    ('{"input_ids": [-1]}\n', "out of range"),
    ('{"input_ids": [1, 2], "labels": [1]}\n', "row 0): expected 2 labels, found 1"),
    ('{"input_ids": [1, 2], "labels": "x"}\n', "labels must be a list of integers"),
    ('{"input_ids": []}\n', "no sequence is left"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        pack_file(tmp_path / "in.jsonl", tmp_path / "out.parquet", 8)
    assert message.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_names_are_taken_literally(tmp_path):
    for name in ("we[i]rd*.jsonl", "größe ?.jsonl", "a#b%20.jsonl"):
        source = write(tmp_path / name, [{"input_ids": [1, 2]}])
        assert pack_file(source, tmp_path / "out.parquet", 8).num_tokens == 2


def test_bad_arguments(tmp_path, run):
    source = write(tmp_path / "in.jsonl", [{"input_ids": [1]}])
    for arguments, status, message in (
        ((tmp_path / "nope.jsonl", tmp_path / "o.parquet", "-c", 8), 1, "found nothing there"),
        ((source, tmp_path / "o.json", "-c", 8), 1, "a name ending in .parquet"),
        ((source, tmp_path / "no" / "o.parquet", "-c", 8), 1, "cannot be written"),
        ((source, tmp_path / "o.parquet", "-c", 8, "--column", "nope"), 1, "there is no column 'nope'"),
        ((source, tmp_path / "o.parquet", "-c", 0), 2, "--capacity"),
        ((source, tmp_path / "o.parquet"), 2, "--capacity"),
        ((source, tmp_path / "o.parquet", "-c", 8, "--oversize", "maybe"), 2, "--oversize"),
    ):
        found, out, err = run("pack", *arguments)
        assert (found, out) == (status, ""), err
        assert message in err
        assert "Traceback" not in err
