"""Agreement of the ranks of a Trainer or an engine, where one process may be all there is.

That is so without a process group; and for whoever says that there are not ``several``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ullage.core.errors import DistributedError, listed
from ullage.core.replacing import replaced
from ullage.ranks import Axis, together
from ullage.ranks.wire import gather_objects

#: Of a thread with a group of its own: ``axis``.
_here = threading.local()


def meeting_over(axis: Axis) -> AbstractContextManager[None]:
    """Within it, this thread meets the other ranks over ``axis``: all of them, in a group that no other thread uses."""
    return replaced(_here, "axis", axis)


def gather(value: Any, several: bool = True) -> list[Any]:
    """``value`` of every rank, by rank; of this process alone unless there are ``several``. Collective."""
    return gather_objects(value, _ranks(several))


def rank_here(several: bool = True) -> int:
    """This process's rank; 0 unless there are ``several``."""
    return _ranks(several).rank


def is_first_of_machine() -> bool:
    """Whether this is the first process of its machine, as launchers number them; rank 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", rank_here())) == 0


def several_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreement(doing: str, several: bool = True) -> AbstractContextManager[None]:
    """:func:`ullage.ranks.together` over all ranks; over this process alone unless there are ``several``."""
    return together(_ranks(several), doing)


def _ranks(several: bool) -> Axis:
    if not several:
        return Axis("world")
    return getattr(_here, "axis", None) or Axis.world()


def require_same_folder(folder: Path) -> Path:
    """``folder`` as an absolute path. Raises ``DistributedError`` on every rank if they name different ones."""
    folder = Path(os.path.abspath(folder))
    folders = gather(str(folder))
    if len(set(folders)) > 1:
        raise DistributedError(
            "the ranks name different folders for one checkpoint",
            expected="the same path on every rank",
            found=by_rank(folders),
            hint="make the name on rank 0 and broadcast it, or take a fixed one",
        )
    return folder


def by_rank(values: Sequence[str]) -> str:
    """The values of all ranks in one line, each once: of ``["a", "b", "a"]`` ``rank 0, 2: a; rank 1: b``."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return listed([f"rank {', '.join(which)}: {value}" for value, which in ranks.items()], 8, "; ")
