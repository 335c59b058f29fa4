"""Reading of the files of a ZeRO checkpoint, one by one, each reduced to names, shapes and places.

Names (``pp_rank`` in them is the data-parallel rank, ``mp_rank`` counts tensor- and pipeline-parallel ranks):

    [bf16_]zero_pp_rank_{DP}_mp_rank_{MP}_optim_states.pt    optimizer shards, one per rank
    mp_rank_{MP}_model_states.pt                             the module, stages 1 and 2
    zero_pp_rank_{DP}_mp_rank_{MP}_model_states.pt           the module, stage 3
    layer_{L}[-model_{TP}]-model_states.pt                   layers of a pipeline module
    layer_{L}_expert_{E}_mp_rank_{MP}_model_states.pt        experts, see ``expert_layers``

Source: ``deepspeed/runtime/engine.py`` and ``pipe/module.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ullage.checkpoint.core.inventory import File
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.files.torchfile import RefusedFile, TorchFile, as_number, read_torch_file
from ullage.checkpoint.files.unpickling import Inert, TensorRef
from ullage.core.errors import CheckpointError

#: Group 1: number of the layer. A grid without tensor parallelism has no rank of it in the name.
LAYER = re.compile(r"layer_(\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt")
#: Groups: number of the layer, of the expert among all, of the model rank.
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
#: Written for experts without ZeRO, and by old versions with ZeRO, where it holds nothing.
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_\d+_mp_rank_(?P<mp>\d+)_optim_states\.pt")
#: Of versions that did not number the layers: the experts of all layers in one file.
_UNNUMBERED = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")
#: Kinds of file by name; of the ranks in it, ``dp`` is the data-parallel and ``mp`` the model rank.
_KINDS: dict[re.Pattern[str], Literal["optimizer", "model", "layer", "expert"]] = {
    re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"): "optimizer",
    re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"): "model",
    LAYER: "layer",
    _EXPERT: "expert",
    _EXPERT_OPTIMIZER: "expert",
}
_OF_OLD = "a mixture of experts of a version that does not number its layers is not supported"
#: What to do with files of a version that saved too little.
LOAD_AND_SAVE = "load it with the version that wrote it, and save it with a newer one"
_FOLDED = "AutoEP folded with tensor parallelism is not supported"
#: The entry of a state that holds what is quantised.
_WRAPPED = "__bnb_optimizer_quant_state__"
#: Two states of these optimizers, by the names that all others have for them.


@dataclass
class ShardFile:
    """One optimizer file: the flat tensors of each group, and the layout that its writer recorded."""

    file: int
    name: str
    dp_rank: int
    model_rank: int
    stage: int
    wrapper: str
    world: list[int]
    #: by group: state key -> flat tensor; ``fp32`` is the master copy
    flats: list[dict[str, FlatTensor]]
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
    #: hyperparameters by parameter group, as they were saved
    settings: list[dict[str, Any]] = field(default_factory=list)
    #: by group: the state as it was saved, kept for rank 0 only
    states: list[dict[str, Any]] = field(default_factory=list, repr=False)
    #: everything else of the file, kept for rank 0 only
    root: dict[str, Any] = field(default_factory=dict, repr=False)
    source: TorchFile | None = field(default=None, repr=False)


@dataclass
class ModelFile:
    """One file of model states, its entries in the types that they must have. ``root`` has all of them as they are."""

    file: int
    name: str
    dp_rank: int
    model_rank: int
    source: TorchFile
    root: dict[str, Any] = field(repr=False)
    #: None for a pipeline module, whose layers have files of their own
    module: dict[str, Any] | None = field(default_factory=dict, repr=False)
    #: by group; None where no ZeRO optimizer wrote the file
    param_shapes: list[Shapes] | None = None
    buffer_names: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    #: None where frozen parameters were left out, or belong to ``module`` (stage 1)
    frozen_shapes: Shapes | None = None
    frozen_fragments: dict[str, TensorRef] = field(default_factory=dict, repr=False)
    dp_world_size: int | None = None
    #: (tp, pp), where the file says so
    degrees: tuple[int, int] | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class ExpertFile:
    """The weights of one expert of one layer.

    Attributes:
        file: number of the file.
        name: of the file.
        layer: number among the layers with experts of its model rank.
        expert: number among all experts of the layer.
        model_rank: the rank among tensor- and pipeline-parallel ranks.
        tensors: by name.
        source: the file.
    """

    file: int
    name: str
    layer: int
    expert: int
    model_rank: int
    tensors: dict[str, TensorRef]
    source: TorchFile = field(repr=False)


def sort_files(folder: Path) -> list[File]:
    """The files of a ZeRO folder whose names are known, by kind. Raises ``CheckpointError`` for experts of old."""
    files = []
    # By number, not by letter: rank 2 comes before rank 10.
    for path in sorted(
        folder.iterdir(), key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", p.name)]
    ):
        if not path.is_file():
            continue
        if _UNNUMBERED.fullmatch(path.name):
            raise RefusedFile(_OF_OLD, where=f"{folder}: {path.name}", hint=LOAD_AND_SAVE)
        for pattern, kind in _KINDS.items():
            if match := pattern.fullmatch(path.name):
                dp_rank = None if kind == "expert" else int(match.groupdict().get("dp") or 0)
                files.append(File(path.name, path.stat().st_size, kind, dp_rank, int(match["mp"] or 0)))
    return files


def read_model(folder: Path, index: int, file: File) -> tuple[ModelFile, TorchFile]:
    """One file of model states. Raises ``CheckpointError``."""
    source = read_torch_file(folder / file.name)
    root, where = source.root, str(folder / file.name)
    if not isinstance(root, dict) or "module" not in root:
        raise CheckpointError("not model states: no module in it", where=where)
    _require_known(root, where)
    given = root.get("param_shapes")
    given = [given] if isinstance(given, dict) else given
    degrees = metadata.mapping(root.get("checkpoint_parallel_dimensions"), "checkpoint_parallel_dimensions", where)
    sizes = [degrees.get(key) or 0 for key in ("tp_degree", "pp_degree")]
    tp, pp = (metadata.integer(n, "checkpoint_parallel_dimensions", where) for n in sizes)
    frozen = root.get("frozen_param_shapes")
    world = root.get("dp_world_size")
    model = ModelFile(
        index, file.name, file.dp_rank or 0, file.model_rank or 0, source, root,
        module=None if root["module"] is None else metadata.mapping(root["module"], "module", where),
        param_shapes=None if given is None else [
            metadata.shapes(g, "param_shapes", where) for g in metadata.sequence(given, "param_shapes", where)
        ],
        buffer_names=frozenset(metadata.names(root.get("buffer_names"), "buffer_names", where)),
        aliases=metadata.shared_params(root.get("shared_params"), where),
        frozen_shapes=None if frozen is None else metadata.shapes(frozen, "frozen_param_shapes", where),
        frozen_fragments=metadata.tensors(root.get("frozen_param_fragments"), "frozen_param_fragments", where),
        dp_world_size=None if world is None else metadata.integer(world, "dp_world_size", where),
        degrees=(tp, pp) if tp and pp else None,
        info=metadata.mapping(root.get("universal_checkpoint_info"), "universal_checkpoint_info", where),
    )  # fmt: skip
    return model, source


def read_expert(folder: Path, index: int, file: File) -> tuple[ExpertFile, TorchFile] | None:
    """One file of an expert's weights; ``None`` for one of optimizer state that holds nothing.

    Raises ``CheckpointError``.
    """
    source = read_torch_file(folder / file.name)
    where = str(folder / file.name)
    if _EXPERT_OPTIMIZER.fullmatch(file.name):
        if metadata.mapping(source.root, "the content", where).get("optimizer") is not None:
            raise RefusedFile(
                "optimizer state of experts without ZeRO is not supported",
                where=where,
                hint="train with ZeRO stage 1 or 2, whose optimizer files can be read",
            )
        return None
    match = _EXPERT.fullmatch(file.name)
    assert match is not None
    held = metadata.mapping(source.root, "the weights of an expert", where)
    if "folding" in held:
        raise RefusedFile(_FOLDED, where=where)
    tensors = metadata.tensors(held, "the weights of an expert", where)
    layer, expert, model_rank = (int(number) for number in match.groups())
    return ExpertFile(index, file.name, layer, expert, model_rank, tensors, source), source


def _require_known(root: dict[str, Any], where: str) -> None:
    """Raise ``RefusedFile`` for model states with experts of a kind that is not read."""
    if "folding" in root:
        raise RefusedFile(_FOLDED, where=where)
    if root.get("autoep_layers") and not root.get("ds_autoep_layers"):
        raise RefusedFile("AutoEP without its layers' description is not supported", where=where)
    counts = root.get("num_experts")
    if counts and not isinstance(counts, (list, tuple)):
        raise RefusedFile(_OF_OLD, where=where, hint=LOAD_AND_SAVE)


def read_shard(folder: Path, index: int, file: File) -> tuple[ShardFile, TorchFile]:
    """One optimizer file, reduced to numbers. Raises ``CheckpointError``."""
    source = read_torch_file(folder / file.name)
    where = str(folder / file.name)
    optimizer = source.root.get("optimizer_state_dict") if isinstance(source.root, dict) else None
    if not isinstance(optimizer, dict):
        raise CheckpointError("not a ZeRO shard: no optimizer_state_dict in it", where=where)
    if optimizer.get("ds_zero_partition_groups"):
        raise RefusedFile(
            "a mixture of experts at ZeRO stage 3 (ds_zero_partition_groups) is not supported", where=where
        )
    stage = _stage(optimizer, where)
    # The master weights of this rank, flat: of each parameter group, or at stage 3 of each sub-group.
    masters = optimizer.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(masters, (list, tuple)):
        raise CheckpointError("not a ZeRO shard: it holds no master weights", where=where)
    states, groups, settings = _states(optimizer, stage, len(masters), where)
    flats, scalars, dtypes = [], [], []
    for i, (master, state) in enumerate(zip(masters, states)):
        if not isinstance(master, TensorRef):
            raise CheckpointError(
                "the master weights lie outside the checkpoint (offloaded?)", where=f"{where}, group {i}"
            )
        flat, scalar = _split(source, master, state, f"{where}, group {i}")
        flats.append(flat)
        scalars.append(scalar)
        step = state.get("step")
        dtypes.append(step.dtype if isinstance(step, TensorRef) else None)
    # One number, or one per parameter group: the ranks over which it is cut.
    count = optimizer.get("partition_count", 0)
    counts = list(count) if isinstance(count, (list, tuple)) else [count] * len(masters)
    paddings = metadata.sequence(optimizer.get("param_alignment_paddings"), "param_alignment_paddings", where)
    mappings = metadata.sequence(optimizer.get("param_slice_mappings"), "param_slice_mappings", where)
    shard = ShardFile(
        file=index,
        name=file.name,
        dp_rank=file.dp_rank or 0,
        model_rank=file.model_rank or 0,
        stage=stage,
        wrapper="BF16_Optimizer" if "zero_stage" not in optimizer else f"ZeRO stage {stage}",
        world=metadata.integers(counts, "partition_count", where),
        flats=flats,
        scalars=scalars,
        step_dtypes=dtypes,
        paddings=metadata.integers(optimizer.get("group_paddings"), "group_paddings", where),
        alignments=[metadata.integers(group, "param_alignment_paddings", where) for group in paddings],
        mappings=[_mapping(group, where) for group in mappings],
        round_robin=round_robin(source.root),
        scaled=_scaler_iterations(optimizer.get("loss_scaler")),
        group_of=groups,
        settings=settings,
        states=states if file.dp_rank == 0 else [],
        root=source.root if file.dp_rank == 0 else {},
        source=source if file.dp_rank == 0 else None,
    )
    return shard, source


def _stage(optimizer: dict[str, Any], where: str) -> int:
    stage = optimizer.get("zero_stage")
    if stage is None:
        return 3 if "fp32_flat_groups" in optimizer else 1  # BF16_Optimizer does not record it
    found = metadata.integer(stage, "zero_stage", where)
    if found > 3:
        raise metadata.malformed("zero_stage", where, "a stage up to 3", found)
    return found


def _states(
    optimizer: dict[str, Any], stage: int, count: int, where: str
) -> tuple[list[dict[str, Any]], list[int], list[dict[str, Any]]]:
    """(state of each flat tensor, parameter group of each flat tensor, hyperparameters of each group)"""
    entry = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    base = optimizer.get(entry) or {}
    if isinstance(base, (list, tuple)):  # elastic: a list by group, without param_groups
        step = optimizer.get("base_optimizer_state_step")
        states = [dict(metadata.mapping(s, entry, where)) for s in base]
        if step is not None:
            states = [{"step": step, **s} for s in states]
        return [*states, *[{}] * (count - len(states))], list(range(count)), []
    base = metadata.mapping(base, entry, where)
    saved = metadata.sequence(base.get("param_groups"), "param_groups", where)
    settings = [metadata.mapping(group, "param_groups", where) for group in saved]
    ids, groups = [], []
    for g, group in enumerate(settings):
        for identity in metadata.integers(group.get("params"), "params of param_groups", where):
            ids.append(identity)
            groups.append(g)
    if len(ids) != count:
        ids, groups = list(range(count)), list(range(count))
    state = metadata.mapping(base.get("state"), f"state of {entry}", where)
    found = []
    for identity, g in zip(ids, groups):
        held = unwrap_state(dict(metadata.mapping(state.get(identity), f"state of {entry}", where)))
        step = settings[g].get("step") if g < len(settings) else None
        # FusedAdam keeps the step in the group, not in the state of each parameter.
        if "step" not in held and step is not None:
            held["step"] = step
        found.append(held)
    return found, groups, settings


def _split(
    source: TorchFile, master: TensorRef, state: dict[str, Any], where: str
) -> tuple[dict[str, FlatTensor], dict[str, Any]]:
    """(tensors that may be cut like the master weights, all other state) of one group."""
    flats = {"fp32": _flat_tensor(source, master, "fp32", where)}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or key == "fp32":
            raise metadata.malformed("a name of optimizer state", where, "a name other than fp32", key)
        # A tensor of no dims is a number (a step); one of some dims may be a partition, which its length will tell.
        if isinstance(value, TensorRef) and value.shape and key != "step":
            flats[key] = _flat_tensor(source, value, key, where)
        elif value is not None:
            number = as_number(value, source)
            scalars[key] = value if number is None else number
    return flats, scalars


def _flat_tensor(source: TorchFile, ref: TensorRef, key: str, where: str) -> FlatTensor:
    if not ref.contiguous:
        raise CheckpointError("optimizer state that is not contiguous", where=f"{where}, state {key}")
    return FlatTensor(ref.dtype, ref.numel, source.place(ref))


def _mapping(group: Any, where: str) -> dict[str, tuple[int, int]]:
    entry = "param_slice_mappings"
    found = {}
    for name, at in metadata.mapping(group, entry, where).items():
        if isinstance(at, Inert):
            numel, start = (metadata.integer(at.get(k, 0), entry, where) for k in ("numel", "start"))
            found[metadata.names([name], entry, where)[0]] = numel, start
    return found


def _scaler_iterations(scaler: Any) -> int | None:
    count = scaler.get("cur_iter") if isinstance(scaler, Inert) else None
    return count if isinstance(count, int) else None


def zero_config(root: dict[str, Any]) -> dict[str, Any] | None:
    """``zero_optimization`` of the configuration of DeepSpeed in a file; None where it does not tell."""
    config = root.get("ds_config")
    found = config.get("zero_optimization") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else None


def offload_of(zero: dict[str, Any] | None) -> dict[str, Any]:
    """``offload_optimizer`` of that configuration; empty where there is none."""
    found = (zero or {}).get("offload_optimizer")
    return found if isinstance(found, dict) else {}


def round_robin(root: dict[str, Any]) -> bool | None:
    """Whether the configuration in a file asks for ``round_robin_gradients``; None where it does not tell."""
    zero = zero_config(root)
    return None if zero is None else bool(zero.get("round_robin_gradients", False))


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flat tensor in a file.

    Attributes:
        dtype: of its elements.
        numel: number of elements.
        offset: byte of the file at which the first lies.
    """

    dtype: str
    numel: int
    offset: int

    @property
    def item_bytes(self) -> int:
        """Bytes per element in the file."""
        return ITEM_BYTES[self.dtype]


def unwrap_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state of one parameter without the dict in it that hides tensors from FSDP."""
    inner = state.get(_WRAPPED)
    if not isinstance(inner, dict):
        return state
    return {key: value for key, value in state.items() if key != _WRAPPED} | inner
