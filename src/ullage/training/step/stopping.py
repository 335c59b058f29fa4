"""Ending a run early, on all ranks after the same step, with a checkpoint to go on from.

A signal reaches one rank or all of them, each at another moment. So the rank that gets one only notes it in a
:class:`StopFlag`; the reduction of the label counts, which every rank enters before a step, carries it to the others,
and all of them stop after that step. A second signal ends the process without waiting for the step. For that a thread
reads the signals too: the main thread may be inside a collective, where Python's own handlers do not run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ullage.core.errors import InputError

#: Seconds in which several signals are one: a launcher forwards what its processes may have got as well.
_ONE_SIGNAL = 1.0


def takes_sigterm(arguments: Any) -> bool:
    """Whether transformers saves a checkpoint at SIGTERM by itself."""
    return bool(getattr(arguments, "enable_jit_checkpoint", False))


@dataclass
class StopFlag:
    """The request to stop after a step, as the number of a signal, 0 for none.

    Attributes:
        requested: on this rank; a signal handler may set it at any time.
        agreed: the greatest of all ranks' requests, known to each before every step.
    """

    requested: int = 0
    agreed: int = 0

    def clear(self) -> None:
        """Take back what was requested and agreed."""
        self.requested = self.agreed = 0


class EarlyEnd(TrainerCallback):
    """End training after a step with a checkpoint. ``reached``: whether it did."""

    reached = False

    def end(self, control: Any) -> None:
        """Save after this step and train no further one."""
        control.should_save = control.should_training_stop = self.reached = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # transformers ends an epoch that was left too; the run that goes on will do what belongs to its end.
        if self.reached and (state.epoch or 0.0) % 1:
            control.should_log = control.should_evaluate = control.should_save = False


class StopOnSignal(EarlyEnd):
    """Within ``with``, the first SIGTERM or Ctrl-C on any rank ends training on all, after the running step.

    A checkpoint is saved there. A second signal, a second or more after the first, ends this process at once. The
    handlers that were there before are put back at the end of the block::

        with StopOnSignal(trainer) as stop:
            trainer.train()
        if stop.number:
            sys.exit(stop.exit_status)

    Use it in the main thread, on every rank alike: the end of the block is collective unless an error leaves it.
    Raises ``InputError`` beside transformers' ``enable_jit_checkpoint``, which takes SIGTERM for itself.

    Args:
        trainer: one of ours.
        signals: those to take.
        at_once: called with the number of the second signal, in a thread; without it the process ends as it would
            without a handler.
    """

    def __init__(
        self,
        trainer: Any,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
        at_once: Callable[[int], None] | None = None,
    ) -> None:
        if signal.SIGTERM in signals and takes_sigterm(trainer.args):
            raise InputError(
                "SIGTERM is taken already",
                where="TrainingArguments.enable_jit_checkpoint",
                hint="leave it out, or pass signals without SIGTERM",
            )
        self.number = 0
        self._trainer, self._signals, self._at_once = trainer, tuple(signals), at_once or _die_of
        self._before: dict[int, Any] = {}
        self._watch: _Watch | None = None
        self._first: float | None = None

    @property
    def exit_status(self) -> int:
        """Exit status in a shell of a process that the signal ended: 143 for SIGTERM, 130 for Ctrl-C; 0 without one."""
        return 128 + self.number if self.number else 0

    def __enter__(self) -> StopOnSignal:
        self._trainer.stop.clear()
        self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        # Python handlers stay in place beside the thread: without one the signal would end the process in C.
        self._watch = _Watch.started(self._received)
        self._trainer.add_callback(self)
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _active.remove(self)
        self._trainer.remove_callback(self)
        if self._watch is not None:
            self._watch.end()
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self.number = self._trainer.stop.agreed or self._trainer.stop.requested
        if kind is None and self._trainer.args.world_size > 1:
            # One that came after the last step is known to its own rank only.
            number = torch.tensor(self.number, device=self._trainer.args.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            self.number = int(number)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stop = self._trainer.stop
        # A rank's own request may be newer than the agreement before this step. Ranks that acted on it would stop after
        # different steps.
        if stop.agreed or (args.world_size == 1 and stop.requested):
            self.end(control)

    def _on_signal(self, number: int, frame: Any) -> None:
        stop = self._trainer.stop
        stop.requested = stop.requested or number
        if self._watch is None:
            self._received(number)

    def _received(self, number: int) -> None:
        if number in self._signals:
            now = time.monotonic()
            if self._first is None:
                self._first = now
            elif now - self._first > _ONE_SIGNAL:
                self._at_once(number)

    def forget(self) -> None:
        """In a process forked meanwhile, a worker of a DataLoader: it ends when its parent tells it to.

        Ctrl-C in a terminal reaches it too, and must not take the batches of the running step away.
        """
        if self._watch is not None:
            # The pipe is the parent's: what this process wrote to it would be a signal to the parent.
            signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            if number == signal.SIGINT:
                handler = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Watch:
    """A thread that hears of each signal when it arrives, whatever the main thread is doing."""

    def __init__(self, received: Callable[[int], None], reading: int, writing: int) -> None:
        self._received, self._reading, self._writing = received, reading, writing
        self._thread = threading.Thread(target=self._run, name="ullage signals", daemon=True)
        self._thread.start()

    @classmethod
    def started(cls, received: Callable[[int], None]) -> _Watch | None:
        """Start the thread; None where an event loop or other code has set a wakeup descriptor of its own."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # Python's C handler writes a signal's number to this pipe at once, on whatever thread; the Python handler runs
        # only when the main thread is back in the interpreter. Not blocking, because set_wakeup_fd demands it.
        other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if other == -1:
            return cls(received, reading, writing)
        signal.set_wakeup_fd(other)
        os.close(reading)
        os.close(writing)
        return None

    def end(self) -> None:
        signal.set_wakeup_fd(-1)
        # No signal has number 0, so it ends the thread.
        os.write(self._writing, b"\0")
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def _run(self) -> None:
        while number := os.read(self._reading, 1)[0]:
            self._received(number)


def _die_of(number: int) -> None:
    """End as a process without a handler does. Python sets handlers in the main thread only, C in any."""
    ctypes.pythonapi.PyOS_setsig(number, None)
    os.kill(os.getpid(), number)


_active: list[StopOnSignal] = []


def _forget_in_child() -> None:
    for stop in _active:
        with suppress(ValueError):
            stop.forget()
    _active.clear()


os.register_at_fork(after_in_child=_forget_in_child)
