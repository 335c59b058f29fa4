"""The files of a ZeRO checkpoint, one by one: what each says, reduced to numbers, before anything is put together.

Names (``pp_rank`` in them is the data-parallel rank, ``mp_rank`` counts tensor- and pipeline-parallel ranks):

    [bf16_]zero_pp_rank_{DP}_mp_rank_{MP}_optim_states.pt    optimizer shards, one a rank
    mp_rank_{MP}_model_states.pt                             the module, stages 1 and 2
    zero_pp_rank_{DP}_mp_rank_{MP}_model_states.pt           the module, stage 3
    layer_{L}-model_{TP}-model_states.pt                     layers of a pipeline module

Source: ``deepspeed/runtime/engine.py`` and ``pipe/module.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.checkpoint.inventory import File
from ullage.checkpoint.torchfile import Inert, TensorRef, TorchFile, as_number, read_torch_file
from ullage.errors import CheckpointError

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_.*|expert_\d+_.*_model_states\.pt|expp_rank_\d+_.*")


@dataclass(frozen=True, slots=True)
class Placed:
    """A flat tensor in a file: its dtype, its elements, and the byte offset of the first."""

    dtype: str
    numel: int
    offset: int


@dataclass
class Shard:
    """One optimizer file: the flat tensors of each group, and what the writer says of itself."""

    file: int
    name: str
    dp_rank: int
    model_rank: int
    stage: int
    wrapper: str
    world: list[int]
    #: by group: state key -> flat tensor; ``fp32`` is the master copy
    flats: list[dict[str, Placed]]
    #: by group: what is not a flat tensor, as numbers where it is one
    scalars: list[dict[str, Any]]
    #: by group: dtype of the step as it was saved, None for a Python number
    step_dtypes: list[str | None]
    paddings: list[int]
    alignments: list[list[int]]
    #: by group: {parameter: (elements, start in this shard)} as the file books it
    mappings: list[dict[str, tuple[int, int]]]
    round_robin: bool | None
    #: how many updates the loss scale has seen, where it counts them
    scaled: int | None
    #: the group that each flat tensor belongs to (stage 3 cuts a group into sub-groups)
    group_of: list[int]
    #: everything else of the file, kept for rank 0 only
    root: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass
class Model:
    """One file of model states."""

    file: int
    name: str
    dp_rank: int
    model_rank: int
    source: TorchFile
    root: dict[str, Any]


def sort_files(folder: Path) -> list[File]:
    """The files of a ZeRO folder that we know, by kind. Raises ``CheckpointError`` for expert files."""
    files = []
    experts = sorted(p.name for p in folder.iterdir() if _EXPERT.fullmatch(p.name))
    if experts:
        raise CheckpointError(
            "a mixture of experts: its expert files are not supported",
            where=f"{folder}: {experts[0]}" + (f" and {len(experts) - 1} more" if len(experts) > 1 else ""),
            hint="convert it with DeepSpeed's own converter",
        )
    for path in sorted(
        folder.iterdir(), key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", p.name)]
    ):
        name = path.name
        if not path.is_file():
            continue
        size = path.stat().st_size
        if match := _OPTIMIZER.fullmatch(name):
            files.append(File(name, size, "optimizer", int(match[1]), int(match[2])))
        elif match := _MODEL.fullmatch(name):
            files.append(File(name, size, "model", 0, int(match[1])))
        elif match := _MODEL3.fullmatch(name):
            files.append(File(name, size, "model", int(match[1]), int(match[2])))
        elif match := LAYER.fullmatch(name):
            files.append(File(name, size, "layer", 0, int(match[2])))
    return files


def read_model(folder: Path, index: int, file: File) -> tuple[Model, TorchFile]:
    """One file of model states. Raises ``CheckpointError``."""
    source = read_torch_file(folder / file.name)
    root = source.root
    if not isinstance(root, dict) or "module" not in root:
        raise CheckpointError("not model states: no module in it", where=str(folder / file.name))
    for key in ("ds_autoep_layers", "autoep_layers", "num_experts"):
        if root.get(key):
            raise CheckpointError(
                f"a mixture of experts ({key}) is not supported",
                where=str(folder / file.name),
                hint="convert it with DeepSpeed's own converter",
            )
    return Model(index, file.name, file.dp_rank or 0, file.model_rank or 0, source, root), source


def read_shard(folder: Path, index: int, file: File) -> tuple[Shard, TorchFile]:
    """One optimizer file, reduced to numbers. Raises ``CheckpointError``."""
    source = read_torch_file(folder / file.name)
    where = str(folder / file.name)
    optimizer = source.root.get("optimizer_state_dict") if isinstance(source.root, dict) else None
    if not isinstance(optimizer, dict):
        raise CheckpointError("not a ZeRO shard: no optimizer_state_dict in it", where=where)
    if optimizer.get("ds_zero_partition_groups"):
        raise CheckpointError("a mixture of experts (ds_zero_partition_groups) is not supported", where=where)
    stage = _stage(optimizer)
    masters = optimizer.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(masters, (list, tuple)):
        raise CheckpointError("not a ZeRO shard: it holds no master weights", where=where)
    states, groups = _states(optimizer, stage, len(masters))
    flats, scalars, dtypes = [], [], []
    for i, (master, state) in enumerate(zip(masters, states)):
        if not isinstance(master, TensorRef):
            raise CheckpointError(
                "the master weights lie outside the checkpoint (offloaded?)", where=f"{where}, group {i}"
            )
        flat, scalar = _split(source, master, state)
        flats.append(flat)
        scalars.append(scalar)
        step = state.get("step")
        dtypes.append(step.dtype if isinstance(step, TensorRef) else None)
    count = optimizer.get("partition_count", 0)
    shard = Shard(
        file=index,
        name=file.name,
        dp_rank=file.dp_rank or 0,
        model_rank=file.model_rank or 0,
        stage=stage,
        wrapper="BF16_Optimizer" if "zero_stage" not in optimizer else f"ZeRO stage {stage}",
        world=[int(c) for c in count] if isinstance(count, (list, tuple)) else [int(count)] * len(masters),
        flats=flats,
        scalars=scalars,
        step_dtypes=dtypes,
        paddings=[int(p) for p in optimizer.get("group_paddings") or []],
        alignments=[[int(p) for p in group] for group in optimizer.get("param_alignment_paddings") or []],
        mappings=[_mapping(group) for group in optimizer.get("param_slice_mappings") or []],
        round_robin=_round_robin(source.root.get("ds_config")),
        scaled=_scaled(optimizer.get("loss_scaler")),
        group_of=groups,
        root=source.root if file.dp_rank == 0 else {},
    )
    return shard, source


def _stage(optimizer: dict[str, Any]) -> int:
    stage = optimizer.get("zero_stage")
    if isinstance(stage, Inert):
        stage = stage.args[0] if stage.args else None
    if stage is None:
        return 3 if "fp32_flat_groups" in optimizer else 1  # BF16_Optimizer says nothing
    return int(stage)


def _states(optimizer: dict[str, Any], stage: int, count: int) -> tuple[list[dict[str, Any]], list[int]]:
    """(state of each flat tensor, parameter group of each flat tensor)"""
    base = optimizer.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state") or {}
    if isinstance(base, (list, tuple)):  # elastic: a list by group, without param_groups
        step = optimizer.get("base_optimizer_state_step")
        states = [dict(s) for s in base]
        if step is not None:
            states = [{"step": step, **s} for s in states]
        return [*states, *[{}] * (count - len(states))], list(range(count))
    ids, groups = [], []
    for g, group in enumerate(base.get("param_groups", [])):
        for identity in group.get("params", []):
            ids.append(identity)
            groups.append(g)
    if len(ids) != count:
        ids, groups = list(range(count)), list(range(count))
    state = base.get("state", {})
    found = []
    for identity, g in zip(ids, groups):
        held = dict(state.get(identity, {}))
        step = base["param_groups"][g].get("step") if base.get("param_groups") else None
        if "step" not in held and step is not None:
            held["step"] = step
        found.append(held)
    return found, groups


def _split(source: TorchFile, master: TensorRef, state: dict[str, Any]) -> tuple[dict[str, Placed], dict[str, Any]]:
    """Flat tensors, which can be cut like the master weights, and the rest."""
    flats = {"fp32": Placed(master.dtype, master.numel, source.place(master))}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, TensorRef) and value.shape and key != "step":
            flats[str(key)] = Placed(value.dtype, value.numel, source.place(value))
        elif value is not None:
            number = as_number(value, source)
            scalars[str(key)] = value if number is None else number
    return flats, scalars


def _mapping(group: Any) -> dict[str, tuple[int, int]]:
    if not isinstance(group, dict):
        return {}
    return {name: (at.get("numel", -1), at.get("start", -1)) for name, at in group.items() if isinstance(at, Inert)}


def _scaled(scaler: Any) -> int | None:
    count = scaler.get("cur_iter") if isinstance(scaler, Inert) else None
    return count if isinstance(count, int) else None


def _round_robin(config: Any) -> bool | None:
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        return None
    return bool(config["zero_optimization"].get("round_robin_gradients", False))
