"""Lengths out of files: every format, which column, and what is said of files that are not what they seem."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ullage.core.errors import InputError
from ullage.datasets.files import read_lengths, read_stream

LENGTHS = [17, 5, 900, 5]


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")
    return path


def parquet(path, columns, **how):
    pq.write_table(pa.table(columns), path, **how)
    return path


def test_every_format_gives_the_same_lengths(tmp_path):
    np.save(tmp_path / "a.npy", np.array(LENGTHS, np.int32))
    texts = {
        "a.csv": "length\n17\n5\n900\n5\n",
        "b.csv": "17\n5\n900\n5\n",
        "c.csv": "\ufeffid,length\r\n1,17\r\n2,5\r\n3,900\r\n4,5\r\n",
        "a.txt": "17 5\n900\t5\n",
        "b.txt": "17, 5, 900, 5",
        "a.jsonl": "".join(f'{{"length": {n}, "id": 1}}\n' for n in LENGTHS),
        "b.jsonl": "17\n5\n\n900\n5",
        "c.jsonl": "".join(json.dumps({"input_ids": [1] * n, "text": "x"}) + "\n" for n in LENGTHS),
        "a.json": json.dumps(LENGTHS),
        "b.json": json.dumps({"id": "x", "lengths": LENGTHS}),
        "d.json": json.dumps([[0] * n for n in LENGTHS]),
    }
    paths = [tmp_path / "a.npy", *(write(tmp_path / name, text) for name, text in texts.items())]
    paths.append(parquet(tmp_path / "a.parquet", {"num_tokens": LENGTHS, "id": [1, 2, 3, 4]}, row_group_size=3))
    paths.append(parquet(tmp_path / "b.parquet", {"input_ids": [[0] * n for n in LENGTHS], "labels": [[0]] * 4}))
    for path in paths:
        np.testing.assert_array_equal(read_lengths(path).lengths, LENGTHS, str(path))
        np.testing.assert_array_equal(read_stream(path.read_bytes()).lengths, LENGTHS, str(path))


def test_text_is_measured_in_bytes_as_byt5_tokenizes(tmp_path):
    from transformers import ByT5Tokenizer

    texts = ["hello", "Grüße, 世界", 'a,b "quoted"\nsecond line', "x"]
    expected = [len(ids) for ids in ByT5Tokenizer()(texts)["input_ids"]]
    rows = [json.dumps({"text": text, "id": str(i)}) for i, text in enumerate(texts)]
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    for path in (
        write(tmp_path / "a.jsonl", "\n".join(rows)),
        write(tmp_path / "a.csv", "id,text\n" + "".join(f"x,{text}\n" for text in quoted)),
        parquet(tmp_path / "a.parquet", {"text": texts, "id": ["a"] * 4}),
    ):
        measured = read_lengths(path)
        np.testing.assert_array_equal(measured.lengths, expected, str(path))
        assert measured.column == "text"
        assert "byte" in measured.unit


def test_txt_of_text_is_a_text_a_line(tmp_path):
    path = write(tmp_path / "a.txt", "one\ntwo words\n")
    np.testing.assert_array_equal(read_lengths(path, "text").lengths, [4, 10])
    with pytest.raises(InputError, match=r"must hold integers.*'one'.*--column text"):
        read_lengths(path)


def test_tokenizer_in_a_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    path = write(tmp_path / "a.jsonl", '{"text": "one two three"}\n{"text": "two"}')
    measured = read_lengths(path, tokenizer=str(tmp_path / "words"))
    np.testing.assert_array_equal(measured.lengths, [3, 1])
    assert measured.unit == "tokens"
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        read_lengths(path, tokenizer=str(tmp_path / "nowhere"))


def test_a_column_that_is_asked_for(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"length": [1, 2], "other": [3, 4], "text": ["ab", "c"]})
    np.testing.assert_array_equal(read_lengths(path).lengths, [1, 2])
    np.testing.assert_array_equal(read_lengths(path, "other").lengths, [3, 4])
    np.testing.assert_array_equal(read_lengths(path, "text").lengths, [3, 2])
    with pytest.raises(InputError, match=r"a column is missing .*expected nope, found length, other, text"):
        read_lengths(path, "nope")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.npy", b"17\n5\n", ".npy file cannot be read"),
    ("a.csv", b"PAR1 and so on", "the dataset is empty"),
    ("a.txt", b"\x93NUMPY\x01\x00", "can't decode byte"),
    ("a", b"?", "expected .npy, .jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt, found none"),
    ("a.txt", b"\n \n", "holds no lengths"),
    ("a.jsonl", b'{"length": 5}\n{"len": 5}\n', "a value is missing (a.jsonl, column length, row 1)"),
    ("a.jsonl", b'{"length": 5}\n7\n', "a line is no JSON object (a.jsonl, line 2)"),
    ("a.jsonl", b'{"length": 5}\n{"length": "x"}\n', "column length, row 1): found 'x'"),
    ("a.jsonl", b'{"length": true}\n', "neither lengths nor tokens nor text"),
    ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "column text, row 1"),
    ("a.jsonl", b'{"a": 5, "b": 6}\n', "expected length, input_ids or text, found a, b"),
    ("a.txt", b"5 -7", "must not be negative (a.txt, item 1)"),
    ("a.txt", b"5 nan", "must be integers"),
    ("a.csv", b"length\n5\nx\n", "column length, row 1): found 'x'"),
    ("a.csv", b"length\n5\nnan\n", "column length, row 1): found 'nan'"),
])  # fmt: skip
def test_bad_files(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        read_lengths(name)
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_arrays(tmp_path):
    for array, message in (
        (np.ones((2, 2), int), "one dimension"),
        (np.array([1.5]), "must be integers"),
        (np.array([3, -1]), "must not be negative"),
        (np.array(["a"]), "must be integers"),
        (np.array([], int), "holds no lengths"),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(InputError, match=message):
            read_lengths(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read"):
        read_lengths(tmp_path / "a.npy")


def test_bad_parquet(tmp_path):
    for columns, message in (
        ({"length": [1, None]}, "a value is missing .*row 1"),
        ({"length": [1, -2]}, "must not be negative"),
        ({"length": [1.5, 2.0]}, "must be integers"),
        ({"when": pa.array([0], pa.timestamp("s"))}, "neither lengths nor tokens nor text .*timestamp"),
        ({"length": pa.array([], pa.int64())}, "the dataset is empty"),
    ):
        with pytest.raises(InputError, match=message):
            read_lengths(parquet(tmp_path / "a.parquet", columns))
    with pytest.raises(InputError, match=r"no such file of lengths here \(.*nowhere.npy\)"):
        read_lengths(tmp_path / "nowhere.npy")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match=r"cannot be read \(.*folder.csv.*contain any data files"):
        read_lengths(tmp_path / "folder.csv")


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(("values", "found"), [
    ([CHAT, CHAT], "messages"),
    ([[[1, 2]], [[3]]], "list"),
    ([[1, 2], [1.5]], "row 1.*found 1.5"),
    ([[True], [False]], "row 0.*bool"),
    ([[1], [2, None]], "row 1.*found None"),
])  # fmt: skip
def test_lists_of_anything_but_integers_are_refused_by_name(tmp_path, ending, values, found):
    """A conversation is a list too: its turns are not tokens."""
    path = tmp_path / f"a.{ending}"
    rows = [{"messages": value, "id": i} for i, value in enumerate(values)]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == "arrow":
        arrow(path, pa.Table.from_pylist(rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=found) as error:
        read_lengths(path, "messages")
    assert "a column of lists holds no token ids" in str(error.value)
    assert "column messages" in str(error.value)
    assert "name another column with --column" in str(error.value).lower()


def arrow(path, table, footed=False):
    make = pa.ipc.new_file if footed else pa.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def test_lists_without_tokens_count_none(tmp_path):
    table = pa.table({"input_ids": [[], [], []]})
    pq.write_table(table, tmp_path / "a.parquet")
    for path in (
        tmp_path / "a.parquet",
        arrow(tmp_path / "a.arrow", table),
        write(tmp_path / "a.json", "[[], [], []]"),
    ):
        assert read_lengths(path).lengths.tolist() == [0, 0, 0]


def test_folders_patterns_and_more_formats_give_the_same_lengths(tmp_path):
    import datasets

    table = pa.table({"length": LENGTHS, "id": ["a", "b", "c", "d"]})
    rows = "".join(f"{length}\tx, y\n" for length in LENGTHS)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved", num_shards=2)
    both = {"train": datasets.Dataset(table), "test": datasets.Dataset(table.slice(0, 1))}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    (tmp_path / "parts").mkdir()
    for number, part in enumerate((table.slice(0, 3), table.slice(3))):
        pq.write_table(part, tmp_path / "parts" / f"train-0000{number}-of-00002.parquet")
    write(tmp_path / "parts" / "README.md", "a card")
    for source in (
        write(tmp_path / "a.tsv", "length\tname\n" + rows),
        arrow(tmp_path / "a.arrow", table),
        arrow(tmp_path / "b.arrow", table, footed=True),
        tmp_path / "saved",
        tmp_path / "both",
        tmp_path / "parts",
        f"{tmp_path}/parts/*.parquet",
        sorted((tmp_path / "parts").glob("*.parquet")),
    ):
        np.testing.assert_array_equal(read_lengths(source).lengths, LENGTHS, str(source))
    write(tmp_path / "c.tsv", "num_tokens\n7\n")
    with pytest.raises(InputError, match=r"hold different things \(.*c.tsv\).*expected column length"):
        read_lengths([tmp_path / "a.tsv", tmp_path / "c.tsv"])


@pytest.mark.parametrize(("values", "place"), [
    ([1, 1, None], "row 2"),
    ([1, 1, -1], "item 2"),
    ([[1], [1], [None]], "row 2"),
    (["a", "a", None], "row 2"),
])  # fmt: skip
def test_a_bad_row_is_counted_from_the_beginning_of_the_file(tmp_path, values, place):
    # Written two rows at a time.
    with pytest.raises(InputError, match=place):
        read_lengths(arrow(tmp_path / "a.arrow", pa.table({"length": values})))
