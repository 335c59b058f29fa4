"""The files of a DeepSpeed run: read at any ZeRO stage, and written for any size at stages 1, 2 and 3.

Shards are read by ``zero``. At stage 0, without ZeRO, all is in the model states, as the module and its optimizer save
it: the weights are the module's own; the optimizer's state is by number, in the order in which the parameters were
given to it. That order is known in two cases only: the optimizer was given names (``param_names``), or no two weights
have the same shape. In any other case the state is refused, and the weights are not.

The cut of what is written is that of the reader (``zero/partitions.py``): parameters of a group end to end in equal
partitions at stages 1 and 2, each parameter cut by itself at stage 3. A partition is a tensor that stretches of
parameters make, with zeros where no parameter lies.

=============================================  ==================================================================
file                                           content
=============================================  ==================================================================
``[bf16_]zero_pp_rank_R_mp_rank_00_optim...``  rank R's partition of masters and states, step, hyperparameters
``mp_rank_00_model_states.pt``                 stages 1, 2: the whole module
``zero_pp_rank_R_mp_rank_00_model_states.pt``  stage 3: buffers, and rank R's fragments of frozen parameters
=============================================  ==================================================================

Names begin with ``bf16_`` where the engine trains in bfloat16: it looks for them under that name alone.
Source: ``_common_checkpoint_state`` in ``deepspeed/runtime/engine.py``; ``Optimizer.state_dict`` of torch;
``state_dict`` and ``load_state_dict`` of ``stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py`` of DeepSpeed
0.19.8; ``_create_fp16_sub_groups`` for sub-groups.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import Group, Inventory, Merge, Stretch, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import FLOATS
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.files.pickling import Instance, TensorCopy
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats import model_states
from ullage.checkpoint.formats.entries import (
    OptimizerGroup,
    archive_again,
    known_buffers,
    number,
    optimizer_groups,
    states_by_name,
)
from ullage.checkpoint.formats.model_states import ModelParts
from ullage.checkpoint.formats.torch_optimizer import NumberedState, read_numbered, unnamed
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.folder import Folder, read_folder
from ullage.checkpoint.zero.parallel import Joining, Patterns, parallel_sizes
from ullage.checkpoint.zero.partitions import rows_by_rank, stage3_group, stage12_group
from ullage.checkpoint.zero.reading import read_shards
from ullage.checkpoint.zero.shards import ModelFile, zero_config
from ullage.checkpoint.zero.states import Details
from ullage.core.display import quantity
from ullage.core.errors import CheckpointError, InputError, require_int

# Reading


def _is_plain(folder: Folder) -> bool:
    """Whether the folder was written without ZeRO: no optimizer shards, and model states that name no groups."""
    shards = any(file.kind == "optimizer" for file in folder.files)
    return not shards and bool(folder.models) and all(m.param_shapes is None for m in folder.models.values())


def read_zero(path: Path) -> Inventory:
    """The inventory of a folder of DeepSpeed (the tag's). Raises ``CheckpointError`` for another folder."""
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
    held, twins = modules.frozen_and_buffers(Joining(folder, patterns, tp), 1, {})
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


# Writing

#: Elements of a sub-group at stage 3, unless the source's configuration says otherwise: DeepSpeed's default.
_SUB_GROUP_SIZE = 10**9
#: More data-parallel ranks than any run has; each is a file.
_MAX_RANKS = 1 << 16
#: As many may be asked for whatever the model.
_FEW_RANKS = 1024
#: Part of the names of experts in DeepSpeed's own layers.
_EXPERT = ".deepspeed_experts."
#: The class of the entries of ``param_slice_mappings``.
_ADDRESS = ("deepspeed.utils.tensor_fragment", "fragment_address")
_WEIGHTS_ONLY = "write the weights alone: --weights-only"


def zero_targets(
    inventory: Inventory, *, stage: int, ranks: int | None, dtype: str | None = None, optimizer: bool = True
) -> list[Target]:
    """The files of the checkpoint, without the tensors' bytes.

    Args:
        inventory: the source.
        stage: 1, 2 or 3.
        ranks: number of data-parallel ranks.
        dtype: of the weights in the module, which is the dtype that the engine trains in; None for the source's.
        optimizer: whether to write the optimizer's state.

    Raises ``InputError`` for a number of ranks that no run has, and ``CheckpointError`` for a source that does not say
    what such files need.
    """
    if ranks is None:
        raise InputError("a ZeRO checkpoint is of a number of ranks", hint="give ranks, or --ranks, of the run to come")
    ranks = require_int(ranks, "ranks", least=1)
    numel = sum(t.numel for t in inventory.tensors if t.kind == "parameter" and t.key == "fp32")
    # A large run has more elements than ranks.
    most = min(_MAX_RANKS, max(numel, _FEW_RANKS))
    if ranks > most:
        raise InputError("too many ranks", expected=f"at most {most:,}", found=f"{ranks:,} for {numel:,} elements")
    writer = _writer(inventory, stage, ranks, dtype, optimizer)
    prefix = "bf16_" if writer.parts.dtype == "bfloat16" else ""
    found = [
        _archive(inventory, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", writer.shard(rank))
        for rank in range(ranks)
    ]
    if stage < 3:
        return [*found, _archive(inventory, "mp_rank_00_model_states.pt", writer.model())]
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    return found + [_archive(inventory, name, writer.model(rank)) for rank, name in enumerate(names)]


def notes_on_shards(stage: int, inventory: Inventory, targets: list[Target]) -> list[str]:
    """What the source of shards lacks, and what is rounded in them."""
    said = [*model_states.notes_on_schedule(inventory), *_notes_on_rounded(targets)]
    trained = {tensor.name for tensor in inventory.tensors if tensor.kind == "parameter" and tensor.key != "fp32"}
    is_told = inventory.groups or trained.issuperset(inventory.parameters) or known_buffers(inventory) is not None
    if stage == 3 and not is_told:
        said.append("nothing says which tensors are buffers: those of floats are taken for parameters")
    return said


def _notes_on_rounded(targets: list[Target]) -> list[str]:
    """A note where tensors of float64 are rounded: as masters of weights, in a group or module of another dtype."""
    found: dict[str, str] = {}
    for target in targets:
        for payload in target.payloads:
            waiting = [(payload.tensor, payload.dtype)]
            while waiting:
                tensor, dtype = waiting.pop()
                if tensor.dtype == "float64" and dtype in FLOATS[1:]:
                    found.setdefault(tensor.name, dtype)
                waiting += [(s.tensor, tensor.dtype) for s in tensor.merge.stretches if s.tensor is not None]
    if not found:
        return []
    name, dtype = min(found.items())
    return [f"{quantity(len(found), 'tensor')} of float64 rounded, such as {name} to {dtype}: an engine has one dtype"]


def _archive(inventory: Inventory, name: str, content: dict[str, Any]) -> Target:
    return archive_again(name, content, Details.of(inventory).lead, model_states.description_bytes(inventory))


def _writer(inventory: Inventory, stage: int, ranks: int, dtype: str | None, optimizer: bool) -> _ShardWriter:
    """The writer, once the source is found to say all that it needs."""
    groups = optimizer_groups(inventory)
    where = str(inventory.folder)
    model = Details.of(inventory).lead
    _require_no_experts(inventory)
    if inventory.format == "zero" and model is not None and model.module is None:
        raise CheckpointError(
            "shards of a pipeline module are not written: its layers have files and names of their own",
            where=where,
            hint="convert it with --to universal, which keeps its files",
        )
    if optimizer and not groups:
        raise CheckpointError(
            "nothing says which parameters the optimizer has, and in which groups",
            where=where,
            expected="the parameter groups of an optimizer",
            found=f"{inventory.format} without them",
            hint=_WEIGHTS_ONLY,
        )
    if optimizer and stage < 3 and ranks > 1 and any(group.settings.get("use_muon") for group in groups):
        raise CheckpointError(
            "shards of Muon's momentum are not written below stage 3, where each rank keeps whole matrices of it",
            where=where,
            hint="use --to zero3, or --to universal and load_universal",
        )
    dtype = dtype.removeprefix("torch.") if dtype else model_states.module_dtype(inventory)
    parts = model_states.parts_of(inventory, dtype, groups)
    for tensor in parts.trained.values():
        model_states.cast_of(tensor, dtype)
    for group in groups:
        kept = {parts.trained[name].dtype: name for name in group.names if name in parts.trained}
        if len(kept) > 1 and (strange := kept.keys() - FLOATS):
            raise CheckpointError(
                "a parameter that is not of floats, in one group with others: ZeRO lays them end to end in one dtype",
                where=f"{where}, parameter {kept[strange.pop()]}",
                hint="use --to universal, or leave it out of the optimizer's groups",
            )
    if stage == 3 and parts.frozen and not Details.of(inventory).buffers_known:
        raise CheckpointError(
            "nothing says whether this is a frozen parameter or a buffer, and stage 3 saves them in different ways",
            where=f"{where}, parameter {next(iter(parts.frozen))}",
            hint="write zero1 or zero2 shards, or universal, which an engine of stage 3 can load",
        )
    if not groups:
        return _ShardWriter(stage, ranks, parts, [OptimizerGroup(tuple(parts.trained))], {}, False)
    states = states_by_name(inventory) if optimizer else {}
    return _ShardWriter(stage, ranks, parts, groups, states, optimizer)


def _require_no_experts(inventory: Inventory) -> None:
    """Raise ``CheckpointError`` for a model with DeepSpeed's experts, whatever format it comes from."""
    model = Details.of(inventory).lead
    named = next((t.name for t in inventory.tensors if t.extra.get("is_expert_param") or _EXPERT in t.name), None)
    said = inventory.written_by.experts or (model is not None and model.root.get("num_experts"))
    if named is not None or said:
        raise CheckpointError(
            "shards of experts are not written: an engine looks for each expert in a file of its own",
            where=f"{inventory.folder}, parameter {named}" if named else str(inventory.folder),
            hint="use --to universal, which DeepSpeed loads at any size of expert parallelism",
        )


@dataclass(frozen=True, eq=False)
class _Flat:
    """A flat buffer: a parameter group, or at stage 3 a sub-group.

    Attributes:
        owner: number of the parameter group.
        group: the buffer and its cut.
        tensors: by key and name, those that lie in it; ``fp32`` are the masters.
    """

    owner: int
    group: Group
    tensors: dict[str, dict[str, Tensor]]

    @cached_property
    def rows(self) -> list[list[tuple[str, int, int, int]]]:
        """By rank: (name, elements, start in the partition, start in the parameter), in the order of the partition."""
        names = self.group.names
        return [[(names[item], n, begin, start) for item, n, begin, start in rows] for rows in rows_by_rank(self.group)]

    def partition(self, rank: int, key: str, stripped: bool = False) -> TensorCopy:
        """One rank's part of one state, as a tensor of one dim; padding is zero, or at its end left out."""
        tensors = self.tensors[key]
        dtypes = {tensor.dtype for tensor in tensors.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        stretches, at = [], 0
        for name, length, begin, start in self.rows[rank]:
            if begin > at:
                stretches.append(Stretch(at, begin - at))
            stretches.append(Stretch(begin, length, tensors[name], start))
            at = begin + length
        numel = at if stripped else self.group.shard_size
        if at < numel:
            stretches.append(Stretch(at, numel - at))
        merge = Merge("joined", stretches=tuple(stretches))
        name = f"group {self.group.index} of rank {rank}"
        return TensorCopy(Tensor(name, key, (numel,), dtype, "parameter", (), merge), dtype)

    def padding(self, rank: int) -> int:
        """Elements of a rank's partition after the last that is no padding."""
        return self.group.shard_size - max((begin + length for _, length, begin, _ in self.rows[rank]), default=0)


@dataclass(eq=False)
class _ShardWriter:
    """Content of the files, rank by rank."""

    stage: int
    ranks: int
    parts: ModelParts
    groups: list[OptimizerGroup]
    states: dict[str, dict[str, Tensor]]
    optimizer: bool
    flats: list[_Flat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.details = Details.of(self.parts.inventory)
        self.config = model_states.run_config(self.stage, self.parts)
        for owner, group in enumerate(self.groups):
            names = [name for name in group.names if name in self.parts.trained]
            for part in self._sub_groups(names) if self.stage == 3 else [names]:
                self.flats.append(self._flat(owner, part))

    def _sub_groups(self, names: list[str]) -> list[list[str]]:
        """The parameters of a group in sub-groups: each ends with the parameter that fills it."""
        model = self.details.lead
        size = ((zero_config(model.root) if model else None) or {}).get("sub_group_size")
        size = int(size) if isinstance(size, (int, float)) and 0 < size < 2**62 else _SUB_GROUP_SIZE
        found: list[list[str]] = [[]]
        filled = 0
        for name in names:
            if filled >= size:
                found.append([])
                filled = 0
            found[-1].append(name)
            filled += -(-self.parts.trained[name].numel // self.ranks)
        return found

    def _flat(self, owner: int, names: list[str]) -> _Flat:
        masters = {name: self.parts.trained[name] for name in names}
        # Without states the masters are the weights, in the precision that masters have.
        tensors = {"fp32": masters if self.optimizer else {name: _as_master(t) for name, t in masters.items()}}
        # One flat tensor per state: it must be there for every parameter, in its shape.
        for key in dict.fromkeys(key for name in names for key in self.states.get(name, {})):
            tensors[key] = {}
            for name in names:
                tensor, shape = self.states.get(name, {}).get(key), masters[name].shape
                if tensor is None or tensor.shape != shape:
                    raise CheckpointError(
                        f"optimizer state {key} does not cover the parameter, and ZeRO keeps one state per group",
                        where=f"{self.parts.inventory.folder}, parameter {name}",
                        expected=list(shape),
                        found="no state" if tensor is None else list(tensor.shape),
                        hint=_WEIGHTS_ONLY,
                    )
                tensors[key][name] = tensor
        make = stage3_group if self.stage == 3 else stage12_group
        shapes = {name: tensor.shape for name, tensor in masters.items()}
        return _Flat(owner, make(len(self.flats), 0, shapes, self.ranks), tensors)

    # One rank's optimizer file

    def shard(self, rank: int) -> dict[str, Any]:
        """The content of a rank's optimizer file."""
        content = self._stage3(rank) if self.stage == 3 else self._stage12(rank)
        return {"optimizer_state_dict": content, "ds_config": self.config, "ds_version": model_states.DEEPSPEED}

    def _base(self, rank: int) -> dict[str, Any]:
        """The state dict of the inner optimizer, whose parameters are the flat buffers."""
        if not self.optimizer:  # an engine that asks for the optimizer's state refuses the file, as it should
            return {"state": {}, "param_groups": []}
        state: dict[int, dict[str, Any]] = {}
        for i, flat in enumerate(self.flats):
            group = self.groups[flat.owner]
            held: dict[str, Any] = {} if group.step is None else {"step": number(group.step, group.step_dtype)}
            held |= group.kept
            held |= {key: flat.partition(rank, key) for key in flat.tensors if key != "fp32"}
            if held:
                state[i] = held
        listed = [[i for i, flat in enumerate(self.flats) if flat.owner == n] for n in range(len(self.groups))]
        return {"state": state, "param_groups": [{**g.settings, "params": p} for g, p in zip(self.groups, listed)]}

    def _stage12(self, rank: int) -> dict[str, Any]:
        places = [{n: {"numel": size, "start": at} for n, size, at, _ in flat.rows[rank]} for flat in self.flats]
        return {
            **self.details.wrapper,
            "base_optimizer_state": self._base(rank),
            "single_partition_of_fp32_groups": [flat.partition(rank, "fp32", stripped=True) for flat in self.flats],
            "zero_stage": self.stage,
            "group_paddings": [flat.padding(rank) for flat in self.flats],
            "param_alignment_paddings": [[0] * len(flat.group.names) for flat in self.flats],
            "partition_count": [self.ranks] * len(self.flats),
            "ds_version": model_states.DEEPSPEED,
            "param_slice_mappings": [
                OrderedDict((name, Instance(*_ADDRESS, at)) for name, at in named.items()) for named in places
            ],
        }

    def _stage3(self, rank: int) -> dict[str, Any]:
        scaler = Instance("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})
        wrapper = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False, **self.details.wrapper}
        wrapper.pop("clip_grad", None)
        return {
            "zero_stage": self.stage,
            **wrapper,
            "partition_count": self.ranks,
            "optimizer_state_dict": self._base(rank),
            "fp32_flat_groups": [flat.partition(rank, "fp32") for flat in self.flats],
        }

    # Model states

    def model(self, rank: int | None = None) -> dict[str, Any]:
        """The content of the model states; at stage 3 those of a rank."""
        names = [list(flat.group.names) for flat in self.flats]
        module = self.parts.module("whole" if rank is None else "empty")
        content = self.parts.states(module, names, self.ranks, self.config)
        if self.stage < 2:
            content["frozen_param_shapes"] = None
        if self.stage > 1:
            content["frozen_param_fragments"] = OrderedDict(
                (name, self.parts.weight(name) if rank is None else self._fragment(rank, tensor))
                for name, tensor in self.parts.frozen.items()
            )
        return content

    def _fragment(self, rank: int, tensor: Tensor) -> TensorCopy:
        """One rank's part of a frozen parameter, cut as a trained one is."""
        group = stage3_group(0, 0, {tensor.name: tensor.shape}, self.ranks)
        return _Flat(0, group, {tensor.key: {tensor.name: tensor}}).partition(rank, tensor.key)


def _as_master(tensor: Tensor) -> Tensor:
    """The tensor in float32, for masters made of weights."""
    if tensor.dtype == "float32" or tensor.dtype not in FLOATS:
        return tensor
    merge = Merge("joined", stretches=(Stretch(0, tensor.numel, tensor),))
    return replace(tensor, dtype="float32", slices=(), merge=merge)
