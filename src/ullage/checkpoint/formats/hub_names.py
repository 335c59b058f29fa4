"""Hugging Face names of experts that AutoEP has stacked, as files of weights on the hub have them.

AutoEP takes the place of a block of experts in a Hugging Face model and gives its tensors names of its own. In
safetensors the models of ``_EXPERTS`` get theirs back, one tensor per expert:

==================  ====================================================
AutoEP              files of weights
==================  ====================================================
experts.w1 [E,I,H]  experts.<e>.gate_proj.weight (Mixtral: w1.weight)
experts.w3 [E,I,H]  experts.<e>.up_proj.weight (Mixtral: w3.weight)
experts.w2 [E,H,I]  experts.<e>.down_proj.weight (Mixtral: w2.weight)
router.gate.weight  gate.weight
==================  ====================================================

Mixtral's files also say ``block_sparse_moe`` for ``mlp``. No byte is moved for a name: a tensor is a window of the
stack's fragments. Source: ``conversion_mapping.py`` of transformers 5.23, ``auto_ep_layer.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.formats.entries import rows_of
from ullage.checkpoint.formats.locate import object_of
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


def hub_named(inventory: Inventory, format: str) -> Inventory:
    """``inventory`` with the names that ``format`` gives AutoEP's tensors; any other inventory as it is."""
    paths, model_type = _stacks(inventory) if format == "safetensors" else (set(), None)
    if not paths:
        return inventory
    if model_type is None:
        note = f"experts keep AutoEP's names: no config.json tells a model of {', '.join(_EXPERTS)}"
        return replace(inventory, notes=(*inventory.notes, *([note] if note not in inventory.notes else [])))
    tensors: list[Tensor] = []
    for tensor in inventory.tensors:
        path = _path(tensor.name, paths)
        if path is None:
            tensors.append(tensor)
        else:
            tensors += _rename(tensor, path, model_type)
    aliases = {alias: own for alias, own in inventory.aliases.items() if _path(alias, paths) is None}
    return replace(inventory, tensors=tuple(tensors), aliases=aliases)


def _stacks(inventory: Inventory) -> tuple[set[str], str | None]:
    """The paths of AutoEP's blocks, and the type of the model; None where nothing tells a known one."""
    paths: set[str] = set()
    presets: set[Any] = set()
    for model in Details.of(inventory).models.values():
        for layer in model.root.get("ds_autoep_layers") or []:
            path = layer.get("module_path") if isinstance(layer, dict) else None
            if isinstance(path, str) and layer.get("expert_key_prefix") == f"{path}.experts":
                paths.add(path)
        config = model.root.get("ds_config")
        asked = config.get("expert_parallel") if isinstance(config, dict) else None
        presets.add(asked.get("preset_model") if isinstance(asked, dict) else None)
    told = object_of(inventory.folder, "config.json").get("model_type") if paths else None
    return paths, next((kind for kind in (told, *presets) if kind in _EXPERTS), None)


def _path(name: str, paths: set[str]) -> str | None:
    """The path of AutoEP's block that ``name`` is in."""
    # Paths are those of modules, so a beginning of the name that ends at a dot is looked up, longest first.
    parts = name.split(".")
    return next((p for n in range(len(parts) - 1, 0, -1) if (p := ".".join(parts[:n])) in paths), None)


def _rename(tensor: Tensor, path: str, model_type: str) -> Iterator[Tensor]:
    """The tensors that are made of one of AutoEP's, in the block at ``path``."""
    within = tensor.name.removeprefix(f"{path}.")
    memory, files = _BLOCKS.get(model_type, ("", ""))
    stem, dot, last = path.rpartition(".")
    block = f"{stem}{dot}{files}" if memory and last == memory else path
    which = {"experts.w1": 0, "experts.w2": 1, "experts.w3": 2}.get(within)
    if which is None:
        begin = next((b for b in _OTHERS if within.startswith(b)), None)
        yield replace(tensor, name=f"{block}.{_OTHERS[begin]}{within.removeprefix(begin)}" if begin else tensor.name)
        return
    for expert in range(tensor.shape[0]):
        one = rows_of(tensor, expert, expert + 1)
        name = f"{block}.experts.{expert}.{_EXPERTS[model_type][which]}.weight"
        yield replace(one, name=name, shape=one.shape[1:], extra={})
