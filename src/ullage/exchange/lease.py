"""Process groups of one iterator's own, lent to the next when it is done.

A group must never be used by two threads, and to close one while a slower rank still reads from it loses that rank's
data. So groups are not closed but kept: an iterator that ended well gives its groups back, and the next iterator over
the same ranks gets them. Whether it does is decided together, so that all ranks use the same ones. At the end of the
process they are dropped: a group that is kept here would outlive ``destroy_process_group``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ullage.ranks import Axis, Topology
from ullage.ranks.ending import before_the_end, end_groups_at_exit
from ullage.ranks.wire import gather_objects

Key = tuple[tuple[tuple[int, ...], ...], timedelta | None]


@dataclass
class Lease:
    """A topology whose groups nobody else uses until it is given back.

    Attributes:
        topology: with gloo groups of its own.
        number: of the lease, the same on every rank; 0 for a single rank, which has no groups.
        key: the ranks along each axis, and the timeout; groups are lent again for an equal one.
        world: the default process group at that time; ``None`` for a single rank.
    """

    topology: Topology
    number: int
    key: Key
    world: object

    def give_back(self, clean: bool) -> None:
        """Lend the groups to whoever comes next, unless a collective on them failed."""
        if clean and self.number:
            _idle.append(self)


_idle: list[Lease] = []
_last = 0


def lease(topology: Topology, timeout: timedelta | None) -> Lease:
    """Gloo groups over the ranks of ``topology``. Collective over the world where it has more than one rank."""
    global _last
    key = (tuple(tuple(axis.ranks) for axis in topology.axes), timeout)
    if topology.world_size == 1:
        return Lease(topology, 0, key, None)
    end_groups_at_exit()
    world = dist.group.WORLD
    # Groups of a world that was destroyed and initialised again are dead, even for equal ranks.
    _idle[:] = [held for held in _idle if held.world is world]
    mine = next((held for held in _idle if held.key == key), None)
    # Each rank offers the lease that it would reuse. It is reused only if all ranks offer the same one: some may
    # still have it in use, or may have failed on it.
    offers: list[tuple[int, int]] = gather_objects((0 if mine is None else mine.number, _last), Axis.world())
    _last = max(last for _, last in offers)
    if mine is not None and all(number == mine.number for number, _ in offers):
        _idle.remove(mine)
        return Lease(topology.with_groups({a.name: a.group for a in mine.topology.axes}), mine.number, key, world)
    # One more than any rank has used, so that a number is never used for two sets of groups.
    _last += 1
    return Lease(topology.on_gloo(timeout), _last, key, world)


@before_the_end
def _drop_idle(until: float) -> bool:
    _idle.clear()
    return True
