"""Saving without waiting: a checkpoint is copied to host memory, and written by a thread while training goes on.

The state is copied where a save that waits would write it (:class:`Snapshot`); a thread of each rank then writes the
rank's files, and these threads do together what makes a checkpoint whole (:mod:`ullage.training.saving.staging`): sums,
manifest, flush, rename, and rotation. They meet in a process group of their own, never in that of training, so no
collective of theirs stands between those of a step. A thread, and no process: nearly all of the work (writing,
summing, flushing) runs without the interpreter's lock, and a thread dies with its process.

At most one save is under way: the next one waits for it, and so do the end of training and any stop. A failure is told
in the reduction before the next step and raised there on every rank.

**Snapshots.** The writers of transformers, accelerate, peft and DeepSpeed all end in two calls: ``torch.save``, and the
``serialize_file`` of safetensors. Within :meth:`Snapshot.taking` these copy instead of writing. An object is pickled at
once, and the bytes of its storages are copied, which is 10 to 40 times faster than writing them; :meth:`Snapshot.write`
then writes the same records by the same libraries, so the files are those of a save that waits, byte for byte. Small
texts, and files of other kinds, are written at once, as ever.

Source: ``_save`` and ``_open_zipfile_writer`` of torch 2.13 ``serialization.py``; ``save_file`` of safetensors 0.8
``torch.py``. Where a version calls neither, its files are written at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.checkpoint.core.numbers import SAFETENSORS
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.ranks import Axis
from ullage.ranks.ending import before_the_end
from ullage.ranks.groups import make_group
from ullage.ranks.lost import is_of_collective
from ullage.ranks.world import agreement, meeting_over, several_ranks

if TYPE_CHECKING:
    import transformers

_LOG = logging.getLogger(__name__)
#: Seconds for a save under way where another rank is lost: it may wait for that one.
_TO_SETTLE = 5.0
#: torch's dtypes by the names in safetensors' headers. Packed ones, which have no name there, are not copied.
_DTYPES = {name: getattr(torch, dtype) for dtype, name in SAFETENSORS.items()}

#: Those whose thread may run, for the end of the process.
_running: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


class HostMemory:
    """Host memory that is kept for the next snapshot: fresh pages cost ten times as much as the copy into them."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._taken = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, taken or not."""
        return sum(copy.numel() for copy in self._copies)

    def copy_of(self, source: Tensor) -> Tensor:
        """The bytes ``source`` [n], uint8 on the host, in memory that is held until :meth:`give_back`."""
        # Saves of one run copy the same tensors in the same order, so copy number k has the size of last time's.
        number, self._taken = self._taken, self._taken + 1
        if number == len(self._copies) or self._copies[number].numel() != source.numel():
            self._copies[number : number + 1] = [torch.empty(source.numel(), dtype=torch.uint8)]
        return self._copies[number].copy_(source)

    def give_back(self) -> None:
        """All memory is free to be copied into again."""
        self._taken = 0


class Snapshot:
    """Files as they are to be written.

    Args:
        memory: of the copies; taken until :meth:`write` has returned.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._files: list[tuple[Path, Callable[[], None]]] = []

    @contextlib.contextmanager
    def taking(self, place: Path) -> Iterator[None]:
        """Within it, what this thread saves below ``place`` by torch or safetensors is copied and not written.

        An empty file stands for it; one that is removed meanwhile is not written later. Waits for the device.
        """
        below, thread = os.path.abspath(place) + os.sep, threading.get_ident()
        serialization: Any = torch.serialization
        library: Any = safetensors.torch
        open_archive, serialize = serialization._open_zipfile_writer, library.serialize_file

        def is_ours(path: Any) -> bool:
            named = isinstance(path, (str, os.PathLike)) and threading.get_ident() == thread
            return named and os.path.abspath(os.fspath(path)).startswith(below)

        def archive(path: Any) -> Any:
            return _Archive(self, Path(path), open_archive) if is_ours(path) else open_archive(path)

        def tensors(flat: dict[str, Any], path: Any, metadata: Any = None) -> None:
            copies = self._copied(flat) if is_ours(path) else None
            if copies is None:
                serialize(flat, path, metadata=metadata)
                return
            self.add(Path(path), lambda: safetensors.torch.save_file(copies, path, metadata))

        with replaced(serialization, "_open_zipfile_writer", archive), replaced(library, "serialize_file", tensors):
            yield

    def add(self, path: Path, write: Callable[[], None]) -> None:
        """Have ``write`` called later for the file ``path``."""
        path.touch()
        self._files.append((path, write))

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage of the same bytes."""
        view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # pyright: ignore
        return self._memory.copy_of(view).untyped_storage()

    def write(self) -> None:
        """Write the files, in the order in which they were saved, and let go of the copies."""
        try:
            for path, write in self._files:
                if path.exists():
                    write()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of the copies, written or not."""
        self._files.clear()
        self._memory.give_back()

    def _copied(self, flat: dict[str, Any]) -> dict[str, Tensor] | None:
        """Copies of the tensors that safetensors' specifications point to; None where there is one of another kind."""
        copies = {}
        for name, spec in flat.items():
            dtype = _DTYPES.get(getattr(spec, "dtype", ""))
            if dtype is None:
                return None
            source = torch.empty(0, dtype=torch.uint8)
            if spec.data_len:
                source = torch.frombuffer(
                    (ctypes.c_uint8 * spec.data_len).from_address(spec.data_ptr), dtype=torch.uint8
                )
            copies[name] = self._memory.copy_of(source).view(dtype).view(list(spec.shape))
        return copies


class _Archive:
    """Stands for torch's writer of an archive: the records are kept for the snapshot."""

    def __init__(self, snapshot: Snapshot, path: Path, open_archive: Callable[[str], Any]) -> None:
        self._snapshot, self._path, self._open = snapshot, path, open_archive
        self._records: list[tuple[str, Any, int]] = []

    def __enter__(self) -> _Archive:
        return self

    def write_record(self, name: str, data: Any, size: int) -> None:
        copied = self._snapshot.copy_of(data) if isinstance(data, torch.UntypedStorage) else data
        self._records.append((name, copied, size))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._snapshot.add(self._path, self._write)

    def _write(self) -> None:
        with self._open(str(self._path)) as archive:
            for name, data, size in self._records:
                archive.write_record(name, data, size)
        self._records.clear()


def saves_in_background(arguments: Any) -> bool:
    """Whether arguments ask for saves in the background."""
    return bool(getattr(arguments, "async_save", False))


class BackgroundSave:
    """The saves of ``trainer`` that are written while it trains.

    Attributes:
        failure: of the last save on this rank, until it was raised.
        is_on: whether the run saves in the background.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._memory = HostMemory()
        self._axis: Axis | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self.failure: BaseException | None = None
        self.is_on = False

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A run of training: the group of the threads is made, and no save outlasts the block.

        Collective. Raises ``InputError`` on every rank for a run that cannot be saved so. A failure of the last save
        is raised by :meth:`settle`, not here, where another error may be on its way.
        """
        if not saves_in_background(self._trainer.args):
            yield
            return
        self._require_possible()
        if self._axis is None and several_ranks():
            # On the host, whatever training talks over: a group of NCCL would share the device's stream.
            group = make_group(range(dist.get_world_size()), name="savers")
            self._axis = Axis.from_group(group, "savers")
        self.is_on = True
        seconds = None
        try:
            yield
        except BaseException as error:
            seconds = _TO_SETTLE if is_of_collective(error) else None
            raise
        finally:
            self.is_on = False
            self.join(seconds)
            if self.failure is not None:
                _LOG.error("the checkpoint that was being written is not there: %s", self.failure)
                self.failure = None
            self._memory = HostMemory()  # a run that is over holds none

    def snapshot(self) -> Snapshot:
        """A snapshot to copy a checkpoint into; the save before must be settled."""
        self._memory.give_back()  # what an error has left of a copy, too
        return Snapshot(self._memory)

    def begin(self, snapshot: Snapshot, finish: Callable[[], None]) -> None:
        """Finish in the background the save of which ``snapshot`` holds the files.

        ``finish``: called in the thread, where it may meet the other ranks; writes what was copied.
        """

        def work() -> None:
            try:
                with contextlib.nullcontext() if self._axis is None else meeting_over(self._axis):
                    finish()
            except BaseException as error:  # raised by the main thread, before its next step
                self.failure = error
                snapshot.forget()

        self._thread = threading.Thread(target=work, name="ullage saving", daemon=True)
        _running.add(self)
        self._thread.start()

    def settle(self) -> None:
        """Wait for the save that is under way. Collective; raises on every rank if it failed on one."""
        if not self.is_on:
            return
        self.join()
        failure, self.failure = self.failure, None
        try:
            with agreement("writing a checkpoint in the background"):
                if failure is not None:
                    raise failure
        finally:
            failure = None  # its traceback refers to this frame

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread, at most ``timeout`` seconds; whether it has ended. From any thread."""
        # In a process that was forked meanwhile, such as a worker of a DataLoader, there is no thread to wait for.
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        self._thread = None
        _running.discard(self)
        return True

    def _require_possible(self) -> None:
        trainer, where = self._trainer, "TrainingArguments.async_save"
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None) if trainer.is_fsdp_enabled else None
        if plugin is not None and "FULL" not in str(plugin.state_dict_type):
            raise InputError(
                "FSDP's ranks write their shards together, by collectives of training's own group",
                where=where,
                expected="fsdp_config={'state_dict_type': 'FULL_STATE_DICT'}, or no FSDP",
                found=str(plugin.state_dict_type),
                hint="leave async_save out, or save whole state dicts",
            )
        if trainer.args.push_to_hub and trainer.args.hub_strategy != "end":
            raise InputError(
                "a checkpoint is uploaded when its save returns, and this one is not written then",
                where=where,
                expected="hub_strategy='end', or no push_to_hub",
                found=f"hub_strategy={str(trainer.args.hub_strategy)!r}",
                hint="leave async_save out, or call trainer.push_to_hub() after training",
            )
        engine = getattr(trainer, "deepspeed", None) if trainer.is_deepspeed_enabled else None
        if engine is not None and engine.checkpoint_engine.is_decoupled():
            raise InputError(
                "DeepSpeed's own decoupled writer tells nobody when a checkpoint is whole",
                where=where,
                expected="no checkpoint writer in DeepSpeed's config",
                found=type(engine.checkpoint_engine).__name__,
                hint="leave 'checkpoint': {'writer': ...} out of DeepSpeed's config",
            )


@before_the_end
def _let_go(until: float) -> bool:
    """Wait until ``until`` for saves that a run was left with; whether all have ended."""
    ended = [save.join(max(0.0, until - time.monotonic())) for save in list(_running)]  # each, whatever the others
    return all(ended)
