"""Lengths of sequences read from files of lengths, tokens or text.

A file of numbers alone is read as such: .npy, .txt, and the text formats where the first line has numbers only. All
others are tables, read by :mod:`ullage.datasets.tables`. A column holds lengths (integers), tokens (lists, whose
lengths are counted) or text (strings, measured by a tokenizer). The column is the one asked for; else one named for
lengths (``length``, ``seq_len``, ``num_tokens`` and so on); else ``input_ids``; else the only one; else ``text``.
The default tokenizer is ByT5's: one token per byte of UTF-8 and one for the end, so that it needs no vocabulary.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ullage.core.errors import InputError, first_line, listed
from ullage.core.extras import needed_by
from ullage.core.layout import Int64, as_lengths
from ullage.datasets.stored import (
    is_json,
    is_list,
    is_text,
    list_lengths,
    odd_one,
    of_json,
    require_token_ids,
    require_values,
)
from ullage.datasets.tables import READERS, load_rows, near, refuse_slip

ENDINGS = (".npy", *READERS)
#: Names of a column of lengths, in lower case.
LENGTH_NAMES = ("length", "lengths", "len", "seq_len", "seqlen", "seq_length", "sequence_length", "num_tokens",
                "tokens")  # fmt: skip
#: Names of a column of text among several.
TEXT_NAMES = ("text", "content", "document")
#: The unit of text measured without a vocabulary.
BYTES = "byte tokens"

_NPY, _PARQUET = b"\x93NUMPY", b"PAR1"


@dataclass(frozen=True, eq=False)
class Measured:
    """Lengths with their source.

    Attributes:
        lengths: int64 [n]
        column: the column that they were read from; ``None`` where there are no columns
        unit: what a length counts
        num_empty: rows that were left out: texts of nothing but white space, lists without a token
    """

    lengths: Int64
    column: str | None = None
    unit: str = "tokens"
    num_empty: int = 0


def read_lengths(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    column: str | None = None,
    tokenizer: str | None = None,
) -> Measured:
    """The lengths in a file, int64 [n].

    Args:
        path: .npy (one dimension of integers), .txt (integers; with ``column="text"``, one text per line), .csv, .tsv,
            .jsonl, .json, .parquet or .arrow; a folder's training files, the files of a pattern, and several, one after
            the other
        column: of the lengths, tokens or text; chosen as the module says if ``None``
        tokenizer: for text, a name or folder for ``AutoTokenizer``

    Raises ``InputError`` for a file that is missing, empty, not what its ending says, or lacks the column (the message
    lists the columns), and for lists of anything but integers.
    """
    sources = [os.fspath(each) for each in ([path] if isinstance(path, (str, os.PathLike)) else path)]
    # A pattern stands for its files, each with lengths of its own.
    files = [Path(file) for source in sources for file in sorted(glob.glob(source)) or [source]]
    parts = [_read_file(file, column, tokenizer) for file in files]
    for file, part in zip(files, parts, strict=True):
        if (part.column, part.unit) != (parts[0].column, parts[0].unit):
            raise InputError(
                "the files hold different things",
                where=str(file),
                expected=f"column {parts[0].column}, {parts[0].unit}, as in {files[0]}",
                found=f"column {part.column}, {part.unit}",
                hint="name one column of all of them with --column",
            )
    lengths = np.concatenate([part.lengths for part in parts])
    return Measured(lengths, parts[0].column, parts[0].unit, sum(part.num_empty for part in parts))


def amounts_in_file(path: str | os.PathLike[str], column: str) -> list[Any]:
    """A number, or a list of the sizes of its items, of each row of a file of :func:`read_lengths`' with columns.

    Rows without a value have none. Raises ``InputError`` for a file without that column, and for other values.
    """
    table = load_rows([os.fspath(path)])
    choose_column(table.column_names, column, os.fspath(path))
    found = [[] if value is None else value for value in table[column][:]]
    for row, value in enumerate(found):
        if not all(type(each) is int and each >= 0 for each in (value if isinstance(value, list) else [value])):
            raise InputError(
                "an amount must be an integer, or a list of them",
                where=f"{os.fspath(path)}, column {column}, row {row}",
                expected=">= 0",
                found=repr(value)[:60],
            )
    return found


def read_stream(data: bytes, column: str | None = None, tokenizer: str | None = None) -> Measured:
    """The lengths in the bytes of a file, of any of the formats of :func:`read_lengths`, told by how they begin."""
    head = data.lstrip(b"\xef\xbb\xbf \t\r\n")
    line = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    if data.startswith(_NPY):
        ending = ".npy"
    elif data.startswith(_PARQUET):
        ending = ".parquet"
    elif line.startswith(("{", "[")):
        ending = ".json" if _is_json(head) else ".jsonl"
    else:
        ending = ".csv" if line and not _are_numbers(line) else ".txt"
    with tempfile.TemporaryDirectory(prefix="ullage-") as folder:
        path = Path(folder) / f"stdin{ending}"
        path.write_bytes(data)
        try:
            return _read_file(path, column, tokenizer)
        except InputError as error:
            raise error.at((error.where or "").replace(str(path), "standard input")) from error


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _read_file(path: Path, column: str | None, tokenizer: str | None) -> Measured:
    ending, where = path.suffix.lower(), str(path)
    refuse_slip(where, "file of lengths", must_exist=True)
    if ending not in ENDINGS and not path.is_dir():
        raise InputError("a file's ending is unknown", where=where, expected=", ".join(ENDINGS), found=ending or "none")
    if ending == ".npy":
        return Measured(_nonempty(_from_npy(path), where))
    if column is None and ending not in (".parquet", ".arrow") and path.is_file():
        numbers = _from_json(path) if ending == ".json" else _from_text(path, ending)
        if numbers is not None:
            return numbers
    with tempfile.TemporaryDirectory(prefix="ullage-") as folder:
        # Mapped from there, so that a table may be larger than memory.
        table = load_rows([where], cache=folder).data
        # Rows of JSON may have columns of their own; the first row decides which there are.
        names = [name for name in table.column_names if table.column(name)[0].is_valid]
        chosen = choose_column(table.column_names if column else names, column, where)
        return _of_column(table.column(chosen), chosen, f"{where}, column {chosen}", tokenizer)


def _from_npy(path: Path) -> Int64:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError("a file cannot be read", where=str(path), found=error.strerror or str(error)) from error
    except (ValueError, EOFError) as error:
        raise InputError("an .npy file cannot be read", where=str(path), found=str(error)) from error
    return _checked(array, str(path))


def _from_text(path: Path, ending: str) -> Measured | None:
    """The integers in a text of numbers between white space or commas; ``None`` where the first line has a word."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError):
        return None  # reading it as a table says what is there instead
    if not _are_numbers(first) and ending != ".txt":
        return None
    words = read_text(path).replace(",", " ").split()
    for word in words:
        if not _are_numbers(word):
            raise InputError(
                "a file must hold integers",
                where=str(path),
                found=repr(word[:40]),
                hint="--column text measures one text per line" if ending == ".txt" else None,
            )
    # int first: a float has 53 bits, and would round a large integer.
    numbers = [int(word) if word.lstrip("+-").isdecimal() else float(word) for word in words]
    return Measured(_nonempty(_checked(np.array(numbers or [], None if words else np.int64), str(path)), str(path)))


def _are_numbers(line: str) -> bool:
    """Whether a line holds numbers only, with white space or commas between them."""
    words = line.replace(",", " ").split()
    try:
        return bool([float(word) for word in words])
    except ValueError:
        return False


def _is_whole(text: str) -> bool:
    return _are_numbers(text) and float(text).is_integer()


def _from_json(path: Path) -> Measured | None:
    """The lengths in a list of integers, or in one by name: ``{"lengths": [5, 3]}``; ``None`` for rows."""
    try:
        value, name = json.loads(read_text(path)), None
    except json.JSONDecodeError:
        return None  # reading it as a table says what is there instead
    if isinstance(value, dict):
        name = next((name for name in value if name.lower() in LENGTH_NAMES), None)
        value = value.get(name)
    # A bool is an int to isinstance, but no length.
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return None
    return Measured(_checked(value, str(path)), name)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, a byte-order mark removed. Raises ``InputError`` if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError("a file cannot be read", where=os.fspath(path), found=error.strerror) from error
    except UnicodeDecodeError as error:
        raise InputError("a file is not text", where=os.fspath(path), expected="UTF-8", found=str(error)) from error


def _checked(values: Any, where: str) -> Int64:
    """``values`` as lengths, int64 [n]. Raises ``InputError`` that names ``where`` and the item."""
    try:
        return as_lengths(values)
    except InputError as error:
        raise error.at(where if error.where is None else f"{where}, {error.where}") from error


def _nonempty(lengths: Int64, where: str) -> Int64:
    if not len(lengths):
        raise InputError("a file holds no lengths", where=where)
    return lengths


def choose_column(names: Sequence[str], column: str | None, where: str) -> str:
    """The column among ``names`` to measure: ``column``, or by name, of lengths, ``input_ids``, the only one, of text.

    Raises ``InputError`` that lists them.
    """
    if column is not None:
        if column not in names:
            found = listed(names, 16) or "none"
            raise InputError("a column is missing", where=where, expected=column, found=found, hint=near(column, names))
        return column
    # The first rule that leaves a single name decides.
    for wanted in (
        [name for name in names if name.strip().lower() in LENGTH_NAMES],
        [name for name in names if name == "input_ids"],
        names,
        [name for name in names if name.lower() in TEXT_NAMES],
    ):
        if len(wanted) == 1:
            return wanted[0]
    raise InputError(
        "no single column holds lengths or text",
        where=where,
        expected="length, input_ids or text",
        found=listed(names, 16) or "none",
        hint="name one of them with --column",
    )


def _of_column(array: Any, column: str, where: str, tokenizer: str | None) -> Measured:
    """Lengths of a column of lengths, of tokens or of text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    require_values(array, where)
    kind = array.type
    if is_json(kind):
        values = of_json(array)
        row = odd_one(values)
        if row is None:
            return Measured(_checked(values, where), column)
        raise InputError(
            "a value is of another kind than the first", where=f"{where}, row {row}", found=repr(values[row])[:60]
        )
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return Measured(_checked(array.to_numpy(), where), column)
    if is_list(kind):
        require_token_ids(array, where)
        lengths = list_lengths(array)
        # Lists that are all empty tell of their lengths, which are 0.
        return _without_empty(lengths, where, column) if lengths.any() else Measured(lengths, column)
    if is_text(kind) and column.strip().lower() in LENGTH_NAMES:
        row = next((row for row, text in enumerate(array.to_pylist()) if not _is_whole(text)), 0)
        raise InputError(
            "a file holds something that is not a length",
            where=f"{where}, row {row}",
            found=repr(array[row].as_py()[:60]),
        )
    if is_text(kind) and tokenizer is None:
        # Arrow counts the bytes of UTF-8 itself; one more for the end.
        sizes = pc.call_function("binary_length", [array]).to_numpy().astype(np.int64)
        return _without_empty(np.where(_blank(array), 0, sizes + 1), where, column, BYTES)
    if is_text(kind) and tokenizer is not None:
        encode, texts = _load_tokenizer(tokenizer), array.to_pylist()
        # A thousand texts at a time, so that the ids of few are in memory.
        groups = (encode(texts[start : start + 1000]) for start in range(0, len(texts), 1000))
        lengths = np.array([len(ids) for group in groups for ids in group], np.int64)
        return _without_empty(np.where(_blank(array), 0, lengths), where, column)
    raise InputError("a column holds neither lengths nor tokens nor text", where=where, found=str(kind))


def _blank(array: Any) -> Any:
    """Which texts of a column are nothing but white space, bool [n]."""
    import pyarrow.compute as pc

    trimmed = pc.call_function("utf8_trim_whitespace", [array])
    return pc.call_function("binary_length", [trimmed]).to_numpy() == 0


def _without_empty(lengths: Int64, where: str, column: str, unit: str = "tokens") -> Measured:
    kept = lengths[lengths > 0]
    return Measured(_nonempty(kept, where), column, unit, len(lengths) - len(kept))


def _load_tokenizer(name: str) -> Callable[[Sequence[str]], list[list[int]]]:
    """The function from texts to token ids of what ``AutoTokenizer`` loads."""
    with needed_by("a tokenizer"):
        from transformers import AutoTokenizer
    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise InputError("a tokenizer cannot be loaded", where=name, found=first_line(error)) from error
    return lambda texts: loaded(list(texts))["input_ids"]
