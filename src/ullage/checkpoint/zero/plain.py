"""ZeRO stage 0, DeepSpeed without ZeRO: all is in the model states, as the module and its optimizer save it.

The weights are the module's own. The optimizer's state is saved by number, in the order in which the parameters were
given to it, and the file does not hold that order. It is known in two cases only: the optimizer was given names
(``param_names``), or no two weights have the same shape. In any other case the state is
refused, and the weights are not.
Source: ``_common_checkpoint_state`` in ``deepspeed/runtime/engine.py``; ``Optimizer.state_dict`` of torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import as_number
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import Inventory, Problem, Tensor, WrittenBy
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.details import Details
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.joining import parallel_sizes
from ullage.checkpoint.zero.parallel import Patterns
from ullage.checkpoint.zero.shards import ModelFile
from ullage.checkpoint.zero.states import WEIGHTS_ONLY


def is_plain(folder: Folder) -> bool:
    """Whether the folder was written without ZeRO: no optimizer shards, and model states that name no groups."""
    shards = any(file.kind == "optimizer" for file in folder.files)
    return not shards and bool(folder.models) and all(m.param_shapes is None for m in folder.models.values())


def read_plain(folder: Folder) -> Inventory:
    """The inventory of a folder of stage 0."""
    lead = folder.models[min(folder.models)]
    model_ranks = len({model_rank for model_rank, _ in folder.models})
    tp, pp = parallel_sizes(folder, model_ranks)
    for model_rank in sorted(set(range(tp * pp)) - {m for m, _ in folder.models}):
        folder.problems.append(Problem("model states are missing", f"mp_rank_{model_rank:02d}_model_states.pt", 0))
    patterns = Patterns(lead.info, str(folder.path))
    if tp > 1 and not lead.info:
        folder.add_problem("tensor parallel, and universal_checkpoint_info is missing: nothing says how slices join")
    tied = _ties(lead) if tp * pp == 1 else {}
    for model in folder.models.values():
        model.aliases = {**tied, **model.aliases}
    held, twins = modules.frozen_and_buffers(folder, 1, tp, patterns, set())
    # No optimizer has claimed anything yet, so all parameters were read as frozen; here they are the weights.
    weights = [replace(t, key="fp32", kind="parameter") if t.kind == "frozen" else t for t in held]
    folder.notes.append("no ZeRO (stage 0): the weights are those of the module")
    states, details, problems = _optimizer(lead, weights) if tp * pp == 1 else ([], None, [_unnamed(lead, "ranks")])
    if details is None:
        details = Details({}, {0: lead}, {}, [])
    if not lead.root.get("optimizer"):
        problems = []
    return Inventory(
        folder=folder.path,
        format="zero",
        written_by=WrittenBy(0, "no ZeRO", lead.dp_world_size or 1, tp, pp),
        files=tuple(folder.files),
        tensors=(*_grouped(weights, states), *states),
        steps={group: value for group, (value, _) in details.steps.items()},
        aliases=modules.aliases_of(folder),
        notes=tuple(dict.fromkeys(folder.notes)),
        read_problems=tuple(folder.problems),
        records=folder.records,
        twins=tuple(twins),
        optimizer_problems=tuple(problems),
        details=details,
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


def _grouped(weights: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    groups = {tensor.name: tensor.group for tensor in states}
    return [replace(t, group=groups[t.name]) if t.name in groups else t for t in weights]


def _unnamed(model: ModelFile, found: str) -> Problem:
    return Problem(
        "the optimizer's state is saved by number, and nothing says which parameter has which",
        model.name,
        expected="an optimizer that was given names, or weights of different shapes",
        found=found,
        hint=WEIGHTS_ONLY,
    )


def _optimizer(model: ModelFile, weights: list[Tensor]) -> tuple[list[Tensor], Details | None, list[Problem]]:
    """The optimizer's state by name: its tensors and settings, or why it cannot be had."""
    where = model.source.path
    saved = metadata.mapping(model.root.get("optimizer"), "optimizer", where)
    if not isinstance(saved.get("param_groups"), (list, tuple)):  # of an FP16 or BF16 optimizer: flat, unnamed
        return [], None, [_unnamed(model, "an optimizer for mixed precision")]
    state = metadata.mapping(saved.get("state"), "state of the optimizer", where)
    groups = [metadata.mapping(g, "param_groups", where) for g in saved["param_groups"]]
    named = _names_of(groups, state, {t.name: t for t in weights if t.kind == "parameter"}, where)
    if isinstance(named, str):
        return [], None, [_unnamed(model, named)]
    tensors: list[Tensor] = []
    steps: dict[int, tuple[Any, str | None]] = {}
    shapes = {t.name: t.shape for t in weights}
    for identity, (name, group) in named.items():
        for key, value in metadata.mapping(state.get(identity), "state of the optimizer", where).items():
            number = as_number(value, model.source)
            if key == "step" and number is not None:
                step = number, value.dtype if isinstance(value, TensorRef) else None
                if steps.setdefault(group, step) != step:
                    return [], None, [replace(_unnamed(model, name), what="parameters of one group are at two steps")]
            elif isinstance(key, str) and isinstance(value, TensorRef) and tuple(value.shape) == shapes[name]:
                made = modules.whole_tensor(name, key, value, model.file, model.source, "parameter")
                tensors.append(replace(made, group=group))
            elif value is not None:
                what = f"optimizer state {metadata.brief(key)} does not have the shape of its parameter"
                return [], None, [replace(_unnamed(model, name), what=what, expected=None)]
    settings = [{**g, "params": [i]} for i, g in enumerate(groups)]
    return tensors, Details({}, {0: model}, steps, settings), []


def _names_of(
    groups: list[dict[str, Any]], state: dict[Any, Any], weights: dict[str, Tensor], where: str
) -> dict[int, tuple[str, int]] | str:
    """Parameter and group by number of the state; a text that says what was found, where they cannot be known."""
    ids = [(i, g) for g, group in enumerate(groups) for i in metadata.integers(group.get("params"), "params", where)]
    given = [n for group in groups for n in metadata.names(group.get("param_names"), "param_names", where)]
    # The names of a group stand in the order of its numbers.
    if len(given) == len(ids) and set(given) <= set(weights) and len(set(given)) == len(given):
        return {i: (name, g) for (i, g), name in zip(ids, given)}
    # Without names, a state belongs to the one weight that has its shape.
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in weights.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    found: dict[int, tuple[str, int]] = {}
    for i, g in ids:
        held = metadata.mapping(state.get(i), "state of the optimizer", where)
        # Of states such as exp_avg, which have the shape of their parameter; a step of one element tells nothing.
        shapes = {tuple(v.shape) for k, v in held.items() if isinstance(v, TensorRef) and k != "step" and v.shape}
        names = by_shape.get(next(iter(shapes)), []) if len(shapes) == 1 else []
        if len(names) != 1:
            return f"{len(names)} weights of shape {list(next(iter(shapes)))}" if len(shapes) == 1 else "no state"
        found[i] = names[0], g
    # Two states that found one weight: then the shapes do not tell them apart after all.
    return found if len({name for name, _ in found.values()}) == len(found) else "weights of one shape"
