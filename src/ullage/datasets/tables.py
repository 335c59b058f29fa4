"""Rows of data by ``datasets``: files, a folder, a pattern or a name of the hub, in memory or as a stream.

What lies on the disk is never taken for a name of the hub, and neither is what is nearly the name of a file here.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError, root_cause
from ullage.core.extras import needed_by

#: The reader of ``datasets`` for files with an ending, and its options. In CSV a text such as "NA" is a text.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {}),
}
#: Names of files that are no data files of their folder.
_BESIDE = ("metadata", "config", "dataset_info", "dataset_infos", "dataset_dict", "state")


def load_rows(
    sources: Sequence[str],
    config: str | None = None,
    split: str | None = None,
    *,
    streaming: bool = False,
    cache: str | None = None,
) -> Any:
    """The rows of files, a folder, a pattern, or a data set of the hub, as a ``datasets.Dataset``.

    Args:
        sources: what is read; several files must be of one kind.
        config: the configuration, of a folder or a data set of the hub.
        split: the split, or a part of it as ``datasets`` writes it: ``train[:10%]``. The default is ``train``.
        streaming: read while the rows are used, as an ``IterableDataset``.
        cache: a folder from which the table is mapped; without one files are read into memory.

    Raises ``InputError`` for what cannot be read and where there are no rows.
    """
    with needed_by("reading data files"):
        import datasets

    name, options = source_for(sources)
    where, chosen = ", ".join(sources), split or "train"
    try:
        with _quiet(), tempfile.TemporaryDirectory(prefix="ullage-") as folder:
            table: Any
            if any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json")):
                saved = datasets.load_from_disk(name)
                table = (saved if isinstance(saved, datasets.DatasetDict) else {"train": saved})[chosen]
            elif streaming:
                table = datasets.load_dataset(name, config, split=chosen, streaming=True, **options)
                table = table if table.column_names else table._resolve_features()
            else:
                if "revision" not in options:  # what the hub gives stays in its cache
                    options |= {"cache_dir": cache or folder, "keep_in_memory": cache is None}
                table = datasets.load_dataset(name, config, split=chosen, **options)
    except Exception as error:  # the readers raise whatever pandas, pyarrow and json raise
        raise unreadable(sources, error) from error
    if not streaming and not len(table):
        raise InputError("the dataset is empty", where=where, expected="at least one sample", found="none")
    names = table.column_names or [""]
    is_csv = options.get("keep_default_na") is False or Path(name).is_dir()
    if is_csv and "sep" not in options and len(names) == 1 and {";", "\t"} & {*names[0]}:
        hint = "write it with commas, or with tabs as a .tsv file"
        raise InputError(
            "the columns of a .csv file are parted by commas", where=where, found=repr(names[0][:60]), hint=hint
        )
    return table


def source_for(sources: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The name and the options with which ``datasets.load_dataset`` reads ``sources``.

    Raises ``InputError`` for files that are not there or not of one kind.
    """
    name, files = sources[0], [file for each in sources for file in sorted(glob.glob(each, recursive=True)) or [each]]
    endings = sorted({Path(file.removesuffix(".gz")).suffix.lower() for file in files})
    absent = next((file for file in files if not Path(file).exists()), None)
    if absent is not None:
        is_file = len(files) > 1 or glob.has_magic(absent) or endings[0] in READERS
        refuse_slip(absent, "data file", must_exist=is_file)
        repository, _, revision = name.partition("@")
        return repository, {"revision": revision or None}
    if Path(name).is_dir():
        _require_one_kind(Path(name))
        return name, {}
    if len(endings) > 1 or endings[0] not in READERS:
        raise InputError(
            "files that are not read", where=", ".join(sources), expected=f"one of {', '.join(READERS)}", found=endings
        )
    reader, options = READERS[endings[0]]
    return reader, {"data_files": [glob.escape(os.path.abspath(file)) for file in files], **options}


def _require_one_kind(folder: Path) -> None:
    """Raise ``InputError`` for a folder of several kinds of data files, of which ``datasets`` would read one."""
    card = folder / "README.md"
    if card.is_file() and "data_files" in card.read_text("utf-8", "replace"):
        return  # it says which
    names = [Path(file.name.removesuffix(".gz")) for file in folder.rglob("[!._]*") if file.stem not in _BESIDE]
    endings = sorted({name.suffix.lower() for name in names} & {*READERS})
    if len({str(READERS[ending]) for ending in endings}) > 1:
        found, hint = " and ".join(endings), f"name the files: {folder}/*{endings[0]}"
        raise InputError("a folder of several kinds of data files", where=str(folder), found=found, hint=hint)


def refuse_slip(name: str, kind: str, known: Iterable[str] = (), *, must_exist: bool = False) -> None:
    """Raise ``InputError`` for a name that is not here and nearly that of something that is.

    Args:
        name: a path, or a name of the hub.
        kind: what it should be, for the message.
        known: names that exist beside those of files.
        must_exist: raise for any name that is not here.
    """
    known, folder = [*known], Path(name).parent
    if Path(name).exists() or name in known:
        return
    here = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # A name with a revision is the hub's for certain.
    hint = None if "@" in name else near(Path(name).name, here, folder) or near(name, known)
    if must_exist and known:
        hint = hint or f"give a file or folder, or {' or '.join(known)}"
    if hint or must_exist or name.startswith((".", "/", "~")):
        raise InputError(f"there is no such {kind} here", where=name, hint=hint)


def revised(name: str, revisions: dict[str, str]) -> tuple[str, str | None]:
    """A name and its revision: the commit that the run took before, or what stands behind ``@``."""
    repository, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    return repository, revisions.get(name) or revision or None


def near(word: object, names: Iterable[str], folder: Path = Path()) -> str | None:
    """The hint that names what a word may have meant, if anything; ``folder``: where the names are."""
    found = get_close_matches(str(word), sorted({*names}), n=2, cutoff=0.7)
    return f"did you mean {' or '.join(str(folder / each) for each in found)}?" if found else None


def row_place(sources: Sequence[str], row: int) -> str:
    """How a row is named: by its line where one file of lines was read, else by its number."""
    ending = Path(sources[0]).suffix.lower()
    if len(sources) == 1 and Path(sources[0]).is_file() and ending in (".jsonl", ".txt"):
        with open(sources[0], "rb") as file:
            lines = (number for number, line in enumerate(file, 1) if ending == ".txt" or line.strip())
            if (line := next(islice(lines, row, None), None)) is not None:
                return f"line {line}"
    return f"row {row} counted from 0"


def text_column(table: Any, where: str, asked: str | None) -> str:
    """The column of texts or of token ids. Raises ``InputError`` that lists the columns, and for chats and images."""
    names = [*table.column_names]
    if asked is not None and asked not in names:
        found, hint = f"columns {', '.join(names)}", near(asked, names)
        raise InputError(f"there is no column {asked!r}", where=where, found=found, hint=hint)
    if asked is not None:
        return asked
    if chats := {"messages", "conversations", "prompt", "image", "images"} & {*names}:
        hint = f"ullage trl sft --dataset_name {where} trains on chats, prompts and images; or name --text_column"
        raise InputError("these rows are no texts", where=where, found=", ".join(sorted(chats)), hint=hint)
    # Of a list the feature within it tells what it holds.
    kinds = {name: str(getattr(getattr(each, "feature", each), "dtype", "")) for name, each in table.features.items()}
    lists = {name for name, each in table.features.items() if hasattr(each, "feature")}
    texts = [name for name, kind in kinds.items() if kind.endswith(("int32", "int64") if name in lists else "string")]
    found = [name for name in ("input_ids", "text") if name in names][:1] or texts
    if len(found) != 1:
        hint = "name it with --text_column"
        raise InputError("which column holds the texts?", where=where, found=", ".join(names), hint=hint)
    return found[0]


def refuse_for_trl(path: str, rows: Any, only_assistant: bool) -> None:
    """Raise ``InputError`` for rows that name images, and for a chat without a turn to train on."""
    columns = getattr(rows, "features", None) or {}
    if named := [name for name in ("image", "images") if "string" in str(columns.get(name))]:
        expected = "a folder of images with a metadata.jsonl of file_name and messages"
        raise InputError("TRL reads no images by name", where=path, expected=expected, found=f"names in {named[0]!r}")
    if getattr(columns.get("messages"), "dtype", None) == "string":
        expected, hint = "a list of turns, each with role and content", "write the list itself, not its text"
        raise InputError("the chats are strings", where=f"{path}, column 'messages'", expected=expected, hint=hint)
    if only_assistant and "messages" in columns and hasattr(rows, "__len__"):
        for row, chat in enumerate(rows["messages"]):
            if not any(turn["role"] == "assistant" for turn in chat or ()):
                where = f"{path}, {row_place([path], row)}"
                hint = "leave it out, or train on all turns, without --assistant_only_loss"
                raise InputError("a chat has no turn of the assistant's", where=where, hint=hint)


def unreadable(sources: Sequence[str], error: Exception) -> InputError:
    """The error of a library in one line, with the first line of a .jsonl that is no JSON object."""
    where, found = ", ".join(sources), " ".join(str(root_cause(error)).split())[:300] or "no row"
    for name in filter(os.path.isfile, sources):
        with open(name, "rb") as file:
            first = file.read(24)
            if first.startswith(b"version https://git-lfs"):
                return InputError("a pointer of git-lfs, not the file", where=name, hint="git lfs pull fetches it")
            file.seek(0)
            lines = enumerate(file if name.lower().endswith(".jsonl") else (), 1)
            bad = next((number for number, line in lines if not _is_row(line)), None)
        if bad is not None:
            is_utf16 = first[:2] in (b"\xff\xfe", b"\xfe\xff")
            hint = "the file is UTF-16: save it as UTF-8" if is_utf16 else "mend or remove it"
            return InputError("a line is no JSON object", where=f"{name}, line {bad}", hint=hint)
    if all(_is_empty(Path(name)) for name in sources):
        return InputError("the dataset is empty", where=where, expected="at least one sample", found="none")
    return InputError("the data cannot be read", where=where, found=found)


def _is_empty(path: Path) -> bool:
    """Whether a file has no row, for which the readers have errors of many kinds."""
    if not path.is_file():
        return False
    if path.suffix.lower() != ".parquet":
        headings = path.suffix.lower() in (".csv", ".tsv")
        with path.open("rb") as file:
            return sum(1 for _ in islice(filter(bytes.strip, file), headings + 1)) <= headings
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(path).metadata.num_rows == 0
    except (OSError, ArrowException):
        return False


def _is_row(line: bytes) -> bool:
    try:
        return not line.strip() or isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except ValueError:
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log and the bars of ``datasets``: what they say of an error, ours says."""
    import datasets

    bars, before = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)
        if bars:
            datasets.enable_progress_bars()
