"""The universal format of DeepSpeed: one file a state of a parameter, in its true shape, for any stage and world size.

    zero/<parameter>/{fp32, exp_avg, ...}.pt    {"param": tensor, "cat_dim": ..., "vocab_tensor": ...}
    zero/<parameter>/step.pt                    the optimizer's step, as it was saved
    zero/optimizer_state.pt                     hyperparameters of the groups, loss scale, and what is not a tensor
    mp_rank_XX_model_states.pt                  read by engines at stages 1 and 2
    zero_pp_rank_0_mp_rank_XX_model_states.pt   read by engines at stage 3
    latest_universal                            beside the folder: its name

Beyond what DeepSpeed's converter writes: shapes and steps at stage 3 too, so that any stage can load it; frozen
parameters and buffers as ``zero/<name>/fp32.pt``, in their own dtype; no shard of rank 0 in ``optimizer_state.pt``.
Source: ``deepspeed/checkpoint/ds_to_universal.py``, ``universal_checkpoint.py``; the loaders in ``zero/stage3.py`` and
``base_optimizer.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ullage.checkpoint import shards
from ullage.checkpoint.archive import Constant, Instance, Stream, Target, archive
from ullage.checkpoint.folder import record_table
from ullage.checkpoint.inventory import File, Inventory, Problem, Slice, Tensor, Topology
from ullage.checkpoint.modules import one_fragment
from ullage.checkpoint.parallel import SubParameters
from ullage.checkpoint.torchfile import TensorRef, as_number, read_torch_file
from ullage.checkpoint.zero import Details
from ullage.errors import CheckpointError
from ullage.layout import Int64

_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")


def plan(inventory: Inventory) -> list[Target]:
    """The files of the universal checkpoint, without the tensors' bytes. Raises ``CheckpointError``."""
    if not isinstance(inventory.details, Details):
        raise CheckpointError(
            "only a ZeRO checkpoint can be made universal", where=str(inventory.folder), found=inventory.format
        )
    targets = [_state_file(tensor) for tensor in inventory.tensors]
    targets += _step_files(inventory)
    targets.append(_optimizer_file(inventory, inventory.details))
    targets += _model_files(inventory, inventory.details)
    return targets


def safe_name(name: str) -> str:
    """``name`` as one component of a path. Raises ``CheckpointError`` for a name that would leave the folder."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError("a name that cannot be a file's", where=repr(name))
    return name


def _state_file(tensor: Tensor) -> Target:
    stem = tensor.key if tensor.kind == "parameter" else "fp32"
    content: dict[str, Any] = {"param": Stream(tensor, tensor.dtype)}
    for key, value in tensor.extra.items():
        if isinstance(value, SubParameters):
            fields = {"patterns": value.patterns, "shape": value.shape, "partition_dim": value.partition_dim}
            value = Instance("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", fields)
        content[key] = value
    return archive(f"zero/{safe_name(tensor.name)}/{safe_name(stem)}.pt", content, stem=stem)


def number(value: Any, dtype: str | None) -> Any:
    """A step as it was saved: a tensor of no dims, or a Python number."""
    codes = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}
    if dtype is None or dtype not in codes:
        return value
    return Constant(dtype, (), struct.pack("<" + codes[dtype], value if codes[dtype] in "fd" else int(value)))


def _step_files(inventory: Inventory) -> list[Target]:
    steps = inventory.details.steps
    group_of = {t.name: t.group for t in inventory.tensors if t.kind == "parameter"}
    targets = []
    for name, group in group_of.items():
        value, dtype = steps.get(group, (None, None))
        if isinstance(value, (int, float)):
            targets.append(archive(f"zero/{safe_name(name)}/step.pt", number(value, dtype), stem="step"))
    return targets


def _optimizer_file(inventory: Inventory, details: Details) -> Target:
    """``optimizer_state.pt`` with what the loaders of all stages ask for."""
    shard = details.shards[min(details.shards)]
    saved = shard.root["optimizer_state_dict"]
    content = {key: value for key, value in saved.items() if key not in _SHARDED}
    groups = details.param_groups  # never empty: the loader walks them, and with none it would load nothing
    state: dict[int, Any] = {}
    for i, scalars in enumerate(shard.scalars):
        dtype = shard.step_dtypes[i]
        state[i] = {"step": None} | {k: number(v, dtype) if k == "step" else v for k, v in scalars.items()}
    content.setdefault("ds_version", details.models[min(details.models)].root.get("ds_version"))
    content["param_groups"] = groups
    content["optimizer_state_dict"] = {"state": state, "param_groups": groups}
    return archive(
        "zero/optimizer_state.pt", content, lambda ref: _stored(inventory, shard.file, ref), stem="optimizer_state"
    )


def _stored(inventory: Inventory, file: int, ref: TensorRef) -> Stream:
    """A tensor that a description holds, carried over from the file it is in."""
    source = read_torch_file(inventory.folder / inventory.files[file].name)
    return Stream(one_fragment("", "carried", ref, file, source.place(ref)), ref.dtype)


def read_universal(folder: Path) -> Inventory:
    """The inventory of a universal checkpoint, ours or DeepSpeed's. Raises ``CheckpointError``."""
    files: list[File] = []
    tensors: list[Tensor] = []
    problems: list[Problem] = []
    records: dict[int, Int64] = {}
    steps: dict[str, Any] = {}
    shapes, notes = _known_shapes(folder)
    for path in sorted((folder / "zero").glob("*/*.pt")):
        name, key = path.parent.name, path.stem
        try:
            source = read_torch_file(path)
        except CheckpointError as error:
            if "refused" in error.what:
                raise
            problems.append(Problem(error.what, str(path.relative_to(folder)), parameter=name, found=str(error.found)))
            continue
        if key == "step":
            steps[name] = as_number(source.root, source)
            continue
        ref = source.root.get("param") if isinstance(source.root, dict) else source.root
        if not isinstance(ref, TensorRef):
            problems.append(Problem("a state file without a tensor", str(path.relative_to(folder)), parameter=name))
            continue
        shape = tuple(ref.shape) if isinstance(source.root, dict) else shapes.get(name, tuple(ref.shape))
        whole = one_fragment(name, key, ref, len(files), source.place(ref))
        kind = "parameter" if name in shapes or not shapes else "frozen"
        part = Slice(0, shape, whole.slices[0].fragments)
        tensors.append(Tensor(name, key if kind == "parameter" else kind, shape, ref.dtype, kind, (part,)))
        records[len(files)] = record_table(source)
        files.append(File(str(path.relative_to(folder)), source.num_bytes, "weights"))
    return Inventory(
        folder, "universal", Topology(), tuple(files), tuple(tensors), notes=tuple(notes), problems=tuple(problems),
        records=records, details=steps,
    )  # fmt: skip


def _known_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Shapes of trained parameters, as the model states say; empty where there are none to read."""
    shapes: dict[str, tuple[int, ...]] = {}
    paths = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    whole = [p for p in paths if p.name.startswith("mp_rank_")] or [p for p in paths if "zero_pp_rank_0_" in p.name]
    for path in whole:
        root = read_torch_file(path).root
        for group in root.get("param_shapes") or [] if isinstance(root, dict) else []:
            shapes.update({name: tuple(int(d) for d in shape) for name, shape in group.items()})
    return shapes, [] if shapes else ["no model states: shapes are those of the state files"]


def _model_files(inventory: Inventory, details: Details) -> list[Target]:
    targets = []
    stage3 = inventory.topology.stage == 3
    held = OrderedDict((t.name, Stream(t, t.dtype)) for t in inventory.tensors if t.kind != "parameter")
    for model_rank, model in details.models.items():
        whole, slim = (
            f"mp_rank_{model_rank:02d}_model_states.pt",
            f"zero_pp_rank_0_mp_rank_{model_rank:02d}_model_states.pt",
        )
        if not stage3:
            targets.append(Target(whole, inventory.files[model.file].num_bytes, copy_of=model.file))
        content = {k: v for k, v in model.root.items() if k != "frozen_param_fragments"}
        content["module"] = held if isinstance(model.root.get("module"), dict) else model.root.get("module")
        content["shared_params"] = inventory.aliases or content.get("shared_params")

        def stored(ref: TensorRef, file: int = model.file, source: Any = model.source) -> Stream:
            return Stream(one_fragment("", "carried", ref, file, source.place(ref)), ref.dtype)

        names = [whole, slim] if stage3 else [slim]
        targets += [archive(name, content, stored, stem=name.removesuffix(".pt")) for name in names]
    for index, file in enumerate(inventory.files):
        if shards.LAYER.fullmatch(file.name):
            targets.append(Target(file.name, file.num_bytes, copy_of=index))
    return targets
