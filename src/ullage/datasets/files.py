"""Lengths of sequences read from files of lengths, tokens or text.

A file is read by its ending, and its first bytes must agree. A column holds lengths (integers), tokens (lists, whose
lengths are counted) or text (strings, measured by a tokenizer). The column is the one asked for; else one named for
lengths (``length``, ``seq_len``, ``num_tokens`` and so on); else ``input_ids``; else the only one; else ``text``.
The default tokenizer is ByT5's: one token per byte of UTF-8 and one for the end, so that it needs no vocabulary.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ullage.datasets.lengths import (
    LENGTH_NAMES,
    as_number,
    choose_column,
    is_number,
    mock_lengths,
    numbers_of,
    read_cells,
)
from ullage.datasets.stored import is_list, is_text, list_lengths, no_tokens, read_arrow, require_tokens, require_values
from ullage.datasets.tables import files_of
from ullage.errors import InputError, first_line
from ullage.extras import needed_by
from ullage.layout import Int64, as_lengths

ENDINGS = (".npy", ".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".arrow")

_PARQUET, _NPY = b"PAR1", b"\x93NUMPY"


def read_lengths(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    column: str | None = None,
    tokenizer: str | None = None,
) -> Measured:
    """The lengths in a file, int64 [n].

    Args:
        path: .npy (one dimension of integers), .csv, .tsv, .txt (integers; with ``column="text"``, one text per line),
            .jsonl (an object, a list or an integer per line), .json (a list of integers, or a mock distribution),
            .parquet or .arrow; a folder's training files, the files of a pattern, and several, one after the other
        column: of the lengths, tokens or text; chosen as the module says if ``None``
        tokenizer: for text, a name or folder for ``AutoTokenizer``

    Raises ``InputError`` for a file that is missing, empty, not what its ending says, or lacks the column (the message
    lists the columns), and for lists of anything but integers.
    """
    sources = [path] if isinstance(path, (str, os.PathLike)) else path
    files = [file for source in sources for file in files_of(source)]
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
    return Measured(np.concatenate([part.lengths for part in parts]), parts[0].column, parts[0].unit)


def _read_file(path: Path, column: str | None, tokenizer: str | None) -> Measured:
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(
            "a file's ending is unknown", where=str(path), expected=", ".join(ENDINGS), found=ending or "none"
        )
    try:
        if ending == ".arrow":
            table = read_arrow(path)
            return of_arrow(table.column_names, lambda name: table[name].chunks, str(path), column, tokenizer)
        with path.open("rb") as file:
            return _read(file, ending, str(path), column, tokenizer)
    except OSError as error:
        raise InputError("a file cannot be read", where=str(path), found=error.strerror or str(error)) from error


def read_stream(stream: BinaryIO, column: str | None = None, tokenizer: str | None = None) -> Measured:
    """The lengths in a stream of any of the formats of :func:`read_lengths`, recognised by its first bytes."""
    data = stream.read()
    # A stream has no ending, so its bytes decide: a magic number, a bracket, or a first line of numbers only (.txt).
    head = data.lstrip(b"\xef\xbb\xbf \t\r\n")
    if data.startswith(_NPY):
        ending = ".npy"
    elif data.startswith(_PARQUET):
        ending = ".parquet"
    elif head.startswith((b"{", b"[")):
        ending = ".json" if _is_json(head) else ".jsonl"
    else:
        first = head.split(b"\n", 1)[0]
        ending = ".csv" if any(byte not in b"0123456789+-., \t\r" for byte in first) else ".txt"
    return _read(io.BytesIO(data), ending, "standard input", column, tokenizer)


def _read(file: BinaryIO, ending: str, where: str, column: str | None, tokenizer: str | None) -> Measured:
    head = file.read(6)
    file.seek(0)
    if not head:
        raise InputError("a file holds no lengths", where=where, hint="it is empty")
    # Binary formats begin with their magic number, text formats with none; both must agree with the ending.
    magic = {_PARQUET: ".parquet", _NPY[:4]: ".npy"}.get(head[:4])
    if (magic or ".txt") != ending and (magic or ending in (".parquet", ".npy")):
        raise InputError(
            "a file is not what its ending says",
            where=where,
            expected=ending,
            found=magic or "neither .npy nor .parquet",
        )
    if ending == ".npy":
        measured = Measured(_from_npy(file, where))
    elif ending == ".parquet":
        measured = _from_parquet(file, where, column, tokenizer)
    else:
        text = _decode(file.read(), where)
        if ending == ".jsonl":
            measured = _from_jsonl(text, where, column, tokenizer)
        elif ending == ".json":
            measured = _from_json(text, where, column, tokenizer)
        elif ending in (".csv", ".tsv"):
            measured = _from_csv(text, ending, where, column, tokenizer)
        else:
            measured = _from_txt(text, where, column, tokenizer)
    if not len(measured.lengths):
        raise InputError("a file holds no lengths", where=where)
    return measured


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("a file is not text", where=where, expected="UTF-8", found=str(error)) from error


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _from_npy(file: BinaryIO, where: str) -> Int64:
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError("an .npy file cannot be read", where=where, found=str(error)) from error
    return checked_lengths(array, where)


def _from_txt(text: str, where: str, column: str | None, tokenizer: str | None) -> Measured:
    if column is not None:
        if column != "text":
            raise InputError("a .txt file has no columns", where=where, expected="text", found=column)
        return of_texts(text.splitlines(), "text", tokenizer)
    # Integers between white space or commas; an empty array needs its dtype given, or it would be float64.
    words = text.replace(",", " ").split()
    for word in words:
        if not is_number(word):
            raise InputError(
                "a .txt file must hold integers",
                where=where,
                found=repr(word[:40]),
                hint="--column text measures one text per line",
            )
    return Measured(
        checked_lengths(np.array([as_number(word) for word in words] or [], dtype=None if words else np.int64), where)
    )


def _from_json(text: str, where: str, column: str | None, tokenizer: str | None) -> Measured:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError("a file is not JSON", where=where, found=str(error)) from error
    if isinstance(value, dict):
        if "mode" not in value:
            # One object is one row, or a column of lengths by its name: {"lengths": [5, 3, 9]}.
            chosen = choose_column(list(value), column, where)
            if chosen.lower() in LENGTH_NAMES and isinstance(value[chosen], list):
                return of_values(value[chosen], chosen, where, tokenizer)
            return _from_records([value], where, column, tokenizer)
        # By its path, so that a relative path in it starts at the file's folder.
        return Measured(mock_lengths(text if where == "standard input" else where))
    if not isinstance(value, list):
        raise InputError("a JSON file must hold a list or a mock distribution", where=where, found=type(value).__name__)
    return _from_records(value, where, column, tokenizer)


def _from_jsonl(text: str, where: str, column: str | None, tokenizer: str | None) -> Measured:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise InputError("a line is not JSON", where=f"{where}, line {number}", found=str(error)) from error
    return _from_records(records, where, column, tokenizer)


def _from_records(records: list[Any], where: str, column: str | None, tokenizer: str | None) -> Measured:
    """Objects with columns, lists of tokens, or integers: all of one kind."""
    if not records:
        raise InputError("a file holds no lengths", where=where)
    if not isinstance(records[0], dict):
        if column is not None:
            raise InputError("a column is missing", where=where, expected=column, found="rows without names")
        return of_values(records, None, where, tokenizer)
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise InputError(
                "rows are of several kinds",
                where=f"{where}, row {number}",
                expected="an object",
                found=type(record).__name__,
            )
    chosen = choose_column(list(records[0]), column, where)
    missing = next((i for i, record in enumerate(records) if chosen not in record), None)
    if missing is not None:
        raise InputError(
            "a row lacks the column",
            where=f"{where}, row {missing}",
            expected=chosen,
            found=", ".join(records[missing]),
        )
    return of_values([record[chosen] for record in records], chosen, where, tokenizer)


def _from_csv(text: str, ending: str, where: str, column: str | None, tokenizer: str | None) -> Measured:
    """Numbers, or a column of text where the header names one and nothing of lengths."""
    chosen, cells = read_cells(text, where, column, "\t" if ending == ".tsv" else ",")
    # The first row below the header tells a column of numbers from one of text.
    first = next((cell for cell in cells if cell is not None), None)
    if chosen is None or first is None or is_number(first):
        return Measured(numbers_of(cells, where), chosen)
    if chosen.lower() in LENGTH_NAMES:
        raise InputError("a file holds something that is not a length", where=where, found=repr(first[:60]))
    return of_texts([cell or "" for cell in cells], chosen, tokenizer)


def _from_parquet(file: BinaryIO, where: str, column: str | None, tokenizer: str | None) -> Measured:
    with needed_by("a .parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        table = pq.ParquetFile(file)

        def arrays(name: str) -> Iterable[Any]:
            return (batch.column(0) for batch in table.iter_batches(columns=[name]))

        return of_arrow(table.schema_arrow.names, arrays, where, column, tokenizer)
    except pa.ArrowException as error:
        raise InputError("a .parquet file cannot be read", where=where, found=first_line(error)) from error


@dataclass(frozen=True, eq=False)
class Measured:
    """Lengths with their source.

    Attributes:
        lengths: int64 [n]
        column: the column that they were read from; ``None`` where there are no columns
        unit: what a length counts
    """

    lengths: Int64
    column: str | None = None
    unit: str = "tokens"


def checked_lengths(values: Any, where: str) -> Int64:
    """``values`` as lengths, int64 [n]. Raises ``InputError`` that names ``where`` and the item."""
    try:
        return as_lengths(values)
    except InputError as error:
        place = where if error.where is None else f"{where}, {error.where}"
        raise error.at(place) from error


def of_texts(texts: Sequence[str], column: str | None, tokenizer: str | None) -> Measured:
    """Lengths of texts in tokens of a tokenizer, or in bytes."""
    return Measured(np.array(measure(tokenizer)(texts), np.int64), column, BYTES if tokenizer is None else "tokens")


def of_values(values: Sequence[Any], column: str | None, where: str, tokenizer: str | None) -> Measured:
    """Lengths of a column's values, which are of one kind. Raises ``InputError`` that names the row of another."""
    if values and isinstance(values[0], str):
        _all_of(values, str, column, where)
        return of_texts(values, column, tokenizer)
    if values and isinstance(values[0], list):
        _all_of(values, list, column, where)
        for row, value in enumerate(values):
            # A bool is an int to isinstance, but no token.
            others = [item for item in value if type(item) is not int]
            if others:
                place = f"{where}, column {column}, row {row}" if column else f"{where}, row {row}"
                raise no_tokens(place, f"a list with {repr(others[0])[:60]}")
        return Measured(np.array([len(value) for value in values], np.int64), column)
    _all_of(values, (int, float), column, where)
    return Measured(checked_lengths(np.array(values), where), column)


def _all_of(values: Sequence[Any], kind: Any, column: str | None, where: str) -> None:
    for row, value in enumerate(values):
        # A bool is an int to isinstance, but no length.
        if not isinstance(value, kind) or isinstance(value, bool):
            place = f"{where}, row {row}" + (f", column {column}" if column else "")
            raise InputError(
                "a value is neither a length nor tokens nor text, as the first is", where=place, found=repr(value)[:60]
            )


def of_arrow(
    names: Sequence[str],
    arrays: Callable[[str], Iterable[Any]],
    where: str,
    column: str | None,
    tokenizer: str | None,
) -> Measured:
    """Lengths of an Arrow column, one that :func:`choose_column` chooses; ``arrays`` gives the parts of one by name."""
    chosen = choose_column(names, column, where)
    place, row = f"{where}, column {chosen}", 0
    parts: list[Measured] = []
    for array in arrays(chosen):
        parts.append(_of_chunk(array, chosen, place, row, tokenizer))
        row += len(array)
    if not parts:
        raise InputError("a file holds no lengths", where=where)
    # Checked as a whole, so that an error counts from the beginning of the file.
    return Measured(checked_lengths(np.concatenate([part.lengths for part in parts]), place), chosen, parts[0].unit)


def _of_chunk(array: Any, column: str, place: str, first_row: int, tokenizer: str | None) -> Measured:
    """Lengths of a part of a column, which begins at ``first_row`` of its file; numbers are not checked yet."""
    import pyarrow as pa
    import pyarrow.compute as pc

    require_values(array, place, first_row)
    kind = array.type
    if is_text(kind):
        if tokenizer is None:
            return Measured(
                # Arrow counts the bytes of UTF-8 itself; one more for the end.
                pc.call_function("binary_length", [array]).to_numpy(zero_copy_only=False).astype(np.int64) + 1,
                column,
                BYTES,
            )
        return of_texts(array.to_pylist(), column, tokenizer)
    if is_list(kind):
        require_tokens(array, place, first_row)
        return Measured(list_lengths(array), column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return Measured(array.to_numpy(zero_copy_only=False), column)
    raise InputError("a column holds neither lengths nor tokens nor text", where=place, found=str(kind))


#: The unit of text measured without a vocabulary.
BYTES = "byte tokens"

#: Texts in, their lengths in tokens out.
Measure = Callable[[Sequence[str]], list[int]]


def measure(tokenizer: str | None) -> Measure:
    """The function that counts the tokens of texts; for ``None``, bytes of UTF-8 and one for the end, as in ByT5."""
    if tokenizer is None:
        # JSON may hold lone surrogates, which strict UTF-8 refuses.
        return lambda texts: [len(text.encode("utf-8", "surrogatepass")) + 1 for text in texts]
    encode = load_tokenizer(tokenizer)
    # A thousand texts at a time, so that the ids of few are in memory.
    return lambda texts: [
        len(ids) for start in range(0, len(texts), 1000) for ids in encode(texts[start : start + 1000])
    ]


def load_tokenizer(name: str | None) -> Callable[[Sequence[str]], list[list[int]]]:
    """The function from texts to token ids: for ``None`` the byte tokenizer, else what ``AutoTokenizer`` loads."""
    with needed_by("a tokenizer"):
        from transformers import AutoTokenizer
    if name is None:
        from ullage.datasets.text import byte_tokenizer  # loads torch, which measuring bytes does not need

        loaded = byte_tokenizer()
    else:
        try:
            loaded = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            raise InputError("a tokenizer cannot be loaded", where=name, found=first_line(error)) from error
    return lambda texts: loaded(list(texts))["input_ids"]
