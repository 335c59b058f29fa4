"""An optimizer's state by the names of its parameters, and back into an optimizer of another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ullage.engines.fsdp import chunks
from ullage.engines.fsdp.optimizer import make_state, names_of, require_optimizer
from ullage.engines.fsdp.weights import tied_names
from ullage.errors import CheckpointError

_STATE, _GROUPS = "optim.state.", "optim.param_groups."
#: Settings of a group that say how an optimizer computes on this machine, not what.
IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the optimizer as it is written: none before its first step."""
    state: dict[str, Any] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, names_of(model, optimizer)):
        for parameter, name in zip(group["params"], names):
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                state[name] = {key: chunks.writable(value) for key, value in held.items() if value is not None}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


class OptimizerLoader:
    """Loader of the optimizer state in a folder, in three calls: ``check``, ``settings``, ``load``.

    Args:
        folder: the checkpoint.
        model: the model of the optimizer's parameters.
        optimizer: filled by :meth:`load`.
        items: metadata of everything in the folder, by name.
    """

    def __init__(self, folder: Path, model: Any, optimizer: torch.optim.Optimizer, items: dict[str, Any]) -> None:
        self._folder, self._optimizer, self._items = folder, optimizer, items
        self._new = False
        require_optimizer(model, optimizer)
        # optim.state.<parameter>.<key>: a parameter's name has dots, a key has none.
        self._saved = {name.removeprefix(_STATE).rpartition(".")[0] for name in items if name.startswith(_STATE)}
        self._aliases = {name: names for names in tied_names(model) for name in names}
        self._groups = [[self._known(name) for name in names] for names in names_of(model, optimizer)]
        self._trained = {self._known(name) for name, p in model.named_parameters() if p.requires_grad}

    def check(self) -> None:
        """Raise ``CheckpointError`` unless the folder has what this optimizer needs. A new one gets its state."""
        if not any(name.startswith("optim.") for name in self._items):
            raise CheckpointError(
                "this checkpoint holds no optimizer",
                where=str(self._folder),
                hint="load the model alone, without an optimizer; of a DeepSpeed run, convert the folder global_step*",
            )
        # torch loads into tensors that exist, so a new optimizer makes its own before it is compared with the folder.
        self._new = not self._optimizer.state
        if self._new and self._saved:
            make_state(self._optimizer)
        wanted = {f"{_STATE}{name}.{key}": v for name, state in self._held().items() for key, v in state.items()}
        try:
            chunks.require_names(self._folder, wanted, self._items)
        except CheckpointError:
            self._forget()
            raise

    def settings(self) -> list[dict[str, Any]]:
        """The folder's settings for each of the optimizer's groups. Collective; changes nothing.

        Raises ``CheckpointError`` on every rank if the folder groups the parameters otherwise.
        """
        # The folder's groups, each with the settings that both sides have. A list in the folder is one item, so an
        # empty list stands for the names that are read in its place.
        count = len({name.split(".")[2] for name in self._items if name.startswith(_GROUPS)})
        listed: list[dict[str, Any]] = [{"params": []} for _ in range(count)]
        for i, group in enumerate(self._optimizer.param_groups[:count]):
            listed[i] |= {key: value for key, value in group.items() if f"{_GROUPS}{i}.{key}" in self._items}
            listed[i]["params"] = []
        if count:
            chunks.read({"optim": {"param_groups": listed}}, self._folder)
        # Frozen parameters have no state, so it does not matter how either side groups them.
        theirs = [{self._known(name) for name in group["params"]} & self._trained for group in listed]
        if theirs != [set(names) & self._trained for names in self._groups]:
            self._forget()
            raise CheckpointError(
                "the optimizer's parameter groups are others than the checkpoint's",
                where=str(self._folder),
                expected=f"{count} groups of {[len(names) for names in theirs]} parameters",
                found=f"{len(self._groups)} of {[len(set(names) & self._trained) for names in self._groups]}",
                hint="group them alike, or load with hyperparameters=False to keep the optimizer's own settings",
            )
        return [{k: v for k, v in group.items() if k not in IMPLEMENTATION} for group in listed]

    def load(self, settings: list[dict[str, Any]]) -> None:
        """Fill the optimizer's tensors, and its settings if there are any. Collective."""
        held = self._held()
        targets = {name: {key: chunks.writable(v) for key, v in state.items()} for name, state in held.items()}
        if targets:
            chunks.read({"optim": {"state": targets}}, self._folder)
        for group, names in zip(self._optimizer.param_groups, self._groups):
            for parameter, name in zip(group["params"], names):
                if name in held:
                    chunks.copy_back(held[name], targets[name])
                    self._optimizer.state[parameter].update(held[name])
                else:  # it had no gradient yet
                    self._optimizer.state.pop(parameter, None)
        for group, told in zip(self._optimizer.param_groups, settings):
            group.update(told)

    def _forget(self) -> None:
        if self._new:
            self._optimizer.state.clear()

    def _held(self) -> dict[str, dict[str, Any]]:
        """The optimizer's own state of each parameter of which the folder has one."""
        return {
            name: {key: value for key, value in self._optimizer.state[parameter].items() if value is not None}
            for group, names in zip(self._optimizer.param_groups, self._groups)
            for parameter, name in zip(group["params"], names)
            if name in self._saved and parameter in self._optimizer.state
        }

    def _known(self, name: str) -> str:
        """The name under which the folder has the state of a parameter, which has several names if it is tied."""
        names = self._aliases.get(name, [name])
        return next((alias for alias in names if alias in self._saved), names[0])
