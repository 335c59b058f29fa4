"""A checkpoint of a plain Trainer, without DeepSpeed, read into this engine with its optimizer.

``checkpoint-N`` of transformers' Trainer and ours holds ``model.safetensors``, ``optimizer.pt`` and ``scheduler.pt``.
The optimizer's state is saved by number: parameters that decay first, then the others, each in the model's order. Each
rank reads the elements that it holds of weights and moments. The way back is ``ullage convert --to trainer``.

Source: transformers 5.23 ``trainer.py``: ``create_optimizer``, ``_save_optimizer_and_scheduler``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ullage.checkpoint.formats.torch_optimizer import decaying_first
from ullage.engines.fsdp import chunks
from ullage.engines.fsdp.optimizer import IMPLEMENTATION, make_state, names_of, require_optimizer
from ullage.engines.fsdp.weights import WeightFolder, names_in, tied_names
from ullage.errors import CheckpointError, first_line

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def is_trainer_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a Trainer's weights, and neither torch's format nor DeepSpeed's."""
    if (folder / ".metadata").is_file() or (folder / "latest").is_file():
        return False
    return any(folder.glob("*model*.safetensors"))


class TrainerCheckpoint:
    """Reader of a Trainer's folder into a model, in two calls: :meth:`check` changes nothing, :meth:`load` fills.

    Args:
        folder: the checkpoint.
        model: from ``parallelize``.
        weights: the model's tensors by name, without tied names.
        optimizer: of the model; None to load the model alone.
        states: objects with ``load_state_dict``; a Trainer's folder holds that of a ``scheduler``.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        weights: dict[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        states: dict[str, Any],
    ) -> None:
        self._folder, self._model, self._optimizer, self._states = folder, model, optimizer, states
        self._held = WeightFolder(folder)
        if self._held.is_adapter:
            trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            weights = {name: value for name, value in weights.items() if name in trained}
        self._weights = weights
        self._names = names_in(model, self._held, weights, tied_names(model))
        self._scheduler: Any = None
        self._saved: dict[str, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []

    def check(self, hyperparameters: bool) -> None:
        """Raise ``CheckpointError`` unless the folder has what is asked for. A new optimizer gets its state."""
        unknown = [name for name in self._states if name != "scheduler"]
        if unknown:
            raise CheckpointError(
                f"a Trainer's checkpoint holds no state of {unknown[0]!r}", where=str(self._folder), found=["scheduler"]
            )
        if self._states:
            self._scheduler = _read(self._folder / SCHEDULER)
        if self._optimizer is not None:
            self._check_optimizer(_read(self._folder / OPTIMIZER), self._optimizer, hyperparameters)

    def _check_optimizer(self, saved: Any, optimizer: torch.optim.Optimizer, hyperparameters: bool) -> None:
        require_optimizer(self._model, optimizer)
        if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
            raise CheckpointError("this file holds no optimizer", where=str(self._folder / OPTIMIZER))
        groups = self._groups(saved["param_groups"])
        numbers = {
            n: name for group, names in zip(saved["param_groups"], groups) for n, name in zip(group["params"], names)
        }
        self._saved = {numbers[number]: state for number, state in saved["state"].items() if number in numbers}
        ours = names_of(self._model, optimizer)
        if hyperparameters:
            # Groups without parameters decide nothing; either side may have left them out.
            filled = [(group, names) for group, names in zip(saved["param_groups"], groups) if names]
            trained = {name for names in groups for name in names}
            if [set(names) for _, names in filled] != [set(names) & trained for names in ours if set(names) & trained]:
                raise CheckpointError(
                    "the optimizer's parameter groups are others than the checkpoint's",
                    where=str(self._folder / OPTIMIZER),
                    expected=f"groups of {[len(names) for _, names in filled]} parameters",
                    found=f"groups of {[len(names) for names in ours]}",
                    hint="group them alike, or load with hyperparameters=False to keep the optimizer's own settings",
                )
            self._settings = [group for group, _ in filled]
        new = not optimizer.state
        if new and self._saved:
            make_state(optimizer)
        try:
            self._require_states(optimizer)
        except CheckpointError:
            if new:
                optimizer.state.clear()
            raise

    def _groups(self, saved: list[dict[str, Any]]) -> list[list[str]]:
        """The names of the parameters in each of the folder's groups, in the order of their numbers."""
        sizes = [len(group["params"]) for group in saved]
        if all("param_names" in group for group in saved):
            return [list(group["param_names"]) for group in saved]
        by_decay = decaying_first(self._model)
        whole = [[name for name, p in self._model.named_parameters() if p.requires_grad]]
        for groups in (by_decay, [names for names in by_decay if names], whole):
            if [len(names) for names in groups] == sizes:
                return groups
        raise CheckpointError(
            "the optimizer's state is saved by number, and its groups are not those of Trainer's optimizer",
            where=str(self._folder / OPTIMIZER),
            expected=f"groups of {[len(names) for names in by_decay]} parameters",
            found=f"groups of {sizes}",
            hint="load the model alone, without an optimizer",
        )

    def _require_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``CheckpointError`` unless the folder has each state of this optimizer, in the shape it has here."""
        for name, state in self._states_by_name(optimizer):
            for key, value in state.items():
                there = self._saved[name].get(key)
                if isinstance(value, Tensor) and not (isinstance(there, Tensor) and there.shape == value.shape):
                    raise CheckpointError(
                        "the checkpoint lacks what the optimizer needs",
                        where=f"{self._folder / OPTIMIZER}, {name}",
                        expected=f"{key} of shape {list(value.shape)}",
                        found=list(there.shape) if isinstance(there, Tensor) else there,
                        hint="continue with the model and the kind of optimizer that it was made from",
                    )

    def _states_by_name(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
        """The optimizer's own state of each parameter of which the folder has one; of the others it is dropped."""
        found = []
        for group, names in zip(optimizer.param_groups, names_of(self._model, optimizer)):
            for parameter, name in zip(group["params"], names):
                if name in self._saved and parameter in optimizer.state:
                    found.append((name, optimizer.state[parameter]))
        return found

    def load(self) -> None:
        """Fill model, optimizer and scheduler. Collective where a layout has to be made anew."""
        for name, value in self._weights.items():
            there = self._names[name]
            chunks.fill(value, lambda indices, there=there: self._held.part(there, indices))
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer)
        if self._scheduler is not None:
            self._states["scheduler"].load_state_dict(self._scheduler)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for name, state in self._states_by_name(optimizer):
            for key, value in state.items():
                there: Any = self._saved[name].get(key)
                if isinstance(value, Tensor):
                    chunks.fill(value, lambda indices, there=there: there[indices] if indices else there)
                elif there is not None:
                    state[key] = there
        for group, names in zip(optimizer.param_groups, names_of(self._model, optimizer)):
            for parameter, name in zip(group["params"], names):
                if name not in self._saved:  # it had no gradient yet
                    optimizer.state.pop(parameter, None)
        filled = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
        for group, told in zip(filled, self._settings):
            group.update({key: value for key, value in told.items() if key in group and key not in IMPLEMENTATION})


def _read(path: Path) -> Any:
    """The content of a file of torch's, mapped and not read. Raises ``CheckpointError``."""
    if not path.is_file():
        raise CheckpointError(
            "this checkpoint holds no " + path.stem,
            where=str(path),
            expected=f"{path.name} of a Trainer",
            found="no such file",
            hint="load the model alone, without it",
        )
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError("this file cannot be read", where=str(path), found=first_line(error)) from error
