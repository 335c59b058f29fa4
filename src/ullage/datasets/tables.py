"""Rows of data files as one table: .jsonl, .json, .csv, .tsv, .parquet, .arrow and .txt, one file or many.

A name stands for a file, for those that match a pattern, for a folder that ``datasets`` saved, or for a folder as the
Hugging Face hub reads a repository: ``datasets`` finds the files of its configurations and splits, by the card
(``README.md``) or by their names. Files are read by ``datasets`` too, each by itself, so that an error names the file
and its line. Tables lie in memory, and nothing is left in any cache.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError, first_line, listed, root_cause
from ullage.core.extras import needed_by

#: Endings of files with rows.
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
#: The split of files whose names tell none.
TRAIN = "train"

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\b.*")
#: Messages of the readers of ``datasets`` about a valid file without rows: .csv, .parquet.
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")
#: Kinds of columns that hold texts beside other values, or not one value.
_MIXED = ("values of several kinds", "null")
_SPLIT = re.compile(r"\s*([\w.-]+)\s*(\[[^\]]*\])?\s*")
#: The reader of ``datasets`` for files with an ending, and its options.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    # texts such as "NA" and "null" are texts
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {}),
}
_PROMISED = {
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".jsonl": "one JSON object per line",
    ".json": "a JSON list of objects",
    ".csv": "comma-separated UTF-8 text",
    ".tsv": "tab-separated UTF-8 text",
    ".txt": "UTF-8 text",
}


def read_table(
    sources: Sequence[str | os.PathLike[str]], config: str | None = None, split: str | None = None, blanks: bool = False
) -> Any:
    """The rows of files, folders and patterns, in their order, as an in-memory ``datasets.Dataset``.

    ``config`` and ``split`` choose among the files of a folder; ``split`` may be a slice, and a sum of them, as
    ``datasets`` writes it: ``train[:10%]+test[100:]``. ``blanks`` keeps the blank lines of .txt files.
    Raises ``InputError`` for what cannot be read, for rows of unequal columns, and where there are no rows.
    """
    with needed_by("reading data files"):
        import datasets

    parts: list[Any] = []
    for spec in (split or TRAIN).split("+"):
        match = _SPLIT.fullmatch(spec)
        if match is None:
            raise InputError("not a split", expected="a name, or such as train[:10%]", found=spec)
        files = [file for source in sources for file in files_of(source, config, match[1])]
        parts.append(_sliced(_join([(file, read_file(file, blanks=blanks)) for file in files]), match[1], spec.strip()))
    table = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if len(table) == 0:
        raise no_rows(", ".join(map(str, sources)))
    return table


def stream_rows(sources: Sequence[str | os.PathLike[str]], config: str | None = None, split: str | None = None) -> Any:
    """The rows of files, folders and patterns as a ``datasets.IterableDataset``, which reads them as it is read.

    ``config`` and ``split`` choose among the files of a folder. Raises ``InputError`` for what cannot be read, as far
    as nothing needs to be read for it: an error of a row comes with the row.
    """
    with needed_by("reading data files"):
        import datasets

    files = [file for source in sources for file in files_of(source, config, split or TRAIN)]
    endings = {file.suffix.lower() for file in files}
    for file in files:
        if not file.is_file() or file.suffix.lower() not in ENDINGS:
            read_file(file)  # which says what is wrong
        _require_content(file, file.suffix.lower())
    if len(endings) > 1:
        raise InputError("a stream is of files with one ending", where=str(sources[0]), found=listed(sorted(endings)))
    reader, options = _READERS[endings.pop()]
    names = [glob.escape(str(file.resolve())) for file in files]
    with quiet():
        return datasets.load_dataset(reader, data_files=names, split=TRAIN, streaming=True, **options)


class EmptyDataError(InputError):
    """Data of which nothing is left to train on."""


def no_rows(where: str | os.PathLike[str]) -> InputError:
    """The error for data without a row."""
    return EmptyDataError("the dataset is empty", where=str(where), expected="at least one sample", found="none")


def files_of(source: str | os.PathLike[str], config: str | None = None, split: str = TRAIN) -> list[Path]:
    """The files of ``source``: of one that exists itself, of a folder its ``split``, of a pattern those that match.

    Raises ``InputError`` that says what is there instead.
    """
    path = Path(source)
    if path.is_dir():
        try:
            files = _splits_of(path, config)
        except InputError as error:
            raise error.at(str(path)) from error
        if split not in files:
            raise InputError(
                "there is no such split",
                where=str(path),
                expected=f"one of {', '.join(files)}",
                found=split,
                hint="name it with --data_split",
            )
        return files[split]
    pattern = os.fspath(source)
    if path.exists() or not glob.has_magic(pattern):
        if config is not None or split != TRAIN:
            raise InputError(
                "a file has neither configurations nor splits", where=pattern, expected=TRAIN, found=config or split
            )
        return [path]
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
    if not found:
        raise InputError("no file matches the pattern", where=pattern)
    return found


def _splits_of(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """The files of each split of a folder."""
    with suppress(FileNotFoundError):
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return {name: _saved(folder / name) for name in names}
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return {TRAIN: _saved(folder)}
    with needed_by("reading a folder of data files"):
        import datasets

    with quiet(), tempfile.TemporaryDirectory(prefix="ullage-") as cache:
        try:
            builder = datasets.load_dataset_builder(str(folder), name=config, cache_dir=cache)
        except FileNotFoundError as error:
            there = listed(sorted(path.name for path in folder.iterdir()), 4) or "no files"
            raise InputError("there are no files of data", expected=", ".join(ENDINGS), found=there) from error
        except Exception as error:  # of a card, or of a configuration: it has no class of its own
            raise _no_configuration(folder, config, error) from error
    files = {str(split): sorted(map(Path, names)) for split, names in (builder.config.data_files or {}).items()}
    for each in files.values():
        _require_whole(each)
    return files


def _saved(folder: Path) -> list[Path]:
    """The files of what ``save_to_disk`` wrote."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("the folder cannot be read", found=str(error)) from error


def _no_configuration(folder: Path, config: str | None, error: Exception) -> InputError:
    import datasets

    try:
        names = datasets.get_dataset_config_names(str(folder))
    except Exception:
        return InputError("the folder cannot be read", found=first_line(root_cause(error)))
    if config in names:
        return InputError("the folder cannot be read", found=first_line(root_cause(error)))
    return InputError(
        "the data has several configurations" if config is None else "there is no such configuration",
        expected=f"one of {', '.join(names)}",
        found=config or "none asked for",
        hint="name it with --data_config",
    )


def _require_whole(files: Sequence[Path]) -> None:
    """Raise ``InputError`` where one of numbered files is missing: ``train-00001-of-00002`` without the first."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in files:
        if shard := _SHARD.fullmatch(path.name):
            numbers.setdefault((shard[1], int(shard[3])), set()).add(int(shard[2]))
    for (name, count), there in numbers.items():
        missing = sorted(set(range(count)) - there)
        if missing:
            raise InputError(
                "a numbered file is missing", expected=f"{name}-00000 to {count - 1:05}", found=f"no {missing[0]:05}"
            )


def _join(tables: list[tuple[Path, Any]]) -> Any:
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


def read_file(path: Path, cache: str | None = None, bars: bool = False, blanks: bool = False) -> Any:
    """The rows of a file as a ``datasets.Dataset`` in memory, or in files of the folder ``cache``.

    ``bars``: show those of ``datasets``. ``blanks``: keep the blank lines of a .txt file.
    Raises ``InputError`` for what cannot be read, and where there are no rows.
    """
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
    table = _read_arrow(path) if ending == ".arrow" else _read_by_datasets(path, ending, cache, bars, blanks)
    if len(table) == 0:
        raise no_rows(path)
    return table


def _require_content(path: Path, ending: str) -> None:
    """Raise ``InputError`` for an empty file, and for JSON under a name that says CSV, which would be read as text."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), None)
    except OSError as error:
        raise InputError("the data file cannot be read", where=str(path), found=error.strerror) from error
    if first is None or (ending == ".json" and first.strip() == b"[]"):
        raise no_rows(path)
    if ending in (".csv", ".tsv") and isinstance(_parsed(first), dict | list):
        raise _not_what_it_says(path, ending, "JSON")


def _not_what_it_says(path: Path, ending: str, found: str) -> InputError:
    return InputError(
        f"the file is not what its ending {ending} says",
        where=str(path),
        expected=_PROMISED[ending],
        found=found,
        hint="rename the file, or write it again",
    )


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return None


def _read_arrow(path: Path) -> Any:
    import datasets

    from ullage.datasets.stored import read_arrow

    return datasets.Dataset(read_arrow(path))


def _read_by_datasets(path: Path, ending: str, cache: str | None, bars: bool, blanks: bool) -> Any:
    """The file as a ``datasets.Dataset``: in ``cache``, or in memory, whose cache is a temporary folder."""
    import datasets

    name, options = _READERS[ending]
    reader = getattr(datasets.Dataset, f"from_{name}")
    try:
        with quiet(bars), tempfile.TemporaryDirectory(prefix="ullage-") as folder:
            names = glob.escape(str(path.resolve()))
            table = reader(names, cache_dir=cache or folder, keep_in_memory=cache is None, **options)
        if ending == ".csv" and len(table.column_names) == 1 and ";" in table.column_names[0]:
            raise InputError(
                "the columns of a .csv file are parted by commas",
                where=str(path),
                found=table.column_names[0][:60],
                hint="write it with commas, or with tabs as a .tsv file",
            )
        if ending != ".txt" or blanks:
            return table
        # Blank lines are not texts.
        return table.select([row for row, text in enumerate(table["text"]) if text.strip()])
    except InputError:
        raise
    except Exception as error:  # the readers raise whatever pandas, pyarrow and json raise
        cause = root_cause(error)
        if any(sign in str(cause) for sign in _NO_ROWS):
            raise no_rows(path) from error
        bad = _bad_line(path, ending) if ending not in (".parquet", ".json") else None
        raise bad or _not_what_it_says(path, ending, f"{type(cause).__name__}: {cause}") from error


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Without the log of ``datasets`` and of the hub, which our errors hold, and without its bars unless ``bars``."""
    import datasets
    from huggingface_hub.utils import logging as of_hub

    enabled = datasets.is_progress_bar_enabled()
    before = [(each, each.get_verbosity()) for each in (datasets.logging, of_hub)]
    (datasets.enable_progress_bars if bars else datasets.disable_progress_bars)()
    for each, _ in before:
        each.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        for each, verbosity in before:
            each.set_verbosity(verbosity)
        (datasets.enable_progress_bars if enabled else datasets.disable_progress_bars)()


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


def line_of(path: Path, row: int) -> int | None:
    """The line, counted from 1, of a row of a .jsonl or .txt file; ``None`` for other files."""
    ending = path.suffix.lower()
    if ending not in (".jsonl", ".txt"):
        return None
    with path.open("rb") as file:
        lines = (number for number, line in enumerate(file, 1) if ending == ".txt" or line.strip())
        return next(itertools.islice(lines, row, None), None)


def text_column(
    table: Any, column: str | None, where: str, option: str = "--text_column", *, mixed: bool = False
) -> str:
    """The column of texts or of token ids: ``column``, else ``input_ids``, ``text``, or the only one of either kind.

    Raises ``InputError`` that lists the columns; ``option`` is what it says to name one with. ``mixed``: a column in
    which some values are of another kind will do, and one without a value.
    """
    names = list(table.column_names)
    kinds = {name: column_kind(feature) for name, feature in table.features.items()}
    if column is None:
        usable = [name for name in names if kinds[name] in ("string", "ids")]
        if kinds.get("input_ids") == "ids":  # what has been tokenized may have its texts and masks beside it
            column = "input_ids"
        else:
            only = usable if len(usable) == 1 else [name for name in ("input_ids",) if name in names]
            column = "text" if "text" in names else next(iter(only), None)
        if column is None:
            raise InputError(
                "it is not clear which column holds the text",
                where=where,
                expected="a column 'text' or 'input_ids', or one column of strings only",
                found=f"columns {', '.join(map(repr, names))}",
                hint=f"name it with {option}",
            )
    elif column not in names:
        raise InputError(
            f"there is no column {column!r}",
            where=where,
            expected=f"one of {', '.join(map(repr, names))}",
            found=repr(column),
            hint=f"name one of them with {option}",
        )
    if kinds[column] not in ("string", "ids", *(_MIXED if mixed else ())):
        raise InputError(
            f"the column {column!r} holds no text",
            where=where,
            expected="strings, or lists of token ids",
            found=kinds[column],
        )
    return column


def column_kind(feature: Any) -> str:
    """``string``, ``ids`` for lists of integers, or the feature as ``datasets`` writes it."""
    dtype = getattr(feature, "dtype", None)
    if dtype in ("string", "large_string"):
        return "string"
    inner = str(getattr(getattr(feature, "feature", None), "dtype", ""))
    if inner.startswith(("int", "uint", "null")):  # lists that are all empty have values of no type
        return "ids"
    if type(feature).__name__ == "Json":  # what ``datasets`` makes of a column whose values do not agree
        return _MIXED[0]
    return str(dtype if dtype not in (None, "list", "dict") else feature)
