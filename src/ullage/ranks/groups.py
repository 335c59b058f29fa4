"""Process groups of our own, made by their members alone under a name that the members agree on.

A group that only its members make (``use_local_synchronization``) is named by torch after its ranks and after the
number of groups that this rank is in. Ranks in unequal numbers of groups, one more for the embedding of the first
stage or for logging on rank 0, then wait for each other under different names, for ever. A group that all ranks make
is named after the number of such groups so far, which differs where a group was ever made on some of the ranks.

Here the members count in the store of the world: each that arrives adds one to a count of these ranks, the name has
the round that the count is in, and the group is made when the last one has come. So nothing depends on what else a
rank has made, and a member that does not come is an error after the timeout.

Source: ``new_group``, ``_new_group_with_tag`` and ``_hash_ranks_to_str`` of torch 2.13.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ullage.core.errors import DistributedError


class PeerLost(DistributedError):
    """A collective could not finish: no further one will, so nobody waits for an agreement."""


def make_group(
    ranks: Iterable[int], *, name: str, backend: str = "gloo", timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """A new process group of these global ranks, in rising order as torch numbers them.

    Args:
        ranks: the members, this rank among them. No other rank has to be there.
        name: what the group is for. Members make the groups of one name and the same ranks in the same order.
        backend: as for ``torch.distributed.new_group``.
        timeout: of its collectives, and of waiting for the members here; the backend's default for ``None``.

    Collective over ``ranks``. Raises :class:`PeerLost` where a member does not come.
    """
    ranks = sorted(ranks)
    kind: Any = c10d.Backend(backend)
    timeout = c10d._get_default_timeout(kind) if timeout is None else timeout
    store = c10d._get_default_store()
    digest = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    label = f"ullage_{name.replace(' ', '_')}_{digest}"
    counted = c10d.PrefixStore(f"{label}/", store)
    try:
        made = f"{label}_{_round(counted, len(ranks), timeout)}"
        # What new_group does, under this name: it has no argument for one.
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            kind,
            store,
            cast(Any, made),  # a str to torch
            timeout=timeout,
            device_id=c10d._get_default_group().bound_device_id,
            group_desc=f"ullage {name}",
        )
    except RuntimeError as error:
        raise PeerLost(
            f"a process group for {name} could not be made, for example because another rank ended",
            where=f"rank {dist.get_rank()}",
            expected=f"ranks {ranks}",
            found=str(error).split(". ")[0] or type(error).__name__,
            hint="look for the first error among the logs of the other ranks",
        ) from error
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives; None for a backend that does not tell. torch has no public way to ask."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (RuntimeError, AttributeError, IndexError):
        return None


def _round(store: Any, size: int, timeout: timedelta) -> int:
    """How often these ``size`` members have met before, told when the last of them has come."""
    # A member comes again only after the round before was full, so the count divided by the members is the round.
    arrived = store.add("arrived", 1)
    turn = (arrived - 1) // size
    if arrived == (turn + 1) * size:
        store.set(f"full {turn}", "1")
    else:
        store.wait([f"full {turn}"], timeout)
    return turn
