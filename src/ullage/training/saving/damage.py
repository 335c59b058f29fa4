"""Damage to a checkpoint: its files against its manifest, by all ranks, before anything of it is loaded.

The ranks that see the same disk share the blocks that the manifest lists, so each block is read once, and all of them
come to the same answer. Without a manifest (of an older version, or by others) only files that were visibly cut are
found. What is damaged is remembered in the folder itself, in ``damaged.txt``, so that it is never taken for a
checkpoint by rotation, and never deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ullage.checkpoint.core.manifest import (
    Block,
    Damage,
    Manifest,
    blocks_of,
    damage_in,
    files_in,
    read_manifests,
    share_of_blocks,
)
from ullage.core.errors import CheckpointError
from ullage.ranks.world import gather, is_first_of_machine, rank_here

#: The file, in a damaged checkpoint, that says what was found.
MARK = "damaged.txt"
#: The kind of damage of a file that lies on a host which is not in this run.
LOST = "lost"
_RANDOM_STATES = re.compile(r"rng_state_(\d+)\.pth")


@dataclass(frozen=True)
class Finding:
    """Result of examining a checkpoint; the same on every rank.

    Attributes:
        checkpoint: the folder.
        has_manifest: whether any rank saw a manifest in it.
        damage: files that are not what was written.
        changed: names of files that are not what was written, and were allowed.
    """

    checkpoint: Path
    has_manifest: bool
    damage: tuple[Damage, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on a checkpoint that is loaded."""
        if not self.has_manifest:
            return (f"{self.checkpoint} has no manifest.json, so its files are loaded unchecked",)
        if self.changed:
            return (f"{self.checkpoint}: taken as changed on purpose: {', '.join(self.changed)}",)
        return ()

    def __str__(self) -> str:
        first = self.damage[0]
        return f"{first.name}: expected {first.expected}, found {first.found}{self._others}"

    def error(self, hint: str) -> CheckpointError:
        """The error of a checkpoint that is damaged."""
        first = self.damage[0]
        return CheckpointError(
            "this checkpoint is not whole on the hosts of this run" if self.is_lost else "this checkpoint is damaged",
            where=str(self.checkpoint / first.name),
            expected=first.expected,
            found=f"{first.found}{self._others}",
            hint=hint,
        )

    @property
    def is_lost(self) -> bool:
        """Whether all that is wrong is that files lie on hosts which are not in this run."""
        return bool(self.damage) and all(damage.kind == LOST for damage in self.damage)

    @property
    def _others(self) -> str:
        count, kind = len(self.damage) - 1, "such" if self.is_lost else "damaged"
        return f", and {count} more {kind} {'file' if count == 1 else 'files'}" if count else ""


def examine(checkpoint: Path, *, allow_changed: bool = False) -> Finding:
    """Compare every file that the manifest of ``checkpoint`` lists with it, in full. Collective.

    ``allow_changed``: files of other content or size count as changed, not as damaged, if they can be read at all.
    Reads what it compares, once per disk; returns damage instead of raising.
    """
    manifest, identity = _seen(checkpoint)
    # Where several disks hold parts, which files are on this one; one rank of each machine tells.
    listed = None
    if manifest is not None and manifest.hosts and is_first_of_machine():
        listed = {block.name for block in manifest.blocks}
    told = gather((identity, None if manifest is None else (manifest.save, bool(manifest.hosts)), listed))
    first = next((save for _, save, _ in told if save is not None), None)
    # Ranks of equal identity see one folder on one disk and divide its blocks; each other disk is read by its own
    # ranks.
    group = [rank for rank, (other, *_) in enumerate(told) if other == identity]
    part, parts = group.index(rank_here()), len(group)
    found: list[Damage] = []
    changed: list[str] = []
    if identity and manifest is not None and first is not None:
        # That of a host which was away meanwhile is not what the others have: it is set aside, and says nothing.
        if not is_other_save(manifest, first):
            held = {name for _, save, names in told if names and save == first for name in names}
            found += manifest.damage
            found += damage_in(checkpoint, share_of_blocks(manifest.blocks, part, parts))
            found += _lost(manifest, held)
    elif identity and first is None:
        # Nowhere a manifest. Where only this rank sees none, it has nothing to compare and says nothing.
        found += _cut_files(checkpoint, part, parts)
    if allow_changed:
        # Changed on purpose is only what its own format can still read; a file that is cut never passes.
        passing = {d.name for d in found if d.kind in ("size", "changed") and _cut(checkpoint / d.name) is None}
        changed, found = sorted(passing), [d for d in found if d.name not in passing]
    told = gather((found, changed))
    # Later entries overwrite, so reversed: for each file the lowest rank's finding, the same everywhere.
    damage = {d.name: d for own, _ in reversed(told) for d in own}
    names = sorted({name for _, own in told for name in own} - damage.keys())
    return Finding(checkpoint, first is not None, tuple(damage[name] for name in sorted(damage)), tuple(names))


def is_damaged(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` was found damaged before, or lacks files or bytes that its manifest lists. Reads none."""
    if (checkpoint / MARK).exists():
        return True
    manifest = read_manifests(checkpoint)
    if manifest is None:
        return False
    return bool(manifest.damage or damage_in(checkpoint, manifest.blocks, content=False))


def remember(finding: Finding) -> None:
    """Write the damage that was found into ``damaged.txt`` in the checkpoint; remove the file if it is whole again.

    What lies on a host that is away is no damage to be remembered: it may come back.
    Does nothing where the folder cannot be written to.
    """
    with contextlib.suppress(OSError):
        mark = finding.checkpoint / MARK
        if finding.is_lost:
            return
        if finding.damage:
            mark.write_text("".join(f"{d.name}: expected {d.expected}, found {d.found}\n" for d in finding.damage))
        elif finding.has_manifest and not finding.changed:
            mark.unlink(missing_ok=True)


def name_for_damaged(checkpoint: Path) -> Path:
    """The first of ``checkpoint.damaged``, ``checkpoint.damaged2``, ... that is free."""
    for count in itertools.count(1):
        path = checkpoint.with_name(f"{checkpoint.name}.damaged{count if count > 1 else ''}")
        if not path.exists():
            return path
    raise AssertionError


def _seen(checkpoint: Path) -> tuple[Manifest | None, str]:
    """The manifest, and an identity that only ranks which see the same folder on the same disk have in common.

    The identity is "" where there is no folder.
    """
    try:
        manifest = read_manifests(checkpoint)
        status = checkpoint.stat()
    except OSError:
        return None, ""
    if manifest is None:
        return None, f"{status.st_ino}:{status.st_mtime_ns}"
    return manifest, manifest.identity or f"{status.st_ino}"


def of_one_rank(name: str) -> int | None:
    """The rank whose random states a file of a checkpoint holds, which no other reads; None for other files."""
    found = _RANDOM_STATES.fullmatch(name)
    return None if found is None else int(found[1])


def is_other_save(part: Manifest, first: tuple[str, bool]) -> bool:
    """Whether a part was saved at another time than the first one, of which its save is told, and whether it has hosts.

    Disks of equal saves have the same manifests, their own or copied.
    """
    return part.save != first[0] and (first[1] or bool(part.hosts))


def _lost(manifest: Manifest, held: set[str]) -> list[Damage]:
    """Files of the checkpoint that lie on no disk of this run. Without random states training can go on."""
    lost = {block.name: block for block in manifest.elsewhere if block.name not in held}
    return [
        Damage(name, LOST, f"{block.file_bytes:,} bytes, written by {manifest.hosts.get(name, 'another host')}",
               "it on no host of this run")
        for name, block in lost.items() if of_one_rank(name) is None
    ]  # fmt: skip


def _cut_files(folder: Path, part: int, parts: int) -> list[Damage]:
    """Files that their own format shows to be cut."""
    mine: list[Block] = share_of_blocks(
        [block for block in blocks_of(files_in(folder)) if block.offset == 0], part, parts
    )
    problems = ((block.name, _cut(folder / block.name)) for block in mine)
    return [Damage(name, "size", "a whole file", problem) for name, problem in problems if problem is not None]


def _cut(path: Path) -> str | None:
    """The way in which a file ends before its format says so; None for a whole one and for formats that do not tell.

    Looks at the table of contents only.
    """
    kind = path.suffix
    try:
        if kind == ".safetensors":
            from safetensors import safe_open

            with safe_open(str(path), framework="numpy"):
                return None
        if kind in (".pt", ".pth", ".bin"):
            with open(path, "rb") as stream:
                start = stream.read(2)
            if not start:
                return "nothing in it"
            if start == b"PK":  # files of torch before 1.6 are no archives, and do not tell
                zipfile.ZipFile(path).close()
        elif path.name in ("trainer_state.json", "config.json"):
            json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # a torn file raises whatever its reader raises
        return " ".join(f"{error}".split()) or type(error).__name__
    return None
