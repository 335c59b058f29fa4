"""Atomic writing of a folder: whole or absent, even if a process is killed while it is written.

``run/checkpoint-8`` is written to ``run/_checkpoint-8.partial/checkpoint-8``, listed in a manifest, flushed to disk,
and renamed when every rank has written its part. The staging folder is named after what is made in it, so saving one
thing never touches another, and the next save of the same thing removes what was left of it. Names that begin with
``_`` are taken for no checkpoint by Trainer, and are not uploaded.

A folder that is replaced is renamed to ``_checkpoint-8.replaced`` first: :func:`recover` puts it back if the process
was killed before the new one was in its place.

All hosts of a run see the same folders. Rank 0 leaves a mark in the staging folder, which every other rank must find
there: else its host has a disk of its own, or another process has removed the folder. The ranks share the reading that
the sums of the manifest cost.

With several processes the ranks agree after each part: if one could not do it, all raise and nothing is renamed.

Torch and safetensors write files by themselves. What they raise where a disk is full names neither the disk nor its
room, "unexpected pos 204608 vs 204500": :func:`one_line` says it, whatever library found it.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ullage.checkpoint.core.manifest import files_in, joined_sums, sum_share, write_manifest
from ullage.core.errors import CheckpointError, TrainingError, UllageError
from ullage.ranks.world import agreement, gather, rank_here, require_same_folder
from ullage.training.saving.damage import examine, is_damaged, name_for_damaged

#: The staging folder of files that are put into a folder one by one.
PARTIAL = "_partial"

_MARK = ".save-"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LOST = (errno.EIO, *_NO_ROOM)
#: What libraries say when a file cannot be written, other than OSError.
_WRITE_FAILED = ("PytorchStreamWriter", "inline_container", "iostream error", "SafetensorError")
#: A disk with fewer bytes free is full: what did not fit may have left a few blocks.
_FULL = 2**20


def staging_of(target: Path) -> Path:
    """The staging folder of the folder ``target``."""
    return target.with_name(f"_{target.name}.partial")


def old_of(target: Path) -> Path:
    """The place of the folder ``target`` while it is replaced."""
    return target.with_name(f"_{target.name}.replaced")


def incomplete(folder: Path, problem: str, missing: Sequence[str], hint: str) -> CheckpointError:
    """The error for a folder that lacks the files ``missing``: it lists some of those that are there."""
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder"
    return CheckpointError(problem, where=str(folder), expected=", ".join(missing[:8]), found=found, hint=hint)


def not_written(folder: Path, missing: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint that was to be written and lacks the files ``missing``."""
    hint = "it is not put in place; what was there before is as it was"
    return incomplete(folder, "the checkpoint that was written is not whole", missing, hint)


def recover(target: Path) -> None:
    """Put back the folder that a killed process had moved aside; remove it if its successor is in place."""
    old = old_of(target)
    if old.is_dir():
        if os.path.lexists(target):
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def write_whole(target: str | Path, write: Callable[[Path], None], check: Callable[[Path], None] | None = None) -> None:
    """Make the folder ``target``, with a manifest; one of that name is replaced, or set aside if it is damaged.

    Collective: all succeed or all raise.

    Args:
        target: the folder to make, the same path on every rank.
        write: called with the path to write to, which has the name of ``target`` and is not there yet.
        check: called with the written folder before it is renamed, on rank 0; raises if something is missing.
    """
    finish_whole(stage_whole(target, write), check)


def stage_whole(target: str | Path, write: Callable[[Path], None]) -> Staged:
    """The first part of :func:`write_whole`, which has the arguments: write, and leave it to :func:`finish_whole`."""
    target = require_same_folder(Path(target))
    return _stage(staging_of(target), target, lambda staging: write(staging / target.name))


def finish_whole(staged: Staged, check: Callable[[Path], None] | None = None) -> None:
    """Sum what was written, list it in a manifest, flush it and give it its name. Collective.

    Any thread of a rank may do it (:func:`ullage.ranks.world.meeting_over`). ``check``: as for
    :func:`write_whole`.
    """
    target, staging = staged.target, staged.staging
    place = staging / target.name
    with agreement("checking what was written"):
        _require_there(staged, place)
        if rank_here() == 0 and check is not None:
            check(place)
    # Of the old folder, read in full while it still has its name: a damaged one is set aside, not overwritten.
    damaged = bool(examine(target).damage)
    with agreement("listing a checkpoint"), one_line(place):
        files = files_in(place) if rank_here() == 0 else []
    listed, everyone = gather(files)[0], len(gather(None))
    with agreement("summing a checkpoint"), one_line(place):
        mine = sum_share(place, listed, rank_here(), everyone)
    sums = joined_sums(gather(mine))
    with agreement("putting a checkpoint in its place"), one_line(target):
        if rank_here() == 0:
            # Order matters: the manifest is the last file, all of it is on the disk, and only then the name is given.
            write_manifest(place, sums.values())
            _flush(place)
            _put(place, target, damaged or is_damaged(target))
    _clear(staging)


def write_into(folder: str | Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with an empty folder and move each file it wrote into ``folder``; others stay. Collective."""
    folder = require_same_folder(Path(folder))
    staging = folder / PARTIAL
    staged = _stage(staging, folder, write)
    with agreement("putting files in their place"), one_line(folder):
        _require_there(staged, staging)
        if rank_here() == 0:
            _flush(staging)
            for entry in sorted(staging.iterdir()):
                # File by file: each is old or new at any moment, but a reader may meet old ones beside new ones.
                if entry.name != staged.mark:
                    _put(entry, folder / entry.name)
    _clear(staging)


@dataclass(frozen=True)
class Staged:
    """What was written to a staging folder and is not in its place yet.

    Attributes:
        target: what it becomes, or becomes part of.
        staging: the folder it was written to.
        mark: the name of a file in it.
    """

    target: Path
    staging: Path
    mark: str


def _stage(staging: Path, target: Path, write: Callable[[Path], None]) -> Staged:
    """Write below ``staging`` on all ranks; rank 0 makes the folder. Collective.

    Args:
        staging: the folder to write to; removed first if it is there.
        target: what it becomes part of, for recovery and for messages.
        write: called with ``staging`` on every rank.
    """
    # Nobody else knows the token, so the mark tells whether a folder is still the one that was made here.
    mark = f"{_MARK}{gather(uuid.uuid4().hex)[0]}"
    with agreement("preparing to save"), one_line(target):
        if rank_here() == 0:
            if target.is_file():
                raise CheckpointError("a file lies where the folder should", where=str(target))
            # write_into stages inside its target, which it never moves: there is nothing to recover.
            if staging.parent != target:
                recover(target)
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True, exist_ok=True)
            (staging / mark).touch()
    with agreement("writing a checkpoint"), one_line(target):
        if not (staging / mark).is_file():
            raise TrainingError(
                "this host does not see what the host of rank 0 writes",
                where=f"{target} on {socket.gethostname()}, rank {rank_here()}",
                expected="a folder that all hosts of the run share",
                hint="mount one, and give a path in it",
            )
        write(staging)
    return Staged(target, staging, mark)


def require_shared(folder: Path) -> None:
    """Raise on every rank if a host does not see the folder that rank 0 writes to; it is made. Collective."""
    staging = folder / PARTIAL
    try:
        _stage(staging, folder, lambda _: None)
    finally:
        _clear(staging)


def _clear(staging: Path) -> None:
    if rank_here() == 0:
        shutil.rmtree(staging, ignore_errors=True)


def _require_there(staged: Staged, place: Path) -> None:
    """Raise ``CheckpointError`` if the folder that was written, or the mark beside it, is not there any more."""
    if not (staged.staging / staged.mark).is_file() or not place.is_dir():
        raise CheckpointError(
            "what was written has been removed before it was in its place",
            where=str(staged.target),
            expected=f"it in {staged.staging}",
            hint="another process saves to the same folder; give each a folder of its own",
        )


def _put(place: Path, target: Path, damaged: bool = False) -> None:
    """Rename ``place`` to ``target``. A folder that is there makes room for it, or is set aside if it is damaged."""
    # What an earlier kill left comes first, so that .replaced is free and holds nothing that is needed.
    recover(target)
    if damaged and os.path.lexists(target):
        target.rename(name_for_damaged(target))
    if not target.is_dir():
        place.replace(target)
    else:
        # Here is a moment without `target`. A kill in it leaves .replaced, which recover() puts back.
        old = old_of(target)
        target.rename(old)
        place.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    # The rename is an entry of the parent: it lasts when that is on the disk.
    _flush_entry(target.parent)


def _flush(folder: Path) -> None:
    """Flush every file below ``folder`` to disk: after a power cut a rename may be there and the content lost."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush_entry(Path(root) / name)
        _flush_entry(Path(root))


def _flush_entry(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # Windows opens no folder
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems refuse to flush a folder. These say that what was written has not come to the disk.
        if error.errno in _LOST:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        os.close(handle)


@contextmanager
def one_line(target: Path) -> Iterator[None]:
    """Turn what a full disk or a folder that is not ours raises in any library into one line that says what to do."""
    try:
        yield
    except UllageError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and not any(word in said for word in _WRITE_FAILED):
            raise
        problem, found = "this cannot be written", (error.strerror if isinstance(error, OSError) else None) or said
        if (words := _no_room(error, target)) is not None:
            free = _free_bytes(target)
            beside = "" if free is None else f", {free} bytes free beside what is written of it"
            problem, found = "the disk is full", f"{words}{beside}"
        hint = "make room, or give a folder that can be written to; what was there before is as it was"
        raise TrainingError(problem, where=str(target), found=found, hint=hint) from error


def _no_room(error: Exception, target: Path) -> str | None:
    """The system's words for the want of room that an error is about; None if it is about something else."""
    for code in _NO_ROOM:
        words = os.strerror(code)
        if (isinstance(error, OSError) and error.errno == code) or words in str(error):
            return words
    # Torch says only how many bytes of how many it has written.
    free = None if isinstance(error, OSError) else _free_bytes(target)
    return os.strerror(errno.ENOSPC) if free is not None and free < _FULL else None


def _free_bytes(target: Path) -> int | None:
    with suppress(OSError, StopIteration):
        return shutil.disk_usage(next(path for path in (target, *target.parents) if path.exists())).free
    return None
