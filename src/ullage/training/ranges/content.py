"""Content of a checkpoint as every rank gets it from the first: where each element lies, and what else the files say.

The first rank reads the descriptions of all files and proves that the fragments tile every tensor; the others get the
result, so that N ranks do not each open the files of M.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint import Inventory, Tensor, read
from ullage.checkpoint.manifest import Block, Manifest, around, damage_in
from ullage.errors import UllageError
from ullage.layout import Int64
from ullage.ranks import Axis
from ullage.ranks.wire import broadcast_record

#: What the state of an optimizer is called under which the step must be known, because it corrects their bias.
_CORRECTED = ("exp_avg", "exp_avg_sq")


@dataclass
class Content:
    """A checkpoint without its data.

    Attributes:
        inventory: its tensors, without what only writers of formats need.
        steps: step and dtype of each parameter group, as they were saved.
        settings: plain hyperparameters by group, where no file of DeepSpeed's holds them.
        model_states: files of model states of data-parallel rank 0, by model rank.
        optimizer_states: the file with the optimizer's hyperparameters and loss scale; None without one of DeepSpeed's.
        left_out: state that the optimizer computes again.
        blocks: by file, offset, bytes and CRC-32 of the blocks of the manifest.
        problems: why it cannot be loaded.
    """

    inventory: Inventory
    steps: dict[int, tuple[Any, str | None]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    model_states: list[Path] = field(default_factory=list)
    optimizer_states: Path | None = None
    left_out: frozenset[str] = frozenset()
    blocks: dict[int, Int64] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys of trained parameters, the master weights (``fp32``) first."""
        return self.inventory.keys

    def named(self, names: list[str], *keys: str) -> Tensor | None:
        """The tensor that the checkpoint has under one of ``names`` and one of ``keys``."""
        # A tied parameter was saved under one of its names; the names of one are the same in another run of the model.
        stored = [*names, *(self.inventory.aliases[name] for name in names if name in self.inventory.aliases)]
        found = ((name, key) for key in keys for name in stored if (name, key) in self.inventory)
        return next((self.inventory.tensor(*each) for each in found), None)


def shared_content(folder: str | Path, tag: str | None, *, manifest: bool) -> Content:
    """The content of the checkpoint, read by the first rank for all. Collective.

    ``manifest``: whether what is read will be compared with the manifest, if there is one. Raises on every rank what
    the first one met.
    """
    axis = Axis.world()
    record = None
    if axis.rank == 0:
        try:
            record = (None, read_content(Path(folder) / tag if tag else Path(folder), manifest=manifest))
        except UllageError as error:
            record = (error, None)
        except Exception as error:  # another rank can only raise what it can be sent
            record = (RuntimeError(f"{type(error).__name__}: {error}"), None)
    error, content = pickle.loads(broadcast_record(pickle.dumps(record), axis, 0))
    if error is not None:
        raise error
    return content


def read_content(folder: Path, *, manifest: bool = True) -> Content:
    """The content of the checkpoint at ``folder``, as for ``ullage.checkpoint.read``. Reads no tensor data."""
    inventory = read(folder)
    details, where = inventory.details, inventory.folder
    content = Content(replace(inventory, details=None), getattr(details, "steps", {}))
    content.problems += [
        str(problem) for problem in (*inventory.problems(manifest=False), *inventory.optimizer_problems)
    ]
    if inventory.format == "zero":
        ranks = sorted((f.model_rank or 0, f.name) for f in inventory.files if f.kind == "model" and not f.dp_rank)
        content.model_states = [where / name for _, name in ranks]
        shard = details.shards[min(details.shards)].name if details.shards else None
        content.optimizer_states = where / shard if shard else next(iter(content.model_states), None)
    elif inventory.format == "universal":
        names = ("mp_rank_*_model_states.pt", "zero_pp_rank_0_mp_rank_*_model_states.pt")
        content.model_states = next((found for name in names if (found := sorted(where.glob(name)))), [])
        content.optimizer_states = where / "zero" / "optimizer_state.pt"
    elif details is not None:
        plain = (int, float, bool, str, tuple, type(None))
        content.settings = [
            {key: value for key, value in group.items() if isinstance(value, plain)} for group in details.param_groups
        ]
    uncut = getattr(details, "uncut", {}).values()
    content.left_out = frozenset(key for each in uncut for key in each.left_out)
    content.problems += _missing_steps(content)
    if manifest:
        _add_blocks(content)
    return content


def _missing_steps(content: Content) -> list[str]:
    inventory = content.inventory
    has_state = inventory.format in ("zero", "universal") or len(inventory.keys) > 1
    if not has_state and not inventory.steps:
        return [f"no optimizer state in it ({inventory.format})"]
    groups = {t.group for t in inventory.tensors if t.key in _CORRECTED}
    lacking = [g for g in groups if g is None or inventory.steps.get(g) is None]
    return ["the optimizer's step is not in it"] if lacking else []


def _add_blocks(content: Content) -> None:
    """The blocks of the manifest that speaks of the checkpoint's files: in its folder, or in the one around it."""
    inventory = content.inventory
    for found, prefix in around(inventory.folder):
        listed = _by_file(found)
        numbers = {i: listed[prefix + f.name] for i, f in enumerate(inventory.files) if prefix + f.name in listed}
        if not numbers and not found.damage:
            continue
        damage = [*found.damage, *damage_in(found.folder, [b for own in numbers.values() for b in own], content=False)]
        content.problems += [f"{d.name} is damaged: expected {d.expected}, found {d.found}" for d in damage]
        content.blocks = {
            number: np.array([(b.offset, b.num_bytes, b.crc) for b in own], np.int64) for number, own in numbers.items()
        }
        return


def _by_file(manifest: Manifest) -> dict[str, list[Block]]:
    listed: dict[str, list[Block]] = {}
    for block in manifest.blocks:
        listed.setdefault(block.name, []).append(block)
    return listed
