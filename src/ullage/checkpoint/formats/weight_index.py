"""Completeness of a folder of safetensors: what its index and the names of its files say against the files there.

Weights in several files are named ``model-00001-of-00003.safetensors``, and ``model.safetensors.index.json`` says which
file holds which tensor. Either tells of a file that is not there, which the files that are there cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.remote.paths import opened
from ullage.errors import CheckpointError

#: Names of tensors by file, relative to the folder; None of a file that cannot be read.
Held = Mapping[str, "set[str] | None"]

_NUMBERED = re.compile(r"(?P<stem>.*[-_])(?P<number>\d{1,18})-of-(?P<count>\d{1,18})(?P<rest>.*)\.safetensors")
#: As for the header of a file: more is damage.
_MAX_INDEX_BYTES = 100 << 20
_COPY = "copy the file again from where it was saved"


def missing_parts(folder: Path, held: Held) -> tuple[list[Problem], list[str]]:
    """(problems, notes): files and tensors that an index or the names of other files promise, and that are not there.

    ``held``: of all files of weights and of optimizer state.
    """
    problems = list(_unnumbered(held))
    notes: list[str] = []
    for pattern in ("*.safetensors.index*.json", "optimizer/*.safetensors.index*.json"):
        for path in sorted(folder.glob(pattern)):
            name = str(path.relative_to(folder))
            try:
                listed = _weight_map(path)
            except CheckpointError as error:
                problems.append(Problem.of_error(error, name))
                continue
            _compare(name, listed, held, problems, notes)
    return problems, notes


def _unnumbered(held: Iterable[str]) -> Iterable[Problem]:
    """A problem for each set of numbered files of which some are missing, or have a number that the set has not."""
    sets: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in held:
        found = _NUMBERED.fullmatch(name)
        if found:
            stem, number, count, rest = found.group("stem", "number", "count", "rest")
            sets.setdefault((stem, rest, int(count)), {})[int(number)] = name
    for (_, _, count), files in sets.items():
        # Some writers count from 0.
        first = 0 if 0 in files else 1
        within = [number for number in files if first <= number < first + count]
        if len(within) < len(files):
            name = files[max(files)]
            yield Problem(
                "the file has a number beyond those of its set", name, expected=f"at most {count}", hint=_COPY
            )
        if len(within) < count:
            # The first number that no file has; the count is not to be walked through, since it can be anything.
            gap = next(number for number in range(first, first + len(within) + 1) if number not in files)
            yield Problem(
                f"file {gap} of {count} is missing",
                next(iter(files.values())),
                expected=f"{count} files, which its name says",
                found=f"{len(within)}",
                hint=_COPY,
            )


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor. Raises ``CheckpointError`` for what is no index."""
    with as_checkpoint_error(str(path)), opened(path) as stream:
        if stream.size > _MAX_INDEX_BYTES:
            raise CheckpointError("not an index of safetensors", where=str(path), found=f"{stream.size} bytes")
        try:
            content: Any = json.loads(stream.pread(stream.size, 0))
        except (ValueError, RecursionError) as error:
            found = f"{type(error).__name__}: {str(error)[:100]}"
            raise CheckpointError("not an index of safetensors", where=str(path), found=found, hint=_COPY) from None
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise metadata.malformed("weight_map", str(path), "a file by the name of each tensor", listed)
    metadata.names(list(listed.values()), "weight_map", str(path))
    return listed


def _compare(name: str, listed: dict[str, str], held: Held, problems: list[Problem], notes: list[str]) -> None:
    """Add what an index says and its files do not hold.

    Args:
        name: of the index, relative to the folder.
        listed: the file of each tensor, relative to the index.
        held: as for :func:`missing_parts`.
        problems: gets a problem for each file that is missing or lacks tensors.
        notes: gets the notes.
    """
    folder = name.rpartition("/")[0]
    by_file: dict[str, list[str]] = {}
    for tensor, file in listed.items():
        by_file.setdefault(file, []).append(tensor)
    files = {file: f"{folder}/{file}" if folder else file for file in by_file}
    # A model that was saved in one file over one in several keeps the old index; loaders take the one file.
    single = name.partition(".safetensors.index")[0] + ".safetensors"
    if single in held and single not in files.values() and not any(file in held for file in files.values()):
        notes.append(f"{name} names {len(files)} files that are not there, and is passed over beside {single}")
        return
    for file, tensors in by_file.items():
        place, more = files[file], f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        if PurePosixPath(file).name != file or file in ("", ".."):
            what = "the index names a file that is none of the folder"
            problems.append(Problem(what, name, parameter=tensors[0], found=metadata.brief(file), hint=_COPY))
        elif place not in held:
            what = "a file that the index names is missing"
            problems.append(Problem(what, place, parameter=f"{tensors[0]}{more}", hint=_COPY))
        else:
            there = held[place]
            lost = [] if there is None else [tensor for tensor in tensors if tensor not in there]
            if lost:
                what = "the index names a tensor that its file does not hold"
                found = f"{len(lost)} such tensors" if len(lost) > 1 else None
                problems.append(Problem(what, place, parameter=lost[0], found=found, hint=_COPY))
    beyond = [t for place in files.values() for t in sorted(held.get(place) or ()) if t not in listed]
    if beyond:
        notes.append(f"{name} does not list {len(beyond)} of the tensors in its files, such as {beyond[0][:200]}")
