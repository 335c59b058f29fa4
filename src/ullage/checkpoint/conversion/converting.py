"""Conversion of a checkpoint: prove, lay out, copy, sync, rename.

Nothing is written before every tensor is proved whole and the target is proved possible. All work goes to
``TARGET.partial``; when every byte is there and synced it is renamed. A conversion that is refused leaves nothing; one
that is interrupted leaves only the partial, and the next call with the same source and options goes on from it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ullage.checkpoint.conversion.checksums import compare_sources
from ullage.checkpoint.conversion.comparing import Pair, compare_pairs
from ullage.checkpoint.conversion.copying import Files, copy_files, split
from ullage.checkpoint.conversion.destination import disk_error, partial_of, point_to, require_paths, require_writable
from ullage.checkpoint.conversion.journal import FOLDER, Journal, Line, mark_of, plan_of, sync_files
from ullage.checkpoint.core.inventory import Inventory
from ullage.checkpoint.core.paths import checkpoint_path, is_remote, is_url
from ullage.checkpoint.core.reading import Unreadable
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.formats import table as formats
from ullage.checkpoint.formats.locate import COMPLETE
from ullage.core.display import Shown, quantity
from ullage.core.errors import CheckpointError, InputError


@dataclass(repr=False)
class Report(Shown):
    """The report of a conversion. Bytes count tensors and descriptions; seconds are wall time."""

    source: str
    target: str
    format: str
    num_tensors: int = 0
    num_files: int = 0
    num_bytes: int = 0
    bytes_resumed: int = 0
    records_checked: int = 0
    seconds: float = 0.0
    workers: int = 1
    #: (parameter, state key, elements that are NaN or Inf)
    not_finite: list[tuple[str, str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def bytes_per_second(self) -> float:
        """Bytes written by this run, without those of an interrupted one, over its wall time."""
        return (self.num_bytes - self.bytes_resumed) / self.seconds if self.seconds else 0.0

    def _facts(self) -> Iterator[str]:
        yield f"{self.format}{', dry run' if self.dry_run else ''}"
        yield quantity(self.num_tensors, "tensor")
        yield f"{quantity(self.num_bytes, 'byte')} in {quantity(self.num_files, 'file')}"
        yield f"{self.seconds:.2f} s"
        if self.not_finite:
            yield f"{quantity(len(self.not_finite), 'tensor')} with NaN or Inf"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)


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
    dry_run: bool = False,
    ranks: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """Convert a checkpoint to another format.

    Args:
        source: the folder or URL, as for :func:`ullage.checkpoint.read`, or an inventory.
        target: a folder that does not exist, whose parents are made. Of ``zero1`` to ``zero3`` the folder for
            ``engine.load_checkpoint``: the files lie in ``global_stepN`` of it, and ``latest`` beside that; or a folder
            of such a name itself.
        format: ``universal``, ``safetensors``, ``dcp``, ``trainer`` (a folder that a plain Trainer resumes from), or
            ``zero1``, ``zero2``, ``zero3``: shards of a DeepSpeed run of that stage.
        workers: threads of this process; by default two for each processor that it may use, at most 8.
        dtype: cast weights to ``bfloat16``, ``float16`` or ``float32`` (safetensors, dcp); of ``zero1`` to
            ``zero3`` the dtype that the run trains in, by default that of the source's module.
        optimizer: whether to carry the optimizer's state; by default not to safetensors, always to universal.
        progress: called as ``progress(done, total)``, in bytes, from any thread, never from two at once.
        dry_run: prove and lay out, write nothing.
        ranks: data-parallel ranks of ``zero1`` to ``zero3``.
        storage_options: those of fsspec, for URLs.

    Returns the report; elements that are NaN or Inf are counted in it. Memory: one chunk of 2 MiB per thread, and the
    descriptions of the tensors.

    Raises ``CheckpointError`` for a source that is not whole (the error's ``problems`` lists all), that is damaged, or
    whose replicas differ; ``InputError`` for a target that cannot be written, or that another process is writing.
    """
    began = time.monotonic()
    inventory = source if isinstance(source, Inventory) else formats.read(source, storage_options=storage_options)
    if is_url(target) or is_remote(target):
        hint = "convert to a folder, and copy that: aws s3 sync FOLDER URL"
        raise InputError("a conversion writes to a folder, not to a URL", where=str(target), hint=hint)
    target = Path(os.path.abspath(checkpoint_path(target)))
    formats.require_format(format, ranks)
    target = formats.shards_folder(inventory, target, format)
    # Everything that can be refused is refused before a byte is written.
    formats.require_none(inventory, inventory.problems())
    targets = formats.targets(inventory, format, dtype=dtype, optimizer=optimizer, ranks=ranks)
    require_paths(targets, target)
    report = _report(inventory, targets, target, format)
    report.workers, report.dry_run = workers or default_workers(), dry_run
    if dry_run:
        report.seconds = time.monotonic() - began
        return report
    options = {"format": format, "dtype": dtype, "optimizer": formats.carries_optimizer(format, optimizer)}
    options |= {} if ranks is None else {"ranks": ranks}
    plan = plan_of(targets)
    with as_checkpoint_error(str(inventory.folder)):
        mark = mark_of(inventory, plan, options)
    options |= {"plan": plan}
    job = _Job(inventory, targets, target, mark, report, progress, options)
    require_writable(inventory, target, job.partial, report.num_bytes)
    job.run()
    _point(target, format)
    report.seconds = time.monotonic() - began
    return report


def _report(inventory: Inventory, targets: list[Target], target: Path, format: str) -> Report:
    """The report of a conversion that has not begun: what it will write."""
    carried = [payload.tensor for t in targets for payload in t.payloads if payload.tensor.name]
    if format.startswith("zero"):  # its pieces hold parts of many tensors, and more pieces on more ranks
        keys = {tensor.key for tensor in carried}
        carried = [tensor for tensor in inventory.tensors if tensor.key in keys]
    return Report(
        str(inventory.folder),
        str(target),
        format,
        num_tensors=len(carried),
        num_files=len(targets),
        num_bytes=sum(t.num_bytes for t in targets),
        notes=[*inventory.notes, *formats.FORMATS[format].notes(inventory, targets)],
    )


def _point(target: Path, format: str) -> None:
    """Write the target's name into the file beside it by which loaders of the format find it, if they do."""
    pointer = formats.FORMATS[format].pointer
    if pointer is None:
        return
    try:
        point_to(target, pointer)
    except OSError as error:
        advice = f"the target is whole: write its name into {target.parent / pointer} once {{}}"
        raise disk_error(error, target.parent, advice) from error


def where_is(folder: Path) -> str:
    """A folder as ``ullage.json`` names it: its absolute path, or its URL."""
    return str(folder) if is_remote(folder) else os.path.abspath(folder)


def default_workers() -> int:
    """Threads of a process: two for each processor that it may use, at most 8."""
    return max(
        1, min(8, 2 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    )


@dataclass
class _Job:
    """One conversion.

    Attributes:
        inventory: the source.
        targets: all files of the target.
        target: the folder under its final name.
        mark: fingerprint of source, plan and options, which the journal must bear.
        report: filled in as the work goes on.
        progress: as for :func:`convert`.
        options: those that ``ullage.json`` records.
    """

    inventory: Inventory
    targets: list[Target]
    target: Path
    mark: str
    report: Report
    progress: Callable[[int, int], None] | None
    options: dict[str, Any]

    @property
    def partial(self) -> Path:
        """The folder in which a conversion to a folder works."""
        return partial_of(self.target)

    def run(self) -> None:
        """Do all units that are not done yet in the partial, and rename it."""
        made = [p for p in self.partial.parents if not p.exists()]
        journal: Journal | None = None
        try:
            journal = Journal(self.partial, self.mark)
            if journal.removed_other:
                self.report.notes.append("a partial of another source or other options was removed")
            self._finish(self._work(journal))
        except CheckpointError as error:
            # An unreadable file may be readable later, so what is done is kept. A source that is refused will be
            # refused again.
            if not isinstance(error, Unreadable):
                shutil.rmtree(self.partial, ignore_errors=True)
                for folder in made:
                    with suppress(OSError):  # someone else has put something there
                        folder.rmdir()
            raise
        except OSError as error:
            advice = "what is done is kept: run the same command again once {}, or remove the .partial"
            raise disk_error(error, self.partial, advice) from error
        finally:
            if journal is not None:
                journal.close()

    def _work(self, journal: Journal) -> list[Line]:
        """What is to be kept of all files, once they are done."""
        files, left = split(self.targets), []
        for each in files:
            # What is done counts where it is still there at its size.
            if each.number in journal.done and self._is_there(each):
                each.line = journal.done[each.number]
                self.report.bytes_resumed += each.num_bytes
            else:
                left.append(each)
        count = self.report.bytes_resumed

        def step(num_bytes: int) -> None:
            nonlocal count
            count += num_bytes
            if self.progress is not None:
                self.progress(count, self.report.num_bytes)

        copy_files(self.inventory, self.targets, self.partial, left, journal, self.report.workers, step)
        return [each.line for each in files]

    def _is_there(self, files: Files) -> bool:
        paths = {self.partial / target.name: target.num_bytes for target in self.targets[files.first : files.last]}
        return all(path.exists() and path.stat().st_size == size for path, size in paths.items())

    def _finish(self, lines: list[Line]) -> None:
        """Compare the checksums of the source, write ``ullage.json``, sync, rename."""
        (self.partial / COMPLETE).write_text(self._make_summary(lines))
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

    def _make_summary(self, lines: list[Line]) -> str:
        """The content of ``ullage.json``, of a source whose checksums agree with all that was read of it."""
        # The source is judged before the target is finished: a damaged source never becomes a target.
        self.report.records_checked = compare_sources(self.inventory, [line.runs for line in lines])
        self._compare_twins()
        counts: Counter[tuple[str, str]] = Counter()
        for index, number, count in (found for line in lines for found in line.not_finite):
            tensor = self.targets[index].payloads[number].tensor
            counts[tensor.name, tensor.key] += count
        self.report.not_finite = sorted((name, key, count) for (name, key), count in counts.items())
        summary = {"mark": self.mark, "source": where_is(self.inventory.folder), **self.options}
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
