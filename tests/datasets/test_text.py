"""Text files and the docstring corpus: what is read, what is refused, and in which words."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.core.errors import InputError
from ullage.core.layout import Layout
from ullage.datasets import TokenDataset, byte_tokenizer, docstrings, split_held_out, tokenize
from ullage.datasets.tables import load_rows
from ullage.datasets.text import read_samples


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return docstrings()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load_text(path: Path, column: str | None = None) -> list:
    return read_samples([str(path)], column)[0]


def refusal(path: Path, column: str | None = None) -> str:
    with pytest.raises(InputError) as error:
        load_text(path, column)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(path), path.name)


def test_the_corpus_is_of_very_unequal_lengths_and_each_text_is_there_once(corpus):
    lengths = np.array([len(text.encode()) for text in corpus])
    assert len(corpus) == len(set(corpus)) > 3000
    assert lengths.min() < 20
    assert lengths.max() > 4000
    assert any("Return a shallow copy" in text for text in corpus)


def test_held_out_texts_do_not_depend_on_the_order_and_keep_it(corpus):
    training, held_out = split_held_out(corpus)
    assert sorted(training + held_out) == sorted(corpus)
    assert 0.03 < len(held_out) / len(corpus) < 0.07
    backwards = split_held_out(corpus[::-1])
    assert backwards == (training[::-1], held_out[::-1])
    assert set(split_held_out(corpus, 0.02)[1]) < set(held_out)


@given(st.lists(st.text(max_size=5), max_size=20), st.floats(0, 0.99))
def test_a_split_loses_nothing_and_never_takes_all(texts, fraction):
    training, held_out = split_held_out(texts, fraction)
    assert sorted(training + held_out) == sorted(texts)
    assert not set(training) & set(held_out)
    assert training or not texts


TEXTS = ["one", "NA", "drei\nZeilen, mit Komma", "vier ♠"]


def save(folder: Path, ending: str, texts: list[str]) -> Path:
    path = folder / f"texts.{ending}"
    rows = [{"text": text, "number": i} for i, text in enumerate(texts)]
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "number"])
            writer.writeheader()
            writer.writerows(rows)
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(texts))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_each_kind_of_file_gives_its_texts_unchanged(tmp_path, ending):
    assert load_text(save(tmp_path, ending, TEXTS)) == TEXTS
    assert load_text(save(tmp_path, ending, TEXTS), "text") == TEXTS


def test_a_text_file_gives_its_lines_and_blank_ones_separate(tmp_path):
    assert load_text(write(tmp_path, "a.jsonl", '\ufeff{"text": "x"}\n')) == ["x"]  # a byte order mark is no text
    assert load_text(write(tmp_path, "a.txt", "one\n\n  \ntwo\r\nthree")) == ["one", "two", "three"]


def test_lists_of_integers_are_token_ids(tmp_path, tokenizer):
    path = write(tmp_path, "a.jsonl", '{"ids": [5, 6, 7], "id": 0}\n{"ids": [8], "id": 1}\n')
    samples = load_text(path)
    assert samples == [[5, 6, 7], [8]]
    dataset = tokenize(samples, tokenizer)
    assert [row["input_ids"].tolist() for row in (dataset[0], dataset[1])] == samples


def test_what_has_been_tokenized_is_taken_with_its_labels_whatever_is_beside_it(tmp_path):
    row = {"text": "a", "input_ids": [3, 4], "attention_mask": [1, 1], "labels": [-100, 4]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    assert load_text(path) == [{"input_ids": [3, 4], "labels": [-100, 4]}]
    assert load_text(path, "text") == ["a"]
    path.write_text(json.dumps({"input_ids": [3, 4], "attention_mask": [1, 1]}))
    assert load_text(path) == [[3, 4]]


EMPTY = "the dataset is empty ({}): expected at least one sample, found none"
HOLE = "a row cannot be used (a.jsonl, line 2, column 'text'): expected a string, found "
NO_LINE = "a line is no JSON object (a.jsonl, line {}). Mend or remove it"
#: A file, what it holds, and how the error begins.
REFUSED = [
    ("a.jsonl", "\n\n", "the dataset is empty (a.jsonl)"),
    ("a.csv", "text,b\n", EMPTY.format("a.csv")),
    ("a.jsonl", '{"text": " "}\n{"text": ""}\n', "the dataset is empty (a.jsonl): expected a sample, found 2 empty rows"),
    ("a.jsonl", '{"text": "x"}\n{"text": null}\n', HOLE + "nothing"),
    ("a.csv", "body,title\nx,y\n",
     "which column holds the texts? (a.csv): found body, title. Name it with --text_column"),
    ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n',
     "these rows are no texts (a.jsonl): found messages. ullage trl sft --dataset_name "),
    ("a.jsonl", '{"text": "x"}\n{"text": \n', NO_LINE.format(2)),
    ("a.parquet", "text\nx\n", "the data cannot be read (a.parquet): found Parquet file size is 7 bytes, "),
    ("a.txt", "café".encode("latin-1"), "the data cannot be read (a.txt): found 'utf-8' codec can't decode byte 0xe9"),
    ("a.xml", "<a/>", "files that are not read (a.xml): expected one of .jsonl, .json, .csv, .tsv, .parquet, "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_what_cannot_be_trained_on_is_refused_in_one_line(tmp_path, name, content, message):
    assert refusal(write(tmp_path, name, content)).startswith(message)


def test_a_folder_of_several_kinds_of_data_files_is_refused_and_what_lies_beside_data_is_not(tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "x"}\n')
    for beside in ("config.json", "README.md", "dataset_infos.json"):
        (folder / beside).write_text("{}")
    assert load_rows([str(folder)])["text"][:] == ["x"]
    (folder / "b.csv").write_text("text\ny\n")
    assert refusal(folder) == (
        "a folder of several kinds of data files (both): found .csv and .jsonl. Name the files: both/*.csv"
    )
    assert load_rows([f"{folder}/*.csv"])["text"][:] == ["y"]


@pytest.mark.parametrize("parted", ["text\tlabel\na\t1\n", "text;label\na;1\n"])
def test_a_csv_that_is_parted_otherwise_is_refused_in_a_folder_too(tmp_path, parted):
    folder = tmp_path / "of"
    folder.mkdir()
    path = write(folder, "a.csv", parted)
    for where in (path, folder):
        assert refusal(where).startswith(f"the columns of a .csv file are parted by commas ({where.name}): found 'text")


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    assert refusal(save(tmp_path, "csv", TEXTS), "txt") == (
        "there is no column 'txt' (texts.csv): found columns text, number. Did you mean text?"
    )


def test_what_is_not_here_is_never_sent_to_the_hub_if_it_is_nearly_a_file(tmp_path):
    save(tmp_path, "jsonl", TEXTS)
    assert refusal(tmp_path / "text.jsonl") == (
        f"there is no such data file here (text.jsonl). Did you mean {tmp_path}/texts.jsonl?"
    )
    assert refusal(tmp_path / "other.csv") == "there is no such data file here (other.csv)"
    with pytest.raises(InputError, match="there is no such data file here"):
        load_rows(["none*.jsonl"])


def test_folders_patterns_and_parts_of_a_split(tmp_path):
    """Files by name of their split, several files in the order of their names, and what ``save_to_disk`` wrote."""
    import datasets

    hub = tmp_path / "hub"
    hub.mkdir()
    for name, texts in (("train-00000-of-00002", "ab"), ("train-00001-of-00002", "cd"), ("test", "e")):
        pq.write_table(pa.table({"text": [*texts]}), hub / f"{name}.parquet")
    assert load_rows([str(hub)])["text"][:] == [*"abcd"]
    assert load_rows([str(hub)], split="test")["text"][:] == ["e"]
    assert load_rows([str(hub)], split="train[:50%]")["text"][:] == ["a", "b"]
    assert load_rows([f"{hub}/train-*.parquet"])["text"][:] == [*"abcd"]
    assert [row["text"] for row in load_rows([f"{hub}/test.parquet"], streaming=True)] == ["e"]
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "saved")
    assert load_rows([str(tmp_path / "saved")])["text"][:] == ["x"]
    with pytest.raises(InputError, match=r"the data cannot be read .*found .*[Uu]nknown split"):
        load_rows([str(hub)], split="validation")


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=8), st.none() | st.integers(1, 20))
def test_tokens_are_the_bytes_and_an_end_cut_and_counted(tokenizer, texts, max_length):
    dataset = tokenize(texts, tokenizer, max_length)
    wanted = [[byte + 3 for byte in text.encode()] + [1] for text in texts]
    found = [dataset[i] for i in range(len(dataset))]
    assert [row["input_ids"].tolist() for row in found] == [ids[:max_length] for ids in wanted]
    assert all(row["labels"].equal(row["input_ids"]) for row in found)
    assert dataset.num_tokens + dataset.truncated_tokens == sum(map(len, wanted))
    assert dataset.num_truncated == sum(len(ids) > (max_length or len(ids)) for ids in wanted)


def test_words_that_look_like_special_tokens_are_bytes(tokenizer, tmp_path):
    text = "a</s> <pad>b"
    assert tokenize([text], tokenizer)[0]["input_ids"].tolist() == [byte + 3 for byte in text.encode()] + [1]
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    row = tokenize(["abc"], again)[0]
    row["labels"][0] = -100  # in memory of their own
    assert row["input_ids"][0] != -100
    assert tokenize([text], again)[0]["input_ids"].tolist() == tokenize([text], tokenizer)[0]["input_ids"].tolist()
    assert again("a</s>")["input_ids"] == [byte + 3 for byte in b"a</s>"]  # a prompt has no end


def test_one_text_is_not_taken_for_a_list_of_letters(tokenizer):
    with pytest.raises(
        InputError, match="one text is no list of samples: expected a list, or one column, found 'one string'"
    ):
        tokenize("one string", tokenizer)


def test_nothing_to_tokenize_and_nothing_left_to_train_on(tokenizer):
    with pytest.raises(InputError, match="expected 0 <= fraction < 1, found 1"):
        split_held_out(["a"], 1.0)
    with pytest.raises(InputError, match="the dataset is empty: expected at least one sample, found none"):
        tokenize([], tokenizer)
    empty = r"a sample is empty \(sample 1\): expected at least one token, found length 0"
    with pytest.raises(InputError, match=empty):
        tokenize([[5], []], tokenizer)
    with pytest.raises(InputError, match="the maximum length is out of range: expected at least 1 token, found 0"):
        tokenize(["a"], tokenizer, 0)


def test_an_id_outside_the_vocabulary_is_named():
    dataset = TokenDataset(np.array([4, 5, 6, 7, 300], np.int32), Layout([2, 3]))
    dataset.require_vocabulary(301)
    with pytest.raises(InputError) as error:
        dataset.require_vocabulary(259, "a.jsonl")
    assert str(error.value) == (
        "a token id is outside the vocabulary (a.jsonl, sample 1, position 2): expected 0 to 258, found 300. "
        "Take the tokenizer that belongs to the model, or a model with a larger vocab_size"
    )
    with pytest.raises(InputError, match=r"sample 0, position 1.*found -1"):
        TokenDataset(np.array([4, -1], np.int32), Layout([2])).require_vocabulary(259)
    with pytest.raises(IndexError):
        dataset[2]
