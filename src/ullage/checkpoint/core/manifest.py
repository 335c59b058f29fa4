"""Manifest of a checkpoint: the files as they were written, so that a reader can tell whether they changed.

``manifest.json`` lists every file of a folder with its size and CRC-32. The format is written down in
``docs/formats.md``. Reading and summing release the GIL, so blocks of a file are summed by several threads, or by
several ranks, and their sums are combined.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.core.paths import is_remote, opened, read_start
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.core.sums import combine
from ullage.core.errors import CheckpointError

FORMAT, VERSION = "ullage-manifest", 2
#: The file that is the manifest of its folder.
MANIFEST = "manifest.json"
#: Bytes that are summed by one thread, and those that stay in a core's cache between reading and summing.
_BLOCK_BYTES, _CHUNK_BYTES = 16 << 20, 1 << 20
#: Cost of looking at a file, in bytes that could have been summed meanwhile.
_FILE_COST = 1 << 14


@dataclass(frozen=True)
class Listed:
    """A file of a folder.

    Attributes:
        name: relative to the folder of the manifest, with ``/`` between the parts.
        num_bytes: of the file.
        crc: CRC-32 of the file as it was written; None before it is known.
    """

    name: str
    num_bytes: int
    crc: int | None = None


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written. ``kind``: ``missing``, ``size``, ``changed`` or ``unreadable``."""

    name: str
    kind: str
    expected: str
    found: str


@dataclass(frozen=True)
class Manifest:
    """The content of the manifests of a folder, those of folders inside it included.

    Attributes:
        folder: the folder; names of files are relative to it.
        files: all that are listed.
        damage: manifests that cannot be read.
    """

    folder: Path
    files: tuple[Listed, ...] = ()
    damage: tuple[Damage, ...] = ()


def files_in(folder: Path) -> list[Listed]:
    """Every file that a manifest of ``folder`` lists, by name, without its sum.

    Of a folder within that has a manifest of its own, that alone.
    """
    found = []
    for root, folders, names in os.walk(folder):
        place = Path(root)
        # A folder within that has a manifest of its own is listed by that: its files are left out here; its manifest is
        # taken as a file. Clearing ``folders`` keeps ``os.walk`` out of it.
        own = _has_manifest(place)
        if place == folder:
            names = [name for name in names if not own or name != MANIFEST]
        elif own:
            folders.clear()
            names = [MANIFEST]
        found += [
            Listed((place / name).relative_to(folder).as_posix(), (place / name).stat().st_size) for name in names
        ]
    return sorted(found, key=lambda each: each.name)


#: What was read of a file: its name, bytes, CRC-32, and what hindered the reading.
Sum = tuple[str, int, int, str]


def sum_share(folder: Path, files: Sequence[Listed], part: int = 0, parts: int = 1) -> list[Sum]:
    """The sums of the neighbouring blocks of ``files`` that member ``part`` of ``parts`` reads; all read as much."""
    blocks = [
        (each.name, at, min(_BLOCK_BYTES, each.num_bytes - at))
        for each in files
        for at in range(0, max(each.num_bytes, 1), _BLOCK_BYTES)
    ]
    costs = [size + _FILE_COST for _, _, size in blocks]
    # A block belongs to the member in whose share of the total cost its middle lies; each is in exactly one share.
    middles = np.cumsum(costs, dtype=np.int64) - np.array(costs, np.int64) // 2
    total = sum(costs)
    mine = [block for block, at in zip(blocks, middles.tolist()) if at * parts // total == part]
    workers = min(len(mine), _workers())
    if workers < 2 or sum(size for _, _, size in mine) < _BLOCK_BYTES // 4:
        return [_sum(folder, *block) for block in mine]
    with ThreadPoolExecutor(workers, "manifest") as threads:
        return list(threads.map(lambda block: _sum(folder, *block), mine))


def joined_sums(shares: Iterable[Sequence[Sum]]) -> dict[str, Sum]:
    """The sum of each file by its name, from the shares of all members in order."""
    found: dict[str, list[Sum]] = {}
    for share in shares:
        for each in share:
            found.setdefault(each[0], []).append(each)
    parts = [(size, crc, owner) for owner, own in enumerate(found.values()) for _, size, crc, _ in own]
    sizes, crcs, owners = np.array(parts, np.int64).reshape(-1, 3).T
    sums = combine(crcs, sizes, owners).tolist()
    return {
        name: (name, sum(size for _, size, _, _ in own), crc, next((why for *_, why in own if why), ""))
        for (name, own), crc in zip(found.items(), sums)
    }


def write_manifest(folder: Path, sums: Iterable[Sum]) -> None:
    """Write the manifest of files that have these sums. Raises ``OSError`` where one could not be read."""
    files: dict[str, Any] = {}
    for name, size, crc, why in sums:
        if why:
            raise OSError(None, why, str(folder / name))
        files[name] = {"bytes": size, "crc32": f"{crc:08x}"}
    content = {"format": FORMAT, "version": VERSION, "files_crc32": _sum_of(files), "files": files}
    (folder / MANIFEST).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_manifests(folder: Path) -> Manifest | None:
    """The content of the manifest in ``folder``, and of those in folders within that it lists; None if it has none.

    A manifest that cannot be read is damage, not an error.
    """
    if not _has_manifest(folder):
        return None
    path = folder / MANIFEST
    try:
        files = _files_of(path, path.read_bytes())
    except (OSError, CheckpointError) as error:
        return Manifest(folder, damage=(Damage(path.name, "changed", "a manifest", str(error)),))
    damage: list[Damage] = []
    # A manifest that is listed as a file speaks for its folder; its files get their names from here.
    for nested in sorted({Path(each.name).parent for each in files if Path(each.name).name == MANIFEST}):
        inner = read_manifests(folder / nested)
        if inner is not None:
            damage += [replace(each, name=f"{nested.as_posix()}/{each.name}") for each in inner.damage]
            files += [replace(each, name=f"{nested.as_posix()}/{each.name}") for each in inner.files]
    return Manifest(folder, tuple(files), tuple(damage))


def around(folder: Path) -> Iterator[tuple[Manifest, str]]:
    """The manifests that may list the files of ``folder``: its own, and that of the folder around it.

    With each, what its names of these files begin with.
    """
    for place, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        found = read_manifests(place)
        if found is not None:
            yield found, prefix


def problems_of(folder: Path) -> list[Problem]:
    """The files of a checkpoint, and what lies beside them, that are not what its manifest lists; each is read.

    Of the manifest of the folder around it, the files of ``folder`` alone.
    """
    found: dict[str, Problem] = {}
    for manifest, prefix in around(folder):
        files = [each for each in manifest.files if each.name.startswith(prefix)]
        # A manifest around it that cannot be read may be that of another checkpoint beside this one.
        own = manifest.damage if not prefix else ()
        wrong = misplaced(manifest.folder, files)
        whole = [each for each in files if each.name not in {damage.name for damage in wrong}]
        sums = joined_sums([sum_share(manifest.folder, whole)])
        for damage in (*own, *wrong, *differing(whole, sums)):
            what, hint = _SAID[damage.kind], "copy it again from where it was saved"
            name = damage.name.removeprefix(prefix)
            found.setdefault(name, Problem(what, name, expected=damage.expected, found=damage.found, hint=hint))
    return [found[name] for name in sorted(found)]


_SAID = {
    "missing": "a file that the manifest lists is missing",
    "size": "a file has not the size that the manifest lists",
    "changed": "a file is not what the manifest lists",
    "unreadable": "a file that the manifest lists cannot be read",
}


def misplaced(folder: Path, files: Sequence[Listed]) -> list[Damage]:
    """The files that are not there, or not of their size. Reads none."""
    problems = []
    for each in files:
        expected = f"{each.num_bytes:,} bytes"
        try:
            found = (folder / each.name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            problems.append(Damage(each.name, "missing", expected, "no such file"))
        except OSError as error:
            problems.append(Damage(each.name, "unreadable", expected, error.strerror or str(error)))
        else:
            if found != each.num_bytes:
                problems.append(Damage(each.name, "size", expected, f"{found:,}"))
    return problems


def differing(files: Sequence[Listed], sums: dict[str, Sum]) -> list[Damage]:
    """The files whose sum is not what was written."""
    problems = []
    for each in files:
        _, _, crc, why = sums[each.name]
        if why:
            problems.append(Damage(each.name, "unreadable", f"{each.num_bytes:,} bytes", why))
        elif crc != each.crc:
            problems.append(Damage(each.name, "changed", f"CRC-32 {each.crc:08x}", f"{crc:08x}"))
    return problems


def _has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest; a file of that name that others wrote is none."""
    path = folder / MANIFEST
    return path.is_file() and _is_ours(path)


def _is_ours(path: Path) -> bool:
    """Whether a file begins as our manifests do, also where one of the words is damaged or the file is empty."""
    start = read_start(path, 160)
    return not start or any(word in start for word in (FORMAT.encode(), b"files_crc32"))


def _files_of(path: Path, text: bytes) -> list[Listed]:
    """The files. Raises ``CheckpointError`` for what is no manifest, or is not as it was written."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise CheckpointError("of another version", expected=VERSION, found=content.get("version"))
        # The list itself has a sum: a flipped digit in it must not be blamed on the file that it is about.
        if content["files_crc32"] != _sum_of(content["files"]):
            raise CheckpointError("its own sum does not agree")
        found = [Listed(name, entry["bytes"], int(entry["crc32"], 16)) for name, entry in content["files"].items()]
        # A name must not lead out of the folder.
        strange = [each.name for each in found if each.name.startswith("/") or ".." in each.name.split("/")]
        if strange:
            raise CheckpointError("an entry that no writer writes", found=strange[0])
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("not the JSON that was written", where=str(path)) from error


def _sum_of(files: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _sum(folder: Path, name: str, offset: int, num_bytes: int) -> Sum:
    crc, done = 0, 0
    step = _BLOCK_BYTES if is_remote(folder) else _CHUNK_BYTES
    try:
        with opened(folder / name) as file:
            while done < num_bytes and (read := file.pread(min(step, num_bytes - done), offset + done)):
                crc, done = zlib.crc32(read, crc), done + len(read)
    except OSError as error:
        return name, num_bytes, 0, error.strerror or str(error)
    return name, num_bytes, crc, "" if done == num_bytes else f"it ended at byte {offset + done:,}"


def _workers() -> int:
    """The processors of this machine that this process has for itself, at most eight."""
    # The ranks of one machine share its processors, and each sums its share of the blocks at the same time.
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, there // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
