"""Saving without waiting: a checkpoint is copied to host memory, and written by a thread while training goes on.

The state is copied where a save that waits would write it (:mod:`ullage.training.snapshot`); a thread of each rank then
writes the rank's files, and these threads do together what makes a checkpoint whole (:mod:`ullage.training.staging`):
sums, manifest, flush, rename, and rotation. They meet in a process group of their own, never in that of training, so
no collective of theirs stands between those of a step. A thread, and no process: nearly all of the work (writing,
summing, flushing) runs without the interpreter's lock, and a thread dies with its process.

At most one save is under way: the next one waits for it, and so do the end of training and any stop. A failure is told
in the reduction before the next step and raised there on every rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ullage.errors import InputError
from ullage.ranks import Axis
from ullage.ranks.ending import before_the_end
from ullage.ranks.groups import make_group
from ullage.training.agreement import agreement, meeting_over
from ullage.training.snapshot import HostMemory, Snapshot

_LOG = logging.getLogger(__name__)

#: Those whose thread may run, for the end of the process.
_running: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


def is_asked_for(arguments: Any) -> bool:
    """Whether arguments ask for saves in the background."""
    return bool(getattr(arguments, "async_save", False))


class BackgroundSave:
    """The saves of ``trainer`` that are written while it trains.

    Attributes:
        failure: of the last save on this rank, until it was raised.
        is_on: whether the run saves in the background.
    """

    def __init__(self, trainer: Any) -> None:
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
        if not is_asked_for(self._trainer.args):
            yield
            return
        self._require_possible()
        if self._axis is None and self._several:
            # On the host, whatever training talks over: a group of NCCL would share the device's stream.
            group = make_group(range(dist.get_world_size()), name="savers")
            self._axis = Axis.from_group(group, "savers")
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            self._join()
            if self.failure is not None:
                _LOG.error("the checkpoint that was being written is not there: %s", self.failure)
                self.failure = None
            self._memory = HostMemory()  # a run that is over holds none

    def begin(self, copy: Callable[[Snapshot], None], finish: Callable[[Callable[[], None]], None]) -> None:
        """Copy a checkpoint now and write it in the background. Collective; the one before must be settled.

        Args:
            copy: saves as ever, with a snapshot to do it in.
            finish: called in the thread, where it may meet the other ranks; its argument writes what was copied.
        """
        snapshot = Snapshot(self._memory)
        copy(snapshot)

        def work() -> None:
            try:
                with contextlib.nullcontext() if self._axis is None else meeting_over(self._axis):
                    finish(snapshot.write)
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
        self._join()
        failure, self.failure = self.failure, None
        try:
            with agreement(self._several, "writing a checkpoint in the background"):
                if failure is not None:
                    raise failure
        finally:
            failure = None  # its traceback refers to this frame

    @property
    def _several(self) -> bool:
        return self._trainer.args.world_size > 1

    def _join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
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
    ended = [save._join(max(0.0, until - time.monotonic())) for save in list(_running)]  # each, whatever the others
    return all(ended)
