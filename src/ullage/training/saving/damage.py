"""Damage to a checkpoint: its files against its manifest, by all ranks, before anything of it is loaded.

The ranks share the files that the manifest lists, so each byte is read once, and all of them come to the same answer.
Each host looks whether it sees every file: one that does not see the folder of the others is named with what it lacks.
Without a manifest (of an older version, or by others) only files that were visibly cut are found. What is damaged is
remembered in the folder itself, in ``damaged.txt``, so that it is never taken for a checkpoint by rotation, and never
deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.checkpoint.core.manifest import (
    Damage,
    differing,
    files_in,
    joined_sums,
    misplaced,
    read_manifests,
    sum_share,
)
from ullage.core.errors import CheckpointError
from ullage.ranks.world import agreement, gather, is_first_of_machine, rank_here

#: The file, in a damaged checkpoint, that says what was found.
MARK = "damaged.txt"


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
            "this checkpoint is damaged",
            where=str(self.checkpoint / first.name),
            expected=first.expected,
            found=f"{first.found}{self._others}",
            hint=hint,
        )

    @property
    def _others(self) -> str:
        count = len(self.damage) - 1
        return f", and {count} more damaged {'file' if count == 1 else 'files'}" if count else ""


def examine(checkpoint: Path, *, allow_changed: bool = False) -> Finding:
    """Compare every file that the manifest of ``checkpoint`` lists with it, in full. Collective.

    ``allow_changed``: files of other content or size count as changed, not as damaged, if they can be read at all.
    Reads what it compares once; returns damage instead of raising.
    """
    manifest = None
    with agreement("looking at a checkpoint"):
        if is_first_of_machine():
            manifest = read_manifests(checkpoint)
    seen = gather((is_first_of_machine(), manifest))
    # Of the lowest rank whose host sees one: all hosts are compared with it.
    manifest = next((each for _, each in seen if each is not None), None)
    rank = rank_here()
    found: list[Damage] = []
    changed: list[str] = []
    if manifest is not None:
        lost = misplaced(checkpoint, manifest.files) if is_first_of_machine() else []
        host = f" on {socket.gethostname()}, the host of rank {rank}" if sum(first for first, _ in seen) > 1 else ""
        found += manifest.damage if rank == 0 else ()
        found += [replace(each, found=f"{each.found}{host}") for each in lost if each.kind == "missing"]
        found += [each for each in lost if each.kind != "missing" and rank == 0]
        wrong = {each.name for own in gather(lost) for each in own}
        whole = [each for each in manifest.files if each.name not in wrong]
        sums = joined_sums(gather(sum_share(checkpoint, whole, rank, len(seen))))
        found += differing(whole, sums) if rank == 0 else ()
    elif checkpoint.is_dir() and rank == 0:
        cut = ((each.name, _cut(checkpoint / each.name)) for each in files_in(checkpoint))
        found += [Damage(name, "size", "a whole file", problem) for name, problem in cut if problem is not None]
    if allow_changed:
        # Changed on purpose is only what its own format can still read; a file that is cut never passes.
        passing = {d.name for d in found if d.kind in ("size", "changed") and _cut(checkpoint / d.name) is None}
        changed, found = sorted(passing), [d for d in found if d.name not in passing]
    told = gather((found, changed))
    # Later entries overwrite, so reversed: for each file the lowest rank's finding, the same everywhere.
    damage = {d.name: d for own, _ in reversed(told) for d in own}
    names = sorted({name for _, own in told for name in own} - damage.keys())
    return Finding(checkpoint, manifest is not None, tuple(damage[name] for name in sorted(damage)), tuple(names))


def is_damaged(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` was found damaged before, or lacks files or bytes that its manifest lists. Reads none."""
    if (checkpoint / MARK).exists():
        return True
    manifest = read_manifests(checkpoint)
    return manifest is not None and bool(manifest.damage or misplaced(checkpoint, manifest.files))


def remember(finding: Finding) -> None:
    """Write the damage that was found into ``damaged.txt`` in the checkpoint; remove the file if it is whole again.

    Does nothing where the folder cannot be written to.
    """
    with contextlib.suppress(OSError):
        mark = finding.checkpoint / MARK
        if finding.damage:
            mark.write_text("".join(f"{d.name}: expected {d.expected}, found {d.found}\n" for d in finding.damage))
        elif finding.has_manifest and not finding.changed:
            mark.unlink(missing_ok=True)


def name_for_damaged(checkpoint: Path) -> Path:
    """The first of ``checkpoint.damaged``, ``checkpoint.damaged2``, ... that is free."""
    names = (f"{checkpoint.name}.damaged{count if count > 1 else ''}" for count in itertools.count(1))
    return next(path for path in map(checkpoint.with_name, names) if not path.exists())


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
