"""Manifest of a checkpoint: the files as they were written, so that a reader can tell whether they changed.

``manifest.json`` lists every file of a folder with its size and a CRC-32 of each block of 16 MiB, so that a range of a
file is checked by reading the blocks it lies in. The format is written down in ``docs/formats.md``. Reading and summing
release the GIL, so blocks are summed by several threads.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ullage.checkpoint.core.paths import is_remote, opened, read_start
from ullage.checkpoint.core.problem import Problem
from ullage.core.errors import CheckpointError

FORMAT, VERSION = "ullage-manifest", 1
#: The file that is the manifest of its folder.
MANIFEST = "manifest.json"
#: Bytes that one sum is of.
BLOCK_BYTES = 16 << 20
#: A chunk that stays in a core's cache between reading and summing.
_CHUNK_BYTES = 1 << 20
#: Cost of looking at a file, in bytes that could have been summed meanwhile.
_FILE_COST = 1 << 14

_T = TypeVar("_T")


@dataclass(frozen=True)
class Block:
    """A part of a file that has one sum. A file without content is one block of no bytes.

    Attributes:
        name: of the file, relative to the folder of the manifest, with ``/`` between the parts.
        offset: byte of the file at which the block begins, a multiple of :data:`BLOCK_BYTES`.
        num_bytes: bytes of the block.
        file_bytes: bytes of the whole file.
        crc: CRC-32 of the block as it was written; None before it is known.
    """

    name: str
    offset: int
    num_bytes: int
    file_bytes: int
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
        folder: the folder; names of blocks are relative to it.
        blocks: of all files, those of one file together and in order.
        damage: manifests that cannot be read.
    """

    folder: Path
    blocks: tuple[Block, ...] = ()
    damage: tuple[Damage, ...] = ()


def files_in(folder: Path) -> list[tuple[str, int]]:
    """Name and bytes of every file that a manifest of ``folder`` lists, by name.

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
        found += [((place / name).relative_to(folder).as_posix(), (place / name).stat().st_size) for name in names]
    return sorted(found)


def blocks_of(files: Iterable[tuple[str, int]]) -> list[Block]:
    """The blocks of files of these names and sizes, without sums."""
    return [
        Block(name, offset, min(BLOCK_BYTES, size - offset), size)
        for name, size in files
        for offset in range(0, max(size, 1), BLOCK_BYTES)
    ]


def share_of_blocks(blocks: Sequence[Block], part: int, parts: int) -> list[Block]:
    """The neighbouring blocks that member ``part`` of ``parts`` sums; each member gets about as many bytes."""
    costs = [block.num_bytes + _FILE_COST for block in blocks]
    total, done, mine = sum(costs), 0, []
    for block, cost in zip(blocks, costs, strict=True):
        # A block belongs to the member in whose share of the total cost its middle lies; each is in exactly one share.
        if (done + cost // 2) * parts // total == part:
            mine.append(block)
        done += cost
    return mine


def sums(folder: Path, blocks: Sequence[Block], workers: int | None = None) -> list[int]:
    """The CRC-32 of each block, read from the files of ``folder``. Raises ``OSError`` where one cannot be read."""
    return list(_each(lambda block: _sum(folder / block.name, block), blocks, workers))


def write_manifest(path: Path, blocks: Sequence[Block], crcs: Sequence[int]) -> None:
    """Write the manifest of files whose blocks have these sums."""
    files: dict[str, Any] = {}
    for block, crc in zip(blocks, crcs, strict=True):
        entry = files.setdefault(block.name, {"bytes": block.file_bytes, "crc32": []})
        entry["crc32"].append(f"{crc:08x}")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "block_bytes": BLOCK_BYTES,
        "files_crc32": _sum_of(files),
        "files": files,
    }
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_manifests(folder: Path) -> Manifest | None:
    """The content of the manifest in ``folder``, and of those in folders within that it lists; None if it has none.

    A manifest that cannot be read is damage, not an error.
    """
    if not _has_manifest(folder):
        return None
    path = folder / MANIFEST
    try:
        blocks = _blocks_by_file(path, path.read_bytes())
    except (OSError, CheckpointError) as error:
        return Manifest(folder, damage=(Damage(path.name, "changed", "a manifest", str(error)),))
    damage: list[Damage] = []
    # A manifest that is listed as a file speaks for its folder; its blocks get their names from here.
    for nested in sorted({Path(name).parent for name in blocks if Path(name).name == MANIFEST}):
        inner = read_manifests(folder / nested)
        if inner is not None:
            place = f"{nested.as_posix()}/"
            damage += [Damage(f"{nested}/{d.name}", d.kind, d.expected, d.found) for d in inner.damage]
            for block in inner.blocks:
                blocks.setdefault(place + block.name, []).append(replace(block, name=place + block.name))
    return Manifest(folder, tuple(b for own in blocks.values() for b in own), tuple(damage))


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
        blocks = [block for block in manifest.blocks if block.name.startswith(prefix)]
        # A manifest around it that cannot be read may be that of another checkpoint beside this one.
        own = manifest.damage if not prefix else ()
        for damage in (*own, *damage_in(manifest.folder, blocks)):
            what, hint = _SAID[damage.kind], "copy it again from where it was saved"
            name = damage.name.removeprefix(prefix)
            found.setdefault(name, Problem(what, name, expected=damage.expected, found=damage.found, hint=hint))
    return list(found.values())


_SAID = {
    "missing": "a file that the manifest lists is missing",
    "size": "a file has not the size that the manifest lists",
    "changed": "a file is not what the manifest lists",
    "unreadable": "a file that the manifest lists cannot be read",
}


def damage_in(
    folder: Path, blocks: Sequence[Block], *, content: bool = True, workers: int | None = None
) -> list[Damage]:
    """Compare files with the blocks that were written; one entry for each file that is not as it was, by name.

    ``content``: whether the blocks are read; otherwise only that the files are there, and their sizes. A block that
    was right before in this process, of a file that nothing has touched since, is not read again.
    """
    problems = _sizes(folder, blocks)
    wrong = {problem.name for problem in problems}
    if content:
        whole = [block for block in blocks if block.name not in wrong]
        for found in _each(lambda block: _compare(folder / block.name, block), whole, workers):
            if found is not None and found.name not in wrong:
                problems.append(found)
                wrong.add(found.name)
    return sorted(problems, key=lambda problem: problem.name)


# The file


def _has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest; a file of that name that others wrote is none."""
    path = folder / MANIFEST
    return path.is_file() and _is_ours(path)


def _is_ours(path: Path) -> bool:
    """Whether a file begins as our manifests do, also where one of the words is damaged or the file is empty."""
    start = read_start(path, 160)
    return not start or any(word in start for word in (FORMAT.encode(), b"block_bytes", b"files_crc32"))


def _blocks_by_file(path: Path, text: bytes) -> dict[str, list[Block]]:
    """The blocks by file.

    Raises ``CheckpointError`` for what is no manifest, or is not as it was written.
    """
    try:
        content = json.loads(text)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise CheckpointError("of another version", expected=VERSION, found=content.get("version"))
        files, size = content["files"], content["block_bytes"]
        # The list itself has a sum: a flipped digit in it must not be blamed on the file that it is about.
        if content["files_crc32"] != _sum_of(files):
            raise CheckpointError("its own sum does not agree")
        if size != BLOCK_BYTES:
            raise CheckpointError("blocks of another size", expected=BLOCK_BYTES, found=size)
        listed = {}
        for name, entry in files.items():
            blocks = blocks_of([(name, entry["bytes"])])
            # A name must not lead out of the folder, and a file has exactly the blocks of its size.
            if name.startswith("/") or ".." in name.split("/") or len(blocks) != len(entry["crc32"]):
                raise CheckpointError("an entry that no writer writes", found=name)
            listed[name] = [
                Block(name, block.offset, block.num_bytes, block.file_bytes, int(crc, 16))
                for block, crc in zip(blocks, entry["crc32"], strict=True)
            ]
        return listed
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("not the JSON that was written", where=str(path)) from error


def _sum_of(files: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True, separators=(',', ':')).encode()):08x}"


# The files that it lists

#: (device, inode, offset) of blocks that were right, with the state that their file had then.
_RIGHT: dict[tuple[int, int, int], tuple[int, ...]] = {}


def _sizes(folder: Path, blocks: Sequence[Block]) -> list[Damage]:
    problems = []
    for name, expected in {block.name: block.file_bytes for block in blocks}.items():
        try:
            found = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            problems.append(Damage(name, "missing", f"{expected:,} bytes", "no such file"))
        except OSError as error:
            problems.append(Damage(name, "unreadable", f"{expected:,} bytes", error.strerror or str(error)))
        else:
            if found != expected:
                problems.append(Damage(name, "size", f"{expected:,} bytes", f"{found:,}"))
    return problems


def _compare(path: Path, block: Block) -> Damage | None:
    try:
        if is_remote(path):
            return _find_change(block, _sum_remote(path, block))
        status = path.stat()
        key = (status.st_dev, status.st_ino, block.offset)
        state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, block.crc or 0)
        # Any write changes mtime or ctime, and a replacement the inode: then the block is read again.
        if _RIGHT.get(key) == state:
            return None
        found = _sum(path, block)
    except OSError as error:
        return Damage(block.name, "unreadable", f"{block.file_bytes:,} bytes", error.strerror or str(error))
    if found == block.crc:
        _RIGHT[key] = state
    return _find_change(block, found)


def _find_change(block: Block, found: int) -> Damage | None:
    if found == block.crc:
        return None
    where = f"in bytes {block.offset:,} to {block.offset + block.num_bytes:,}"
    return Damage(block.name, "changed", f"CRC-32 {block.crc:08x} {where}", f"{found:08x}")


def _sum(path: Path, block: Block) -> int:
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(block.num_bytes, 1))))
    crc, left = 0, block.num_bytes
    with open(path, "rb", buffering=0) as stream:
        stream.seek(block.offset)
        while left:
            read = stream.readinto(buffer[: min(left, len(buffer))])
            if not read:
                break  # a file that was cut: the sum of what is left is another one
            crc = zlib.crc32(buffer[:read], crc)
            left -= read
    return crc


def _sum_remote(path: Path, block: Block) -> int:
    with opened(path) as file:
        return zlib.crc32(file.pread(block.num_bytes, block.offset)) if block.num_bytes else 0


def _each(work: Callable[[Block], _T], blocks: Sequence[Block], workers: int | None) -> Iterator[_T]:
    """``work`` of every block, in order, by threads where there is enough to do."""
    workers = min(len(blocks), workers or _workers())
    if workers < 2 or sum(block.num_bytes for block in blocks) < BLOCK_BYTES // 4:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(workers, "manifest") as threads:
        yield from threads.map(work, blocks)


def _workers() -> int:
    """The processors of this machine that this process has for itself, at most eight."""
    # The ranks of one machine share its processors, and each sums its share of the blocks at the same time.
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, there // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
