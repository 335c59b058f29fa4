"""Content of a ZeRO checkpoint that the writers of other formats need beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.files.torchfile import TorchFile
from ullage.checkpoint.zero.shards import ModelFile, ShardFile
from ullage.checkpoint.zero.states import Uncut, kept_whole

#: Entries of a shard that are the same on all ranks, of DeepSpeed's wrapper around the optimizer.
WRAPPER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


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
    #: by parameter group: the names in the order of the optimizer, where it is not that of the tensors
    names: list[list[str]] | None = None
    #: of sources other than ZeRO: by parameter group, numbers of the state beside the step
    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: of sources other than ZeRO: the file that the hyperparameters were read from
    settings_file: TorchFile | None = field(default=None, repr=False)
    #: entries of DeepSpeed's wrapper around the optimizer, such as ``loss_scaler``
    wrapper: dict[str, Any] = field(default_factory=dict)
    #: state of the learning rate's schedule, where it lies outside the model states
    scheduler: Any = None
    #: whether buffers are told from frozen parameters
    buffers_known: bool = True
    #: steps taken by the run, where the files say so
    global_step: int | None = None
    #: by model rank with experts: ``param_shapes`` with the experts of all ranks, which the files have of one
    shapes: dict[int, list[Shapes]] = field(default_factory=dict)


def kept_by_group(details: Details) -> dict[int, dict[str, Any]]:
    """Optimizer state that is neither cut nor the step and is the same on all ranks, by parameter group."""
    found: dict[int, dict[str, Any]] = {group: dict(held) for group, held in details.numbers.items()}
    for rank, shard in list(details.shards.items())[:1]:
        for index, group in enumerate(shard.group_of):
            if rank in details.uncut:
                found.setdefault(group, {}).update(kept_whole(shard, index, details.uncut[rank]))
    return {group: kept for group, kept in found.items() if kept}
