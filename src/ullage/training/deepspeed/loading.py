"""Loading of a checkpoint of DeepSpeed's into an engine of another layout, or into a model without DeepSpeed.

1. The first rank reads the descriptions of all files and proves that each element lies in exactly one place
   (``content``); every rank compares it with what it holds (``engine``). Whatever does not fit is raised
   here, by all ranks, and nothing has been touched.
2. Each rank reads the elements that it holds into its own tensors, and the sums of what all read are compared with
   those of the files.
3. Steps, hyperparameters, counters and schedule are set, and the weights are made from the masters as the engine makes
   them after a step.

**The sums.** Every rank sums its ranges while it reads them. The ranges of all ranks, end to end, make most records of
the archives whole, and most files of the manifest; the few bytes between them (padding, headers of records) are read
for the comparison, as far as they are few. So a record or a file is compared where the ranks together read nearly all
of it, and is not where they needed a part of it only: the weights of a module that the masters replace.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ullage.checkpoint import Tensor
from ullage.checkpoint.conversion.checksums import compare_runs
from ullage.checkpoint.core.numbers import Bytes
from ullage.checkpoint.core.reading import CHUNK_BYTES, Sources, Tally, row_elements, stream
from ullage.checkpoint.core.sums import combine
from ullage.checkpoint.formats.torch_optimizer import may_be_state
from ullage.core.errors import CheckpointError, listed
from ullage.core.layout import Int64
from ullage.core.replacing import replaced
from ullage.ranks import Axis, together
from ullage.ranks.ending import end_groups_at_exit
from ullage.ranks.wire import gather_objects
from ullage.training.deepspeed.content import SCALE, Content, ModelStates, RangePlan, Read, make_plan, shared_content
from ullage.training.deepspeed.engine import (
    EngineTensors,
    HeldRange,
    HeldTensor,
    MasterWeights,
    is_stage3,
    require_engine,
    tensors_of,
)

_LOG = logging.getLogger(__name__)
#: Of the bytes that a rank reads for itself, one in this many may be read for comparisons besides.
_SPARE = 32
#: What bitsandbytes calls Adam's moments.
_BITSANDBYTES = {"exp_avg": "state1", "exp_avg_sq": "state2"}
_NONE: Int64 = np.zeros((0, 3), np.int64)


@dataclass(frozen=True)
class Loaded:
    """A loading, on this rank.

    Attributes:
        path: of the model states, or the folder of a format without.
        client_state: what the user saved with the checkpoint.
        share_bytes: bytes of the elements that this rank needs, in the checkpoint.
        read_bytes: bytes of tensors that it read, those for comparing sums included.
        compared: records and files whose sums were compared, on all ranks.
    """

    path: str
    client_state: dict[str, Any]
    share_bytes: int
    read_bytes: int
    compared: int


def load_ranges(
    engine: Any,
    folder: str | Path,
    tag: str | None = None,
    *,
    strict: bool = True,
    load_lr_scheduler_states: bool = True,
    manifest: bool = True,
) -> Loaded:
    """Load a checkpoint of any layout into ``engine``. Collective; waits for the device.

    Args:
        engine: as for :func:`ullage.training.deepspeed.load_checkpoint`, as are the arguments up to the schedule.
        folder: of the checkpoint.
        tag: its folder inside, where that is not the latest.
        strict: every frozen parameter and buffer must be there.
        load_lr_scheduler_states: whether the schedule is loaded.
        manifest: whether the sums of a manifest are compared; False where that was done before.
    """
    end_groups_at_exit()
    require_engine(engine)
    zero, world = engine.optimizer, Axis.world()
    content = shared_content(folder, tag, manifest=manifest)
    here, plan = EngineTensors([], [], set()), RangePlan()
    with together(world, "reading the checkpoint's descriptions"):
        here = tensors_of(engine)
        plan = make_plan(here, content, strict)
        scheduled = load_lr_scheduler_states and engine.lr_scheduler is not None
        if scheduled and "lr_scheduler" in content.objects:
            said = f"the schedule holds an object of {content.objects['lr_scheduler']}, which is not loaded"
            plan.problems.append(f"{said}: set load_lr_scheduler_states=False")
    what = "universal checkpoint" if content.inventory.format == "universal" else "checkpoint"
    _require_fit(plan, content, f"the {what} does not fit this engine")
    if is_stage3(zero):
        zero.checkpoint_event_prologue()
    with contextlib.closing(_RangeReader(content)) as reader:
        with together(world, "reading the checkpoint"):
            _fill_optimizer(reader, zero, here.masters, content, plan)
            reader.fill_others(plan)
        compared = reader.compare()
    with together(world, "setting the state of the engine"):
        _set_settings(zero.optimizer, plan, content.settings)
        _set_scale(zero, content.whole)
        path, client_state = _set_counters(engine, content, load_lr_scheduler_states)
    _make_weights(zero, here.masters)
    return Loaded(path, client_state, plan.num_bytes, reader.num_bytes, compared)


def load_weights(model: torch.nn.Module, content: Content) -> None:
    """Copy the weights and buffers of a checkpoint into a model that every rank holds whole. Collective.

    Raises ``CheckpointError`` that names everything that does not fit, before anything is copied. Waits for the device.
    """
    plan = RangePlan(problems=list(content.problems))
    if not plan.problems:
        whole = _held_whole(model)
        known = {name for held in whole for name in held.names}
        plan.problems += [f"{name}: not in the model" for name in content.beside(known)]
        for held in whole:
            plan.add_other(held, content)
    _require_fit(plan, content, "the checkpoint does not fit the model")
    _read_others(plan, content)


def load_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, content: Content) -> None:
    """Put the state of a checkpoint into the ``optimizer`` of a model that every rank holds whole. Collective.

    State goes by the names of the model's parameters. Hyperparameters stay as they are: they are this run's arguments.
    A parameter that the checkpoint's optimizer has not stepped starts from nothing, which is said. Raises
    ``CheckpointError`` for a parameter whose state the checkpoint lacks.
    """
    plan, state, lacking = RangePlan(problems=list(content.problems)), {}, []
    own = getattr(optimizer, "optimizer", optimizer)  # within accelerate's
    by_identity = {id(held.target): held for held in _held_whole(model)}
    # A state dict of an optimizer goes by position.
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        held, there = by_identity[id(parameter)], optimizer.state.get(parameter, {})
        weight, mine = content.named(held.names, "fp32"), {}
        for key in content.keys:
            tensor = content.named(held.names, key) if key != "fp32" else None
            if tensor is not None and (may_be_state(key, tensor.shape, held.shape) or plan.fits(held, tensor, key)):
                # As ``load_state_dict`` would cast and move it.
                dtype = parameter.dtype if parameter.is_floating_point() else getattr(torch, tensor.dtype)
                mine[key] = torch.empty(tensor.shape, dtype=dtype, device=parameter.device)
                plan.others.append((mine[key], [Read(tensor, 0, 0, tensor.numel)]))
        if weight is not None and content.begins(weight):
            plan.begins += [weight.name] * (bool(there) or len(content.by_group[weight.group]) > 1)
            continue
        has_lost = weight is not None and not mine and len(content.by_group[weight.group]) > 1
        if (
            weight is None
            or has_lost
            or any(torch.is_tensor(v) and v.dim() and k not in mine for k, v in there.items())
        ):
            lacking.append(held.names[0])
        group = None if weight is None else weight.group
        step = None if group is None else _step_for(content.inventory.steps.get(group), None, own)
        kept = {} if group is None else _numbers_for(content.numbers.get(group, {}), own)
        state[index] = {**({} if step is None else {"step": step}), **_named_for(mine, own), **kept}
    _require_fit(plan, content, "the checkpoint does not fit the model")
    # An optimizer without state, such as SGD without momentum, saves nothing, and nothing is absent then.
    if lacking and any(state.values()):
        what = "the checkpoint lacks the optimizer's state of these parameters"
        raise CheckpointError(what, where=str(content.inventory.folder), found=listed(lacking, 5, "; "))
    _read_others(plan, content)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _held_whole(model: torch.nn.Module) -> list[HeldTensor]:
    """Everything that a state dict holds, under all its names: a tied parameter has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names.setdefault(value, []).append(name)
    return [
        HeldTensor(tuple(own), tuple(value.shape), value, (HeldRange(0, 0, value.numel()),) if value.numel() else ())
        for value, own in names.items()
    ]


def _read_others(plan: RangePlan, content: Content) -> None:
    with contextlib.closing(_RangeReader(content)) as reader:
        with together(Axis.world(), "reading the checkpoint"):
            reader.fill_others(plan)
        reader.compare()


def _require_fit(plan: RangePlan, content: Content, what: str) -> None:
    """Raise the same ``CheckpointError`` on every rank if any has a problem; say what begins. Collective."""
    gathered = gather_objects(plan.problems, Axis.world())
    found = list(dict.fromkeys(problem for problems in gathered for problem in problems))
    if found:
        raise CheckpointError(what, where=str(content.inventory.folder), found=listed(found, 5, "; "))
    if Axis.world().rank:
        return
    if content.objects:
        said = [f"{name} ({kind})" for name, kind in content.objects.items()]
        _LOG.warning("%s: objects are not loaded, and left out: %s", content.inventory.folder, listed(said, 5, ", "))
    if plan.begins:
        said = "%s: the optimizer had not stepped these parameters, whose state starts from nothing: %s"
        _LOG.warning(said, content.inventory.folder, listed(plan.begins, 5, ", "))


# Reading


class _RangeReader:
    """The open files of a checkpoint, buffers, and a record of what was read."""

    def __init__(self, content: Content) -> None:
        self._content, self._sources = content, Sources(content.inventory)
        self._tally = Tally()
        self._buffers = [np.empty(CHUNK_BYTES, np.uint8)]
        self._twins: dict[tuple[str, str], list[Tensor]] = {}
        for first, other in (pair for pair in content.inventory.twins if pair[0].dtype == pair[1].dtype):
            self._twins.setdefault((first.name, first.key), []).append(other)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that were read."""
        return self._sources.num_bytes

    def close(self) -> None:
        """Close all files."""
        self._sources.close()

    @torch.no_grad()
    def fill(self, target: torch.Tensor, reads: Iterable[Read]) -> None:
        """Copy the elements of ``reads`` into ``target``, flat, in its dtype.

        Raises ``CheckpointError`` where pipeline stages hold different values of one parameter.
        """
        for read in reads:
            dtype, row, at = getattr(torch, read.tensor.dtype), row_elements(read.tensor), read.at
            # Rows that tensor parallelism has cut are read whole, so what is asked for may lie inside the first one:
            # elements 7 to 12 of rows of 5 are within 5 to 15, of which 2 to 7 are wanted.
            low, stop = read.start // row * row, read.start + read.length
            high = min(-(-stop // row) * row, read.tensor.numel)
            for chunk in self._chunks(read.tensor, low, high):
                values = torch.from_numpy(chunk).view(dtype)
                begin, end = max(read.start - low, 0), min(len(values), stop - low)
                if begin < end:
                    target.narrow(0, at, end - begin).copy_(values[begin:end])
                    at += end - begin
                low += len(values)

    def _chunks(self, tensor: Tensor, low: int, high: int) -> Iterator[Bytes]:
        """The bytes of elements ``[low, high)``, equal in every stage of a pipeline that holds the tensor."""
        held = [tensor, *self._twins.get((tensor.name, tensor.key), [])]
        while len(self._buffers) < len(held):
            self._buffers.append(np.empty(CHUNK_BYTES, np.uint8))
        streams = [stream(self._sources, t, low, high, b, self._tally) for t, b in zip(held, self._buffers)]
        for chunk, *others in zip(*streams, strict=True):
            if not all(np.array_equal(chunk, other) for other in others):
                raise CheckpointError(
                    "pipeline stages hold different values of one parameter",
                    where=f"parameter {tensor.name} ({tensor.key})",
                    hint="a tied weight that has drifted apart, or two parameters of one name",
                )
            yield chunk

    def fill_others(self, plan: RangePlan) -> None:
        """Read what is held one by one: at stage 3 this rank's partition, otherwise the whole."""
        for target, reads in plan.others:
            own: Any = target
            held = own.ds_tensor.data if hasattr(target, "ds_id") else target.data
            if held.is_contiguous():
                self.fill(held.view(-1), reads)
            else:
                whole = torch.empty(held.numel(), dtype=held.dtype)
                self.fill(whole, reads)
                held.copy_(whole.view(held.shape))

    def compare(self) -> int:
        """Compare the sums of what all ranks read; returns how many were compared, on all ranks. Collective."""
        world, count, runs = Axis.world(), 0, None
        with together(world, "summing what was read"):
            runs = _join_runs(self._tally.runs, self._content)
        everywhere = gather_objects(runs, world)
        with together(world, "comparing the checkpoint's sums"):
            count = compare_runs(
                self._sources,
                self._content.inventory,
                np.concatenate(everywhere),
                _tables(self._content),
                part=world.rank,
                parts=world.size,
                spare=self._sources.num_bytes // _SPARE,
                hint="the engine holds a part of it: load another checkpoint before training, or copy the file again",
            )
        return sum(gather_objects(count, world))


# The optimizer of an engine


def _fill_optimizer(
    reader: _RangeReader, zero: Any, masters: list[MasterWeights], content: Content, plan: RangePlan
) -> None:
    """Read masters and states, and give each flat tensor its own step; padding becomes zero."""
    optimizer = zero.optimizer
    for number, master in enumerate(masters):
        made: dict[str, Any] = {}
        for key, reads in plan.flats[number].items():
            target = master.flat.data
            if key != "fp32":
                held = master.whole.get(key)
                size = target.numel() if held is None else sum(part.length for each in held for part in each.ranges)
                target = made[key] = _state_tensor(optimizer, plan, master.flat, key, size)
            target.zero_()
            reader.fill(target, reads)
        group = plan.groups.get(master.group)
        source = -1 if group is None else group
        state = optimizer.state[master.flat]
        state.clear()
        if not made and len(content.by_group.get(group, ())) > 1:
            continue  # the optimizer makes it at its first step
        step = _step_for(*content.steps.get(source, (content.inventory.steps.get(source), None)), optimizer)
        settings = optimizer.param_groups[master.group]
        if torch.is_tensor(step) and (settings.get("fused") or settings.get("capturable")):
            step = step.to(device=master.flat.device, dtype=torch.float32)
        kept = _numbers_for(content.numbers.get(source, {}), optimizer)
        state.update({**({} if step is None else {"step": step}), **_named_for(made, optimizer), **kept})


def _state_tensor(optimizer: Any, plan: RangePlan, master: torch.Tensor, key: str, size: int) -> torch.Tensor:
    """The tensor for a state: the one that is there, or a new one."""
    there = optimizer.state[master].get(key) if master in optimizer.state else None
    if torch.is_tensor(there) and there.shape == (size,):
        return there
    # As ``Optimizer.load_state_dict``: a state saved in the dtype of its weights gets the dtype of the weights here.
    saved = plan.dtypes.get(key)
    alike = saved is None or saved == plan.dtypes.get("fp32")
    return master.new_zeros(size, dtype=master.dtype if alike else getattr(torch, saved or "float32"))


def _step_for(value: Any, dtype: str | None, optimizer: torch.optim.Optimizer) -> Any:
    """A step as ``optimizer`` keeps it: torch's a tensor, DeepSpeed's a number; any other as it was saved."""
    if value is None:
        return None
    home = type(optimizer).__module__
    if home.startswith("torch.optim"):
        return torch.tensor(float(value), dtype=getattr(torch, dtype or "float32"))
    if dtype is None or home.startswith("deepspeed.ops"):
        return int(value)
    return torch.tensor(value, dtype=getattr(torch, dtype))


def _numbers_for(kept: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers of its state as ``optimizer`` keeps them: torch's as tensors, such as ``mu_product`` of NAdam."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return kept
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    is_number = {key: isinstance(value, (int, float)) for key, value in kept.items()}
    return {key: torch.tensor(float(v), dtype=dtype) if is_number[key] else v for key, v in kept.items()}


def _named_for(made: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Adam's moments by the names that ``optimizer`` has for them. One of bitsandbytes goes on with 32 bits of them."""
    if not type(optimizer).__module__.startswith("bitsandbytes"):
        return made
    return {_BITSANDBYTES.get(key, key): value for key, value in made.items()}


def _set_settings(optimizer: Any, plan: RangePlan, settings: list[dict[str, Any]]) -> None:
    """Give each parameter group the hyperparameters that it was saved with."""
    for number, group in enumerate(optimizer.param_groups):
        # A group of which no parameter is trained keeps its number.
        source = plan.groups.get(number, number)
        if source is not None and source < len(settings):
            # DeepSpeed finds the ranks of a group of experts by its name, which tells the size of expert parallelism.
            own = {"name": group["name"]} if group.get("moe") else {}
            group.update({**copy.deepcopy(settings[source]), **own})


def _set_scale(zero: Any, whole: dict[str, Any]) -> None:
    """Set loss scale and clipping by the engine's own loader, the scale only where both runs scale in the same way."""
    import deepspeed

    if not whole:
        return
    whole = {**whole, "ds_version": deepspeed.__version__}
    # A scale that adapts itself, saved by a run in fp16, has no place in one in bf16, nor the other way round.
    kind, state = whole.get("loss_scaler") or ("", {})
    own = getattr(zero, "loss_scaler", None)
    if type(own).__name__ == kind:
        whole["loss_scaler"] = copy.copy(own)
        vars(whole["loss_scaler"]).update(state)
    else:
        whole = {key: value for key, value in whole.items() if key not in SCALE}
    if is_stage3(zero):
        zero._load_global_state_stage3(whole)
    else:
        zero._load_global_state(whole)


def _set_counters(engine: Any, content: Content, schedule: bool) -> tuple[str, Any]:
    """Counters, schedule and client state, by the engine's own reader of model states."""
    path = content.path
    if path is None:
        steps = [int(step) for step in content.inventory.steps.values() if step is not None]
        engine.global_steps = max(steps, default=engine.global_steps)
        engine.global_samples = engine.global_steps * engine.train_batch_size()
        return str(content.inventory.folder), {}
    with contextlib.ExitStack() as around:
        # With a universal checkpoint asked for, the engine leaves the weights alone.
        around.enter_context(replaced(engine._config, "load_universal_checkpoint", True))
        around.enter_context(replaced(engine, "_get_all_ckpt_names", lambda *_: [str(path)]))
        around.enter_context(replaced(engine, "checkpoint_engine", ModelStates(content)))
        return engine._load_checkpoint(str(path.parent.parent), path.parent.name, load_lr_scheduler_states=schedule)


def _make_weights(zero: Any, masters: list[MasterWeights]) -> None:
    """Make the weights of the module from the masters, and link the states, as after a step. Collective."""
    if not is_stage3(zero):
        zero.update_lp_params()
        zero._link_all_hp_params()
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
        return
    for number, master in enumerate(masters):
        weights = zero.fp16_partitioned_groups_flat[number]
        if master.flat.numel():
            weights.data.copy_(master.flat.data)
        # Partitions are views of the flat tensor, except where DeepSpeed has moved one of them since.
        views = zero.unflatten(weights, zero.fp16_partitioned_groups[number])
        for partition, view in zip(zero.fp16_partitioned_groups[number], views, strict=True):
            partition.data = view.data
    zero.checkpoint_event_epilogue()


# Comparison of what was read with the sums of the files and of their manifest


def _join_runs(runs: list[tuple[int, int, int, int]], content: Content) -> Int64:
    """Runs (file, offset, bytes, crc) as [n, 4], those that follow one another within a record or file made one."""
    table = np.unique(np.array(runs, np.int64).reshape(-1, 4), axis=0)
    if len(table) < 2:
        return table
    # Runs of bytes [0, 8), [8, 12) and [16, 20) of a file become [0, 12) and [16, 20); but [0, 8) stays by itself where
    # a record begins at 8. A run may not reach over the beginning of a record, where another sum begins.
    begins = np.zeros(len(table), bool)
    for file in np.unique(table[:, 0]).tolist():
        edges = np.concatenate([units.get(file, _NONE)[:, 0] for units in _tables(content)])
        mine = table[:, 0] == file
        begins[mine] = np.isin(table[mine, 1], edges)
    follows = (table[1:, 0] == table[:-1, 0]) & (table[1:, 1] == table[:-1, 1] + table[:-1, 2])
    owner = np.concatenate([[0], np.cumsum(~follows | begins[1:])])
    first = np.searchsorted(owner, np.arange(owner[-1] + 1))
    crcs = combine(table[:, 3], table[:, 2], owner)
    return np.column_stack([table[first, :2], np.bincount(owner, table[:, 2]).astype(np.int64), crcs])


def _tables(content: Content) -> tuple[dict[int, Any], dict[int, Any]]:
    return content.inventory.records, content.sums
