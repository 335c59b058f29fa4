"""What of a checkpoint goes where in an engine, and everything that does not fit, before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ullage.checkpoint import Tensor
from ullage.training.ranges.content import Content
from ullage.training.ranges.places import HeldRange, group_of, masters, numel_of, part_of, places, shape_of
from ullage.training.universal import groups_name, untrained


@dataclass(frozen=True, eq=False)
class Read:
    """Elements ``[start, start + length)`` of a tensor of the checkpoint, to ``at`` of a tensor of the engine."""

    tensor: Tensor
    start: int
    at: int
    length: int

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements in the checkpoint."""
        return self.length * self.tensor.item_bytes


@dataclass
class RangePlan:
    """The reading of one rank.

    Attributes:
        flats: by number of the flat tensor and state key, what is read into it.
        untrained: frozen parameters and buffers, each with what is read into it.
        dtypes: by state key, the dtype that the checkpoint has it in.
        groups: by parameter group of the engine, that of the checkpoint.
        problems: what does not fit.
    """

    flats: dict[tuple[int, str], list[Read]] = field(default_factory=dict)
    untrained: list[tuple[torch.Tensor, Read]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    groups: dict[int, int | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """This rank's share: bytes of all that it needs."""
        reads = [read for own in self.flats.values() for read in own] + [read for _, read in self.untrained]
        return sum(read.num_bytes for read in reads)


def make_plan(engine: Any, content: Content, strict: bool) -> RangePlan:
    """The reading of this rank. Every rank checks every parameter, so that all have the same problems."""
    plan = RangePlan(problems=list(content.problems))
    if plan.problems:
        return plan
    names = _names(engine)
    _add_trained(plan, engine.optimizer, content, names)
    _add_untrained(plan, engine, content, names, strict)
    if strict:
        known = {name for own in names.values() for name in own}
        missing = dict.fromkeys(t.name for t in content.inventory.tensors if t.name not in known)
        aliases = {owner for alias, owner in content.inventory.aliases.items() if alias in known}
        plan.problems += [f"{name}: in the checkpoint, not in the model" for name in missing if name not in aliases]
    return plan


def _names(engine: Any) -> dict[int, list[str]]:
    """All names of each parameter and buffer, by identity: a tied one has several."""
    found: dict[int, list[str]] = {}
    for name, value in engine.module.named_parameters(remove_duplicate=False):
        found.setdefault(id(value), []).append(name)
    for name, value in engine.module.named_buffers(remove_duplicate=False):
        found.setdefault(id(value), []).append(name)
    return found


def _add_trained(plan: RangePlan, zero: Any, content: Content, names: dict[int, list[str]]) -> None:
    """Masters and states: each tensor is looked up and compared once, and read where this rank masters a part of it."""
    mine: dict[tuple[int, str], HeldRange] = {(place.flat, place.name): place for place in places(zero)}
    owners = group_of(zero)
    for flat, group in enumerate(getattr(zero, groups_name(zero))):
        for key in content.keys:
            plan.flats[flat, key] = []
        for p in group:
            name = zero.param_names[p]
            own = [name, *names.get(id(p), [])]
            for key in content.keys:
                tensor = content.named(own, key)
                if tensor is None:
                    plan.problems.append(f"{name}: {'' if key == 'fp32' else f'{key} is '}not in the checkpoint")
                    continue
                if not _fits(plan, name, tensor, shape_of(p), key):
                    continue
                plan.dtypes.setdefault(key, tensor.dtype)
                before = plan.groups.setdefault(owners[flat], tensor.group)
                if before != tensor.group:
                    plan.problems.append(f"{name}: in group {tensor.group} of the checkpoint, others in {before}")
                place = mine.get((flat, name))
                if place is not None:
                    plan.flats[flat, key].append(Read(tensor, place.start, place.at, place.length))
    assert len(masters(zero)) == len(owners)


def _add_untrained(plan: RangePlan, engine: Any, content: Content, names: dict[int, list[str]], strict: bool) -> None:
    for name, target in untrained(engine):
        tensor = content.named([name, *names.get(id(target), [])], "frozen", "buffer", "fp32")
        if tensor is None:
            if strict:
                plan.problems.append(f"{name}: not in the checkpoint")
        elif _fits(plan, name, tensor, shape_of(target)):
            start, length = part_of(target) if hasattr(target, "ds_id") else (0, numel_of(target))
            if length:
                plan.untrained.append((target, Read(tensor, start, 0, length)))


def _fits(plan: RangePlan, name: str, tensor: Tensor, shape: tuple[int, ...], key: str = "fp32") -> bool:
    # DeepSpeed's own universal files of stage 3 are flat.
    if tuple(tensor.shape) != shape:
        what = "" if key == "fp32" else f"{key} is "
        plan.problems.append(f"{name}: {what}{list(tensor.shape)} in the checkpoint, {list(shape)} here")
    return tuple(tensor.shape) == shape
