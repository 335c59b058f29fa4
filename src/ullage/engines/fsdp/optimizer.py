"""A sharded model's optimizer: whose parameters it holds, its state by their names, and the norm that it clips.

An optimizer made before ``parallelize`` holds tensors that the model no longer has, and would train nothing without an
error. With tp, parameters live on two meshes, dp·cp × tp and dp·cp alone: the kernels that take many tensors at once
take those of one, and so does torch's own ``clip_grad_norm_``. Here each rank adds up the squares it holds, in float32,
and each sum is added up over exactly the axes that its gradients are sharded over, so that nothing counts twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ullage.checkpoint.formats.torch_optimizer import decaying_first
from ullage.core.errors import CheckpointError, InputError, first_line
from ullage.engines.fsdp import chunks
from ullage.engines.fsdp.weights import tied_names
from ullage.training.setup.fsdp import reshard

#: An optimizer's state by parameter and key.
States = dict[str, dict[str, Any]]
#: Optimizers that were looked at, with the number of parameters they had.
_CHECKED: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()


def parameter_names(model: Any, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each group. Raises ``InputError`` if one is not the model's."""
    # Parameters are compared as objects: while weights are gathered, the model has other tensors than the optimizer.
    reshard(model)
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in by_id for parameter in group["params"]):
            raise InputError(
                "the optimizer holds parameters that the model does not",
                hint="make the optimizer after parallelize: the model's parameters are other tensors then",
            )
        groups.append([by_id[id(parameter)] for parameter in group["params"]])
    return groups


def require_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer once, and keep it from batching tensors of two meshes. Raises as :func:`parameter_names`."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == count:
        return
    parameter_names(model, optimizer)
    for group in optimizer.param_groups:
        # Under tp a group may hold parameters on dp·cp × tp and on dp·cp alone, and one call over many tensors takes
        # one mesh.
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        if len(meshes) > 1 and (group.get("foreach") or group.get("fused")):
            group["foreach"] = group["fused"] = False
    _CHECKED[optimizer] = count


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have a new optimizer make its state: a step with zero gradients at a rate of zero, which changes no weight."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            # A product keeps the type, as the rate may be a tensor. The step count becomes 1; whoever calls this loads
            # over it.
            group["lr"] = group["lr"] * 0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        if "lr" in group:
            group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


_STATE, _GROUPS = "optim.state.", "optim.param_groups."
#: Settings of a group that say how an optimizer computes on this machine, not what.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the optimizer as it is written: none before its first step."""
    state: dict[str, Any] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, parameter_names(model, optimizer)):
        for parameter, name in zip(group["params"], names):
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                state[name] = {key: chunks.writable(value) for key, value in held.items() if value is not None}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


class SavedOptimizer(Protocol):
    """An optimizer's state in a checkpoint. ``where``: its place; ``names``: the parameters that it has state of."""

    where: str
    names: set[str]

    def require(self, wanted: States) -> None:
        """Raise ``CheckpointError`` unless each wanted item is there, and of its size."""
        ...

    def groups(self, own: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
        """Settings and parameters of each group; ``own``: the optimizer's groups. Collective; changes nothing."""
        ...

    def fill(self, held: States) -> None:
        """Fill the tensors of the state, and replace its other values. Collective."""
        ...


class OptimizerLoader:
    """Loader of saved state into an optimizer of any layout, in three calls: ``check``, ``settings``, ``load``.

    Args:
        model: the model of the optimizer's parameters.
        optimizer: filled by :meth:`load`.
        saved: what it is filled with.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, saved: SavedOptimizer) -> None:
        self._optimizer, self._saved, self._new = optimizer, saved, False
        require_optimizer(model, optimizer)
        self._aliases = {name: names for names in tied_names(model) for name in names}
        self._groups = [[self._known(name) for name in names] for names in parameter_names(model, optimizer)]
        self._trained = {self._known(name) for name, p in model.named_parameters() if p.requires_grad}

    def check(self) -> None:
        """Raise ``CheckpointError`` unless there is what this optimizer needs. A new one gets its state."""
        # What is loaded fills tensors that exist, so a new optimizer makes its own first.
        self._new = not self._optimizer.state
        if self._new and self._saved.names:
            make_state(self._optimizer)
        try:
            self._saved.require(self._own_state())
        except CheckpointError:
            self._forget()
            raise

    def settings(self) -> list[dict[str, Any]]:
        """The saved settings of the optimizer's groups that have trained parameters. Collective; changes nothing.

        Raises ``CheckpointError`` on every rank if the parameters were grouped otherwise.
        """
        groups = self._saved.groups(self._optimizer.param_groups)
        # Frozen parameters have no state, so it does not matter how either side groups them.
        named = [(settings, {self._known(name) for name in names} & self._trained) for settings, names in groups]
        theirs = [(settings, names) for settings, names in named if names]
        ours = [names for names in (set(names) & self._trained for names in self._groups) if names]
        if [names for _, names in theirs] != ours:
            self._forget()
            raise CheckpointError(
                "the optimizer's parameter groups are others than the checkpoint's",
                where=self._saved.where,
                expected=f"groups of {[len(names) for _, names in theirs]} parameters",
                found=f"groups of {[len(names) for names in ours]}",
                hint="group them alike, or load with hyperparameters=False to keep the optimizer's own settings",
            )
        return [settings for settings, _ in theirs]

    def load(self, settings: list[dict[str, Any]]) -> None:
        """Fill the optimizer's tensors, and its settings if there are any. Collective."""
        held = self._own_state()
        if held:
            self._saved.fill(held)
        for group, names in zip(self._optimizer.param_groups, self._groups):
            for parameter, name in zip(group["params"], names):
                if name in held:
                    self._optimizer.state[parameter].update(held[name])
                else:  # it had no gradient yet
                    self._optimizer.state.pop(parameter, None)
        pairs = zip(self._optimizer.param_groups, self._groups)
        filled = [group for group, names in pairs if set(names) & self._trained]
        for group, told in zip(filled, settings):
            group.update({key: value for key, value in told.items() if key in group and key not in _IMPLEMENTATION})

    def _forget(self) -> None:
        if self._new:
            self._optimizer.state.clear()

    def _own_state(self) -> States:
        """The optimizer's own state of each parameter of which some was saved."""
        return {
            name: {key: value for key, value in self._optimizer.state[parameter].items() if value is not None}
            for group, names in zip(self._optimizer.param_groups, self._groups)
            for parameter, name in zip(group["params"], names)
            if name in self._saved.names and parameter in self._optimizer.state
        }

    def _known(self, name: str) -> str:
        """The name under which the state of a parameter was saved, which has several names if it is tied."""
        names = self._aliases.get(name, [name])
        return next((alias for alias in names if alias in self._saved.names), names[0])


class DistributedOptimizer:
    """:class:`SavedOptimizer` in a folder of torch's format. ``items``: metadata of all that it holds, by name."""

    def __init__(self, folder: Path, items: dict[str, Any]) -> None:
        self._folder, self._items, self.where = folder, items, str(folder)
        if not any(name.startswith("optim.") for name in items):
            raise CheckpointError(
                "this checkpoint holds no optimizer",
                where=self.where,
                hint="load the model alone, without an optimizer; of a DeepSpeed run, convert the folder global_step*",
            )
        # optim.state.<parameter>.<key>: a parameter's name has dots, a key has none.
        self.names = {name.removeprefix(_STATE).rpartition(".")[0] for name in items if name.startswith(_STATE)}

    def require(self, wanted: States) -> None:
        flat = {f"{_STATE}{name}.{key}": value for name, state in wanted.items() for key, value in state.items()}
        chunks.require_names(self._folder, flat, self._items)

    def groups(self, own: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
        # Each with the settings that both sides have. A list in the folder is one item, so an empty list stands for the
        # names that are read in its place.
        count = len({name.split(".")[2] for name in self._items if name.startswith(_GROUPS)})
        listed: list[dict[str, Any]] = [{"params": []} for _ in range(count)]
        for i, group in enumerate(own[:count]):
            listed[i] |= {key: value for key, value in group.items() if f"{_GROUPS}{i}.{key}" in self._items}
            listed[i]["params"] = []
        if count:
            chunks.load_chunks({"optim": {"param_groups": listed}}, self._folder)
        return [(group, group["params"]) for group in listed]

    def fill(self, held: States) -> None:
        targets = {name: {key: chunks.writable(v) for key, v in state.items()} for name, state in held.items()}
        chunks.load_chunks({"optim": {"state": targets}}, self._folder)
        for name, state in held.items():
            chunks.copy_back(state, targets[name])


class TrainerOptimizer:
    """:class:`SavedOptimizer` in a plain Trainer's ``optimizer.pt``, which has state by number.

    The numbers are those of parameters that decay first, then of the others, each in the model's order; or the groups
    tell the names. Source: transformers 5.23 ``trainer.py``: ``create_optimizer``.
    """

    def __init__(self, path: Path, model: Any) -> None:
        self.where, saved = str(path), read_mapped(path)
        if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
            raise CheckpointError("this file holds no optimizer", where=self.where)
        self._groups: list[dict[str, Any]] = saved["param_groups"]
        self._listed = self._names(model)
        pairs = (pair for group, names in zip(self._groups, self._listed) for pair in zip(group["params"], names))
        self._state = {name: saved["state"][number] for number, name in pairs if number in saved["state"]}
        self.names = set(self._state)

    def _names(self, model: Any) -> list[list[str]]:
        """The names of the parameters in each group, in the order of their numbers."""
        sizes = [len(group["params"]) for group in self._groups]
        if all("param_names" in group for group in self._groups):
            return [list(group["param_names"]) for group in self._groups]
        by_decay = decaying_first(model)
        whole = [[name for name, p in model.named_parameters() if p.requires_grad]]
        for groups in (by_decay, [names for names in by_decay if names], whole):
            if [len(names) for names in groups] == sizes:
                return groups
        raise CheckpointError(
            "the optimizer's state is saved by number, and its groups are not those of Trainer's optimizer",
            where=self.where,
            expected=f"groups of {[len(names) for names in by_decay]} parameters",
            found=f"groups of {sizes}",
            hint="load the model alone, without an optimizer",
        )

    def require(self, wanted: States) -> None:
        for name, state in wanted.items():
            for key, value in state.items():
                there = self._state[name].get(key)
                if isinstance(value, Tensor) and not (isinstance(there, Tensor) and there.shape == value.shape):
                    raise CheckpointError(
                        "the checkpoint lacks what the optimizer needs",
                        where=f"{self.where}, {name}",
                        expected=f"{key} of shape {list(value.shape)}",
                        found=list(there.shape) if isinstance(there, Tensor) else there,
                        hint="continue with the model and the kind of optimizer that it was made from",
                    )

    def groups(self, own: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
        return list(zip(self._groups, self._listed))

    def fill(self, held: States) -> None:
        for name, state in held.items():
            for key, value in state.items():
                there: Any = self._state[name].get(key)
                if isinstance(value, Tensor):
                    chunks.fill(value, lambda indices, there=there: there[indices] if indices else there)
                elif there is not None:
                    state[key] = there


def read_mapped(path: Path) -> Any:
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


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None = None) -> Tensor:
    """The norm of all gradients together, float32, 0-dim; scales them down to ``max_norm`` if that is given.

    Collective over every mesh that the gradients live on. Does not wait for the device. A parameter without a gradient
    counts nothing. Raises ``InputError`` for a ``max_norm`` that is not positive.
    """
    if max_norm is not None and not max_norm > 0:
        raise InputError("max_norm must be positive", found=max_norm)
    # Gradients by mesh and by the dims that cut them. Parameters come in the same order on every rank, and so do these
    # groups and the collectives below.
    kinds: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    local: list[Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        held = grad._local_tensor if isinstance(grad, DTensor) else grad
        kinds.setdefault(_sharding(grad), []).append(held)
        local.append(held)
    squares = []
    for (mesh, dims), held in kinds.items():
        norms = torch._foreach_norm(held, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        square = torch.stack(norms).square().sum()
        # Summed over the dims whose ranks hold different parts; over the others every rank has the same sum already.
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    if max_norm is not None and local:
        # The factor stays on the device and is always applied, so that nothing waits for it. 1e-6 as in torch's
        # clip_grad_norm_.
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for held in local:
            held.mul_(factor.to(held.device))
    return total


def _sharding(grad: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a gradient and the mesh dims whose ranks hold different parts of it."""
    if not isinstance(grad, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in grad.placements):
        raise AssertionError("a gradient that is still partial")
    return grad.device_mesh, tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
