"""Conversion of a checkpoint: prove, lay out, copy, sync, rename.

Nothing is written before every tensor is proved whole and the target is proved possible. All work goes to
``TARGET.partial``; when every byte is there and synced it is renamed. A conversion that is refused leaves nothing; one
that is interrupted leaves only the partial, and the next call with the same source and options goes on from it.

Under torchrun (``RANK`` and ``WORLD_SIZE``) every process makes the same plan and takes its share of the units; process
0 waits for the journals of the others, fills in the checksums, and renames. The only thing shared is the file system.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.checkpoint.conversion import checksums, copying, uploading
from ullage.checkpoint.conversion.comparing import Pair, compare_pairs
from ullage.checkpoint.conversion.destination import disk_error, partial_of, point_to, require_paths, require_writable
from ullage.checkpoint.conversion.journal import FOLDER, Journal, Unit, mark_of, read_journals, split, sync_files
from ullage.checkpoint.conversion.meeting import Meeting, remove_other
from ullage.checkpoint.conversion.report import Report
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.formats import table as formats
from ullage.checkpoint.formats.locate import COMPLETE
from ullage.checkpoint.inventory import Inventory
from ullage.checkpoint.reading import Unreadable
from ullage.checkpoint.remote.paths import is_remote, path_of
from ullage.errors import CheckpointError, DistributedError, InputError, UllageError

#: By what the twins are: what it means that they differ, and what to do.
_TWINS = {
    "zero": (
        "pipeline stages hold different values of one parameter",
        "a tied weight that has drifted apart, or two parameters of one name",
    ),
    "muon": (
        "ranks hold different values of one parameter",
        "each rank that has a part of a matrix saves the whole of its momentum; train on from another checkpoint",
    ),
    "torch_dist": (
        "the optimizer's master copy is not the model's weight",
        "Megatron-Core 0.16.1 writes it so where a bucket of its buffers is padded; save again with --no-save-optim",
    ),
}


def convert(
    source: str | Path | Inventory,
    target: str | Path,
    *,
    format: str = "universal",
    workers: int | None = None,
    dtype: str | None = None,
    optimizer: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    dry_run: bool = False,
    ranks: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """Convert a checkpoint to another format.

    Args:
        source: the folder or URL, as for :func:`ullage.checkpoint.read`, or an inventory.
        target: a folder that does not exist, whose parents are made; or a URL at which nothing lies.
        format: ``universal``, ``safetensors``, ``dcp``, ``torch_dist`` (Megatron-Core's), ``trainer`` (a folder that a
            plain Trainer resumes from), or ``zero1``, ``zero2``, ``zero3``: shards of a DeepSpeed run of that stage.
        workers: threads of this process; by default two for each processor that it may use, at most 8.
        dtype: cast weights to ``bfloat16``, ``float16`` or ``float32`` (safetensors, dcp, torch_dist); of ``zero1`` to
            ``zero3`` the dtype that the run trains in, by default that of the source's module.
        optimizer: whether to carry the optimizer's state; by default not to safetensors, always to universal.
        progress: called as ``progress(done, total)``, in bytes, from any thread, never from two at once.
        rank: this process among those that share the work; by default torchrun's, else 0.
        world_size: processes that share the work; by default torchrun's, else 1.
        dry_run: prove and lay out, write nothing.
        ranks: data-parallel ranks of ``zero1`` to ``zero3``.
        storage_options: those of fsspec, for URLs.

    Returns the report; elements that are NaN or Inf are counted in it. Memory: one chunk of 2 MiB per thread, and the
    descriptions of the tensors.

    Raises ``CheckpointError`` for a source that is not whole (the error's ``problems`` lists all), that is damaged, or
    whose replicas differ; ``InputError`` for a target that cannot be written; ``DistributedError`` where another
    process of the launch fails.
    """
    began = time.monotonic()
    inventory = source if isinstance(source, Inventory) else formats.read(source, storage_options=storage_options)
    target = path_of(target, storage_options)
    target = target if is_remote(target) else Path(os.path.abspath(target))
    formats.require_format(format, ranks)
    share = _share(rank, world_size)
    # Everything that can be refused is refused before a byte is written.
    formats.require_none(inventory, inventory.problems())
    targets = formats.targets(inventory, format, dtype=dtype, optimizer=optimizer, ranks=ranks)
    require_paths(targets, target)
    report = _report(inventory, targets, target, format)
    report.world_size, report.workers, report.dry_run = share[1], workers or default_workers(), dry_run
    if dry_run:
        report.seconds = time.monotonic() - began
        return report
    options = {"format": format, "dtype": dtype, "optimizer": formats.carries_optimizer(format, optimizer)}
    options |= {} if ranks is None else {"ranks": ranks}
    with as_checkpoint_error(str(inventory.folder)):
        mark = mark_of(inventory, targets, options)
    job = _Job(inventory, targets, target, mark, share, report, progress, options)
    if is_remote(target):
        uploading.require_writable(inventory, target, share[1])
        job.run_to_store()
    else:
        require_writable(inventory, target, job.partial, report.num_bytes)
        job.run()
        if share[0] == 0:
            _point(target, format)
    report.seconds = time.monotonic() - began
    return report


def _report(inventory: Inventory, targets: list[Target], target: Path, format: str) -> Report:
    """The report of a conversion that has not begun: what it will write."""
    return Report(
        str(inventory.folder),
        str(target),
        format,
        num_tensors=sum(len(t.payloads) for t in targets),
        num_files=len(targets),
        num_bytes=sum(t.num_bytes for t in targets),
        notes=[*inventory.notes, *formats.notes(inventory, format, targets)],
    )


def _point(target: Path, format: str) -> None:
    """Write the target's name into the file beside it by which loaders of the format find it, if they do."""
    pointer = formats.POINTERS.get(format)
    if pointer is None:
        return
    try:
        point_to(target, pointer)
    except OSError as error:
        advice = f"the target is whole: write its name into {target.parent / pointer} once {{}}"
        raise disk_error(error, target.parent, advice) from error


def default_workers() -> int:
    """Threads of a process: two for each processor that it may use, at most 8."""
    return max(
        1, min(8, 2 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    )


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank, world_size = rank or 0, world_size or 1
    if not 0 <= rank < world_size:
        raise InputError("rank outside the world", expected=f"0 to {world_size - 1}", found=rank)
    return rank, world_size


@dataclass
class _Job:
    """One process's part of a conversion.

    Attributes:
        inventory: the source.
        targets: all files of the target, the same in every process.
        target: the folder under its final name.
        mark: fingerprint of source, plan and options, which the journals must bear.
        share: (rank, number of processes).
        report: filled in as the work goes on.
        progress: as for :func:`convert`.
        options: those that ``ullage.json`` records.
        made: folders above the target that this conversion made, innermost first.
    """

    inventory: Inventory
    targets: list[Target]
    target: Path
    mark: str
    share: tuple[int, int]
    report: Report
    progress: Callable[[int, int], None] | None
    options: dict[str, Any]
    made: list[Path] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        """The folder in which a conversion to a folder works."""
        return partial_of(self.target)

    def run(self) -> None:
        """Do this process's share of the units; process 0 then finishes, and the others wait for it."""
        rank, world_size = self.share
        self.meeting = Meeting(self.partial, rank, world_size)
        journal: Journal | None = None
        try:
            if rank == 0:
                # Process 0 alone makes the partial, and locks it before it clears: a second launch is refused at the
                # lock, and must not have removed the files of the first. The others join once they are answered.
                self._make_partial()
                journal = Journal(self.partial, rank, self.mark)
                self.meeting.clear()
                self.meeting.begin()
            else:
                self.meeting.begin()
                journal = Journal(self.partial, rank, self.mark)
            self._work(self._present(read_journals(self.partial, self.mark) or {}), journal)
        except DistributedError:
            raise
        except UllageError as error:
            # An unreadable file may be readable later, so what is done is kept; other processes may still be writing.
            refused = isinstance(error, CheckpointError) and not isinstance(error, Unreadable)
            self._fail(error, remove=world_size == 1 and refused)
            raise
        except OSError as error:
            self._fail(error, remove=False)
            advice = "what is done is kept: run the same command again once {}, or remove the .partial"
            raise disk_error(error, self.partial, advice) from error
        finally:
            if journal is not None:
                journal.close()
        if rank > 0:
            self.meeting.wait(lambda: self.target.exists() or not self.partial.exists(), "process 0 to finish")
            if not self.target.exists():
                raise DistributedError("process 0 gave up", where=str(self.partial))

    def run_to_store(self) -> None:
        """Do all units, file by file, into a target in a store."""

        def step(num_bytes: int) -> None:
            if self.progress is not None:
                self.progress(num_bytes, self.report.num_bytes)

        job = uploading.Upload(self.inventory, self.targets, self.target, self.mark, self.report.workers, step)
        self.report.bytes_resumed = job.run(self._judged, pointer=formats.POINTERS.get(self.options["format"]))
        self.report.notes += job.notes

    def _work(self, done: dict[int, dict[str, Any]], journal: Journal) -> None:
        rank, world_size = self.share
        units = split(self.targets)
        mine = [u for u in _part(units, rank, world_size) if u.number not in done]
        # Bytes done before, by any process: progress counts the whole conversion.
        held = sum(u.num_bytes for u in units if u.number in done)
        self.report.bytes_resumed = held
        count = [held]

        def step(num_bytes: int) -> None:
            count[0] += num_bytes
            if self.progress is not None:
                self.progress(count[0], self.report.num_bytes)

        # Every process prepares: it needs the files, and does not know which process was first.
        copying.prepare(self.partial, self.targets)
        lines = done | copying.run_units(
            self.inventory, self.targets, self.partial, mine, journal, self.report.workers, step
        )
        if rank == 0:
            self._finish(units, self._gather(units, lines) if world_size > 1 else lines)
        else:
            self.meeting.finish_share()

    def _make_partial(self) -> None:
        """Make the partial, or go on with the one that is there if it is of this very conversion."""
        if self.partial.exists() and read_journals(self.partial, self.mark) is None:
            remove_other(self.partial)
            self.report.notes.append("a partial of another source or other options was removed")
        self.made = [p for p in self.partial.parents if not p.exists()]
        (self.partial / FOLDER).mkdir(parents=True, exist_ok=True)

    def _present(self, done: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Finished units whose files are still there at their size; a unit of small files needs all of them."""
        units = {u.number: u for u in split(self.targets)}

        def whole(unit: Unit) -> bool:
            for target in self.targets[unit.first : unit.last]:
                path = self.partial / target.name
                if not path.exists() or path.stat().st_size != target.num_bytes:
                    return False
            return True

        return {n: line for n, line in done.items() if n in units and whole(units[n])}

    def _finish(self, units: list[Unit], lines: dict[int, dict[str, Any]]) -> None:
        """Compare and fill in the checksums, write ``ullage.json``, sync, rename."""
        summary = self._judged(lines)
        checksums.fill_checksums(self.targets, self.partial, units, lines)
        (self.partial / COMPLETE).write_text(summary)
        # All bytes are on the disk before the name is given; then the name is synced, an entry of the parent folder. So
        # what stands under the target's name is complete, even after a crash.
        sync_files(self.partial)
        shutil.rmtree(self.partial / FOLDER)
        os.rename(self.partial, self.target)
        fd = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _judged(self, lines: dict[int, dict[str, Any]]) -> str:
        """The content of ``ullage.json``, of a source whose checksums agree with all that was read of it."""
        # The source is judged before the target is finished: a damaged source never becomes a target.
        self.report.records_checked = checksums.compare_sources(self.inventory, lines)
        self._compare_twins()
        for line in lines.values():
            for index, number, count in line.get("not_finite", ()):
                tensor = self.targets[index].payloads[number].tensor
                self.report.not_finite.append((tensor.name, tensor.key, count))
        self.report.not_finite = _summed(self.report.not_finite)
        summary = {"mark": self.mark, "source": str(self.inventory.folder), **self.options}
        summary |= {
            "num_bytes": self.report.num_bytes,
            "not_finite": self.report.not_finite,
            "notes": self.report.notes,
        }
        return json.dumps(summary, indent=1) + "\n"

    def _compare_twins(self) -> None:
        """Refuse tensors of which the source holds two copies that differ."""
        carried = {(payload.tensor.name, payload.tensor.key) for t in self.targets for payload in t.payloads}
        pairs: list[Pair] = [(a, b, None) for a, b in self.inventory.twins if (a.name, a.key) in carried]
        for problem in compare_pairs(self.inventory, self.inventory, pairs, self.report.workers):
            is_muons = self.inventory.format == "zero" and self.inventory.written_by.pp == 1
            what, hint = _TWINS["muon" if is_muons else self.inventory.format]
            where = f"{self.inventory.folder}, parameter {problem.parameter}"
            raise CheckpointError(what, where=where, found=problem.what, hint=hint)

    def _gather(self, units: list[Unit], lines: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Wait until the journals of all processes hold all units; returns their lines by number."""
        found = dict(lines)

        def complete() -> bool:
            # A process adds a line after the bytes of the unit are written, so all lines together mean all bytes. One
            # without units may still be starting: it must have prepared the files before their checksums are filled in.
            found.update(read_journals(self.partial, self.mark) or {})
            return len(found) >= len(units) and self.meeting.shares_finished()

        self.meeting.wait(complete, "the other processes")
        return found

    def _fail(self, error: Exception, *, remove: bool) -> None:
        if not remove:
            self.meeting.fail(error)
            return
        # A source that is refused will be refused again, so nothing is kept for a resumption.
        shutil.rmtree(self.partial, ignore_errors=True)
        for folder in self.made:
            with suppress(OSError):  # someone else has put something there
                folder.rmdir()


def _part(units: list[Unit], rank: int, world_size: int) -> list[Unit]:
    """This process's share of the units: each process gets about as many bytes.

    All units are dealt out, done or not: the number of done ones grows while processes start, and all processes must
    come to the same shares.
    """
    if world_size == 1:
        return units
    loads = [0] * world_size
    mine = []
    # Largest first, each to the process with the fewest bytes so far.
    for unit in sorted(units, key=lambda u: (-u.num_bytes, u.number)):
        to = loads.index(min(loads))
        loads[to] += max(1, unit.num_bytes)
        if to == rank:
            mine.append(unit)
    return mine


def _summed(found: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    total: dict[tuple[str, str], int] = {}
    for name, key, count in found:
        total[name, key] = total.get((name, key), 0) + count
    return sorted((name, key, count) for (name, key), count in total.items())
