"""Resuming on another layout, where DeepSpeed and the Hugging Face Trainer fall short.

:func:`load_checkpoint` reads the elements that each rank needs from a checkpoint of any layout (``ranges``).
:func:`load_universal` loads one that was converted.

A universal checkpoint holds each logical tensor once, so any number of ranks and any ZeRO stage can take its own part
of it. DeepSpeed's loader does that, and gets some of it wrong (read and run on DeepSpeed 0.19.8):

===============================================  ==================================================================
what DeepSpeed does                               what :func:`load_universal` does about it
===============================================  ==================================================================
frozen parameters and buffers stay as they were   copies them from the model states in the checkpoint
stage 3: ONE step tensor in the state of every    gives each state its own, so that a step counts once
sub-group, so each optimizer step counts once a
sub-group
stage 3: hyperparameters of group 0 for all       gives each group its own
stage 3: only exp_avg and exp_avg_sq are loaded   loads whatever state the checkpoint has (momentum, or none)
stages 1, 2, BF16_Optimizer: IndexError on a      lets that rank take an empty fragment
rank whose partition of a group is all padding
MoE layers: an expert is looked up by its number  looks it up by its number among all, so any size of expert
on the rank; groups take the names of the run     parallelism fits; groups keep the names of this run
that wrote the checkpoint
a parameter that is missing or of another shape   every rank checks everything first and all raise together
raises on its owner, and the other ranks hang
===============================================  ==================================================================

The way is DeepSpeed's own: ``engine.load_checkpoint`` runs, with ``checkpoint.load_universal`` asked for, and what is
wrong in it is mended around it and after it. Source: ``deepspeed/runtime/engine.py``, ``runtime/base_optimizer.py``,
``runtime/zero/stage3.py``, ``checkpoint/universal_checkpoint.py``.

DeepSpeed unpickles the files, which can run code: load only checkpoints whose origin you trust.

:func:`init_distributed` starts DeepSpeed's communication without the operator that it would compile first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ullage.errors import CheckpointError, InputError
from ullage.ranks.ending import end_groups_at_exit
from ullage.replacing import replaced
from ullage.training.agreement import gather
from ullage.training.expert_names import expert_names, group_names
from ullage.training.ranges.loading import load_ranges
from ullage.training.universal import (
    groups_name,
    is_stage3,
    model_files,
    model_states,
    model_value,
    prefers_universal,
    problems_of,
    read_file,
    saved_groups,
    universal_at,
    untrained,
)

#: What DeepSpeed compiles when its communication starts on a CPU.
_SHARED_MEMORY = "deepspeed_shm_comm"


def init_distributed(backend: str | None = None) -> None:
    """Start DeepSpeed's communication without compiling its shared-memory operator.

    ``backend``: as for ``deepspeed.init_distributed``; by default gloo on a CPU. Joins the process group where there is
    one, forms one from torchrun's variables otherwise, and does nothing where DeepSpeed's communication has started.

    On a CPU, DeepSpeed compiles ``deepspeed_shm_comm`` first: one to two minutes, and a C++ compiler. Its one
    collective, ``inference_all_reduce``, is called by tensor-parallel layers only, never by ZeRO, and
    ``torch.distributed`` serves it where the operator is missing. So it is marked as not compatible while the
    communication starts, as DeepSpeed itself marks it on other systems than Linux; afterwards the mark is as before.
    Source: ``deepspeed/comm/torch.py``, ``build_shm_op``.
    """
    import deepspeed

    end_groups_at_exit()
    if deepspeed.comm.is_initialized():
        return
    # Reading the attribute would make DeepSpeed ask a compiler about each of its operators: look without asking.
    marks: Any = vars(deepspeed.ops)
    known = marks.get("__compatible_ops__")
    marks["__compatible_ops__"] = {**(known or {}), _SHARED_MEMORY: False}
    try:
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    finally:
        if known is None:
            del marks["__compatible_ops__"]
        else:
            marks["__compatible_ops__"] = known


def load_checkpoint(
    engine: Any,
    folder: str | Path,
    tag: str | None = None,
    *,
    strict: bool = True,
    load_lr_scheduler_states: bool = True,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint of any number of ranks and any ZeRO stage into a DeepSpeed engine, without converting it.

    Each rank reads from the files the elements that its own layout needs, straight into its tensors: its part of the
    master weights and of the optimizer's state, frozen parameters and buffers. Steps, hyperparameters by group, loss
    scale, schedule, counters and client state are those of the checkpoint. Nothing is written.

    Args:
        engine: what ``deepspeed.initialize`` returned, at ZeRO stage 1, 2 or 3 or with BF16_Optimizer, data-parallel.
        folder: as for ``engine.load_checkpoint``, or the tag's own folder: what DeepSpeed wrote at any stage, or any
            other checkpoint with an optimizer's state that :func:`ullage.checkpoint.read` reads.
        tag: by default the latest.
        strict: every frozen parameter and every buffer of a state dict must be in the checkpoint, and everything in the
            checkpoint in the model.
        load_lr_scheduler_states: as for ``engine.load_checkpoint``.

    Returns what ``engine.load_checkpoint`` returns: the path read and the client state. Collective: every rank calls
    it, and all raise if one does. Waits for the device. What is incomplete, or does not fit the model, is refused with
    ``CheckpointError`` before anything is loaded. What is read is compared with the checksums of the files and of a
    manifest, as far as nearly all of a record or block is read; if one of them differs, every rank raises, and the
    engine holds a part of the checkpoint. Raises ``InputError`` for an engine without ZeRO, with experts, with model
    parallelism, or with tensors on NVMe.

    The first rank reads the descriptions of all files for all ranks. Hyperparameters and client state are unpickled
    from two of the files on every rank, as by DeepSpeed.
    """
    loaded = load_ranges(engine, folder, tag, strict=strict, load_lr_scheduler_states=load_lr_scheduler_states)
    return loaded.path, loaded.client_state


def load_universal(
    engine: Any,
    folder: str | Path,
    tag: str | None = None,
    *,
    strict: bool = True,
    load_lr_scheduler_states: bool = True,
) -> tuple[str, dict[str, Any]]:
    """Load a universal checkpoint completely into a DeepSpeed engine: weights, optimizer, frozen parameters, buffers.

    Args:
        engine: what ``deepspeed.initialize`` returned, at ZeRO stage 1, 2 or 3 or with BF16_Optimizer; its config need
            not ask for a universal checkpoint.
        folder: the parent of the tag, as for ``engine.load_checkpoint``, or the tag's own folder.
        tag: by default the one that ``latest_universal`` names.
        strict: every frozen parameter and every buffer of a state dict must be in the checkpoint; without it those that
            are not keep their values (adapters over a frozen base that was not saved).
        load_lr_scheduler_states: as for ``engine.load_checkpoint``.

    Returns what ``engine.load_checkpoint`` returns: the path read and the client state. Collective: every rank calls
    it, and all raise if one does. Waits for the device. Raises ``CheckpointError`` for a checkpoint that is
    incomplete or does not fit the model, ``InputError`` for an engine without ZeRO.
    """
    end_groups_at_exit()
    zero = engine.optimizer
    if not hasattr(zero, "load_hp_checkpoint_state_from_checkpoint_dir") or not groups_name(zero):
        raise InputError("the engine has no ZeRO optimizer", expected="stage 1, 2 or 3", found=type(zero).__name__)
    parent, name, problems = Path(folder), "", []
    try:
        parent, name = universal_at(folder, tag)
        # Everything is checked before anything is loaded, so that a refusal leaves the engine as it was.
        problems = problems_of(engine, parent / name, strict)
    except Exception as error:  # told to every rank, so that none waits for this one
        problems = [str(error)]
    _agree(problems, folder)
    path, client_state = _load_together(engine, parent, name, load_lr_scheduler_states)
    if is_stage3(zero):
        _mend_stage3(zero, parent / name / "zero")
    _place_steps(zero)
    _load_untrained(engine, parent / name)
    return path, client_state


@contextlib.contextmanager
def resume_from_universal() -> Iterator[None]:
    """Within it the Hugging Face ``Trainer`` resumes from a universal checkpoint by :func:`load_universal`::

        with resume_from_universal():
            trainer.train(resume_from_checkpoint="out/checkpoint-400")

    The Trainer cannot ask for one by itself (transformers#33157). Convert the ``global_step*`` folder inside the
    Trainer's ``checkpoint-*`` folder, to a folder beside it; a checkpoint that has ``latest_universal`` and no newer
    checkpoint of DeepSpeed's own is then loaded from it, at any number of ranks and any stage, and any other as ever.
    Everything else the Trainer keeps (its state, random states, scheduler) it reads from the same folder as before.
    """
    with checkpoints_loaded_by(lambda engine, path, strict: False):
        yield


@contextlib.contextmanager
def checkpoints_loaded_by(load: Callable[[Any, str, bool], bool]) -> Iterator[None]:
    """Within it the Hugging Face ``Trainer`` loads a checkpoint of DeepSpeed's by ``load``, if that returns True.

    A universal checkpoint is loaded by :func:`load_universal`, and what ``load`` leaves by transformers' own function.
    """
    from importlib import import_module

    module: Any = import_module("transformers.trainer")
    original = module.deepspeed_load_checkpoint

    def load_any(engine: Any, checkpoint_path: str, load_module_strict: bool = True) -> None:
        if prefers_universal(checkpoint_path):
            load_universal(engine, checkpoint_path, strict=load_module_strict)
        elif not load(engine, checkpoint_path, load_module_strict):
            original(engine, checkpoint_path, load_module_strict=load_module_strict)

    module.deepspeed_load_checkpoint = load_any
    try:
        yield
    finally:
        module.deepspeed_load_checkpoint = original


def _agree(problems: list[str], where: str | Path) -> None:
    """Raise the same ``CheckpointError`` on every rank if any rank has a problem. Collective."""
    found = list(dict.fromkeys(problem for rank in gather(problems, True) for problem in rank))
    if found:
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise CheckpointError(
            "the universal checkpoint does not fit this engine", where=str(where), found="; ".join(found[:5]) + more
        )


# DeepSpeed's own loader, and what is mended around it


def _load_together(engine: Any, parent: Path, tag: str, schedulers: bool) -> tuple[str, dict[str, Any]]:
    """``engine.load_checkpoint``, except that a rank that fails in it tells the others, which would wait for it."""
    # A rank enters _agree once: after the optimizer's part, or, if it failed before that, in the handler below. Both
    # are the same gather, so a rank that fails early meets the others there. After it, agreed keeps it from a second.
    zero, agreed = engine.optimizer, False

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        nonlocal agreed
        failed: list[str] = []
        try:
            type(zero).load_state_dict(zero, *args, **kwargs)
        except Exception as error:
            failed = [f"rank {dist.get_rank()}: {type(error).__name__}: {error}"]
        agreed = True
        _agree(failed, parent / tag)

    with contextlib.ExitStack() as around:
        # Ask for the universal loader, whatever the engine's config says.
        around.enter_context(replaced(engine._config, "load_universal_checkpoint", True))
        # DeepSpeed looks for model states by the file name of this engine's stage; those of the other stages are read
        # too.
        around.enter_context(replaced(engine, "_get_all_ckpt_names", lambda *_: model_files(engine, parent / tag)))
        around.enter_context(replaced(zero, "load_state_dict", load_state_dict))
        if is_stage3(zero):
            around.enter_context(replaced(zero, "load_hp_checkpoint_state", _partition_reader(zero)))
        else:
            around.enter_context(_empty_fragments(zero))
            around.enter_context(_names_of_experts(engine))
        try:
            return engine.load_checkpoint(str(parent), tag=tag, load_lr_scheduler_states=schedulers)
        except Exception as error:
            if not agreed:
                _agree([f"rank {dist.get_rank()}: {type(error).__name__}: {error}"], parent / tag)
            raise


@contextlib.contextmanager
def _empty_fragments(zero: Any) -> Iterator[None]:
    """Within it, a group of which this rank holds padding only has an empty fragment of its first parameter.

    The loader takes the step of a group from the first parameter this rank has a fragment of, and fails without one.
    """
    from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

    lent = []
    for i, group in enumerate(getattr(zero, groups_name(zero))):
        # _hp_mapping links a parameter to its fragment of this rank's flat fp32 partition. Where it is None throughout,
        # the loader's list of steps is empty and steps[0] raises. An empty fragment reads the step and copies no
        # element.
        if group and all(p._hp_mapping is None for p in group):
            nothing = torch.empty(0, device=group[0].device)
            group[0]._hp_mapping = tensor_fragment(
                lp_fragment=nothing,
                lp_fragment_address=fragment_address(numel=0, start=0),
                hp_fragment=nothing,
                hp_fragment_address=fragment_address(numel=0, start=0),
                gradient_dict={},
                offload_gradient_dict={},
                use_offload=False,
                param_group_index=i,
            )
            lent.append(group[0])
    try:
        yield
    finally:
        for p in lent:
            p._hp_mapping = None


@contextlib.contextmanager
def _names_of_experts(engine: Any) -> Iterator[None]:
    """Within it, parameters of experts have their names among all; after it, groups of experts have theirs again."""
    zero, names = engine.optimizer, expert_names(engine)
    groups = list(group_names(zero))
    with replaced(zero, "param_names", {p: names.of(name) for p, name in zero.param_names.items()}):
        yield
    for group, name in groups:
        group["name"] = name


def _partition_reader(zero: Any) -> Callable[..., torch.Tensor]:
    """Stage 3: this rank's part of a state; zeros for a state that the checkpoint's optimizer does not have."""

    def read(folder: str, key: str, param: Any = None) -> torch.Tensor:
        if key != "fp32" and not (Path(folder) / f"{key}.pt").is_file():
            # The loader asks for exp_avg and exp_avg_sq by name, even for SGD. _mend_stage3 removes these zeros.
            return torch.zeros(param.ds_tensor.ds_numel)
        return type(zero).load_hp_checkpoint_state(zero, folder, key, param=param)

    return read


def _mend_stage3(zero: Any, tensors: Path) -> None:
    """Give each sub-group its own step and states, and each group its own hyperparameters."""
    # A sub-group is one flat fp32 tensor of this rank's partitions, end to end in the order of its parameters; the
    # inner optimizer keeps its state by that tensor.
    for i, group in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[i]
        state, first = zero.optimizer.state[flat], tensors / zero.param_names[group[0]]
        keys = {path.stem for path in first.glob("*.pt")} - {"fp32"}
        if "step" in keys:
            # From the file, or a copy: the loader put the same tensor into each state, and the optimizer adds to it in
            # place.
            state["step"] = read_file(first / "step.pt")
        elif torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
        elif state.get("step") is None:
            state.pop("step", None)
        # Remove the zeros of _partition_reader: this optimizer has no such state.
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in keys:
                state.pop(key, None)
        for key in keys - {"step", "exp_avg", "exp_avg_sq"}:
            state[key] = torch.zeros_like(flat)
            start = 0
            for p in group:
                # The method of the class again: it cuts the whole tensor to this rank's part, padding included.
                part = zero.load_hp_checkpoint_state(str(tensors / zero.param_names[p]), key, param=p)
                state[key].narrow(0, start, part.numel()).copy_(part)
                start += part.numel()
    # Hyperparameters belong to parameter groups, not to sub-groups. The loader gave all of them those of group 0.
    saved = saved_groups(zero, read_file(tensors / "optimizer_state.pt"))
    assert saved is not None  # checked before
    for group, values in zip(zero.optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _place_steps(zero: Any) -> None:
    """Move step counts to the device for fused and capturable optimizers, as ``Optimizer.load_state_dict`` does."""
    if any(group.get("fused") or group.get("capturable") for group in zero.optimizer.param_groups):
        for flat, state in zero.optimizer.state.items():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(device=flat.device, dtype=torch.float32)


# Frozen parameters and buffers


def _load_untrained(engine: Any, checkpoint: Path) -> None:
    """Copy frozen parameters and buffers from the checkpoint; those it does not have keep their values."""
    import deepspeed

    states, names = model_states(engine, checkpoint, read_file), expert_names(engine)
    for name, target in untrained(engine):
        value = model_value(states, name, target, checkpoint, read_file)
        if value is None:
            continue
        # Stages 1 and 2, and buffers at any stage: every rank holds the whole tensor.
        if not hasattr(target, "ds_id"):
            target.data.copy_(names.held(name, value).view(target.shape))
            continue
        # Stage 3: gathered here, written by rank 0, and cut and sent out again at the end of the block. Collective.
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            if dist.get_rank() == 0:
                target.data.copy_(value.view(target.shape))
