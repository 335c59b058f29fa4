"""Objects of a checkpoint beside its tensors, as DeepSpeed wrote them: hyperparameters, loss scale, counters, schedule.

The files are mapped, so that of a file with all weights only the description is read. As by DeepSpeed's own loader they
are unpickled, which can run code.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ullage.training.ranges.content import Content
from ullage.training.universal import is_stage3, read_file

#: Entries of model states whose tensors are read by ranges, or replaced by the masters.
_TENSORS = ("module", "frozen_param_fragments", "optimizer")
#: Entries of a parameter group that belong to the run that saved it.
_OWN = ("params", "param_names")
#: What the loss scale is kept in, by ``_load_global_state``.
_SCALE = ("loss_scaler", "dynamic_loss_scale")


@dataclass
class Saved:
    """What the files of DeepSpeed say of the optimizer.

    Attributes:
        groups: hyperparameters by parameter group; empty where nothing holds them.
        kept: by parameter group, state that is neither cut like the weights nor the step.
        whole: loss scale, clipping and version, for the engine's own loader; empty for formats without.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


def read_saved(content: Content) -> Saved:
    """The objects of the optimizer. Reads the description of one file."""
    if content.optimizer_states is None:
        return Saved(content.settings)
    root = read_file(content.optimizer_states)
    inventory = content.inventory
    saved = root  # universal
    if inventory.format == "zero":
        saved = root.get("optimizer" if inventory.written_by.stage == 0 else "optimizer_state_dict") or {}
    inner = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict") or saved
    groups, state = [], {}  # as of an elastic checkpoint: a list by group, without hyperparameters
    if isinstance(inner, dict):
        groups = inner.get("param_groups") or saved.get("param_groups") or []
        state = inner.get("state") or {}
    others = {*content.keys, *content.left_out, "step"}
    kept = {
        number: {key: copy.deepcopy(value) for key, value in state[first].items() if key not in others}
        for number, group in enumerate(groups)
        for first in list(group.get("params", ()))[:1]
        if isinstance(state.get(first), dict)
    }
    whole = {key: saved[key] for key in (*_SCALE, "overflow", "clip_grad", "ds_version") if key in saved}
    whole.setdefault("ds_version", root.get("ds_version"))
    settings = [{key: value for key, value in group.items() if key not in _OWN} for group in groups]
    return Saved(copy.deepcopy(settings), kept, whole if inventory.written_by.stage != 0 else {})


def set_scale(zero: Any, saved: Saved) -> None:
    """Set loss scale and clipping by the engine's own loader, the scale only where both runs scale in the same way."""
    import deepspeed

    whole = dict(saved.whole)
    if not whole:
        return
    # A scale that adapts itself, saved by a run in fp16, has no place in one in bf16, nor the other way round.
    if type(whole.get("loss_scaler")) is not type(getattr(zero, "loss_scaler", None)):
        whole = {key: value for key, value in whole.items() if key not in _SCALE}
    whole["ds_version"] = whole.get("ds_version") or deepspeed.__version__
    if is_stage3(zero):
        zero._load_global_state_stage3(whole)
    else:
        zero._load_global_state(whole)


class ModelStates:
    """The model states without the tensors that are read by ranges, given to the engine as its reader of files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        root = {key: value for key, value in read_file(path).items() if key not in _TENSORS}
        # Copied, because a mapped tensor would change with its file.
        self._root = {**copy.deepcopy(root), "module": {}, "mp_world_size": 1}

    def load(self, path: Any, map_location: Any = None) -> dict[str, Any]:
        """The states, whatever file is asked for."""
        return dict(self._root)


def step_for(value: Any, dtype: str | None, optimizer: torch.optim.Optimizer) -> Any:
    """A step as ``optimizer`` keeps it: torch's a tensor, DeepSpeed's a number; any other as it was saved."""
    home = type(optimizer).__module__
    if home.startswith("torch.optim"):
        return torch.tensor(float(value), dtype=getattr(torch, dtype or "float32"))
    if dtype is None or home.startswith("deepspeed.ops"):
        return int(value)
    return torch.tensor(value, dtype=getattr(torch, dtype))
