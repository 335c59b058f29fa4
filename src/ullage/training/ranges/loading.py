"""Loading of a checkpoint into a DeepSpeed engine of another layout, without converting it.

1. The first rank reads the descriptions of all files and proves that each element lies in exactly one place
   (``content``); every rank compares it with its engine (``plan``). Whatever does not fit is raised here, by all ranks,
   and the engine is as it was.
2. Each rank reads the elements that it masters, and what no optimizer holds, into its own tensors (``filling``), and
   the sums of what all read are compared with those of the files (``checks``).
3. Steps, hyperparameters, counters and schedule are set, and the weights are made from the masters as the engine makes
   them after a step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ullage.checkpoint.manifest import BLOCK_BYTES
from ullage.checkpoint.reading import Sources, Tally
from ullage.errors import CheckpointError
from ullage.ranks.ending import end_groups_at_exit
from ullage.replacing import replaced
from ullage.training.agreement import agreement, gather, rank_here
from ullage.training.ranges.checks import compare, joined
from ullage.training.ranges.content import Content, shared_content
from ullage.training.ranges.filling import Filler, fill_optimizer, fill_untrained
from ullage.training.ranges.places import group_of, masters, require_engine
from ullage.training.ranges.plan import RangePlan, make_plan
from ullage.training.ranges.states import ModelStates, Saved, read_saved, set_scale, step_for
from ullage.training.universal import is_stage3

#: How many problems an error lists.
_LISTED = 5


@dataclass(frozen=True)
class Loaded:
    """A loading, on this rank.

    Attributes:
        path: of the model states, or the folder of a format without.
        client_state: what the user saved with the checkpoint.
        share_bytes: bytes of the elements that this rank needs, in the checkpoint.
        read_bytes: bytes of tensors that it read, those for comparing sums included.
        compared: records and blocks whose sums were compared, on all ranks.
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
        manifest: whether the blocks of a manifest are compared; False where that was done before.
    """
    end_groups_at_exit()
    require_engine(engine)
    zero = engine.optimizer
    content = shared_content(folder, tag, manifest=manifest)
    plan, saved, states = RangePlan(), Saved(), None
    with agreement(True, "reading the checkpoint's descriptions"):
        plan = make_plan(engine, content, strict)
        if not plan.problems:
            saved = read_saved(content)
            states = ModelStates(content.model_states[0]) if content.model_states else None
    _require_fit(plan, content)
    if is_stage3(zero):
        zero.checkpoint_event_prologue()
    with contextlib.closing(Sources(content.inventory)) as sources:
        compared = _read(engine, content, plan, saved, sources)
        read_bytes = sources.num_bytes
    with agreement(True, "setting the state of the engine"):
        set_scale(zero, saved)
        path, client_state = _set_counters(engine, content, states, load_lr_scheduler_states)
    _make_weights(zero)
    return Loaded(path, client_state, plan.num_bytes, read_bytes, compared)


def _require_fit(plan: RangePlan, content: Content) -> None:
    found = list(dict.fromkeys(problem for rank in gather(plan.problems, True) for problem in rank))
    if found:
        more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise CheckpointError(
            "the checkpoint does not fit this engine",
            where=str(content.inventory.folder),
            found="; ".join(found[:_LISTED]) + more,
        )


def _read(engine: Any, content: Content, plan: RangePlan, saved: Saved, sources: Sources) -> int:
    """Read all tensors and compare their sums; returns how many sums were compared, on all ranks."""
    zero, tally = engine.optimizer, Tally(block_bytes=BLOCK_BYTES if content.blocks else 0)
    filler, runs = Filler(sources, tally, content.inventory), None
    with agreement(True, "reading the checkpoint"):
        states = fill_optimizer(filler, zero, plan)
        fill_untrained(filler, plan)
        _set_states(zero, states, content, plan, saved)
        runs = joined(tally.runs, content)
    together, count = gather(runs, True), 0
    with agreement(True, "comparing the checkpoint's sums"):
        count = compare(sources, content, together, rank_here(True))
    return sum(gather(count, True))


def _set_states(
    zero: Any, states: dict[int, dict[str, torch.Tensor]], content: Content, plan: RangePlan, saved: Saved
) -> None:
    """Give each flat tensor its own step and states, and each group its own hyperparameters."""
    optimizer, owners = zero.optimizer, group_of(zero)
    for flat, master in enumerate(masters(zero)):
        group = plan.groups.get(owners[flat])
        number = -1 if group is None else group
        value, dtype = content.steps.get(number, (content.inventory.steps.get(number), None))
        made: dict[str, Any] = {} if value is None else {"step": step_for(value, dtype, optimizer)}
        settings = optimizer.param_groups[owners[flat]]
        if "step" in made and torch.is_tensor(made["step"]) and (settings.get("fused") or settings.get("capturable")):
            made["step"] = made["step"].to(device=master.device, dtype=torch.float32)
        kept = {
            key: state.to(master.device) if torch.is_tensor(state) and state.dim() else state
            for key, state in saved.kept.get(number, {}).items()
        }
        state = optimizer.state[master]
        state.clear()
        state.update({**made, **states[flat], **kept})
    # A group of which no parameter is trained keeps its number.
    for number, group in enumerate(optimizer.param_groups):
        source = plan.groups.get(number, number)
        if source is not None and source < len(saved.groups):
            group.update(saved.groups[source])


def _set_counters(engine: Any, content: Content, states: ModelStates | None, schedule: bool) -> tuple[str, Any]:
    """Counters, schedule and client state, by the engine's own reader of model states."""
    if states is None:
        steps = [int(step) for step in content.inventory.steps.values() if step is not None]
        engine.global_steps = max(steps, default=engine.global_steps)
        engine.global_samples = engine.global_steps * engine.train_batch_size()
        return str(content.inventory.folder), {}
    with contextlib.ExitStack() as around:
        # With a universal checkpoint asked for, the engine leaves the weights alone.
        around.enter_context(replaced(engine._config, "load_universal_checkpoint", True))
        around.enter_context(replaced(engine, "_get_all_ckpt_names", lambda *_: [str(states.path)]))
        around.enter_context(replaced(engine, "checkpoint_engine", states))
        return engine._load_checkpoint(
            str(states.path.parent.parent), states.path.parent.name, load_lr_scheduler_states=schedule
        )


def _make_weights(zero: Any) -> None:
    """Make the weights of the module from the masters, and link the states, as after a step. Collective."""
    if not is_stage3(zero):
        zero.update_lp_params()
        zero._link_all_hp_params()
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
        return
    for flat, master in enumerate(masters(zero)):
        weights = zero.fp16_partitioned_groups_flat[flat]
        if master.numel():
            weights.data.copy_(master.data)
        # Partitions are views of the flat tensor, except where DeepSpeed has moved one of them since.
        views = zero.unflatten(weights, zero.fp16_partitioned_groups[flat])
        for partition, view in zip(zero.fp16_partitioned_groups[flat], views, strict=True):
            partition.data = view.data
    zero.checkpoint_event_epilogue()
