"""Memory that processes of one machine share, so that bytes between them are written once and read in place.

A loopback carries each byte through buffers of the kernel; processes of one machine need none. Each rank has two rooms
without a name in any file system (``memfd``), which the others of its machine map by way of ``/proc``; they end with
the processes that hold them, however those end. Who can read whose is found out once per group, by trying: each rank
writes a random token into a room, and whoever reads it there is a neighbour. Where anything stands in the way (another
machine, a container with processes of its own, another system than Linux, ``ULLAGE_SHARED_MEMORY=0``) a rank is no
neighbour, and what goes to it takes the network.

A rank writes into its two rooms in turn, and after each writing all ranks meet. Who writes into a room again has
therefore met, at the writing into the other one, every reader of the first: nobody reads what is being overwritten, and
no collective is added for it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ullage.ranks.agreement import agree, tried
from ullage.ranks.topology import Axis
from ullage.ranks.wire import device_of, gather_int64, gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What a rank tells the others of the room that it wrote into: turn, serial number, process, file, size in bytes.
Notice = Sequence[int]

_TOKEN_BYTES = 16


class _Room:
    """A buffer of this process that others can map."""

    def __init__(self, num_bytes: int, serial: int) -> None:
        self.serial = serial
        # Steps differ a little in size; an eighth more than the largest so far is seldom outgrown.
        self.size = num_bytes + num_bytes // 8 + mmap.PAGESIZE
        self.file = os.memfd_create("ullage", os.MFD_CLOEXEC)  # an AttributeError on other systems than Linux
        # Without memory for it this raises here, and not as a signal at the first write.
        os.posix_fallocate(self.file, 0, self.size)
        self.bytes = _mapped(self.file, self.size)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # where it was never made
            os.close(self.file)


class Neighbours:
    """The ranks along an axis that read this process's memory, and whose memory it reads.

    Attributes:
        near [size]: whether the rank at each coordinate is one; this rank itself is not.
        everybody: whether all ranks are neighbours of all, so that nothing takes the network. Equal on every rank.
    """

    def __init__(self, near: Sequence[bool], everybody: bool) -> None:
        self.near, self.everybody = list(near), everybody
        self._rooms: list[_Room | None] = [None, None]
        self._turn, self._made = 0, 0
        # By coordinate and turn: the serial number of the last room of every rank, and the bytes of a neighbour's.
        self._serials: dict[tuple[int, int], int] = {}
        self._mapped: dict[tuple[int, int], Tensor] = {}
        #: What this rank tells the others at the next meeting; nothing before the first writing.
        self.notice: Notice = ()

    def room(self, num_bytes: int) -> Tensor:
        """The next room, of at least ``num_bytes`` uint8, to write into before the ranks meet over :attr:`notice`."""
        self._turn = 1 - self._turn
        room = self._rooms[self._turn]
        if room is None or room.size < num_bytes:
            self._made += 1
            room = self._rooms[self._turn] = _Room(num_bytes, serial=self._made)
        self.notice = (self._turn, room.serial, os.getpid(), room.file, room.size)
        return room.bytes

    def meet(self, notices: Sequence[Notice], axis: Axis) -> None:
        """Map what the neighbours wrote into. ``notices``: of every rank, by coordinate, the same everywhere.

        Collective where any rank has made a room anew, so that one that cannot map it is an error on all.
        """
        new = [i for i, notice in enumerate(notices) if notice and self._serials.get((i, notice[0])) != notice[1]]
        if not new:
            return
        _, failure = tried(lambda: [self._map(i, notices[i]) for i in new if self.near[i]])
        agree(failure, axis, "reading its neighbours' memory")
        for i in new:
            self._serials[i, notices[i][0]] = notices[i][1]

    def read(self, coordinate: int, notice: Notice) -> Tensor:
        """The room that a neighbour wrote into, once :meth:`meet` has mapped it."""
        return self._mapped[coordinate, notice[0]]

    def _map(self, coordinate: int, notice: Notice) -> None:
        turn, _, process, file, size = notice
        self._mapped[coordinate, turn] = _opened(process, file, size)


_known: WeakKeyDictionary[ProcessGroup, Neighbours] = WeakKeyDictionary()


def neighbours(axis: Axis) -> Neighbours:
    """The neighbours along an axis, found out at the first call for its group, which is collective over it.

    The same ranks must call it as often as each other, and one thread at a time for one group, as for any collective.
    """
    if axis.size == 1:
        return Neighbours([False], everybody=True)
    group = axis.require_group()
    found = _known.get(group)
    if found is None:
        found = _known[group] = _find(axis)
    return found


def _find(axis: Axis) -> Neighbours:
    token = secrets.token_bytes(_TOKEN_BYTES)
    mine, _ = tried(lambda: _offered(token) if device_of(axis.require_group()).type == "cpu" else None)
    records: list[Any] = gather_objects(None if mine is None else (mine[0], token, mine[1].file, os.getpid()), axis)
    # The same machine by its name first: the process of that number on another machine is another one.
    near = np.zeros(axis.size, np.int64)
    for i, record in enumerate(records):
        if record is None or mine is None or i == axis.rank or record[0] != mine[0]:
            continue
        _, other, file, process = record
        seen, _ = tried(lambda process=process, file=file: _opened(process, file, _TOKEN_BYTES))
        near[i] = seen is not None and bytes(seen.tolist()) == other
    reaches = gather_int64(near, axis) > 0
    # Both ways: who is read by a rank need not be able to read it.
    mutual = reaches & reaches.T
    everybody = bool((mutual | np.eye(axis.size, dtype=bool)).all())
    return Neighbours(mutual[axis.rank].tolist(), everybody)


def _offered(token: bytes) -> tuple[str, _Room] | None:
    """The name of this machine, and a room that holds the token; ``None`` where memory is not to be shared."""
    if os.environ.get("ULLAGE_SHARED_MEMORY", "1") == "0":
        return None
    room = _Room(len(token), serial=0)
    room.bytes[: len(token)] = torch.tensor(list(token), dtype=torch.uint8)
    return Path("/proc/sys/kernel/random/boot_id").read_text(), room


def _opened(process: int, file: int, size: int) -> Tensor:
    """The first ``size`` bytes of another process's room."""
    here = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(here, size)
    finally:
        os.close(here)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
