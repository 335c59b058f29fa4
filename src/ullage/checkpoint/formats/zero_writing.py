"""The shards of a DeepSpeed run of any size, at ZeRO stage 1, 2 or 3, from the inventory of any format.

The cut is that of the reader (``zero/partitions.py``): parameters of a group end to end in equal partitions at stages 1
and 2, each parameter cut by itself at stage 3. A partition is a tensor that stretches of parameters make, with zeros
where no parameter lies.

=============================================  ==================================================================
file                                           content
=============================================  ==================================================================
``[bf16_]zero_pp_rank_R_mp_rank_00_optim...``  rank R's partition of masters and states, step, hyperparameters
``mp_rank_00_model_states.pt``                 stages 1, 2: the whole module
``zero_pp_rank_R_mp_rank_00_model_states.pt``  stage 3: buffers, and rank R's fragments of frozen parameters
=============================================  ==================================================================

Names begin with ``bf16_`` where the engine trains in bfloat16: it looks for them under that name alone.
Source: ``state_dict`` and ``load_state_dict`` of ``stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py`` of
DeepSpeed 0.19.8; ``_create_fp16_sub_groups`` for sub-groups.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ullage.checkpoint.dtypes import FLOATS
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.files.pickling import Instance, TensorCopy
from ullage.checkpoint.formats import model_states
from ullage.checkpoint.formats.entries import OptimizerGroup, described, number, optimizer_groups, states_by_name
from ullage.checkpoint.formats.model_states import ModelParts
from ullage.checkpoint.inventory import Group, Inventory, Merge, Stretch, Tensor
from ullage.checkpoint.zero.partitions import stage3_group, stage12_group
from ullage.checkpoint.zero.states import Details
from ullage.display import counted
from ullage.errors import CheckpointError, InputError, require_int

#: Elements of a sub-group at stage 3, unless the source's configuration says otherwise: DeepSpeed's default.
_SUB_GROUP_SIZE = 10**9
#: More data-parallel ranks than any run has; each is a file.
_MAX_RANKS = 1 << 16
#: As many may be asked for whatever the model.
_FEW_RANKS = 1024
#: Part of the names of experts in DeepSpeed's own layers.
_EXPERT = ".deepspeed_experts."
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
    _require_elements(inventory, ranks)
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


def _require_elements(inventory: Inventory, ranks: int) -> None:
    """Raise ``InputError`` for more ranks than any run has; a large one has more elements than ranks."""
    numel = sum(t.numel for t in inventory.tensors if t.kind == "parameter" and t.key == "fp32")
    most = min(_MAX_RANKS, max(numel, _FEW_RANKS))
    if ranks > most:
        found = f"{ranks:,} for {numel:,} elements"
        raise InputError("too many ranks", expected=f"at most {most:,}", found=found)


def notes_on_rounded(targets: list[Target]) -> list[str]:
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
    return [f"{counted(len(found), 'tensor')} of float64 rounded, such as {name} to {dtype}: an engine has one dtype"]


def _archive(inventory: Inventory, name: str, content: dict[str, Any]) -> Target:
    model = model_states.lead_model(inventory)
    more = model_states.description_bytes(inventory)
    return described(name, content, model.source if model else None, model.file if model else 0, more)


def _writer(inventory: Inventory, stage: int, ranks: int, dtype: str | None, optimizer: bool) -> _ShardWriter:
    """The writer, once the source is found to say all that it needs."""
    groups = optimizer_groups(inventory)
    where = str(inventory.folder)
    model = model_states.lead_model(inventory)
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
    dtype = dtype.removeprefix("torch.") if dtype else model_states.module_dtype(inventory)
    parts = model_states.parts_of(inventory, dtype, groups)
    for tensor in parts.trained.values():
        model_states.cast_of(tensor, dtype)
    known = not isinstance(inventory.details, Details) or inventory.details.buffers_known
    if stage == 3 and parts.frozen and not known:
        raise CheckpointError(
            "nothing says whether this is a frozen parameter or a buffer, and stage 3 saves them in different ways",
            where=f"{where}, parameter {next(iter(parts.frozen))}",
            hint="write zero1 or zero2 shards, or universal, which an engine of stage 3 can load",
        )
    if not groups:
        return _ShardWriter(inventory, stage, ranks, parts, [OptimizerGroup(tuple(parts.trained))], {}, False)
    states = states_by_name(inventory) if optimizer else {}
    return _ShardWriter(inventory, stage, ranks, parts, groups, states, optimizer)


def _require_no_experts(inventory: Inventory) -> None:
    """Raise ``CheckpointError`` for a model with DeepSpeed's experts, whatever format it comes from."""
    model = model_states.lead_model(inventory)
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
    """A flat buffer: a parameter group, or at stage 3 a sub-group."""

    owner: int
    names: list[str]
    group: Group
    keys: list[str]

    @cached_property
    def _by_rank(self) -> list[Any]:
        """The numbers of each rank's pieces, in the order of its partition."""
        pieces = self.group.pieces
        order = np.lexsort((pieces.shard_start, pieces.shard))
        ends = np.searchsorted(pieces.shard[order], np.arange(self.group.num_shards + 1))
        return [order[low:high] for low, high in itertools.pairwise(ends)]

    def partition(self, rank: int, key: str, tensors: dict[str, Tensor], numel: int | None = None) -> TensorCopy:
        """One rank's part of one state, as a tensor of one dim; padding is zero. ``numel``: elements to keep of it."""
        dtypes = {tensor.dtype for tensor in tensors.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        pieces, stretches, at = self.group.pieces, [], 0
        for k in self._by_rank[rank].tolist():
            begin, length = int(pieces.shard_start[k]), int(pieces.length[k])
            if begin > at:
                stretches.append(Stretch(at, begin - at))
            tensor = tensors[self.names[pieces.item[k]]]
            stretches.append(Stretch(begin, length, tensor, int(pieces.item_start[k])))
            at = begin + length
        numel = self.group.shard_size if numel is None else numel
        if at < numel:
            stretches.append(Stretch(at, numel - at))
        merge = Merge("joined", stretches=tuple(stretches))
        name = f"group {self.group.index} of rank {rank}"
        return TensorCopy(Tensor(name, key, (numel,), dtype, "parameter", (), merge), dtype)

    def held(self, rank: int) -> int:
        """Elements of a rank's partition up to the last that is no padding."""
        mine = self._by_rank[rank]
        pieces = self.group.pieces
        return int((pieces.shard_start[mine] + pieces.length[mine]).max(initial=0))


@dataclass(eq=False)
class _ShardWriter:
    """Content of the files, rank by rank."""

    inventory: Inventory
    stage: int
    ranks: int
    parts: ModelParts
    groups: list[OptimizerGroup]
    states: dict[str, dict[str, Tensor]]
    optimizer: bool
    flats: list[_Flat] = field(default_factory=list)

    def __post_init__(self) -> None:
        for owner, group in enumerate(self.groups):
            names = [name for name in group.names if name in self.parts.trained]
            for part in self._sub_groups(names) if self.stage == 3 else [names]:
                self.flats.append(self._flat(owner, part))
        self._tensors = {
            (i, key): {n: self.parts.trained[n] if key == "fp32" else self.states[n][key] for n in flat.names}
            for i, flat in enumerate(self.flats)
            for key in ("fp32", *flat.keys)
        }
        if not self.optimizer:
            # Without states the masters are the weights, in the precision that masters have.
            self._tensors = {key: {n: _as_master(t) for n, t in held.items()} for key, held in self._tensors.items()}

    def _sub_groups(self, names: list[str]) -> list[list[str]]:
        """The parameters of a group in sub-groups: each ends with the parameter that fills it."""
        shares = [-(-self.parts.trained[name].numel // self.ranks) for name in names]
        size = self._sub_group_size()
        if size >= sum(shares):
            return [names]
        found: list[list[str]] = [[]]
        filled = 0
        for name, share in zip(names, shares):
            if filled >= size:
                found.append([])
                filled = 0
            found[-1].append(name)
            filled += share
        return found

    def _sub_group_size(self) -> int:
        model = model_states.lead_model(self.inventory)
        config = model.root.get("ds_config") if model else None
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        size = zero.get("sub_group_size") if isinstance(zero, dict) else None
        return int(size) if isinstance(size, (int, float)) and 0 < size < 2**62 else _SUB_GROUP_SIZE

    def _flat(self, owner: int, names: list[str]) -> _Flat:
        shapes = {name: self.parts.trained[name].shape for name in names}
        index = len(self.flats)
        make = stage3_group if self.stage == 3 else stage12_group
        group = make(index, 0, shapes, self.ranks)
        # One flat tensor per state: it must be there for every parameter, in its shape.
        keys = list(dict.fromkeys(key for name in names for key in self.states.get(name, {})))
        for key in keys:
            for name in names:
                tensor = self.states.get(name, {}).get(key)
                if tensor is None or tensor.shape != shapes[name]:
                    raise CheckpointError(
                        f"optimizer state {key} does not cover the parameter, and ZeRO keeps one state per group",
                        where=f"{self.inventory.folder}, parameter {name}",
                        expected=list(shapes[name]),
                        found="no state" if tensor is None else list(tensor.shape),
                        hint=_WEIGHTS_ONLY,
                    )
        return _Flat(owner, names, group, keys)

    # One rank's optimizer file

    def shard(self, rank: int) -> dict[str, Any]:
        """The content of a rank's optimizer file."""
        content = self._stage3(rank) if self.stage == 3 else self._stage12(rank)
        config = model_states.run_config(self.stage, self.parts)
        return {"optimizer_state_dict": content, "ds_config": config, "ds_version": model_states.DEEPSPEED}

    def _masters(self, rank: int, stripped: bool) -> list[TensorCopy]:
        return [
            flat.partition(rank, "fp32", self._tensors[i, "fp32"], flat.held(rank) if stripped else None)
            for i, flat in enumerate(self.flats)
        ]

    def _base(self, rank: int) -> dict[str, Any]:
        """The state dict of the inner optimizer, whose parameters are the flat buffers."""
        state: dict[int, dict[str, Any]] = {}
        listed: list[list[int]] = [[] for _ in self.groups]
        for i, flat in enumerate(self.flats):
            group = self.groups[flat.owner]
            listed[flat.owner].append(i)
            if not self.optimizer:
                continue
            held: dict[str, Any] = {} if group.step is None else {"step": number(group.step, group.step_dtype)}
            held |= group.kept
            held |= {key: flat.partition(rank, key, self._tensors[i, key]) for key in flat.keys}
            if held:
                state[i] = held
        # Without groups an engine that asks for the optimizer's state refuses the file, as it should.
        groups = [{**g.settings, "params": listed[n]} for n, g in enumerate(self.groups)] if self.optimizer else []
        return {"state": state, "param_groups": groups}

    def _wrapper(self) -> dict[str, Any]:
        details = self.inventory.details
        return dict(details.wrapper) if isinstance(details, Details) else {}

    def _stage12(self, rank: int) -> dict[str, Any]:
        mappings = []
        for flat in self.flats:
            pieces, mine = flat.group.pieces, flat._by_rank[rank]
            rows = zip(pieces.item[mine].tolist(), pieces.length[mine].tolist(), pieces.shard_start[mine].tolist())
            mappings.append(OrderedDict((flat.names[item], _address(length, start)) for item, length, start in rows))
        return {
            **self._wrapper(),
            "base_optimizer_state": self._base(rank),
            "single_partition_of_fp32_groups": self._masters(rank, stripped=True),
            "zero_stage": self.stage,
            "group_paddings": [flat.group.shard_size - flat.held(rank) for flat in self.flats],
            "param_alignment_paddings": [[0] * len(flat.names) for flat in self.flats],
            "partition_count": [self.ranks] * len(self.flats),
            "ds_version": model_states.DEEPSPEED,
            "param_slice_mappings": mappings,
        }

    def _stage3(self, rank: int) -> dict[str, Any]:
        scaler = Instance("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})
        wrapper = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False, **self._wrapper()}
        wrapper.pop("clip_grad", None)
        return {
            "zero_stage": self.stage,
            **wrapper,
            "partition_count": self.ranks,
            "optimizer_state_dict": self._base(rank),
            "fp32_flat_groups": self._masters(rank, stripped=False),
        }

    # Model states

    def model(self, rank: int | None = None) -> dict[str, Any]:
        """The content of the model states; at stage 3 those of a rank."""
        names = [flat.names for flat in self.flats]
        make = model_states.whole_module if rank is None else model_states.empty_module
        module = make(self.inventory, self.parts)
        config = model_states.run_config(self.stage, self.parts)
        content = model_states.states(self.inventory, self.parts, module, names, self.ranks, config)
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
        return _Flat(0, [tensor.name], group, []).partition(rank, tensor.key, {tensor.name: tensor})


def _address(numel: int, start: int) -> Instance:
    return Instance("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": numel, "start": start})


def _as_master(tensor: Tensor) -> Tensor:
    """The tensor in float32, for masters made of weights."""
    if tensor.dtype == "float32" or tensor.dtype not in FLOATS:
        return tensor
    merge = Merge("joined", stretches=(Stretch(0, tensor.numel, tensor),))
    return Tensor(tensor.name, tensor.key, tensor.shape, "float32", tensor.kind, (), merge, tensor.group, tensor.extra)
