"""The loss of another rank: noticed by the collectives that wait for it, and told in one last line.

Where a rank ends, gloo's and NCCL's connections break, the others raise, and their launcher starts what is left. Where
a rank is stopped or cut off no connection breaks, and a collective waits for the timeout of its group: half an hour by
default, because one rank may tokenise, compile or save for long. Within a step nobody does. So from the second step on
the collectives of a step have a timeout of their own, and those of everything else keep theirs.

A launcher's log names the process that ended. What is raised here says what broke, and from which checkpoint the run
goes on; its status, 75, is that of a failure that passes.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ullage.core.errors import DistributedError, UllageError, first_line
from ullage.core.leaving import LOST
from ullage.ranks.groups import PeerLost, timeout_of

#: Seconds above the longest step seen for which a collective of a step waits.
ABOVE_LONGEST = 300.0
#: What broken connections are called by those who raise a plain RuntimeError.
_BROKEN = ("gloo", "nccl", "connection", "broken pipe", "timed out", "a collective failed")


class RankLost(DistributedError):
    """Another rank has ended, is stopped, or cannot be reached."""

    exit_status = LOST


class CannotMeet(PeerLost):
    """This rank has failed where the others are in a collective of somebody else's: it ends, and they notice."""


class LostRanks:
    """The timeouts of a run's steps, and the line that ends it where another rank is lost.

    ``saved``: says in a few words what is saved.
    """

    def __init__(self, saved: Callable[[], str]) -> None:
        self._saved, self._is_on = saved, False
        self._longest, self._began = 0.0, 0.0
        self._usual: list[tuple[dist.ProcessGroup, timedelta]] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Raise :class:`RankLost` in the place of what a collective raises in the block; not in a block within it."""
        if self._is_on or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            yield
            return
        self._is_on, self._longest = True, 0.0
        try:
            yield
        except BaseException as error:
            if not is_of_collective(error):
                raise
            raise RankLost(
                "another rank has ended or does not answer",
                where=f"noticed by rank {dist.get_rank()} on {socket.gethostname()}",
                found=first_line(error),
                hint=f"the first error in the log of another rank says why; {self._saved()}",
            ) from error
        finally:
            self._is_on = False
            self._wait_as_usual()

    def begin_step(self) -> None:
        """A step begins: this rank draws its batches, and meets the others then."""
        self._began = time.monotonic()

    def met(self) -> None:
        """All ranks are in the step, and none does anything else before its end."""
        if self._is_on and self._longest and not self._usual:
            limit = timedelta(seconds=ABOVE_LONGEST + self._longest)
            # A save in the background has a group of its own, and takes its time.
            groups = [group for group in c10d._world.pg_map if not group.group_desc.startswith("ullage savers")]
            self._usual = [(group, usual) for group in groups if (usual := timeout_of(group)) is not None]
            for group, usual in self._usual:
                c10d._set_pg_timeout(min(limit, usual), group)

    def end_step(self, is_quiet: bool) -> None:
        """The step has been taken. ``is_quiet``: the next one follows, without a save or an evaluation between."""
        if self._began:
            self._longest, self._began = max(self._longest, time.monotonic() - self._began), 0.0
        if not is_quiet:
            self._wait_as_usual()

    def _wait_as_usual(self) -> None:
        for group, usual in self._usual:
            with contextlib.suppress(Exception):  # of a group that was destroyed meanwhile
                c10d._set_pg_timeout(usual, group)
        self._usual = []


def is_of_collective(error: BaseException) -> bool:
    """Whether an error may be what a collective raises because a rank is gone."""
    if isinstance(error, (PeerLost, dist.DistError)):
        return not isinstance(error, CannotMeet)
    is_ours = isinstance(error, UllageError)
    return isinstance(error, RuntimeError) and not is_ours and any(word in str(error).lower() for word in _BROKEN)
