"""A universal checkpoint from the inventory of any format but ZeRO shards, whose own files ``universal`` carries over.

The files are those that a run of stage 3 would leave: of the module only what no optimizer holds, because the weights
are in ``zero/``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.formats import model_states
from ullage.checkpoint.formats.model_states import ModelParts
from ullage.checkpoint.formats.optimizer_groups import OptimizerGroup, optimizer_groups
from ullage.checkpoint.formats.universal import described, number, state_file, step_files
from ullage.checkpoint.inventory import Inventory
from ullage.checkpoint.zero.details import Details
from ullage.errors import CheckpointError


def universal_targets_of_any(inventory: Inventory) -> list[Target]:
    """The files of the universal checkpoint, without the tensors' bytes. Raises ``CheckpointError``."""
    groups = optimizer_groups(inventory)
    if not groups:
        raise CheckpointError(
            "a universal checkpoint has the groups of an optimizer, and this one holds none",
            where=str(inventory.folder),
            found=f"{inventory.format} of weights alone",
            hint="weights alone are loaded as they are: from_pretrained, or load_state_dict",
        )
    parts = model_states.parts_of(inventory, None, groups)
    kinds = dict.fromkeys(parts.trained, "parameter") | dict.fromkeys(parts.frozen, "frozen")
    laid_out: dict[Any, Target] = {}
    targets = [state_file(t, kinds.get(t.name, t.kind), laid_out) for t in inventory.tensors]
    for group in groups:
        targets += step_files(group.names, group.step, group.step_dtype)
    targets.append(_optimizer_file(inventory, groups))
    content = _states(inventory, parts, groups)
    model = model_states.lead_model(inventory)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        source, file = (model.source, model.file) if model else (None, 0)
        targets.append(described(name, content, source, file, model_states.description_bytes(inventory)))
    return targets


def _optimizer_file(inventory: Inventory, groups: list[OptimizerGroup]) -> Target:
    details = inventory.details
    wrapper = dict(details.wrapper) if isinstance(details, Details) else {}
    settings = [{**group.settings, "params": [index]} for index, group in enumerate(groups)]
    # The loader of stage 3 asks for ``state[0]["step"]``, also of an optimizer that keeps no step.
    state = {
        index: {"step": None if group.step is None else number(group.step, group.step_dtype), **group.kept}
        for index, group in enumerate(groups)
    }
    content = {
        **wrapper,
        "ds_version": model_states.DEEPSPEED,
        "param_groups": settings,
        "optimizer_state_dict": {"state": state, "param_groups": settings},
    }
    more = model_states.description_bytes(inventory)
    return described("zero/optimizer_state.pt", content, None, 0, more)


def _states(inventory: Inventory, parts: ModelParts, groups: list[OptimizerGroup]) -> dict[str, Any]:
    held = {name: parts.weight(name) for name in (*parts.frozen, *parts.buffers)}
    module = OrderedDict({**held, **model_states.others(inventory)})
    names = [[name for name in group.names if name in parts.trained] for group in groups]
    model = model_states.lead_model(inventory)
    config = model.root.get("ds_config") if model else {}
    return model_states.states(inventory, parts, module, names, inventory.written_by.dp, config or {})
