"""One failed, so all raise: what the ranks of a Trainer or an engine agree on before they go on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ullage.errors import DistributedError, UllageError

#: How many different values an error lists.
_LISTED = 8


def gather(value: Any, several: bool) -> list[Any]:
    """``value`` of every rank, by rank; of this process alone unless there are ``several``. Collective."""
    if not several:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank_here(several: bool) -> int:
    """This process's rank; 0 unless there are ``several``."""
    return dist.get_rank() if several else 0


def several_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def agreement(several: bool, doing: str) -> Iterator[None]:
    """Leaves the block on all ranks or on none: if one raised, the others raise ``DistributedError`` that names it."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    told = gather(None if problem is None else f"{type(problem).__name__}: {problem}", several)
    if problem is not None:
        if several and isinstance(problem, UllageError):
            problem.told_to_all = True
        raise problem
    for rank, text in enumerate(told):
        if text is not None:
            raise DistributedError(f"another rank failed while {doing}", where=f"rank {rank}", found=text)


def require_same_folder(folder: Path, several: bool) -> Path:
    """``folder`` as an absolute path. Raises ``DistributedError`` on every rank if they name different ones."""
    folder = Path(os.path.abspath(folder))
    ranks: dict[str, list[str]] = {}
    for rank, path in enumerate(gather(str(folder), several)):
        ranks.setdefault(path, []).append(str(rank))
    if len(ranks) == 1:
        return folder
    named = [f"{path} on rank {', '.join(who)}" for path, who in ranks.items()]
    more = f"; and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    raise DistributedError(
        "the ranks name different folders for one checkpoint",
        expected="the same path on every rank",
        found="; ".join(named[:_LISTED]) + more,
        hint="make the name on rank 0 and broadcast it, or take a fixed one",
    )
