"""Content of a checkpoint as every rank gets it from the first: where each element lies, what else the files say, and
what of it goes where in an engine or a model; everything that does not fit is found before anything is read.

The first rank reads the descriptions of all files and proves that the fragments tile every tensor; the others get the
result, so that N ranks do not each open the files of M. Hyperparameters, loss scale, counters and schedule come from
the same descriptions, as plain data: unlike DeepSpeed's own loader, nothing that a file names is imported or called.
"""

from __future__ import annotations

import copy
import pickle
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ullage.checkpoint import Inventory, Tensor, read
from ullage.checkpoint.core.manifest import around, misplaced
from ullage.checkpoint.files.torchfile import TorchFile, read_bytes
from ullage.checkpoint.files.unpickling import Inert, Named, Size, TensorRef
from ullage.checkpoint.zero.states import Details, kept_by_group
from ullage.core.errors import CheckpointError, UllageError
from ullage.core.layout import Int64
from ullage.ranks import Axis
from ullage.ranks.wire import broadcast_record
from ullage.training.deepspeed.engine import EngineTensors, HeldTensor, MasterWeights

#: What the state of an optimizer is called under which the step must be known, because it corrects their bias.
_CORRECTED = ("exp_avg", "exp_avg_sq")
#: Entries of model states whose tensors are read by ranges, or replaced by the masters.
_TENSORS = ("module", "frozen_param_fragments", "optimizer")
#: Entries of a parameter group that belong to the run that saved it.
_OWN = ("params", "param_names")
#: What the loss scale is kept in, by ``_load_global_state``.
SCALE = ("loss_scaler", "dynamic_loss_scale")
#: The file beside a universal checkpoint that names it.
_LATEST = "latest_universal"


@dataclass
class Content:
    """A checkpoint without its data.

    Attributes:
        inventory: its tensors, without what only writers of formats need.
        steps: step and dtype of each parameter group, as they were saved.
        settings: hyperparameters by group; empty where nothing holds them.
        numbers: by group, state that is neither cut like the weights nor the step.
        path: the file of model states that is given to the engine, of data-parallel rank 0; None without one.
        states: its entries that are plain data, beside tensors.
        whole: what DeepSpeed's wrapper keeps, such as the class and state of the loss scale; empty without it.
        objects: entries of the files that are no plain data, which are left out, and the class in each.
        left_out: state that the optimizer computes again.
        sums: by file, (0, bytes, CRC-32) of all of it, as the manifest lists it.
        stepped: of a universal checkpoint, the parameters that have a step of their own.
        problems: why it cannot be loaded.
    """

    inventory: Inventory
    steps: dict[int, tuple[Any, str | None]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    path: Path | None = None
    states: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    sums: dict[int, Int64] = field(default_factory=dict)
    stepped: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list)

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys of trained parameters, the master weights (``fp32``) first."""
        return self.inventory.keys

    @cached_property
    def by_group(self) -> dict[int | None, list[str]]:
        """Those of them that a parameter group has: groups may keep different state."""
        keys, held = self.keys, {(tensor.group, tensor.key) for tensor in self.inventory.tensors}
        return {group: [key for key in keys if (group, key) in held] for group, _ in held}

    def begins(self, weight: Tensor) -> bool:
        """Whether the optimizer that was saved had not stepped a parameter yet, so that it has no state of it."""
        keys, steps = self.by_group[weight.group], self.inventory.steps
        if any((weight.name, key) in self.inventory for key in keys if key != "fp32"):
            return False
        if len(keys) < 2:
            return weight.group is None or steps.get(weight.group) is None
        # Of a universal checkpoint single files may be missing: what has a step has lost its state.
        return self.inventory.format != "universal" or (bool(self.stepped) and weight.name not in self.stepped)

    def beside(self, names: set[str]) -> list[str]:
        """The tensors of the checkpoint that have none of ``names``, nor are one of these under another name."""
        aliases = {owner for alias, owner in self.inventory.aliases.items() if alias in names}
        found = dict.fromkeys(tensor.name for tensor in self.inventory.tensors)
        return [name for name in found if name not in names and name not in aliases]

    def named(self, names: Sequence[str], *keys: str) -> Tensor | None:
        """The tensor that the checkpoint has under one of ``names`` and one of ``keys``."""
        # A tied parameter was saved under one of its names; the names of one are the same in another run of the model.
        stored = [*names, *(self.inventory.aliases[name] for name in names if name in self.inventory.aliases)]
        found = ((name, key) for key in keys for name in stored if (name, key) in self.inventory)
        return next((self.inventory.tensor(*each) for each in found), None)


def shared_content(folder: str | Path, tag: str | None = None, *, manifest: bool = False) -> Content:
    """The content of the checkpoint, read by the first rank for all. Collective.

    Args:
        folder: of the checkpoint, or the one around it.
        tag: its folder inside, where that is not the latest.
        manifest: whether what is read will be compared with the manifest, if there is one.

    Raises on every rank what the first one met.
    """
    axis = Axis.world()
    record = None
    if axis.rank == 0:
        try:
            record = (None, read_content(Path(folder) / (tag or ""), manifest=manifest))
        except UllageError as error:
            record = (error, None)
        except Exception as error:  # another rank can only raise what it can be sent
            record = (RuntimeError(f"{type(error).__name__}: {error}"), None)
    error, content = pickle.loads(broadcast_record(pickle.dumps(record), axis, 0))
    if error is not None:
        raise error
    return content


def read_content(folder: Path, *, manifest: bool) -> Content:
    """The content of the checkpoint at ``folder``, as for ``ullage.checkpoint.read``. Reads no tensor data."""
    inventory = read(folder)
    details, where = inventory.details, inventory.folder
    content = Content(replace(inventory, details=None), getattr(details, "steps", {}))
    content.numbers = kept_by_group(Details.of(inventory))
    content.problems += [
        str(problem) for problem in (*inventory.problems(manifest=False), *inventory.optimizer_problems)
    ]
    if inventory.format == "universal":
        content.stepped = frozenset(path.parent.name for path in where.glob("zero/*/step.pt"))
    _add_objects(content, Details.of(inventory))
    uncut = getattr(details, "uncut", {}).values()
    content.left_out = frozenset(key for each in uncut for key in each.left_out)
    content.problems += _missing_steps(content)
    if manifest:
        _add_sums(content)
    return content


def _missing_steps(content: Content) -> list[str]:
    inventory = content.inventory
    has_state = inventory.format in ("zero", "universal") or len(inventory.keys) > 1
    if not has_state and not inventory.steps:
        return [f"no optimizer state in it ({inventory.format})"]
    groups = {t.group for t in inventory.tensors if t.key in _CORRECTED}
    lacking = [g for g in groups if g is None or inventory.steps.get(g) is None]
    return ["the optimizer's step is not in it"] if lacking else []


def _add_sums(content: Content) -> None:
    """The sums of the manifest that speaks of the checkpoint's files: in its folder, or in the one around it."""
    inventory = content.inventory
    for found, prefix in around(inventory.folder):
        listed = {each.name: each for each in found.files}
        numbers = {i: listed[prefix + f.name] for i, f in enumerate(inventory.files) if prefix + f.name in listed}
        if not numbers and not found.damage:
            continue
        damage = [*found.damage, *misplaced(found.folder, list(numbers.values()))]
        content.problems += [f"{d.name} is damaged: expected {d.expected}, found {d.found}" for d in damage]
        content.sums = {i: np.array([(0, each.num_bytes, each.crc)], np.int64) for i, each in numbers.items()}
        return


# The objects of the files as plain data: no class that a file names is imported, and nothing of it is called


class _Object(Exception):
    """An object of a class. Holds its name."""


class _Plain:
    """The values of a file, in which tensors, arrays and namespaces are made anew. ``source``: None without tensors."""

    def __init__(self, source: TorchFile | None) -> None:
        self._source = source
        #: what was made of each object, by its identity: a small file may name one often, and nest that
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The value. Raises :class:`_Object` for an object of another class."""
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = ((key, self.of(each)) for key, each in value.items())
            return OrderedDict(made) if isinstance(value, OrderedDict) else dict(made)
        if isinstance(value, Size):
            return torch.Size(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
            return kind(self.of(each) for each in value)
        if isinstance(value, TensorRef) and value.contiguous and self._source is not None:
            data = bytearray(read_bytes(self._source, value))
            dtype = getattr(torch, value.dtype)
            return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(value.shape)
        if isinstance(value, Named):
            return getattr(torch, value.name)
        if isinstance(value, Inert):
            return self._stood_for(value)
        if isinstance(value, TensorRef) or callable(value):
            raise _Object("a tensor that is not contiguous" if isinstance(value, TensorRef) else str(value))
        return value

    def _stood_for(self, value: Inert) -> Any:
        """What a stand-in stands for, where that is plain data."""
        name, args = f"{value.module}.{value.name}", value.args
        if name in ("argparse.Namespace", "types.SimpleNamespace"):
            return (Namespace if value.name == "Namespace" else SimpleNamespace)(
                **(self.of(value.state) if value.state else {})
            )
        if value.module.startswith("numpy") and value.name == "dtype":
            return np.dtype(args[0]).newbyteorder(value.state[1] if isinstance(value.state, tuple) else "=")
        if value.module.endswith("multiarray") and value.name == "scalar" and len(args) == 2:
            return np.frombuffer(args[1], self.of(args[0]))[0]
        if value.module.endswith("multiarray") and value.name == "_reconstruct" and isinstance(value.state, tuple):
            _, shape, dtype, is_fortran, data = value.state
            if isinstance(data, bytes):
                found = np.frombuffer(data, self.of(dtype)).copy()
                return found.reshape(shape, order="F" if is_fortran else "C")
        raise _Object(name)


def _add_objects(content: Content, details: Details) -> None:
    """Add hyperparameters, loss scale and model states to ``content``."""
    first = next((shard.source for shard in details.shards.values()), None)
    source = details.settings_file or first
    if any(set(group) - {*_OWN, "step"} for group in details.param_groups):
        content.settings = [
            _entries({key: value for key, value in group.items() if key not in _OWN}, source, content)
            for group in details.param_groups
        ]
    is_scaled = content.inventory.format in ("zero", "universal") and content.inventory.written_by.stage != 0
    if source is not None and is_scaled:
        scaler = details.wrapper.get("loss_scaler")
        content.whole = _entries({k: v for k, v in details.wrapper.items() if k != "loss_scaler"}, source, content)
        if isinstance(scaler, Inert) and isinstance(scaler.state, dict):
            content.whole["loss_scaler"] = scaler.name, _entries(scaler.state, source, content)
    lead = details.lead
    if lead is not None:
        content.path = content.inventory.folder / lead.name
        content.states = _entries({k: v for k, v in lead.root.items() if k not in _TENSORS}, lead.source, content)


def _entries(held: dict[Any, Any], source: TorchFile | None, content: Content) -> dict[Any, Any]:
    """The entries that are plain data; the names of others are noted with their class."""
    found, plain = {}, _Plain(source)
    for key, value in held.items():
        try:
            found[key] = plain.of(value)
        except CheckpointError:
            raise
        except Exception as error:  # no plain data, or a stand-in whose state is another than its class says
            content.objects[str(key)] = str(error)
    return found


class ModelStates:
    """The model states without the tensors that are read by ranges, given to the engine as its reader of files."""

    def __init__(self, content: Content) -> None:
        self._root = {**content.states, "module": {}, "mp_world_size": 1}

    def load(self, path: Any, map_location: Any = None) -> dict[str, Any]:
        """The states, whatever file is asked for."""
        return copy.deepcopy(self._root)


# What of it goes where


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
        flats: by number of the flat tensor, the state that it gets by key, and what is read into it.
        others: tensors that are held one by one, each with what is read into it.
        dtypes: by state key, the dtype that the checkpoint has it in.
        groups: by parameter group of the engine, that of the checkpoint.
        begins: parameters whose state starts from nothing, because the checkpoint's optimizer has not stepped them.
        problems: what does not fit.
    """

    flats: dict[int, dict[str, list[Read]]] = field(default_factory=dict)
    others: list[tuple[torch.Tensor, list[Read]]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    groups: dict[int, int | None] = field(default_factory=dict)
    begins: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """This rank's share: bytes of all that it needs."""
        flats = (reads for flat in self.flats.values() for reads in flat.values())
        targets = [*flats, *(reads for _, reads in self.others)]
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
    weights: list[tuple[HeldTensor, Tensor]] = []
    for held in master.held:
        name, weight = held.names[0], content.named(held.names, "fp32")
        if weight is None:  # of a parameter that is not there, no state is either
            plan.problems.append(f"{name}: not in the checkpoint")
            continue
        weights.append((held, weight))
        before = plan.groups.setdefault(master.group, weight.group)
        if before != weight.group:
            plan.problems.append(f"{name}: in group {weight.group} of the checkpoint, others in {before}")
    # What the group keeps, and what the optimizer here has by now; nothing where no parameter of it was stepped yet.
    needed = {*master.keys} - content.left_out
    needed |= {key for _, weight in weights for key in content.by_group[weight.group]} - {"fp32"}
    begins = {weight.name for _, weight in weights if needed and content.begins(weight)}
    plan.begins += sorted(begins)
    keys, flat = sorted(needed) if len(begins) < len(weights) else (), plan.flats.setdefault(number, {})
    for key in ("fp32", *keys):
        reads = flat[key] = []
        whole = dict(zip(map(id, master.held), master.whole.get(key, master.held)))
        for held, weight in weights:
            tensor = weight if key == "fp32" else content.named(held.names, key)
            if tensor is not None and plan.fits(held, tensor, key):
                plan.dtypes.setdefault(key, tensor.dtype)
                reads += reads_of(tensor, whole[id(held)])
            elif tensor is None and weight.name not in begins:
                plan.problems.append(f"{held.names[0]}: {key} is not in the checkpoint")
        # Through the memory from its beginning to its end, as the checkpoint's own flat buffers lie mostly: under
        # round_robin_gradients the first weight of a group may stand behind the others.
        reads.sort(key=lambda read: read.at)


# Where a universal checkpoint lies


def prefers_universal(folder: str | Path) -> bool:
    """Whether ``folder`` has a universal checkpoint and none of DeepSpeed's own that is of a later step.

    Steps are those in the tags that ``latest_universal`` and ``latest`` name, such as ``global_step400``; where one of
    them tells no step, the universal checkpoint is preferred, because somebody made it on purpose.
    """
    universal, native = Path(folder) / _LATEST, Path(folder) / "latest"
    if not universal.is_file() or not native.is_file():
        return universal.is_file()
    ours, theirs = _step_of(universal.read_text()), _step_of(native.read_text())
    return ours is None or theirs is None or theirs <= ours


def universal_at(folder: str | Path, tag: str | None = None) -> Path:
    """The folder of the universal checkpoint at ``folder`` or in it. Raises ``CheckpointError`` if there is none."""
    folder = Path(folder)
    if tag is None:
        if (folder / _LATEST).is_file():
            tag = (folder / _LATEST).read_text().strip()
        elif (folder / "zero").is_dir():
            tag = ""
        else:
            raise CheckpointError(
                "no universal checkpoint",
                where=str(folder),
                expected=f"a file {_LATEST} or a folder zero",
                found="DeepSpeed's own checkpoint" if (folder / "latest").is_file() else "neither",
                hint="make one with: ullage convert SOURCE TARGET --to universal",
            )
    folder /= tag
    if not (folder / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError("the universal checkpoint is incomplete", where=f"{folder}/zero/optimizer_state.pt")
    return folder


def _step_of(tag: str) -> int | None:
    found = re.search(r"step_?(\d+)", tag)
    return int(found[1]) if found else None
