"""Loading of a checkpoint into a DeepSpeed engine of any layout, where DeepSpeed and the HF Trainer fall short.

:func:`load_checkpoint` reads the elements that each rank needs from a checkpoint of any layout; :func:`load_universal`
is its name for one that was converted. DeepSpeed loads a checkpoint of the same layout, or a universal one, of which it
gets some wrong (read and run on DeepSpeed 0.19.8):

===============================================  ==================================================================
what DeepSpeed does                               what is done here
===============================================  ==================================================================
frozen parameters and buffers stay as they were   read from the checkpoint like all others
stage 3: ONE step tensor in the state of every    each state has its own, so that a step counts once
sub-group, so each optimizer step counts once a
sub-group
stage 3: hyperparameters of group 0 for all       each group has its own
stage 3: only exp_avg and exp_avg_sq are loaded   whatever state the checkpoint has (momentum, or none)
stages 1, 2, BF16_Optimizer: IndexError on a      that rank reads nothing of the group
rank whose partition of a group is all padding
MoE layers: an expert is looked up by its number  it is looked up by its number among all, so any size of expert
on the rank; groups take the names of the run     parallelism fits; groups keep the names of this run
that wrote the checkpoint
a parameter that is missing or of another shape   every rank checks everything first and all raise together
raises on its owner, and the other ranks hang
===============================================  ==================================================================

Source: ``deepspeed/runtime/engine.py``, ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``,
``checkpoint/universal_checkpoint.py``.

:func:`init_distributed` starts DeepSpeed's communication without the operator that it would compile first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ullage.ranks import Axis, together
from ullage.ranks.ending import end_groups_at_exit
from ullage.core.replacing import replaced
from ullage.training.deepspeed.content import prefers_universal, universal_at
from ullage.training.deepspeed.engine import require_engine
from ullage.training.deepspeed.loading import load_ranges

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
    marks = vars(deepspeed.ops).get("__compatible_ops__") or {}
    with replaced(deepspeed.ops, "__compatible_ops__", {**marks, _SHARED_MEMORY: False}):
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


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
        engine: what ``deepspeed.initialize`` returned, at ZeRO stage 1, 2 or 3 or with BF16_Optimizer, data- and
            expert-parallel; its config need not ask for a universal checkpoint.
        folder: as for ``engine.load_checkpoint``, or the tag's own folder: what DeepSpeed wrote at any stage, a
            universal checkpoint, or any other with an optimizer's state that :func:`ullage.checkpoint.read` reads.
        tag: by default the latest.
        strict: every frozen parameter and every buffer of a state dict must be in the checkpoint, and everything in the
            checkpoint in the model; without it those that are not there keep their values (adapters over a frozen base
            that was not saved).
        load_lr_scheduler_states: as for ``engine.load_checkpoint``.

    Returns what ``engine.load_checkpoint`` returns: the path read and the client state. Collective: every rank calls
    it, and all raise if one does. Waits for the device. What is incomplete, or does not fit the model, is refused with
    ``CheckpointError`` before anything is loaded. What is read is compared with the checksums of the files and of a
    manifest, as far as nearly all of a record or file is read; if one of them differs, every rank raises, and the
    engine holds a part of the checkpoint. Raises ``InputError`` for an engine without ZeRO, with model parallelism, or
    with tensors on NVMe.

    The first rank reads the descriptions of all files for all ranks. No code of the files is run: client state is plain
    data, tensors, arrays and namespaces, and an entry with an object of another class is left out with a warning.
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
    """:func:`load_checkpoint` of the universal checkpoint at ``folder``; by default the one ``latest_universal`` names.

    Raises ``CheckpointError`` where there is none.
    """
    require_engine(engine)
    where = Path(folder)
    with together(Axis.world(), "looking for a universal checkpoint"):
        where = universal_at(folder, tag)
    return load_checkpoint(engine, where, strict=strict, load_lr_scheduler_states=load_lr_scheduler_states)


@contextlib.contextmanager
def checkpoints_loaded_by(load: Callable[[Any, str, bool], bool]) -> Iterator[None]:
    """Within it the Hugging Face ``Trainer`` loads a checkpoint of DeepSpeed's by ``load``, if that returns True.

    What ``load`` leaves is loaded by transformers' own function; but first of all, a universal checkpoint of the same
    step or a later one (``latest_universal`` in the Trainer's ``checkpoint-*`` folder) by :func:`load_universal`. The
    Trainer cannot ask for one by itself (transformers#33157).
    """
    module: Any = import_module("transformers.trainer")
    original = module.deepspeed_load_checkpoint

    def load_any(engine: Any, checkpoint_path: str, load_module_strict: bool = True) -> None:
        if prefers_universal(checkpoint_path):
            load_universal(engine, checkpoint_path, strict=load_module_strict)
        elif not load(engine, checkpoint_path, load_module_strict):
            original(engine, checkpoint_path, load_module_strict=load_module_strict)

    with replaced(module, "deepspeed_load_checkpoint", load_any):
        yield
