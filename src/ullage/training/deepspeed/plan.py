"""What of a checkpoint goes where in an engine or a model, and all that does not fit, before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ullage.checkpoint import Tensor
from ullage.training.deepspeed.content import Content
from ullage.training.deepspeed.engine import EngineTensors, HeldTensor, MasterWeights


@dataclass(frozen=True, eq=False)
class Read:
    """Elements ``[start, start + length)`` of a tensor of the checkpoint, to ``at`` of a tensor here."""

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
        others: tensors that are held one by one, each with what is read into it.
        dtypes: by state key, the dtype that the checkpoint has it in.
        groups: by parameter group of the engine, that of the checkpoint.
        problems: what does not fit.
    """

    flats: dict[tuple[int, str], list[Read]] = field(default_factory=dict)
    others: list[tuple[torch.Tensor, list[Read]]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    groups: dict[int, int | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """This rank's share: bytes of all that it needs."""
        targets = [*self.flats.values(), *(reads for _, reads in self.others)]
        return sum(read.num_bytes for reads in targets for read in reads)

    def fits(self, held: HeldTensor, tensor: Tensor, key: str = "fp32") -> bool:
        """Whether the tensor of the checkpoint has the shape of the one here; otherwise a problem."""
        if tuple(tensor.shape) == held.shape:
            return True
        what = "" if key == "fp32" else f"{key} is "
        found = f"{what}{list(tensor.shape)} in the checkpoint, {list(held.shape)} here"
        self.problems.append(f"{held.names[0]}: {found}")
        return False

    def add_other(self, held: HeldTensor, content: Content, needed: bool = True) -> None:
        """Read the value of a tensor into its own memory; where it is ``needed`` and not there, that is a problem."""
        tensor = content.named(held.names, "frozen", "buffer", "fp32")
        if tensor is None:
            self.problems += [f"{held.names[0]}: not in the checkpoint"] * needed
        elif self.fits(held, tensor) and held.ranges:
            self.others.append((held.target, reads_of(tensor, held)))


def reads_of(tensor: Tensor, held: HeldTensor) -> list[Read]:
    """The elements of ``tensor`` that are held here."""
    return [Read(tensor, part.start, part.at, part.length) for part in held.ranges]


def make_plan(here: EngineTensors, content: Content, strict: bool) -> RangePlan:
    """The reading of this rank. Every rank checks every parameter, so that all have the same problems."""
    plan = RangePlan(problems=list(content.problems))
    if plan.problems:
        return plan
    for number, master in enumerate(here.masters):
        _add_master(plan, number, master, content)
    for held in here.untrained:
        plan.add_other(held, content, strict)
    if strict:
        plan.problems += [f"{name}: in the checkpoint, not in the model" for name in content.beside(here.known)]
    return plan


def _add_master(plan: RangePlan, number: int, master: MasterWeights, content: Content) -> None:
    """Masters and states: each tensor is looked up and compared once, and read where this rank masters a part of it."""
    for key in content.keys:
        plan.flats[number, key] = []
    for held in master.held:
        for key in content.keys:
            name, tensor = held.names[0], content.named(held.names, key)
            if tensor is None:
                plan.problems.append(f"{name}: {'' if key == 'fp32' else f'{key} is '}not in the checkpoint")
                if key == "fp32":
                    break  # of a parameter that is not there, no state is either
            elif plan.fits(held, tensor, key):
                plan.dtypes.setdefault(key, tensor.dtype)
                before = plan.groups.setdefault(master.group, tensor.group)
                if before != tensor.group:
                    plan.problems.append(f"{name}: in group {tensor.group} of the checkpoint, others in {before}")
                plan.flats[number, key] += reads_of(tensor, held)
    # Through the memory from its beginning to its end, as the checkpoint's own flat buffers lie mostly.
    for key in content.keys:
        plan.flats[number, key].sort(key=lambda read: read.at)
