"""Hugging Face names of experts that AutoEP has stacked, as its files have them and as its models do.

AutoEP takes the place of a block of experts in a Hugging Face model and gives its tensors names of its own. For the
models in ``_EXPERTS`` they get their names back: in safetensors those of the files on the hub, one tensor per expert,
and in DCP those of the model in memory (transformers 5), where gate and up projections of all experts are one tensor:

==================  ====================================================  =========================================
AutoEP              files of weights                                      the model in memory
==================  ====================================================  =========================================
experts.w1 [E,I,H]  experts.<e>.gate_proj.weight (Mixtral: w1.weight)     experts.gate_up_proj [E,2I,H], first rows
experts.w3 [E,I,H]  experts.<e>.up_proj.weight (Mixtral: w3.weight)       experts.gate_up_proj, last rows
experts.w2 [E,H,I]  experts.<e>.down_proj.weight (Mixtral: w2.weight)     experts.down_proj
router.gate.weight  gate.weight                                           gate.weight
==================  ====================================================  =========================================

Mixtral's files also say ``block_sparse_moe`` for ``mlp``. No byte is moved for a name: a tensor is a window of the
stack's fragments. Source: ``conversion_mapping.py`` of transformers 5.23, ``auto_ep_layer.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ullage.checkpoint.inventory import Band, Inventory, Merge, Slice, Tensor
from ullage.checkpoint.zero.states import Details

#: Names of (w1, w2, w3) of one expert in files of weights, by model type.
_EXPERTS = {
    "mixtral": ("w1", "w2", "w3"),
    "qwen2_moe": ("gate_proj", "down_proj", "up_proj"),
    "qwen3_moe": ("gate_proj", "down_proj", "up_proj"),
}
#: Last components of the path of a block, in memory and in files, where they differ.
_BLOCKS = {"mixtral": ("mlp", "block_sparse_moe")}
#: Beginnings of other names in a block: AutoEP's and the model's.
_OTHERS = {"router.": "", "shared_experts.": "shared_expert.", "shared_experts_gate.": "shared_expert_gate."}


@dataclass(frozen=True)
class _Stacks:
    """AutoEP's blocks: the paths of their modules, and the type of the model, None where nothing tells a known one."""

    paths: frozenset[str]
    model_type: str | None


def hub_named(inventory: Inventory, format: str) -> Inventory:
    """``inventory`` with the names that ``format`` gives AutoEP's tensors; any other inventory as it is."""
    place: Literal["files", "memory"] | None = {"safetensors": "files", "dcp": "memory"}.get(format)  # type: ignore
    stacks = _stacks(inventory) if place else None
    if stacks is None or place is None:
        return inventory
    if stacks.model_type is None:
        note = f"experts keep AutoEP's names: no config.json tells a model of {', '.join(_EXPERTS)}"
        return replace(inventory, notes=(*inventory.notes, *([note] if note not in inventory.notes else [])))
    by_name = {(t.name, t.key): t for t in inventory.tensors}
    tensors = [made for t in inventory.tensors for made in _named(t, by_name, stacks, place)]
    aliases = {alias: own for alias, own in inventory.aliases.items() if _path(alias, stacks) is None}
    return replace(inventory, tensors=tuple(tensors), aliases=aliases)


def _stacks(inventory: Inventory) -> _Stacks | None:
    details = inventory.details
    if not isinstance(details, Details):
        return None
    paths: set[str] = set()
    presets: set[Any] = set()
    for model in details.models.values():
        for layer in model.root.get("ds_autoep_layers") or []:
            path = layer.get("module_path") if isinstance(layer, dict) else None
            if isinstance(path, str) and layer.get("expert_key_prefix") == f"{path}.experts":
                paths.add(path)
        config = model.root.get("ds_config")
        asked = config.get("expert_parallel") if isinstance(config, dict) else None
        presets.add(asked.get("preset_model") if isinstance(asked, dict) else None)
    if not paths:
        return None
    known = [kind for kind in (_config_type(inventory), *presets) if kind in _EXPERTS]
    return _Stacks(frozenset(paths), known[0] if known else None)


def _config_type(inventory: Inventory) -> Any:
    """``model_type`` of the ``config.json`` in the folder or beside it."""
    for folder in (inventory.folder, inventory.folder.parent):
        try:
            said = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError, RecursionError):
            continue
        return said.get("model_type") if isinstance(said, dict) else None
    return None


def _path(name: str, stacks: _Stacks) -> str | None:
    """The path of AutoEP's block that ``name`` is in."""
    # Paths are those of modules, so a beginning of the name that ends at a dot is looked up, longest first.
    parts = name.split(".")
    return next((p for n in range(len(parts) - 1, 0, -1) if (p := ".".join(parts[:n])) in stacks.paths), None)


def _named(
    tensor: Tensor, by_name: dict[tuple[str, str], Tensor], stacks: _Stacks, place: Literal["files", "memory"]
) -> Iterator[Tensor]:
    """The tensors that are made of one of AutoEP's.

    Args:
        tensor: one of AutoEP's, or any other, which stays as it is.
        by_name: all tensors of the checkpoint, by name and key.
        stacks: AutoEP's blocks.
        place: whose names to give.
    """
    path = _path(tensor.name, stacks)
    if path is None or stacks.model_type is None:
        yield tensor
        return
    within = tensor.name.removeprefix(f"{path}.")
    memory, files = _BLOCKS.get(stacks.model_type, ("", ""))
    stem, dot, last = path.rpartition(".")
    block = f"{stem}{dot}{files}" if place == "files" and memory and last == memory else path
    which = {"experts.w1": 0, "experts.w2": 1, "experts.w3": 2}.get(within)
    if which is None:
        begin = next((b for b in _OTHERS if within.startswith(b)), None)
        yield replace(tensor, name=f"{block}.{_OTHERS[begin]}{within.removeprefix(begin)}" if begin else tensor.name)
    elif place == "files":
        own = _EXPERTS[stacks.model_type][which]
        for expert in range(tensor.shape[0]):
            yield _one(tensor, expert, f"{block}.experts.{expert}.{own}.weight")
    elif which == 1:
        yield replace(tensor, name=f"{block}.experts.down_proj")
    elif which == 0:
        up = by_name[f"{path}.experts.w3", tensor.key]
        yield _side_by_side(tensor, up, f"{block}.experts.gate_up_proj")


def _one(stack: Tensor, expert: int, name: str) -> Tensor:
    """One expert of a stack."""
    part, shape = stack.slices[0], stack.shape[1:]
    numel = stack.numel // max(1, stack.shape[0])
    window = part.fragments.window(expert * numel, (expert + 1) * numel, stack.item_bytes)
    made = Slice(part.model_rank, shape, window.moved(-expert * numel))
    return replace(stack, name=name, shape=shape, slices=(made,), extra={})


def _side_by_side(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Two stacks as one, with the rows of the second below those of the first in each expert."""
    experts, rows, columns = gate.shape
    bands = (Band(0, 0, 0, rows), Band(1, 0, rows, rows))
    merge = Merge("columns", experts, 2 * rows, columns, bands)
    shape, slices = (experts, 2 * rows, columns), (gate.slices[0], up.slices[0])
    return replace(gate, name=name, shape=shape, slices=slices, merge=merge, extra={})
