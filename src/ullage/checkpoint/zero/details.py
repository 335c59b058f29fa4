"""Content of a ZeRO checkpoint that the writers of other formats need beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ullage.checkpoint.zero.shards import ModelFile, ShardFile
from ullage.checkpoint.zero.states import Uncut, kept_whole


@dataclass
class Details:
    """The files of data-parallel rank 0, by model rank, and the settings of the optimizer."""

    shards: dict[int, ShardFile]
    models: dict[int, ModelFile]
    #: by parameter group: the step, and its dtype as it was saved (None for a Python number)
    steps: dict[int, tuple[Any, str | None]]
    param_groups: list[dict[str, Any]]
    #: by model rank: the state that is not cut like the weights
    uncut: dict[int, Uncut] = field(default_factory=dict)


def kept_by_group(details: Details) -> dict[int, dict[str, Any]]:
    """Optimizer state that is neither cut nor the step and is the same on all ranks, by parameter group."""
    found: dict[int, dict[str, Any]] = {}
    for rank, shard in list(details.shards.items())[:1]:
        for index, group in enumerate(shard.group_of):
            if rank in details.uncut:
                found.setdefault(group, {}).update(kept_whole(shard, index, details.uncut[rank]))
    return {group: kept for group, kept in found.items() if kept}
