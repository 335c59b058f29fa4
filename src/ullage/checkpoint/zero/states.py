"""Optimizer state that is not cut like the weights, and what else of a ZeRO checkpoint writers of other formats need.

A state tensor as long as the partition is cut with the weights. Codes of one byte, as 8-bit optimizers save them, are
refused. Muon's momentum is whole parameters (:func:`take_momentum`). Any other tensor may belong to ONE rank's
partition, and would mean nothing once the partition is gone: the optimizer's state is refused. The weights are not
concerned. Numbers that are the same on all ranks are carried.

Muon makes a matrix orthogonal, so below stage 3 a rank needs the whole momentum of every parameter of which its
partition has some elements: ``momentum_buffer`` is those parameters end to end, in the order of the flat buffer,
without padding. A parameter that lies in two partitions is there twice, and both must be equal. With the optimizer
offloaded to the CPU the momentum is a partition like any other state; stage 3 saves it as one too.
Source: ``_muon_momentum_buffer`` and ``get_flat_partition`` in ``stage_1_and_2.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ullage.checkpoint.core.inventory import Fragments, Group, Inventory
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.metadata import Shapes, brief, comparable
from ullage.checkpoint.files.torchfile import TorchFile
from ullage.checkpoint.zero.shards import FlatTensor, ModelFile, ShardFile, offload_of, zero_config

#: What to do where the optimizer's state cannot be carried.
WEIGHTS_ONLY = "the weights can be converted without it: --to safetensors or --to dcp, with --weights-only"
#: Numbers that an optimizer computes again from the weights before it reads them, so that they may be left out.
#: RMS: ``Adafactor.step`` of transformers.
RECOMPUTED = {"RMS"}
#: Dtypes of codes: no optimizer keeps values of its own in one byte.
_CODES = {"uint8", "int8"}
#: Muon's state.
MOMENTUM = "momentum_buffer"
#: Entries of a shard that are the same on all ranks, of DeepSpeed's wrapper around the optimizer.
WRAPPER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


@dataclass
class Uncut:
    """Optimizer state of one model rank that is not cut into partitions.

    Attributes:
        keys: states whose tensors are no partition, so that they have no place in a layout.
        left_out: states that are numbers and need not be carried.
        problems: why the state cannot be converted.
        notes: what was decided, for the report.
    """

    keys: set[str]
    left_out: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_uncut(shards: list[ShardFile], groups: list[Group]) -> Uncut:
    """Compare all state that is not cut over the shards of one model rank. ``groups``: that rank's flat buffers."""
    ordered = sorted(shards, key=lambda s: s.dp_rank)
    lead = ordered[0]
    sizes = {group.index: group.shard_size for group in groups}
    held = [(index, key, placed) for index, flat in enumerate(lead.flats) for key, placed in flat.items()]
    # A key whose length is not the partition's in some group is not one in any other: lengths may agree by chance.
    keys = {
        key
        for index, key, placed in held
        if key != "fp32" and placed.numel not in (sizes.get(index), lead.flats[index]["fp32"].numel)
    }
    found = Uncut(keys)

    def add(what: str, index: int, **facts: str) -> None:
        found.problems.append(Problem(what, lead.name, lead.dp_rank, index, hint=WEIGHTS_ONLY, **facts))

    for index, key, placed in held:
        if placed.dtype in _CODES:
            expected = "blocks with a scale each, as bitsandbytes saves them"
            what = f"optimizer state {key} is quantised in a way that is not known"
            add(what, index, expected=expected, found=f"{placed.numel} elements of {placed.dtype}")
    for index, scalars in enumerate(lead.scalars):
        for key, value in scalars.items():
            if not is_plain_state(value):
                what = f"optimizer state {key} is of a kind that is not known"
                add(what, index, expected="tensors and numbers", found=brief(value))
    # A state on some ranks only has no place on the others. The reverse, a state that ``lead`` has and another rank
    # lacks, is found where fragments are made of the state.
    for shard in ordered[1:]:
        for index, (mine, theirs) in enumerate(zip(lead.flats, shard.flats)):
            for key in sorted(set(theirs) - set(mine))[:1]:
                add(f"optimizer state {key} is not on all ranks", index)
    for index, key, placed in held:
        if key in keys and placed.dtype not in _CODES:
            what = f"optimizer state {key} is no partition, so it cannot be carried to another layout"
            expected = f"a state of {lead.flats[index]['fp32'].numel} elements, like the weights"
            add(what, index, expected=expected, found=f"{placed.numel} elements")
    found.problems += _compare_numbers(ordered)
    for key in sorted(RECOMPUTED):
        scalars = [
            [comparable(s.scalars[i].get(key)) for s in ordered if i < len(s.scalars)] for i in range(len(lead.scalars))
        ]
        if any(len(set(map(repr, values))) > 1 for values in scalars):
            found.left_out.add(key)
            found.notes.append(f"state {key} differs between ranks; the optimizer computes it again, so it is left out")
    return found


def is_plain_state(value: Any) -> bool:
    """Whether a value is a number or text, or a container of such; anything else may hold tensors of its own form."""
    if isinstance(value, dict):
        return all(map(is_plain_state, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain_state, value))
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _compare_numbers(shards: list[ShardFile]) -> list[Problem]:
    """Numbers and settings of the optimizer that differ between ranks, other than the step, which is checked apart.

    One rank that differs is enough to say.
    """
    lead, *others = shards
    for shard in others:
        # Words before the key, group, entries of rank 0 and of this rank, and keys that may differ.
        pairs: list[tuple[str, int, dict[str, Any], dict[str, Any], set[str]]] = [
            ("optimizer state ", index, mine, theirs, RECOMPUTED | {"step"})
            for index, (mine, theirs) in enumerate(zip(lead.scalars, shard.scalars))
        ]
        settings = enumerate(zip(lead.settings, shard.settings))
        pairs += [("the optimizer's ", index, mine, theirs, {"params"}) for index, (mine, theirs) in settings]
        sizes = {"number of groups": len(lead.settings)}, {"number of groups": len(shard.settings)}
        found = [
            Problem(
                f"{what}{key} differs between ranks, so it cannot be carried to another layout",
                shard.name, shard.dp_rank, index,
                expected=f"{comparable(mine.get(key))}, as on rank 0",
                found=f"{comparable(theirs.get(key))}", hint=WEIGHTS_ONLY,
            )
            for what, index, mine, theirs, but in [*pairs, ("the ", 0, *sizes, set[str]())]
            for key in sorted({k for k in {*mine, *theirs} if isinstance(k, str)} - but)
            if comparable(mine.get(key)) != comparable(theirs.get(key))
        ]  # fmt: skip
        if found:
            return found
    return []


def kept_numbers(shard: ShardFile, index: int, uncut: Uncut) -> dict[str, Any]:
    """State of a group that is neither cut nor the step: numbers."""
    return {k: v for k, v in shard.scalars[index].items() if k != "step" and k not in uncut.left_out}


@dataclass
class Momentum:
    """The momentum of one group: its dtype, and by parameter one whole copy per rank that has one."""

    dtype: str
    copies: dict[str, list[Fragments]] = field(default_factory=dict)


def take_momentum(group: Group, named: Shapes, mine: dict[int, ShardFile]) -> Momentum | None:
    """The momentum of a Muon group, taken out of the shards; None where the group has none of this layout.

    Args:
        group: the flat buffer.
        named: the shape of each parameter, in the order of memory.
        mine: the optimizer files by data-parallel rank; ``momentum_buffer`` is removed from what they hold.
    """
    if not all(_uses_muon(shard, group.index) and shard.stage < 3 for shard in mine.values()):
        return None
    numels = np.array([int(np.prod(shape, dtype=np.int64)) for shape in named.values()], np.int64)
    flats: dict[int, FlatTensor] = {}
    items: dict[int, list[int]] = {}
    for rank, shard in mine.items():
        items[rank] = np.unique(group.pieces.item[group.pieces.shard == rank]).tolist()
        flat = shard.flats[group.index].get(MOMENTUM)
        # A rank of padding only has no momentum.
        if (flat.numel if flat else 0) != int(numels[items[rank]].sum()):
            return None
        if flat is not None:
            flats[rank] = flat
    if len({flat.dtype for flat in flats.values()}) != 1:
        return None
    offload = offload_of(zero_config(mine[min(mine)].root))
    if all(flat.numel == group.shard_size for flat in flats.values()) and str(offload.get("device", "none")) != "none":
        return None  # a partition like any other
    names = list(named)
    found = Momentum(next(iter(flats.values())).dtype)
    for rank, flat in sorted(flats.items()):
        del mine[rank].flats[group.index][MOMENTUM]
        starts = np.concatenate([[0], np.cumsum(numels[items[rank]])]).tolist()
        for item, (low, high) in zip(items[rank], pairwise(starts)):
            whole = Fragments.one(mine[rank].file, flat.offset + low * flat.item_bytes, high - low)
            found.copies.setdefault(names[item], []).append(whole)
    return found


def _uses_muon(shard: ShardFile, index: int) -> bool:
    group = shard.group_of[index] if index < len(shard.group_of) else -1
    return 0 <= group < len(shard.settings) and bool(shard.settings[group].get("use_muon"))


@dataclass
class Details:
    """The files of data-parallel rank 0, by model rank, and the settings of the optimizer."""

    shards: dict[int, ShardFile] = field(default_factory=dict)
    models: dict[int, ModelFile] = field(default_factory=dict)
    #: by parameter group: the step, and its dtype as it was saved (None for a Python number)
    steps: dict[int, tuple[Any, str | None]] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
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

    @classmethod
    def of(cls, inventory: Inventory) -> Details:
        """Those of an inventory; empty for one without them."""
        return inventory.details if isinstance(inventory.details, Details) else cls()

    @property
    def lead(self) -> ModelFile | None:
        """The source's own model states, of its first model rank."""
        return self.models[min(self.models)] if self.models else None


def kept_by_group(details: Details) -> dict[int, dict[str, Any]]:
    """Optimizer state that is neither cut nor the step and is the same on all ranks, by parameter group."""
    found: dict[int, dict[str, Any]] = {group: dict(held) for group, held in details.numbers.items()}
    for rank, shard in list(details.shards.items())[:1]:
        for index, group in enumerate(shard.group_of):
            if rank in details.uncut:
                found.setdefault(group, {}).update(kept_numbers(shard, index, details.uncut[rank]))
    return {group: kept for group, kept in found.items() if kept}
