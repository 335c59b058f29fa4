"""Model states as a DeepSpeed engine loads them, made from the inventory of any format.

What the source's own model states say beside the module (client state, schedule, counters) is carried. Of other sources
the entries are those that ``DeepSpeedEngine.load_checkpoint`` asks for.
Source: ``_common_checkpoint_state``, ``_load_checkpoint`` in ``deepspeed/runtime/engine.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.core.numbers import FLOATS
from ullage.checkpoint.files.pickling import Constant, TensorCopy
from ullage.checkpoint.files.unpickling import Size, TensorRef
from ullage.checkpoint.formats.entries import OptimizerGroup, cast_of, kept_entries, states_by_name
from ullage.checkpoint.formats.locate import schedule_beside
from ullage.checkpoint.zero.states import Details
from ullage.core.errors import CheckpointError

#: The version whose files are written.
DEEPSPEED = "0.19.8"
#: What the source's model states say of its own layout, which is not the target's.
_OWN = ("checkpoint_parallel_dimensions", "frozen_param_fragments")
#: Names that torch gives to the buffers of BatchNorm and its kin; no optimizer has them.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The tensors of a checkpoint as an engine divides them.

    Attributes:
        inventory: the source.
        trained: weights by name; those without elements are not among them.
        frozen: parameters that no optimizer holds, and trained ones without elements.
        buffers: of the module.
        dtype: of the trained weights in the module; None for that of the masters.
    """

    inventory: Inventory
    trained: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    dtype: str | None

    def weight(self, name: str) -> TensorCopy:
        """A weight, frozen parameter or buffer as the module holds it."""
        if name in self.trained:
            return TensorCopy(self.trained[name], cast_of(self.trained[name], self.dtype))
        tensor = self.frozen.get(name) or self.buffers[name]
        return TensorCopy(tensor, tensor.dtype)

    def module(self, trained: Literal["whole", "empty", "absent"]) -> dict[str, Any]:
        """The module as an engine loads it, with the source's entries that are no tensors.

        Engines of stages 1 and 2 load every tensor, also under its tied names; those of stage 3 whole buffers, and
        parameters without elements. Beside universal files it has what no optimizer holds.
        """
        aliases, parameters = self.inventory.aliases, {**self.trained, **self.frozen}
        held: dict[str, Any] = OrderedDict()
        if trained == "empty":
            for name in [*parameters, *(alias for alias in aliases if alias not in self.buffers)]:
                owner = aliases.get(name, name)
                if owner in parameters:
                    held[name] = Constant(self.weight(owner).dtype, (0,), b"")
            parameters = {}
        elif trained == "absent":
            parameters = self.frozen
        held |= {name: self.weight(name) for name in [*parameters, *self.buffers]}
        for alias, owner in aliases.items() if trained == "whole" else ():
            if owner in held:
                held[alias] = held[owner]
        model = Details.of(self.inventory).lead
        own = (model.module if model else None) or {}
        return OrderedDict({**held, **{n: value for n, value in own.items() if not isinstance(value, TensorRef)}})

    def states(
        self, module: dict[str, Any], flats: list[list[str]], ranks: int, config: dict[str, Any]
    ) -> dict[str, Any]:
        """The content of a file of model states.

        Args:
            module: as the engine loads it.
            flats: the names in each flat buffer, in the order of memory.
            ranks: data-parallel ranks of the engine.
            config: that of the run.
        """
        details, step = Details.of(self.inventory), global_step(self.inventory)
        content: dict[str, Any] = {
            "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": step,
        }  # fmt: skip
        if details.lead is not None:
            content |= {key: value for key, value in kept_entries(details.lead)[0].items() if key not in _OWN}
        content["lr_scheduler"] = schedule_of(self.inventory)
        shapes = [OrderedDict((name, Size(self.trained[name].shape)) for name in names) for names in flats]
        return content | {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((name, Size(tensor.shape)) for name, tensor in self.frozen.items()),
            "shared_params": self.inventory.aliases,
            "frozen_param_fragments": None,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_config": config,
            "ds_version": DEEPSPEED,
        }


def parts_of(inventory: Inventory, dtype: str | None, groups: list[OptimizerGroup]) -> ModelParts:
    """The tensors of an inventory, divided. Without groups every tensor of floats counts as trained, but for the
    statistics of normalisations.

    Raises ``CheckpointError`` for optimizer state of a parameter that is in no group.
    """
    named, stateful = {name for group in groups for name in group.names}, states_by_name(inventory)
    held: dict[str, dict[str, Tensor]] = {"parameter": {}, "frozen": {}, "buffer": {}}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter" and tensor.key != "fp32":
            continue
        kind = tensor.kind
        is_statistic = tensor.name not in named and tensor.name.rpartition(".")[2] in _STATISTICS
        if is_statistic or (kind == "parameter" and not groups and tensor.dtype not in FLOATS):
            kind = "buffer"
        elif kind == "parameter" and groups and tensor.name not in named:
            if tensor.name in stateful:
                where = f"{inventory.folder}, parameter {tensor.name}"
                raise CheckpointError("a parameter with optimizer state is in no group of the optimizer", where=where)
            kind = "frozen"
        elif kind == "parameter" and not tensor.numel:
            kind = "frozen"  # DeepSpeed keeps a parameter without elements out of its flat buffers
        held[kind][tensor.name] = tensor
    return ModelParts(inventory, held["parameter"], held["frozen"], held["buffer"], dtype)


def module_dtype(inventory: Inventory) -> str | None:
    """The dtype of the trained weights in the source's module, where it has one."""
    trained = {t.name for t in inventory.tensors if t.kind == "parameter" and t.numel}
    for model in Details.of(inventory).models.values():
        for name, value in (model.module or {}).items():
            # An engine trains in no other dtype; a weight of float64 keeps it, whatever the others have.
            if name in trained and isinstance(value, TensorRef) and value.dtype in FLOATS[1:]:
                return value.dtype
    return None


def global_step(inventory: Inventory) -> int:
    """The steps of the run, or those of the optimizer where nothing tells."""
    told = Details.of(inventory).global_step
    steps = [step for step in inventory.steps.values() if isinstance(step, (int, float))]
    return int(max(steps, default=0)) if told is None else told


def schedule_of(inventory: Inventory) -> Any:
    """The state of the learning rate's schedule; None where the source has none."""
    details = Details.of(inventory)
    found = details.scheduler if details.lead is None else details.lead.root.get("lr_scheduler")
    return schedule_beside(inventory.folder) if found is None else found


def notes_on_schedule(inventory: Inventory) -> list[str]:
    """A note where an engine with a schedule would miss its state."""
    if schedule_of(inventory) is not None:
        return []
    return ["the source has no state of a schedule: load with load_lr_scheduler_states=False, or without a scheduler"]


def description_bytes(inventory: Inventory) -> int:
    """Bytes of the description of a file at most: each name stands in a few lists, with a shape and a tensor."""
    return sum(8 * len(tensor.name) + 4096 for tensor in inventory.tensors)


def run_config(stage: int, parts: ModelParts) -> dict[str, Any]:
    """The configuration that such a checkpoint is of, as far as its files depend on it."""
    zero = {"stage": stage, "round_robin_gradients": False}
    return {"zero_optimization": zero, "bf16": {"enabled": parts.dtype == "bfloat16"}}
