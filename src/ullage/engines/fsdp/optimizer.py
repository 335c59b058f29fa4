"""A sharded model's optimizer: whose parameters it holds, its state by their names, and the norm that it clips.

An optimizer made before ``parallelize`` holds tensors that the model no longer has, and would train nothing without an
error. With tp, parameters live on two meshes, dp·cp × tp and dp·cp alone: the kernels that take many tensors at once
take those of one, and so does torch's own ``clip_grad_norm_``. Here each rank adds up the squares it holds, in float32,
and each sum is added up over exactly the axes that its gradients are sharded over, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from ullage.core.errors import CheckpointError, InputError
from ullage.engines.fsdp import chunks
from ullage.engines.fsdp.weights import saved_names
from ullage.training.setup.fsdp import reshard

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


_STATE, _GROUPS = "optim.state.", "optim.param_groups."
#: Settings of a group that say how an optimizer computes on this machine, not what.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the optimizer as it is written: none before its first step, which torch would take."""
    state: dict[str, Any] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, parameter_names(model, optimizer)):
        for parameter, name in zip(group["params"], names):
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                state[name] = {key: chunks.writable(value) for key, value in held.items() if value is not None}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


class OptimizerLoader:
    """Loader of saved state into an optimizer of any layout, in three calls: ``check``, ``settings``, ``load``.

    Args:
        model: the model of the optimizer's parameters.
        optimizer: filled by :meth:`load`.
        folder: in torch's format.
        items: metadata of all that it holds, by name.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, folder: Path, items: dict[str, Any]) -> None:
        self._model, self._optimizer, self._folder, self._items = model, optimizer, folder, items
        self._new = not optimizer.state
        if not any(name.startswith("optim.") for name in items):
            raise CheckpointError(
                "this checkpoint holds no optimizer",
                where=str(folder),
                hint="load the model alone, without an optimizer; of a DeepSpeed run, take the folder global_step*",
            )
        # optim.state.<parameter>.<key>: a parameter's name has dots, a key has none.
        self._saved = {name.removeprefix(_STATE).rpartition(".")[0] for name in items if name.startswith(_STATE)}
        require_optimizer(model, optimizer)
        # A tied weight has state under one of its names, which need not be the first that the weights have.
        weights = (name.removeprefix("model.") for name in items)
        self._known = saved_names(model, self._saved or set(weights))
        self._groups = [[self._known[name] for name in names] for names in parameter_names(model, optimizer)]
        self._trained = {self._known[name] for name, p in model.named_parameters() if p.requires_grad}

    def check(self) -> None:
        """Raise ``CheckpointError`` unless there is what this optimizer needs. A new one gets its state."""
        if self._new and self._saved:
            self._optimizer.zero_grad(set_to_none=True)
            get_optimizer_state_dict(self._model, self._optimizer)  # which makes it: what is loaded fills tensors
        wanted = {f"{_STATE}{name}.{key}": v for name, held in self._own_state().items() for key, v in held.items()}
        with self._forgotten():
            chunks.require_names(self._folder, wanted, self._items)

    def settings(self) -> list[dict[str, Any]]:
        """The saved settings of the optimizer's groups that have trained parameters. Collective; changes nothing.

        Raises ``CheckpointError`` on every rank if the parameters were grouped otherwise.
        """
        # Each with the settings that both sides have. A list in the folder is one item, so an empty list stands for the
        # names that are read in its place.
        count = len({name.split(".")[2] for name in self._items if name.startswith(_GROUPS)})
        listed: list[dict[str, Any]] = [{"params": []} for _ in range(count)]
        for i, group in enumerate(self._optimizer.param_groups[:count]):
            listed[i] |= {key: value for key, value in group.items() if f"{_GROUPS}{i}.{key}" in self._items}
            listed[i]["params"] = []
        if count:
            chunks.load_chunks({"optim": {"param_groups": listed}}, self._folder)
        # Frozen parameters have no state, so it does not matter how either side groups them.
        named = [(group, {self._known.get(name, name) for name in group["params"]} & self._trained) for group in listed]
        theirs = [(group, names) for group, names in named if names]
        ours = [names for names in (self._trained.intersection(names) for names in self._groups) if names]
        with self._forgotten():
            if [names for _, names in theirs] != ours:
                raise CheckpointError(
                    "the optimizer's parameter groups are others than the checkpoint's",
                    where=str(self._folder),
                    expected=f"groups of {[len(names) for _, names in theirs]} parameters",
                    found=f"groups of {[len(names) for names in ours]}",
                    hint="group them alike, or load with hyperparameters=False to keep the optimizer's own settings",
                )
        return [group for group, _ in theirs]

    def load(self, settings: list[dict[str, Any]]) -> None:
        """Fill the optimizer's tensors, and its settings if there are any. Collective."""
        held = self._own_state()
        targets = {name: {key: chunks.writable(v) for key, v in state.items()} for name, state in held.items()}
        if targets:
            chunks.load_chunks({"optim": {"state": targets}}, self._folder)
        for group, names in zip(self._optimizer.param_groups, self._groups):
            for parameter, name in zip(group["params"], names):
                if name in held:
                    chunks.copy_back(held[name], targets[name])
                    self._optimizer.state[parameter].update(held[name])
                else:  # it had no gradient yet
                    self._optimizer.state.pop(parameter, None)
        pairs = zip(self._optimizer.param_groups, self._groups)
        filled = [group for group, names in pairs if self._trained.intersection(names)]
        for group, told in zip(filled, settings):
            group.update({key: value for key, value in told.items() if key in group and key not in _IMPLEMENTATION})

    @contextmanager
    def _forgotten(self) -> Iterator[None]:
        """Within it an error takes the state that a new optimizer was given."""
        try:
            yield
        except CheckpointError:
            if self._new:
                self._optimizer.state.clear()
            raise

    def _own_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's own state of each parameter of which some was saved."""
        return {
            name: {key: value for key, value in self._optimizer.state[parameter].items() if value is not None}
            for group, names in zip(self._optimizer.param_groups, self._groups)
            for parameter, name in zip(group["params"], names)
            if name in self._saved and parameter in self._optimizer.state
        }


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
