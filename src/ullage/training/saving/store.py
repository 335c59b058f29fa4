"""A run whose output folder is a URL: every host trains in a working folder of its own, and a store keeps the run.

Each save is uploaded when it stands on all hosts, every host its part of one folder. A store renames nothing, so a
checkpoint is there once ``manifest.json`` is, which the first rank writes when all have uploaded their part and the
store lists every file at its size. From the beginning of the upload on ``.journal/mark`` lies in the folder, and is
removed after the manifest: readers refuse a folder with a mark, and the next start removes one that has a mark and no
manifest. A checkpoint that is deleted loses its manifest first.

Beside the checkpoints the first rank uploads what else is in its working folder: settings, log, report, final model.
A start fetches settings and log, and of a checkpoint what the ranks of its host read.

A request that fails is repeated as :mod:`ullage.checkpoint.core.paths` says; what then fails ends the run in one line,
with the checkpoints before it whole.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ullage.checkpoint.conversion.destination import MARK, send_files, spool_of
from ullage.checkpoint.core.manifest import (
    copies_of_manifests,
    damage_in,
    elsewhere_name,
    manifest_name,
    read_manifests,
)
from ullage.checkpoint.core.paths import PARALLEL, Store, checkpoint_path, is_url, key_of, store_at
from ullage.core.errors import TrainingError
from ullage.ranks.world import agreement, gather, is_first_of_machine, rank_here
from ullage.training.saving.parts import Readers
from ullage.training.saving.staging import Disk, disk_of, staging_of

_LOG = logging.getLogger(__name__)
_CHECKPOINT = "checkpoint-"
#: Files of a run that a start reads.
_OURS = "ullage_"
_PROBE = ".writable"
#: By working folder, the stores of this process.
_stores: dict[Path, RunStore] = {}


def adopt(arguments: Any) -> RunStore | None:
    """The store of a run whose arguments name a URL; their output folder is the working folder from here on."""
    if is_url(arguments.output_dir):
        arguments.output_dir = str(RunStore.at(arguments.output_dir).folder)
    return store_of_run(arguments.output_dir)


def store_of_run(folder: str | Path | None) -> RunStore | None:
    """The store that a working folder belongs to; None for other folders."""
    return _stores.get(Path(os.path.abspath(folder or ".")))


def local_path(where: str | Path) -> Path:
    """The place of a checkpoint in this machine's file system: of a URL, in the working folder of its run."""
    if not is_url(where):
        return Path(where)
    run, _, name = str(where).rstrip("/").rpartition("/")
    return RunStore.at(run).folder / name


class RunStore:
    """The store side of a run.

    Attributes:
        url: of the run.
        folder: the working folder on this host, the same path on all.
        is_done: whether all of it is in the store, so that the folder may go when the process ends.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = checkpoint_path(url)
        self.folder = spool_of(url) / self.place.name
        self.is_done = False
        self._sent: dict[str, tuple[int, int]] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self._leave, os.getpid())

    @classmethod
    def at(cls, url: str) -> RunStore:
        """The store of the run at a URL: one in a process."""
        url = url.rstrip("/")
        found = next((store for store in _stores.values() if store.url == url), None)
        if found is None:
            found = cls(url)
            _stores[found.folder] = found
            if rank_here() == 0:
                _LOG.warning("%s: this run works in %s, and each save is uploaded", url, found.folder)
        return found

    @property
    def _store(self) -> Store:
        return store_at(self.place)

    def _key(self, *names: str) -> str:
        return "/".join((key_of(self.place), *names))

    # A start.

    def arrive(self) -> list[str]:
        """The names of the checkpoints that are whole. Removes what was never finished, in the store and here.

        Collective. Settings and log of the run are then in the working folder.
        """
        whole: list[str] = []
        with agreement("looking into the store"), _in_one_line(self.url):
            if rank_here() == 0:
                whole = self._tidy()
        whole = gather(whole)[0]
        with agreement("fetching the settings of the run"), _in_one_line(self.url):
            if is_first_of_machine():
                self.folder.mkdir(parents=True, exist_ok=True)
                for path in self.folder.glob(f"{_CHECKPOINT}*"):
                    if path.name not in whole:  # never uploaded: other hosts may not have their part
                        shutil.rmtree(path, ignore_errors=True)
                there = self._store.look(self._key())
                self._download(self.folder, {n: self._key(n) for n in there if n.startswith(_OURS) and "/" not in n})
        return whole

    def _tidy(self) -> list[str]:
        # What would fail at the first save fails now.
        self._store.write(self._key(_PROBE), b"")
        self._store.remove([self._key(_PROBE)])
        there: dict[str, set[str]] = {}
        for name in self._store.look(self._key()):
            folder, _, inner = name.partition("/")
            if folder.startswith(_CHECKPOINT) and inner:
                there.setdefault(folder, set()).add(inner)
        for folder, names in there.items():
            if MARK in names:
                unfinished = manifest_name() not in names
                self._store.remove([self._key(folder, name) for name in (names if unfinished else [MARK])])
                if unfinished:
                    _LOG.warning("%s/%s was never uploaded whole, and is removed", self.url, folder)
        return [folder for folder, names in there.items() if manifest_name() in names]

    def names(self) -> list[str]:
        """The names of the checkpoints in the store, whole or not."""
        with _in_one_line(self.url):
            found = {name.partition("/")[0] for name in self._store.look(self._key()) if "/" in name}
        return sorted(name for name in found if name.startswith(_CHECKPOINT))

    def has(self, names: Iterable[str]) -> bool:
        """Whether one of these files lies in the folder of the run."""
        with _in_one_line(self.url):
            return not self._store.look(self._key()).keys().isdisjoint(names)

    def fetch(self, checkpoint: Path, readers: Readers | None) -> None:
        """Have the files of a checkpoint in the working folder that the ranks of this host read. Collective.

        Those that are there and right are not fetched again. ``readers``: who goes on from it; None fetches all.
        """
        disk, remote = disk_of(self.folder), self.place / checkpoint.name
        with agreement("fetching a checkpoint"), _in_one_line(str(remote)):
            if not disk.is_mine:
                return
            self._store.look(self._key(checkpoint.name))
            manifest = read_manifests(remote)
            if manifest is None:
                return  # what is said of a folder that is not there
            texts = copies_of_manifests(remote)
            if checkpoint.is_dir() and copies_of_manifests(checkpoint) != texts:
                shutil.rmtree(checkpoint)  # of another save
            names = {block.name for block in manifest.blocks}
            names = names if readers is None else set(readers.need(sorted(names), disk.ranks))
            wrong = damage_in(checkpoint, [block for block in manifest.blocks if block.name in names])
            self._download(checkpoint, {d.name: self._key(checkpoint.name, d.name) for d in wrong})
            if not copies_of_manifests(checkpoint):
                for rank, text in texts.items():
                    (checkpoint / elsewhere_name(rank)).write_text(text, encoding="utf-8")

    def _download(self, into: Path, keys: dict[str, str]) -> None:
        """Fetch objects as files of these names, each of which appears whole."""
        staging = staging_of(into)
        shutil.rmtree(staging, ignore_errors=True)
        into.mkdir(parents=True, exist_ok=True)

        def one(item: tuple[str, str]) -> None:
            name, key = item
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            self._store.download(key, staging / name)
            (staging / name).replace(into / name)

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(one, keys.items()))
        shutil.rmtree(staging, ignore_errors=True)

    # A save.

    def send(self, checkpoint: Path, disk: Disk) -> None:
        """Upload a checkpoint that stands on all hosts, each rank a part of what lies on its disk. Collective.

        In a thread of each rank as well (:func:`ullage.ranks.world.meeting_over`).
        """
        target, key = self.place / checkpoint.name, self._key(checkpoint.name)
        token = gather(uuid.uuid4().hex)[0]
        with agreement("beginning an upload"), _in_one_line(str(target)):
            if rank_here() == 0:
                # From here on the folder is no checkpoint, also if one of this step lay there.
                before = self._store.look(key)
                self._store.write(f"{key}/{MARK}", token.encode())
                _remove(self._store, key, before)
        here = _files_of(checkpoint) if checkpoint.is_dir() else {}
        told = gather((disk.owner, here if disk.is_mine else None))
        first: dict[str, tuple[int, int]] = {}
        for owner, files in told:  # the same file on several disks: of the lowest rank
            for name, num_bytes in (files or {}).items():
                first.setdefault(name, (owner, num_bytes))
        mine = sorted(name for name, (owner, _) in first.items() if owner == disk.owner)
        mine = mine[disk.ranks.index(rank_here()) :: len(disk.ranks)]
        with agreement("uploading a checkpoint"), _in_one_line(str(target)):
            send_files(target, {name: checkpoint / name for name in mine})
        with agreement("finishing an upload"), _in_one_line(str(target)):
            if rank_here() == 0:
                self._finish(checkpoint, key, token, {name: num_bytes for name, (_, num_bytes) in first.items()})
        self.send_run_files()

    def _finish(self, checkpoint: Path, key: str, token: str, sizes: dict[str, int]) -> None:
        there = self._store.look(key)
        mark = self._store.read(f"{key}/{MARK}", 0, there[MARK]).decode() if MARK in there else "none"
        wrong = next((name for name, num_bytes in sizes.items() if there.get(name) != num_bytes), None)
        if mark != token or wrong is not None:
            raise TrainingError(
                "what was uploaded is not what the store holds",
                where=f"{self.url}/{checkpoint.name}/{wrong or MARK}",
                expected=token if wrong is None else f"{sizes[wrong]} bytes",
                found=mark if wrong is None else str(there.get(wrong, "no object")),
                hint="another program writes to the same URL; give each run one of its own",
            )
        self._store.write(f"{key}/{manifest_name()}", (checkpoint / manifest_name()).read_bytes())
        self._store.remove([f"{key}/{MARK}"])

    def send_run_files(self) -> None:
        """Upload what lies beside the checkpoints and has changed; the first rank does."""
        if rank_here() != 0:
            return
        files = {}
        for top in sorted(self.folder.iterdir()):
            if top.name.startswith(("_", ".", _CHECKPOINT)):
                continue
            for path in [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file()):
                status, name = path.stat(), path.relative_to(self.folder).as_posix()
                if self._sent.get(name) != (status.st_size, status.st_mtime_ns):
                    files[name] = path
                    self._sent[name] = (status.st_size, status.st_mtime_ns)
        with _in_one_line(self.url):
            send_files(self.place, files)

    def _leave(self, process: int) -> None:
        """Remove the working folder of a run that is over."""
        if self.is_done and process == os.getpid() and is_first_of_machine():
            shutil.rmtree(self.folder.parent, ignore_errors=True)


def delete_remote(checkpoint: Path) -> None:
    """Remove a checkpoint of a store."""
    store, key = store_at(checkpoint), key_of(checkpoint)
    with _in_one_line(str(checkpoint)):
        _remove(store, key, store.look(key))


def _remove(store: Store, key: str, names: Iterable[str]) -> None:
    """The manifest first: what has none is no checkpoint."""
    names = sorted(names, key=lambda name: name != manifest_name())
    for some in (names[:1], names[1:]):
        store.remove([f"{key}/{name}" for name in some])


def _files_of(checkpoint: Path) -> dict[str, int]:
    """Bytes of the files that are uploaded: all but the manifest that comes last, and copies of others' manifests."""
    found = {p.relative_to(checkpoint).as_posix(): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
    return {
        name: num_bytes for name, num_bytes in found.items()
        if name != manifest_name() and not name.startswith("elsewhere_")
    }  # fmt: skip


@contextmanager
def _in_one_line(where: str) -> Iterator[None]:
    """What a store refuses, or cannot do after all repetitions, in one line."""
    try:
        yield
    except OSError as error:
        url = str(error.filename or where)
        if "://" not in url:
            raise
        what, hint = (
            "the store cannot be used",
            "checkpoints that are whole there stay so; start again with the same call",
        )
        if isinstance(error, FileNotFoundError):
            what, hint = "the bucket or the object is not there", "make the bucket, or look at the URL"
        if isinstance(error, PermissionError):
            what, hint = "the store permits it not", "look at the credentials"
        raise TrainingError(what, where=url, found=error.strerror or str(error), hint=hint) from error
