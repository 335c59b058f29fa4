"""Files that a name of data stands for: a file, a pattern, a folder of files, a folder that ``datasets`` saved.

A folder is read as the Hugging Face hub reads a repository. Its card (``README.md``) may list configurations and the
files of their splits; otherwise the names of the files tell the splits: ``train-00000-of-00002.parquet``,
``data/test.jsonl``, ``validation/a.csv``. Files without such a name are for training.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ullage.errors import InputError

#: Endings of files with rows.
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
#: The split of files whose names tell none.
TRAIN = "train"
CARD = "README.md"

_NO_DATA = re.compile(
    r"(readme|license|requirements|notice|citation)\b.*|(dataset_infos?|dataset_dict|state)\.json", re.I
)
_SPLIT_WORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"(?P<split>[\w.]+(?:-[\w.]+)*?)-(?P<number>\d{5})-of-(?P<count>\d{5})\b")


def files_of(source: str | os.PathLike[str], config: str | None = None, split: str = TRAIN) -> list[Path]:
    """The files of ``source``: of one that exists itself, of a folder its ``split``, of a pattern those that match.

    Raises ``InputError`` that says what is there instead.
    """
    path = Path(source)
    if path.is_dir():
        return _files_in(path, config, split)
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


def chosen_files(
    names: Sequence[str], card: str | None = None, config: str | None = None, split: str = TRAIN
) -> list[str]:
    """The files of one split among the ``names`` of a folder or repository, in order.

    ``card``: the text of its ``README.md``. Raises ``InputError`` that lists the configurations or splits there are,
    and where numbered files are missing.
    """
    data = sorted(name for name in names if _is_data(name))
    splits = _splits_of_card(data, _configurations(card), config)
    if splits is None:
        splits = _splits_by_name(_under(data, config))
    if not splits:
        there = ", ".join(sorted(names)[:4]) or "no files"
        raise InputError("there are no files of data", expected=", ".join(ENDINGS), found=there)
    if split not in splits:
        raise _no_split(splits, split)
    return _of_one_kind(splits[split])


def _no_split(there: Iterable[str], split: str) -> InputError:
    return InputError(
        "there is no such split", expected=f"one of {', '.join(there)}", found=split, hint="name it with --data_split"
    )


def _files_in(folder: Path, config: str | None, split: str) -> list[Path]:
    try:
        saved = _saved_splits(folder)
        if saved is not None:
            if split not in saved:
                raise _no_split(saved, split)
            return saved[split]
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        card = folder / CARD
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
        return [folder / name for name in chosen_files(names, text, config, split)]
    except InputError as error:
        raise error.at(str(folder)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("the folder cannot be read", where=str(folder), found=str(error)) from error


def _saved_splits(folder: Path) -> dict[str, list[Path]] | None:
    """The files of each split of what ``save_to_disk`` wrote; ``None`` for any other folder."""
    whole = folder / "dataset_dict.json"
    if whole.is_file():
        names = json.loads(whole.read_text(encoding="utf-8"))["splits"]
        return {name: _saved(folder / name) for name in names}
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return {TRAIN: _saved(folder)}
    return None


def _saved(folder: Path) -> list[Path]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return [folder / file["filename"] for file in state["_data_files"]]


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return not hidden and path.suffix.lower() in ENDINGS and not _NO_DATA.fullmatch(path.name)


def _configurations(card: str | None) -> dict[str, dict[str, Any]]:
    """The configurations that the head of a card lists, by name; those without names of files are left out."""
    import yaml

    head = re.match(r"\s*---\s*\n(.*?)\n---", card or "", re.DOTALL)
    if head is None:
        return {}
    try:
        listed = (yaml.safe_load(head[1]) or {}).get("configs") or []
    except (yaml.YAMLError, AttributeError):
        return {}
    known = [each for each in listed if isinstance(each, dict) and ("data_files" in each or "data_dir" in each)]
    return {str(each.get("config_name", "default")): each for each in known}


def require_listed(card: str | None, config: str | None = None, split: str = TRAIN) -> None:
    """Raise ``InputError`` where a card lists its configurations or splits, and not the one asked for."""
    patterns, _ = _listed(_configurations(card), config)
    if patterns is not None and split not in patterns:
        raise _no_split(patterns, split)


def _listed(listed: dict[str, dict[str, Any]], config: str | None) -> tuple[dict[str, list[str]] | None, str | None]:
    """The patterns of each split of a configuration, and the folder that it lies in; ``None`` where nothing says so."""
    if not listed:
        return None, None
    if config is None:
        defaults = [name for name, each in listed.items() if each.get("default") or name == "default"]
        config = defaults[0] if defaults else next(iter(listed)) if len(listed) == 1 else None
    if config not in listed:
        raise InputError(
            "the data has several configurations" if config is None else "there is no such configuration",
            expected=f"one of {', '.join(listed)}",
            found=config or "none asked for",
            hint="name it with --data_config",
        )
    folder, files = listed[config].get("data_dir"), listed[config].get("data_files")
    folder = None if folder is None else f"{str(folder).removeprefix('./').strip('/')}/"
    if files is None:
        return None, folder
    # A pattern, a list of them, {split: patterns}, or a list of {"split": ..., "path": ...}.
    if isinstance(files, list) and files and isinstance(files[0], dict):
        patterns = {each["split"]: each["path"] for each in files}
    else:
        patterns = dict(files) if isinstance(files, dict) else {TRAIN: files}
    made = {str(split): [one] if isinstance(one, str) else one for split, one in patterns.items()}
    return {split: [f"{folder or ''}{one.removeprefix('./')}" for one in each] for split, each in made.items()}, folder


def _splits_of_card(
    data: Sequence[str], listed: dict[str, dict[str, Any]], config: str | None
) -> dict[str, list[str]] | None:
    patterns, folder = _listed(listed, config)
    if patterns is None:
        return None if not listed else _splits_by_name([name for name in data if name.startswith(folder or "")])
    found = {split: [n for n in data if any(_matches(n, one) for one in each)] for split, each in patterns.items()}
    return {split: names for split, names in found.items() if names}


def _matches(name: str, pattern: str) -> bool:
    # As on the hub, where a single star stays within a folder and two do not.
    pieces = re.split(r"(\*\*/?|\*|\?)", pattern)
    made = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(made.get(piece, re.escape(piece)) for piece in pieces), name) is not None


def _under(data: Sequence[str], config: str | None) -> Sequence[str]:
    """The files in the folder that bears the name of the configuration."""
    if config is None:
        return data
    found = [name for name in data if config in PurePosixPath(name).parts[:-1]]
    if not found:
        folders = sorted({part for name in data for part in PurePosixPath(name).parts[:-1]})
        raise InputError("there is no such configuration", expected=", ".join(folders) or "none", found=config)
    return found


def _splits_by_name(data: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in data:
        split = _split_of(name)
        if split is not None:
            found.setdefault(split, []).append(name)
    # As on the hub: where some names tell a split, the others are of none.
    return found or ({TRAIN: list(data)} if data else {})


def _split_of(name: str) -> str | None:
    shard = _SHARD.match(PurePosixPath(name).name)
    words = re.split(r"[^a-z0-9]+", name.lower())
    for split, known in _SPLIT_WORDS.items():
        # ``train_sft-00000-of-00003`` is a split of that name.
        if any(word in known for word in words) and (shard is None or shard["split"] in known):
            return split
    return shard["split"] if shard is not None else None


def _of_one_kind(names: list[str]) -> list[str]:
    """The files of the kind that most of them have. Raises ``InputError`` for missing numbers among them."""
    kinds = Counter(PurePosixPath(name).suffix.lower() for name in names)
    most = max(kinds, key=lambda kind: (kinds[kind], -ENDINGS.index(kind)))
    chosen = [name for name in names if name.lower().endswith(most)]
    counts: dict[tuple[str, int], set[int]] = {}
    for name in chosen:
        path = PurePosixPath(name)
        if shard := _SHARD.match(path.name):
            key = (f"{path.parent}/{shard['split']}", int(shard["count"]))
            counts.setdefault(key, set()).add(int(shard["number"]))
    for (name, count), there in counts.items():
        missing = sorted(set(range(count)) - there)
        if missing:
            raise InputError(
                "a numbered file is missing", expected=f"{name}-00000 to {count - 1:05}", found=f"no {missing[0]:05}"
            )
    return chosen
