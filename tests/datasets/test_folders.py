"""Which files a folder, a repository or a pattern stands for, and the tables that are made of them."""

import json

import pytest
from datasets import Dataset, DatasetDict

from ullage.core.errors import InputError
from ullage.datasets import load_text
from ullage.datasets.tables import files_of, read_table

CARD = """---
license: mit
configs:
- config_name: small
  data_files:
  - split: train
    path: small/*.jsonl
  - split: test
    path: ["small/held/**", "other.jsonl"]
- config_name: big
  data_dir: ./big
- config_name: flat
  data_files: "*.csv"
---
# A card
"""
NAMES = [
    "README.md", "small/a.jsonl", "small/b.jsonl", "small/held/x/c.jsonl", "other.jsonl", "big/test.csv", "big/x.csv",
]  # fmt: skip


def chosen(folder, names, card=None, **options):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}" if name.endswith("json") else "a")
    if card is not None:
        (folder / "README.md").write_text(card)
    return [path.relative_to(folder.resolve()).as_posix() for path in files_of(folder, **options)]


@pytest.mark.parametrize(("names", "options", "expected"), [
    (["a.csv"], {}, ["a.csv"]),
    (["b.jsonl", "a.jsonl", "LICENSE.txt", "README.md", ".git/x.json", "dataset_infos.json"], {}, ["a.jsonl", "b.jsonl"]),
    (["train.csv", "test.csv", "more.csv"], {}, ["train.csv"]),
    (["data/dev.csv", "data/train-1.csv"], {"split": "validation"}, ["data/dev.csv"]),
    (["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001-ab12.parquet"],
     {"split": "train_sft"}, ["data/train_sft-00000-of-00001.parquet"]),
    (["train-00001-of-00002.parquet", "train-00000-of-00002.parquet"], {},
     ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]),
    (["restrained.csv"], {}, ["restrained.csv"]),
    (["a.parquet", "b.parquet", "notes.txt"], {}, ["a.parquet", "b.parquet"]),
    (NAMES, {"card": CARD, "config": "small"}, ["small/a.jsonl", "small/b.jsonl"]),
    (NAMES, {"card": CARD, "config": "small", "split": "test"}, ["other.jsonl", "small/held/x/c.jsonl"]),
    (NAMES, {"card": CARD, "config": "big", "split": "test"}, ["big/test.csv"]),
    ([*NAMES, "a.csv", "in/b.csv"], {"card": CARD, "config": "flat"}, ["a.csv"]),
    (["a.csv"], {"card": "no head"}, ["a.csv"]),
])  # fmt: skip
def test_the_files_of_a_split(tmp_path, names, options, expected, capfd):
    assert chosen(tmp_path, names, **options) == expected
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("names", "options", "message"), [
    (["README.md", "a.py"], {}, "no files of data.*found README.md, a.py"),
    (["train.csv", "test.csv"], {"split": "eval"},
     r"no such split \(.*\): expected one of train, test, found eval"),
    (["a/train.csv"], {"config": "b"}, "no such configuration .*expected one of default, found b"),
    (["a.csv"], {"card": "---\nconfigs: [[\n---"}, "the folder cannot be read"),
    (NAMES, {"card": CARD}, "several configurations .*: expected one of small, big, flat, found none asked for"),
    (NAMES, {"card": CARD, "config": "huge"},
     "no such configuration .*: expected one of small, big, flat, found huge"),
    (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], {}, "a numbered file is missing.*no 00001"),
])  # fmt: skip
def test_what_a_folder_does_not_have_is_said(tmp_path, names, options, message):
    with pytest.raises(InputError, match=message):
        chosen(tmp_path, names, **options)


def rows(*texts):
    return [{"text": text, "id": i} for i, text in enumerate(texts)]


def test_files_of_every_kind_give_the_same_rows(tmp_path):
    one, two = rows("a b", "c"), rows("d,\te", "f")
    table = Dataset.from_list([*one, *two])
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    DatasetDict(train=table, test=Dataset.from_list(two)).save_to_disk(tmp_path / "both")
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, part in enumerate((one, two)):
        (parts / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    table.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    expected = ["a b", "c", "d,\te", "f"]
    for source in ("saved", "both", "parts", "a.tsv", "parts/*.jsonl"):
        assert load_text(tmp_path / source) == expected, source
    assert load_text([parts / "1.jsonl", parts / "0.jsonl"]) == [*expected[2:], *expected[:2]]
    assert [path.name for path in files_of(tmp_path / "both", split="test")] == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize(
    ("split", "expected"),
    [("train[:2]", [0, 1]), ("train[50%:]", [2, 3]), ("train[-1:]+test", [3, 2, 3]), ("test[:1]+train[:1]", [2, 0])],
)
def test_a_split_may_be_a_slice_and_a_sum(tmp_path, split, expected):
    table = Dataset.from_list([{"id": i} for i in range(4)])
    DatasetDict(train=table, test=table.select([2, 3])).save_to_disk(tmp_path)
    assert read_table([tmp_path], split=split)["id"][:] == expected


def test_what_cannot_be_joined_or_cut_is_refused_in_one_line(tmp_path):
    for name, content in {"a.jsonl": {"text": "a"}, "b.jsonl": {"body": "a"}, "c.jsonl": {"text": [1]}}.items():
        (tmp_path / name).write_text(json.dumps(content))
    for sources, options, message in (
        (["a.jsonl", "b.jsonl"], {}, r"the files have other columns \(.*b.jsonl\): expected text, as in .*a.jsonl"),
        (["a.jsonl", "c.jsonl"], {}, "the files have columns of other kinds"),
        (["a.jsonl"], {"split": "test"}, "neither configurations nor splits"),
        (["a.jsonl"], {"split": "train[x]"}, "not a part of a split"),
        (["a.jsonl"], {"split": "train[5:]"}, "not a part of a split|the dataset is empty"),
        (["a.jsonl"], {"split": "a b"}, "not a split"),
        (["*.csv"], {}, "no file matches"),
        (["d.jsonl"], {}, "expected a file, found nothing there"),
    ):
        with pytest.raises(InputError, match=message) as error:
            read_table([tmp_path / name for name in sources], **options)
        assert "\n" not in str(error.value)
