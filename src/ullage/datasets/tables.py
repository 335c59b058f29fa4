"""Rows of data files as one table: .jsonl, .json, .csv, .tsv, .parquet, .arrow and .txt, one file or many.

Files are read by ``datasets``; before that the first bytes are compared with the ending, because a parser that accepts
anything turns a wrong name into a bad model. Tables lie in memory, and nothing is left in any cache.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ullage.datasets.folders import ENDINGS, TRAIN, files_of
from ullage.errors import InputError, first_line, root_cause
from ullage.extras import needed_by

# Bytes by which a format is recognised.
_HEAD_BYTES = 4096
#: Messages of the readers of ``datasets`` about a valid file without rows: .csv, .parquet.
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")
_SPLIT = re.compile(r"\s*([\w.-]+)\s*(\[[^\]]*\])?\s*")
_PROMISED = {
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".jsonl": "one JSON object per line",
    ".json": "a JSON list of objects",
    ".csv": "comma-separated UTF-8 text",
    ".tsv": "tab-separated UTF-8 text",
    ".txt": "UTF-8 text",
}
_MAGIC = (
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"\xff\xff\xff\xff", "Arrow"),  # of a stream, as ``datasets`` writes it
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "a zip archive"),
)


def read_table(sources: Sequence[str | os.PathLike[str]], config: str | None = None, split: str | None = None) -> Any:
    """The rows of files, folders and patterns, in their order, as an in-memory ``datasets.Dataset``.

    ``config`` and ``split`` choose among the files of a folder; ``split`` may be a slice, and a sum of them, as
    ``datasets`` writes it: ``train[:10%]+test[100:]``. Raises ``InputError`` for what cannot be read, for rows of
    unequal columns, and where there are no rows.
    """
    with needed_by("reading data files"):
        import datasets

    parts: list[Any] = []
    for spec in (split or TRAIN).split("+"):
        match = _SPLIT.fullmatch(spec)
        if match is None:
            raise InputError("not a split", expected="a name, or such as train[:10%]", found=spec)
        files = [file for source in sources for file in files_of(source, config, match[1])]
        parts.append(_sliced(_joined([(file, _read_file(file)) for file in files]), match[1], spec.strip()))
    table = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if len(table) == 0:
        raise no_rows(", ".join(map(str, sources)))
    return table


def no_rows(where: str | os.PathLike[str]) -> InputError:
    """The error for data without a row."""
    return InputError("the dataset is empty", where=str(where), expected="at least one sample", found="none")


def _joined(tables: list[tuple[Path, Any]]) -> Any:
    import datasets

    if len(tables) == 1:
        return tables[0][1]
    first, columns = tables[0][0], tables[0][1].column_names
    for path, table in tables:
        if sorted(table.column_names) != sorted(columns):
            raise InputError(
                "the files have other columns",
                where=str(path),
                expected=f"{', '.join(columns)}, as in {first}",
                found=", ".join(table.column_names),
            )
    try:
        return datasets.concatenate_datasets([table.select_columns(columns) for _, table in tables])
    except Exception as error:  # a column of one name and of several kinds
        found = first_line(root_cause(error))
        raise InputError("the files have columns of other kinds", where=f"{first} and others", found=found) from error


def _sliced(table: Any, name: str, spec: str) -> Any:
    """The part of a table that ``spec`` asks for, as ``name[100:200]`` or ``name[:10%]``."""
    if spec == name:
        return table
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute({name: len(table)})
    except (ValueError, AssertionError) as error:
        raise InputError(
            "not a part of a split", where=f"{spec} of {len(table)} rows", found=first_line(error)
        ) from error
    rows = [row for part in parts for row in range(part.from_ or 0, len(table) if part.to is None else part.to)]
    return table.select(rows)


def _read_file(path: Path) -> Any:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing there"
        raise InputError("the data file cannot be read", where=str(path), expected="a file", found=found)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(
            "the data file has an unknown ending",
            where=str(path),
            expected=f"one of {', '.join(ENDINGS)}",
            found=ending or "none",
        )
    _require_content(path, ending)
    table = _read_arrow(path) if ending == ".arrow" else _read_by_datasets(path, ending)
    if len(table) == 0:
        raise no_rows(path)
    return table


def _require_content(path: Path, ending: str) -> None:
    """Raise ``InputError`` where the first bytes of the file do not fit its ending."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            file.seek(0)
            # A line may be longer than the head, and these formats are told apart by a whole one.
            lines = ending in (".jsonl", ".csv", ".tsv")
            first = next((line for line in file if line.strip()), b"") if lines else b""
    except OSError as error:
        raise InputError("the data file cannot be read", where=str(path), found=error.strerror) from error
    if not head.strip():
        raise no_rows(path)
    expected, found = _PROMISED[ending], _looks_like(head)
    if ending in (".parquet", ".arrow"):
        right = found == expected
    elif found not in ("text", "JSON"):
        right = False
    elif ending == ".jsonl":
        right = isinstance(_parsed(first), dict)
    elif ending == ".json":
        right = found == "JSON"
    elif ending in (".csv", ".tsv"):
        right = not isinstance(_parsed(first), dict | list)
        found = "text" if right else "JSON"
    else:
        right = True
    if not right:
        raise _not_what_it_says(path, ending, found)


def _not_what_it_says(path: Path, ending: str, found: str) -> InputError:
    return InputError(
        f"the file is not what its ending {ending} says",
        where=str(path),
        expected=_PROMISED[ending],
        found=found,
        hint="rename the file, or write it again",
    )


def _looks_like(head: bytes) -> str:
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    try:
        # final=False: the head may end inside a character
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError:
        return "bytes that are not UTF-8"
    if "\0" in text:
        return "binary data"
    return "JSON" if text.lstrip()[:1] in ("{", "[") else "text"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return None


def _read_arrow(path: Path) -> Any:
    import datasets

    from ullage.datasets.arrow import read_arrow

    return datasets.Dataset(read_arrow(path))


def _read_by_datasets(path: Path, ending: str) -> Any:
    """The file as an in-memory ``datasets.Dataset``; its cache is a temporary folder."""
    import datasets

    reader, options = {
        ".jsonl": (datasets.Dataset.from_json, {}),
        ".json": (datasets.Dataset.from_json, {}),
        # texts such as "NA" and "null" are texts
        ".csv": (datasets.Dataset.from_csv, {"keep_default_na": False}),
        ".tsv": (datasets.Dataset.from_csv, {"keep_default_na": False, "sep": "\t"}),
        ".parquet": (datasets.Dataset.from_parquet, {}),
        ".txt": (datasets.Dataset.from_text, {}),
    }[ending]
    if ending == ".json" and path.stat().st_size < _HEAD_BYTES and _parsed(path.read_bytes()) == []:
        raise no_rows(path)
    bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error raised below holds what it would log
    try:
        with tempfile.TemporaryDirectory(prefix="ullage-") as cache:
            table = reader(str(path), cache_dir=cache, keep_in_memory=True, **options)
        if ending != ".txt":
            return table
        # Blank lines are no texts.
        return table.select([row for row, text in enumerate(table["text"]) if text.strip()])
    except Exception as error:  # the readers raise whatever pandas, pyarrow and json raise
        cause = root_cause(error)
        if any(sign in str(cause) for sign in _NO_ROWS):
            raise no_rows(path) from error
        bad = _bad_line(path, ending) if ending not in (".parquet", ".json") else None
        if bad is not None:
            raise bad from error
        raise _not_what_it_says(path, ending, f"{type(cause).__name__}: {cause}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _bad_line(path: Path, ending: str) -> InputError | None:
    """The error for the first line that a file with this ending cannot have; ``None`` where lines tell nothing."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                found, hint = f"the byte {line[error.start]:#04x}", "write the file in UTF-8"
                return InputError("a line is not UTF-8", where=where, found=found, hint=hint)
            if ending == ".jsonl" and text.strip() and not isinstance(_parsed(line), dict):
                found, hint = repr(text.strip()[:40]), "mend this line, or remove it"
                return InputError("a line is no JSON object", where=where, found=found, hint=hint)
    return None
