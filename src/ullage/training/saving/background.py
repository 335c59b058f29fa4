"""Saving without waiting: a checkpoint is written to memory, and moved to the disk by a thread while training goes on.

Where the host has a file system in memory (tmpfs, ``/dev/shm``) with room for what its ranks save, transformers' own
writers write there; a thread of each rank then does what makes a checkpoint whole
(:mod:`ullage.training.saving.staging`): files moved, sums, manifest, flush, rename, and rotation. The threads meet in a
process group of their own, never in that of training, so no collective of theirs stands between those of a step. A
thread, and no process: nearly all of the work runs without the interpreter's lock, and a thread dies with its process.
Where there is no such room, the save waits, which is said once.

At most one save is under way: the next one waits for it, and so do the end of training and any stop. A failure is told
in the reduction before the next step and raised there on every rank. What a killed process leaves in memory is removed
by the next run on the host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ullage.checkpoint.conversion.journal import lock
from ullage.core.display import size
from ullage.core.errors import InputError
from ullage.ranks import Axis
from ullage.ranks.ending import before_the_end
from ullage.ranks.groups import make_group
from ullage.ranks.lost import is_of_collective
from ullage.ranks.world import agreement, gather, is_first_of_machine, meeting_over, several_ranks
from ullage.training.setup.device_memory import free_host_memory

if TYPE_CHECKING:
    import transformers

_LOG = logging.getLogger(__name__)
#: Seconds for a save under way where another rank is lost: it may wait for that one.
_TO_SETTLE = 5.0
#: The file system in memory, the beginning of the names of our folders there, and the file that a run has locked.
_MEMORY, _PREFIX, _LOCK = Path("/dev/shm"), "ullage-save-", "lock"
#: Seconds in which a folder may not be locked yet by the run that has made it.
_YOUNG = 60.0
#: Bytes beside tensors, and how much more than them is asked for.
_BESIDE, _MARGIN = 16 << 20, 1.1

#: Those whose thread may run, for the end of the process.
_running: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


class MemoryFolder:
    """A folder in memory on each host, for the ranks of a run there. Collective."""

    def __init__(self) -> None:
        name = f"{_PREFIX}{gather(uuid.uuid4().hex)[0]}"
        self.path = _MEMORY / name
        self._lock: IO[Any] | None = None
        self._said = False
        if is_first_of_machine() and _MEMORY.is_dir():
            for left in _MEMORY.glob(f"{_PREFIX}*"):
                with contextlib.suppress(OSError), open(left / _LOCK, "a") as held:
                    if time.time() - left.stat().st_mtime > _YOUNG:
                        lock(held)  # by nobody: its process was killed
                        shutil.rmtree(left, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path.mkdir()
                self._lock = open(self.path / _LOCK, "a")  # noqa: SIM115
                lock(self._lock)
        gather(None)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the ranks of every host can write as much as they say there, on every rank the same."""
        wanted = gather((socket.gethostname(), num_bytes))
        mine = sum(each for host, each in wanted if host == socket.gethostname())
        try:
            free = min(shutil.disk_usage(self.path).free, free_host_memory())
        except OSError:
            free = 0
        lacking = [each for each in gather((mine, free)) if each[0] * _MARGIN + _BESIDE > each[1]]
        if lacking and is_first_of_machine() and not self._said:
            found, self._said = f"{size(lacking[0][1])} free, {size(lacking[0][0])} to save", True
            _LOG.warning("async_save: no room in %s (%s), so training waits for this save", _MEMORY, found)
        return not lacking

    def move(self, name: str, to: Path) -> None:
        """Move what the ranks of this host have written as ``name``; one of them does."""
        if is_first_of_machine():
            shutil.copytree(self.path / name, to, dirs_exist_ok=True)
            shutil.rmtree(self.path / name, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _bytes_to_save(trainer: transformers.Trainer) -> int:
    """Bytes of the weights and of the optimizer's tensors on this rank: as much as it saves, or more."""
    if not (trainer.args.should_save or trainer.is_deepspeed_enabled):
        return 0
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, and DeepSpeed's
        optimizer = optimizer.optimizer
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        tensors += [each for group in optimizer.param_groups for each in group["params"]]
        tensors += [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    whole = (getattr(each, "ds_tensor", each) for each in tensors)
    return sum(each.numel() * each.element_size() for each in whole)


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
        self._memory: MemoryFolder | None = None
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
        self._memory = MemoryFolder()
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
            self._memory.close()
            self._memory = None

    def memory(self) -> MemoryFolder | None:
        """Where the next checkpoint is to be written first; None where there is no room. The save before is settled.

        Collective.
        """
        memory = self._memory if self.is_on else None
        return memory if memory is not None and memory.has_room(_bytes_to_save(self._trainer)) else None

    def begin(self, finish: Callable[[], None]) -> None:
        """Have ``finish`` called in the thread, where it may meet the other ranks."""

        def work() -> None:
            try:
                with contextlib.nullcontext() if self._axis is None else meeting_over(self._axis):
                    finish()
            except BaseException as error:  # raised by the main thread, before its next step
                self.failure = error

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
