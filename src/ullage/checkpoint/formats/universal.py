"""The universal format of DeepSpeed: one file per state of a parameter, in its true shape, for any number of ranks.

    zero/<parameter>/{fp32, exp_avg, ...}.pt    {"param": tensor, "cat_dim": ..., "vocab_tensor": ...}
    zero/<parameter>/step.pt                    the optimizer's step, as it was saved
    zero/optimizer_state.pt                     hyperparameters of the groups, loss scale, and what is not a tensor
    mp_rank_XX_model_states.pt                  read by engines at stages 1 and 2
    zero_pp_rank_0_mp_rank_XX_model_states.pt   read by engines at stage 3
    latest_universal                            beside the folder: its name

Beyond what DeepSpeed's converter writes: shapes and steps at stage 3 too, so that any stage can load it (stage 3
from DeepSpeed 0.19.4 on; before, its loader takes no dict); frozen
parameters and buffers as ``zero/<name>/fp32.pt``, in their own dtype; no shard of rank 0 in ``optimizer_state.pt``.
Source: ``deepspeed/checkpoint/ds_to_universal.py``, ``universal_checkpoint.py``; the loaders in ``zero/stage3.py`` and
``base_optimizer.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import File, Inventory, Tensor, WrittenBy
from ullage.checkpoint.core.paths import hold_descriptions
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Target, archive, archive_like
from ullage.checkpoint.files.pickling import Instance, TensorCopy
from ullage.checkpoint.files.torchfile import as_number, read_torch_file
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats import model_states
from ullage.checkpoint.formats.entries import (
    archive_again,
    copied_file,
    in_file,
    kept_entries,
    number,
    optimizer_groups,
    saved_number,
)
from ullage.checkpoint.zero import shards
from ullage.checkpoint.zero.expert_layers import router_copies
from ullage.checkpoint.zero.folder import collect_problems, record_table
from ullage.checkpoint.zero.modules import whole_tensor
from ullage.checkpoint.zero.parallel import SubParameters
from ullage.checkpoint.zero.partitions import undealt
from ullage.checkpoint.zero.shards import ModelFile
from ullage.checkpoint.zero.states import WEIGHTS_ONLY, WRAPPER, Details, kept_numbers
from ullage.core.errors import CheckpointError
from ullage.core.layout import Int64

#: Entries of an optimizer file that hold one rank's shard or describe it; they mean nothing on other ranks.
_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
#: Bytes of the longest name of a file on the file systems in use.
_LONGEST_NAME = 255


def universal_targets(inventory: Inventory) -> list[Target]:
    """The files of the universal checkpoint, without the tensors' bytes. Raises ``CheckpointError``."""
    return _of_shards(inventory) if _has_shards(inventory) else _of_any(inventory)


def _has_shards(inventory: Inventory) -> bool:
    """Whether the source is shards with model states of their own, which are carried over."""
    return inventory.format == "zero" and bool(inventory.written_by.stage)


def _of_shards(inventory: Inventory) -> list[Target]:
    details = inventory.details
    assert isinstance(details, Details)
    laid_out: dict[Any, Target] = {}
    targets = [state_file(tensor, laid_out=laid_out) for tensor in inventory.tensors]
    named: dict[Any, dict[str, None]] = {}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter":
            named.setdefault(tensor.group, {})[tensor.name] = None
    for group, names in named.items():
        targets += step_files(names, *details.steps.get(group, (None, None)))
    return [*targets, _optimizer_file(details), *_model_files(inventory, details)]


def state_file(tensor: Tensor, kind: str | None = None, laid_out: dict[Any, Target] | None = None) -> Target:
    """The file of one state of a parameter, or of a frozen parameter or buffer; ``kind`` where it is not its own.

    Files of one shape differ in their bytes alone: ``laid_out`` holds one of each sort.
    """
    # What no optimizer holds has one state, its value, under the name that loaders of weights look for.
    stem = tensor.key if (kind or tensor.kind) == "parameter" else "fp32"
    copy = TensorCopy(tensor, tensor.dtype)
    content: dict[str, Any] = {"param": copy}
    for key, value in tensor.extra.items():
        if isinstance(value, SubParameters):
            fields = {"patterns": value.patterns, "shape": value.shape, "partition_dim": value.partition_dim}
            value = Instance("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", fields)
        content[key] = value
    name = f"zero/{safe_name(tensor.name)}/{safe_name(stem)}.pt"
    laid_out = {} if laid_out is None else laid_out
    sort = (stem, tensor.shape, tensor.dtype, repr(tensor.extra))
    if sort not in laid_out:
        laid_out[sort] = archive(name, content, stem=stem)
    return archive_like(laid_out[sort], name, copy)


def step_files(names: Iterable[str], value: Any, dtype: str | None) -> list[Target]:
    """The files of the step of the parameters of one group, which differ in their names alone; none without a step."""
    if not isinstance(value, (int, float)):
        return []
    model = archive("", number(value, dtype), stem="step")
    return [archive_like(model, f"zero/{safe_name(name)}/step.pt") for name in names]


def _optimizer_file(details: Details) -> Target:
    """``optimizer_state.pt`` with what the loaders of all stages ask for."""
    rank = min(details.shards)
    shard = details.shards[rank]
    saved = shard.root["optimizer_state_dict"]
    content = {key: value for key, value in saved.items() if key not in _SHARDED}
    groups = details.param_groups  # never empty: the loader walks them, and with none it would load nothing
    state: dict[int, Any] = {}
    for i, scalars in enumerate(shard.scalars):
        # The loader of stage 3 asks for ``state[0]["step"]``, also of an optimizer that keeps no step.
        state[i] = {"step": None}
        if "step" in scalars:
            state[i]["step"] = number(scalars["step"], shard.step_dtypes[i])
        if rank in details.uncut:
            state[i] |= kept_numbers(shard, i, details.uncut[rank])
    content.setdefault("ds_version", details.models[min(details.models)].root.get("ds_version"))
    # At the top for the loaders of stages 1 and 2 (``base_optimizer.py``), inside for that of stage 3.
    content["param_groups"] = groups
    content["optimizer_state_dict"] = {"state": state, "param_groups": groups}
    return archive_again("zero/optimizer_state.pt", content, shard)


def notes_for_engines(inventory: Inventory, targets: list[Target]) -> list[str]:
    """What the source lacks; of shards, one note per file of model states with entries that are left out."""
    if not _has_shards(inventory):
        return model_states.notes_on_schedule(inventory)
    found = []
    for model in inventory.details.models.values():
        with in_file(model.source):
            _, left_out = kept_entries(model)
        if left_out:
            stages = "any stage" if inventory.written_by.stage == 3 else "stage 3"
            names = ", ".join(left_out[:5])
            found.append(f"{names} of {model.name} cannot be written again; left out for engines of {stages}")
    return found


def _model_files(inventory: Inventory, details: Details) -> list[Target]:
    targets = []
    stage3 = inventory.written_by.stage == 3
    held = OrderedDict((t.name, TensorCopy(t, t.dtype)) for t in inventory.tensors if t.kind != "parameter")
    for model_rank, model in details.models.items():
        whole, slim = (
            f"mp_rank_{model_rank:02d}_model_states.pt",
            f"zero_pp_rank_0_mp_rank_{model_rank:02d}_model_states.pt",
        )
        with in_file(model.source):
            content, _ = kept_entries(model)
        if model_rank in details.shapes:
            # With experts the file names those of one rank, and has the weights of none.
            content["param_shapes"] = [OrderedDict(named) for named in details.shapes[model_rank]]
            targets.append(archive_again(whole, content, model))
            content = dict(content)
        elif not stage3:
            # Below stage 3 the file has the whole module, and engines of these stages load it as it is.
            targets.append(copied_file(whole, inventory, model.file))
        if model.module is not None:
            # Trained weights are loaded from zero/; of the module only what no optimizer holds is written again.
            others = {k: v for k, v in model.module.items() if not isinstance(v, TensorRef)}
            content["module"] = OrderedDict({**held, **others})
        content["shared_params"] = inventory.aliases or content.get("shared_params")
        names = [whole, slim] if stage3 else [slim]
        targets += [archive_again(name, content, model) for name in names]
    for index, file in enumerate(inventory.files):
        if shards.LAYER.fullmatch(file.name):
            targets.append(copied_file(file.name, inventory, index))
    return targets


def read_universal(folder: Path) -> Inventory:
    """The inventory of a universal checkpoint, ours or DeepSpeed's. Raises ``CheckpointError``."""
    found = _Reading(folder)
    models = found.models()
    paths = sorted((folder / "zero").glob("*/*.pt"), key=lambda path: path.parts)
    groups = [shapes for model in models for shapes in model.param_shapes or []]
    with collect_problems(found.problems, "zero/optimizer_state.pt"):
        found.read_optimizer({path.stem for path in paths})
    # The n-th entry of ``param_shapes`` is the n-th flat buffer, of which the groups list the numbers. The model ranks
    # have the same groups.
    flat_groups, count = found.flat_groups, len(found.flat_groups)
    one_to_one = bool(models) and all(len(model.param_shapes or []) == count for model in models)
    group_of = {name: flat_groups[n % count] for n, named in enumerate(groups) for name in named if one_to_one}
    shapes = {name: shape for named in groups for name, shape in named.items()}
    hold_descriptions((path, 0, path.stat().st_size) for path in paths)
    for path in paths:
        with collect_problems(found.problems, str(path.relative_to(folder))):
            found.add(path, shapes, group_of)
    for model in models:
        found.add_of_module(model, shapes)
    whole = {t.name: t.shape for t in found.tensors if t.key == "fp32"}
    for tensor in found.tensors:
        if tensor.kind == "parameter" and tensor.shape != whole.get(tensor.name, tensor.shape):
            what, said = "state of another shape than its weight", (whole[tensor.name], tensor.shape)
            expected, shown = (str(list(shape)) for shape in said)
            found.problems.append(
                Problem(what, parameter=f"{tensor.name} {tensor.key}", expected=expected, found=shown)
            )
    steps: dict[int, tuple[Any, str | None]] = {}
    for name, step in found.steps.items():
        if name in group_of and steps.setdefault(group_of[name], step) != step:
            found.problems.append(Problem("another step", parameter=name, found=str(step[0])))
    # DeepSpeed's own, of stage 3, has no files of steps.
    steps = found.details.steps = found.details.steps | steps
    if one_to_one:
        weights = {t.name for t in found.tensors if t.key == "fp32"}
        names = found.details.names = [[] for _ in found.details.param_groups]
        for n, named in enumerate(groups):
            listed = names[flat_groups[n % count]]
            listed += [x for x in _in_order(list(named), models[0]) if x in weights and x not in listed]
    else:
        what = "which parameter belongs to which group of the optimizer is not in the files"
        size = f"{len(groups)} groups of parameters, {count} of settings"
        hint = "convert the weights only, or from the original"
        found.optimizer_problems.insert(0, Problem(what, found=size, hint=hint))
    found.details.models = {0: models[0]} if models else {}
    notes = [] if shapes else ["no model states: shapes are those of the state files"]
    held = {t.name for t in found.tensors}
    return Inventory(
        folder, "universal", WrittenBy(), tuple(found.files), tuple(found.tensors),
        aliases={a: o for model in models for a, o in model.aliases.items() if o in held},
        steps={group: value for group, (value, _) in steps.items()}, notes=tuple(notes),
        read_problems=tuple(found.problems), records=found.records,
        optimizer_problems=tuple(found.optimizer_problems), details=found.details,
    )  # fmt: skip


def _in_order(names: list[str], model: ModelFile) -> list[str]:
    """The names of a flat buffer in the order of the optimizer that the model states are of."""
    dealt = shards.round_robin(model.root) and (shards.zero_config(model.root) or {}).get("stage") in (1, 2)
    return undealt(names, max(1, model.dp_world_size or 1)) if dealt else names


class _Reading:
    """A universal folder while it is read, file by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[File] = []
        self.tensors: list[Tensor] = []
        self.problems: list[Problem] = []
        self.buffers: frozenset[str] = frozenset()
        self.records: dict[int, Int64] = {}
        self.steps: dict[str, tuple[Any, str | None]] = {}
        self.details = Details()
        #: by flat buffer: its parameter group
        self.flat_groups: list[int] = []
        self.optimizer_problems: list[Problem] = []

    def models(self) -> list[ModelFile]:
        """The model states: of the stages below 3 where there are some."""
        paths = sorted(self.folder.glob("*mp_rank_*_model_states.pt"))
        whole = [p for p in paths if p.name.startswith("mp_rank_")] or [p for p in paths if "zero_pp_rank_0_" in p.name]
        found = []
        for path in whole:
            file = File(path.name, path.stat().st_size, "model", 0, 0)
            with collect_problems(self.problems, path.name):
                model, source = shards.read_model(self.folder, len(self.files), file)
                found.append(model)
                model.aliases |= router_copies(model)
                self.buffers |= model.buffer_names
                self.records[len(self.files)] = record_table(source)
                self.files.append(file)
        return found

    def read_optimizer(self, keys: set[str]) -> None:
        """Read ``optimizer_state.pt``, where there is one: hyperparameters by group, steps, and numbers.

        ``keys``: of the state that has files of its own. Raises ``CheckpointError``.
        """
        path = self.folder / "zero" / "optimizer_state.pt"
        if not path.is_file():
            return
        where, source = str(path), read_torch_file(path)
        root = metadata.mapping(source.root, "the content", where)
        saved = metadata.sequence(root.get("param_groups"), "param_groups", where)
        groups = [metadata.mapping(group, "param_groups", where) for group in saved]
        flats = [metadata.sequence(group.get("params"), "params of param_groups", where) for group in groups]
        group_of = [index for index, listed in enumerate(flats) for _ in listed]
        inner = metadata.mapping(root.get("optimizer_state_dict"), "optimizer_state_dict", where)
        state = metadata.mapping(inner.get("state"), "state", where)
        numbers: dict[int, dict[str, Any]] = {}
        steps: dict[int, tuple[Any, str | None]] = {}
        problems: list[Problem] = []
        for flat, index in enumerate(group_of):
            for key, value in metadata.mapping(state.get(flat), "state", where).items():
                if key == "step":
                    if value is not None:
                        steps.setdefault(index, saved_number(value, source))
                elif key in keys:
                    continue  # DeepSpeed's own, of stage 3, has the partitions of rank 0 here too
                elif isinstance(value, TensorRef) and value.shape:
                    what = f"optimizer state {metadata.brief(key)} is not a partition, and is kept in universal only"
                    problems.append(Problem(what, path.name, group=index, hint=WEIGHTS_ONLY))
                elif value is not None:
                    numbers.setdefault(index, {})[key] = as_number(value, source)
        wrapper = {key: root[key] for key in WRAPPER if key in root}
        self.details = Details({}, {}, steps, groups, numbers=numbers, settings_file=source, wrapper=wrapper)
        self.flat_groups, self.optimizer_problems = group_of, problems

    def add(self, path: Path, shapes: metadata.Shapes, group_of: dict[str, int]) -> None:
        """Read one state file, or the step, of a parameter, and add what it holds. Raises ``CheckpointError``."""
        name, key, source = path.parent.name, path.stem, read_torch_file(path)
        if key == "step":
            self.steps[name] = saved_number(source.root, source)
            return
        ref = source.root.get("param") if isinstance(source.root, dict) else source.root
        where = str(path.relative_to(self.folder))
        if not isinstance(ref, TensorRef):
            self.problems.append(Problem("a state file without a tensor", where, parameter=name))
            return
        # ``param_shapes`` lists what an optimizer trains; without model states, everything counts as trained.
        kind = "parameter" if name in shapes or not shapes else "buffer" if name in self.buffers else "frozen"
        shape = tuple(ref.shape)
        if not isinstance(source.root, dict) and ref.contiguous:  # DeepSpeed's, of stage 3: flat
            shape = shapes.get(name, shape)
        made = whole_tensor(name, key, ref, len(self.files), source, kind)
        part = made.slices[0]
        part = part if made.merge.kind == "strided" else replace(part, shape=shape)
        key = key if kind == "parameter" else kind
        self.tensors.append(replace(made, key=key, shape=shape, slices=(part,), group=group_of.get(name)))
        self.records[len(self.files)] = record_table(source)
        self.files.append(File(where, source.num_bytes, "weights"))

    def add_of_module(self, model: ModelFile, trained: metadata.Shapes) -> None:
        """Add what no optimizer holds and only the model states have: DeepSpeed's converter gives it no file."""
        known = {*trained, *model.aliases, *(tensor.name for tensor in self.tensors)}
        for name, ref in (model.module or {}).items():
            if not isinstance(ref, TensorRef) or name in known:
                continue
            kind = "buffer" if name in self.buffers else "frozen"
            # Stage 3 leaves a tensor of no elements for each parameter that it shards.
            if kind == "buffer" or ref.numel:
                with collect_problems(self.problems, model.name):
                    self.tensors.append(whole_tensor(name, kind, ref, model.file, model.source, kind))


def safe_name(name: str) -> str:
    """``name`` as one component of a path. Raises ``CheckpointError`` for a name that cannot be one."""
    where = repr(name if len(name) <= 80 else f"{name[:80]}...")
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or "/" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError("a name that cannot be a file's", where=where)
    if len(encoded) > _LONGEST_NAME:
        found = f"{len(encoded)} bytes"
        raise CheckpointError("a name too long to be a file's", where=where, expected=f"{_LONGEST_NAME}", found=found)
    if name == "optimizer_state.pt":
        raise CheckpointError(
            "a parameter has the name of a file of the universal format", where=where, hint="rename the parameter"
        )
    return name


def _of_any(inventory: Inventory) -> list[Target]:
    """The files of a universal checkpoint of any source but ZeRO shards.

    They are those that a run of stage 3 would leave: of the module only what no optimizer holds, because the weights
    are in ``zero/``.
    """
    hint = "weights alone are loaded as they are: from_pretrained, or load_state_dict"
    groups = optimizer_groups(inventory, needed_by="a universal checkpoint", hint=hint)
    parts = model_states.parts_of(inventory, None, groups)
    kinds = dict.fromkeys(parts.trained, "parameter") | dict.fromkeys(parts.frozen, "frozen")
    laid_out: dict[Any, Target] = {}
    targets = [state_file(t, kinds.get(t.name, t.kind), laid_out) for t in inventory.tensors]
    for group in groups:
        targets += step_files(group.stepped, group.step, group.step_dtype)
    details, model, more = Details.of(inventory), Details.of(inventory).lead, model_states.description_bytes(inventory)
    settings = [{**group.settings, "params": [index]} for index, group in enumerate(groups)]
    # The loader of stage 3 asks for ``state[0]["step"]``, also of an optimizer that keeps no step.
    state = {
        index: {"step": None if group.step is None else number(group.step, group.step_dtype), **group.kept}
        for index, group in enumerate(groups)
    }
    content = {
        **details.wrapper,
        "ds_version": model_states.DEEPSPEED,
        "param_groups": settings,
        "optimizer_state_dict": {"state": state, "param_groups": settings},
    }
    targets.append(archive_again("zero/optimizer_state.pt", content, None, more))
    names = [[name for name in group.names if name in parts.trained] for group in groups]
    config = model.root.get("ds_config") if model else {}
    said = parts.states(parts.module("absent"), names, inventory.written_by.dp, config or {})
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        targets.append(archive_again(name, said, model, more))
    return targets
