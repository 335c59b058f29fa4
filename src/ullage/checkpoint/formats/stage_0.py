"""ZeRO stage 0, DeepSpeed without ZeRO: all is in the model states, as the module and its optimizer save it.

The weights are the module's own. The optimizer's state is saved by number, in the order in which the parameters were
given to it, and the file does not hold that order. It is known in two cases only: the optimizer was given names
(``param_names``), or no two weights have the same shape. In any other case the state is
refused, and the weights are not.
Source: ``_common_checkpoint_state`` in ``deepspeed/runtime/engine.py``; ``Optimizer.state_dict`` of torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import Inventory, Tensor, WrittenBy
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats.torch_optimizer import NumberedState, read_numbered, unnamed
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.folder import Folder, read_folder
from ullage.checkpoint.zero.parallel import Joining, Patterns, parallel_sizes
from ullage.checkpoint.zero.reading import read_shards
from ullage.checkpoint.zero.shards import ModelFile


def _is_plain(folder: Folder) -> bool:
    """Whether the folder was written without ZeRO: no optimizer shards, and model states that name no groups."""
    shards = any(file.kind == "optimizer" for file in folder.files)
    return not shards and bool(folder.models) and all(m.param_shapes is None for m in folder.models.values())


def read_zero(path: Path) -> Inventory:
    """The inventory of a folder of DeepSpeed (the tag's). Raises ``CheckpointError`` where it is none of any stage."""
    folder = read_folder(path)
    if not _is_plain(folder):
        return read_shards(folder)
    if folder.experts:
        raise RefusedFile("experts without ZeRO are not supported", where=str(path))
    return _read_plain(folder)


def _read_plain(folder: Folder) -> Inventory:
    """The inventory of a folder of stage 0."""
    lead = folder.models[min(folder.models)]
    model_ranks = len({model_rank for model_rank, _ in folder.models})
    tp, pp = parallel_sizes(folder, model_ranks)
    for model_rank in sorted(set(range(tp * pp)) - {m for m, _ in folder.models}):
        folder.add_problem("model states are missing", file=f"mp_rank_{model_rank:02d}_model_states.pt", rank=0)
    patterns = Patterns(lead.info, str(folder.path))
    if tp > 1 and not lead.info:
        folder.add_problem("tensor parallel, and universal_checkpoint_info is missing: nothing says how slices join")
    tied = _ties(lead) if tp * pp == 1 else {}
    for model in folder.models.values():
        model.aliases = {**tied, **model.aliases}
    held, twins = modules.frozen_and_buffers(Joining(folder, patterns, tp), 1, set())
    # No optimizer has claimed anything yet, so all parameters were read as frozen; here they are the weights.
    weights = [replace(t, key="fp32", kind="parameter") if t.kind == "frozen" else t for t in held]
    folder.notes.append("no ZeRO (stage 0): the weights are those of the module")
    found = _optimizer(lead, weights, tp * pp)
    group_of = {tensor.name: tensor.group for tensor in found.tensors}
    weights = [replace(t, group=group_of.get(t.name)) for t in weights]
    return Inventory(
        folder=folder.path,
        format="zero",
        written_by=WrittenBy(0, "no ZeRO", lead.dp_world_size or 1, tp, pp),
        files=tuple(folder.files),
        tensors=(*weights, *found.tensors),
        steps={group: value for group, (value, _) in found.steps.items()},
        aliases=folder.aliases,
        notes=tuple(dict.fromkeys(folder.notes)),
        read_problems=tuple(folder.problems),
        records=folder.records,
        twins=tuple(twins),
        optimizer_problems=(found.problem,) if found.problem and lead.root.get("optimizer") else (),
        details=found.details(models={0: lead}, settings_file=lead.source),
    )


def _ties(model: ModelFile) -> dict[str, str]:
    """Names of the module that are the same tensor as an earlier one."""
    owners: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, ref in (model.module or {}).items():
        if isinstance(ref, TensorRef) and ref.numel and name not in model.buffer_names:
            # Tied tensors were one tensor when they were saved, so they name the same place in the file.
            place = (ref.storage, ref.start, ref.shape, ref.strides)
            if place in owners:
                found[name] = owners[place]
            owners.setdefault(place, name)
    return found


def _optimizer(model: ModelFile, weights: list[Tensor], ranks: int) -> NumberedState:
    """The optimizer's state by name, or why it cannot be had."""
    if ranks > 1:
        return NumberedState([], problem=unnamed(model.name, "ranks"))
    saved = metadata.mapping(model.root.get("optimizer"), "optimizer", model.source.path)
    if not isinstance(saved.get("param_groups"), (list, tuple)):  # of an FP16 or BF16 optimizer: flat, unnamed
        return NumberedState([], problem=unnamed(model.name, "an optimizer for mixed precision"))
    trained = {t.name: t for t in weights if t.kind == "parameter"}
    return read_numbered(saved, trained, model.source, model.file, model.name)
