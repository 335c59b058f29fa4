"""Making the next step while this one trains: one thread, in step with the threads of all other ranks.

Every step that the thread makes is collective, so two ranks must never make different numbers of them. A thread may
therefore run at most ``ahead`` steps beyond those that were taken, and it makes all of these even when it is being
closed: ranks that took the same number of steps have then made the same number, whatever their timing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from ullage.ranks.ending import before_the_end

T = TypeVar("T")

# Weak: an iterator that nobody holds must not be kept alive by the handler at the end of the process.
_running: WeakSet[Background[Any]] = WeakSet()


class Background(Generic[T]):
    """Calls ``make`` in a thread, at most ``ahead`` results beyond those taken; ``None`` is the end.

    What ``make`` raises is raised by :meth:`take` in its turn. Neither it nor ``None`` is followed by another call.
    """

    def __init__(self, make: Callable[[], T | None], ahead: int) -> None:
        self._make, self._ahead = make, ahead
        self._results: deque[tuple[T | None, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._made, self._allowed, self._closing = 0, ahead, False
        self._thread = threading.Thread(target=self._run, name="ullage exchange", daemon=True)
        _running.add(self)
        self._thread.start()

    def take(self) -> T | None:
        """The next result; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._results)
            result, error = self._results[0]
            # An error stays first in the queue too: every later call raises it again.
            if error is not None:
                raise error
            if result is not None:  # the end stays where it is, for whoever asks again
                self._results.popleft()
                self._allowed += 1
                self._changed.notify_all()
            return result

    @property
    def runs(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def close(self, timeout: float | None = None) -> None:
        """Wait until the thread has made what it may, drop that, and end it. ``timeout``: seconds to wait at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._results.clear()

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                # Closing does not stop the thread early: it makes all it may, as the other ranks do, and ends then.
                self._changed.wait_for(lambda: self._made < self._allowed or self._closing)
                if self._made >= self._allowed:
                    return
            # Without the lock, so that a result can be taken while the next one is made.
            result, error = None, None
            try:
                result = self._make()
            except BaseException as caught:  # handed to the thread that takes, whatever it is
                error = caught
            last = error is not None or result is None
            with self._changed:
                self._made += 1
                self._results.append((result, error))
                self._changed.notify_all()


@before_the_end
def _close_all(until: float) -> bool:
    """A thread that nobody closed may be in the middle of a step while the interpreter ends."""
    for background in list(_running):
        background.close(timeout=max(until - time.monotonic(), 0.0))
    return not any(background.runs for background in list(_running))
