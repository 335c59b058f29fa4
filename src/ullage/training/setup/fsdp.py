"""Sharding by accelerate's FSDP2 (``--fsdp``, ``ACCELERATE_USE_FSDP``): what it refuses, and where it falls short.

Source: accelerate 1.15 ``state.py`` and ``utils/fsdp_utils.py``; transformers 5.23 ``trainer.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from ullage.core.errors import CheckpointError, InputError
from ullage.core.replacing import replaced

if TYPE_CHECKING:
    import transformers

_LOG = logging.getLogger(__name__)

_FULL, _SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
_ASKED = "ACCELERATE_USE_FSDP"


def is_asked_for(arguments: Any) -> bool:
    """Whether arguments, or the environment that ``accelerate launch`` sets, ask for FSDP."""
    return bool(getattr(arguments, "fsdp", None)) or _is_true(_ASKED)


def require_possible(arguments: Any) -> None:
    """Raise ``InputError`` on every rank for what was asked for and would not be done.

    Warns where the environment asks for it and there is one process, which holds the whole model then.
    """
    _require_data_parallel(arguments)
    state = getattr(arguments, "distributed_state", None)
    if not is_asked_for(arguments) or state is None or (arguments.fsdp and arguments.fsdp_config.get("xla")):
        return
    if state.distributed_type == DistributedType.NO:
        if not arguments.fsdp:
            _LOG.warning("%s is set, and one process holds the whole model: start the script with torchrun", _ASKED)
            return
        raise InputError(
            "fsdp was asked for, and there is one process, which would hold the whole model",
            where="TrainingArguments.fsdp",
            expected="several processes",
            found=1,
            hint="start the script with torchrun --nproc_per_node, or leave fsdp out",
        )


def _require_data_parallel(arguments: Any) -> None:
    """Raise ``InputError`` for sizes of accelerate's ``ParallelismConfig`` that are not honoured here."""
    sizes: Any = getattr(arguments, "parallelism_config", None)
    if sizes is None and _is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        sizes = ParallelismConfig()
    if sizes is None:
        return
    for name in ("tp_size", "cp_size", "sp_size"):  # over which ranks would have to share their samples
        if getattr(sizes, name, 1) > 1:  # accelerate has sp_size since 1.12
            raise InputError(
                f"{name} is not honoured: every rank trains on samples of its own here",
                where="ParallelismConfig",
                expected=f"{name}=1, with dp_replicate_size and dp_shard_size",
                found=f"{name}={getattr(sizes, name)}",
                hint="ullage.engines.fsdp has context and tensor parallelism: `ullage train --dp --cp --tp`",
            )
    if sizes.dp_shard_size > 1 and not is_asked_for(arguments):
        raise InputError(
            "dp_shard_size says over how many ranks FSDP shards, and no FSDP was asked for",
            where="ParallelismConfig",
            expected="fsdp=True with it",
            found=f"dp_shard_size={sizes.dp_shard_size} alone",
            hint="set TrainingArguments(fsdp=True, ...), or leave dp_shard_size out",
        )


def require_sharding(trainer: transformers.Trainer) -> None:
    """Raise ``InputError`` on every rank where FSDP was asked for and the trainer's accelerator does not shard."""
    shards = trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled
    if is_asked_for(trainer.args) and trainer.args.world_size > 1 and not shards:
        raise InputError(
            "fsdp was asked for, but accelerate does not shard here: every rank would hold the whole model",
            where="TrainingArguments.fsdp",
            expected="processes on accelerators, and an Accelerator that the Trainer makes",
            found=str(trainer.accelerator.distributed_type),
            hint="leave fsdp out for data parallel training; on CPUs ullage.engines.fsdp shards: `ullage train --dp`",
        )


@contextlib.contextmanager
def sharded_once(trainer: transformers.Trainer) -> Iterator[None]:
    """Within it the trainer's accelerator shards the trainer's model, or leaves one that is sharded already as it is.

    Does nothing without FSDP2. Raises ``InputError`` on every rank for a plan of layers that cannot be sharded.
    """
    accelerator = trainer.accelerator
    if not (trainer.is_fsdp_enabled and accelerator.is_fsdp2):
        yield
        return
    model: Any = trainer.model
    if isinstance(model, FSDPModule):
        reshard(model)  # pyright: ignore[reportArgumentType]  it is both

        # A second run. accelerate would checkpoint each layer once more, and find the optimizer's parameters by their
        # addresses, which ranks with empty parts do not have. They are the model's already.
        def prepared(*objects: Any) -> tuple[Any, ...]:
            accelerator._models.extend(each for each in objects if isinstance(each, nn.Module))
            return tuple(
                each if isinstance(each, nn.Module) else accelerator._prepare_one(each, first_pass=True)
                for each in objects
            )

        accelerator._prepare_fsdp2 = prepared
        try:
            yield
        finally:
            del accelerator._prepare_fsdp2
        return
    _settle_layers(accelerator.state.fsdp_plugin, model)
    yield
    # What transformers asks before it generates: ranks whose sequences end early go on calling the model.
    if isinstance(trainer.model, FSDPModule):
        setattr(trainer.model, "_is_fsdp_managed_module", True)  # noqa: B010  a name that FSDPModule does not have


def shard_for_evaluation(trainer: transformers.Trainer) -> None:
    """Shard a model that no run has sharded yet; accelerate does so with an optimizer only."""
    if not (trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2) or isinstance(trainer.model, FSDPModule):
        return
    accelerator = trainer.accelerator
    assert trainer.model is not None
    with sharded_once(trainer):
        unused = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
        trainer.model, optimizer = accelerator.prepare(trainer.model, unused)
        trainer.model_wrapped = trainer.model
    accelerator._optimizers.remove(optimizer)


def reshard(model: nn.Module) -> None:
    """Give up what a forward without backward has left gathered, so that the model's parameters are its parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_weights(accelerator: Accelerator) -> contextlib.AbstractContextManager[None]:
    """Within it ``save_model`` writes the weights for ``from_pretrained``, whatever form checkpoints have."""
    return _state_dicts_as(accelerator, _FULL)


def read_as_written(accelerator: Accelerator, checkpoint: str | Path | None) -> contextlib.AbstractContextManager[None]:
    """Within it FSDP's part of ``checkpoint`` is read in the form that it was written in."""
    return _state_dicts_as(accelerator, None if checkpoint is None else _form_of(Path(checkpoint)))


@contextlib.contextmanager
def _state_dicts_as(accelerator: Accelerator, form: str | None) -> Iterator[None]:
    """Within it state dicts of FSDP have this form; does nothing for None, and without FSDP."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if form is None or plugin is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in ("state_dict_type", "state_dict_config", "optim_state_dict_config"):
            stack.enter_context(replaced(plugin, name, None))  # the configs are made anew for the form
        plugin.set_state_dict_type(form)
        yield


def _form_of(checkpoint: Path) -> str | None:
    """The form of FSDP's weights in a checkpoint; None if they are not FSDP's."""
    if (checkpoint / f"{FSDP_MODEL_NAME}.bin").is_file():
        return _FULL
    return _SHARDED if (checkpoint / f"{FSDP_MODEL_NAME}_0").is_dir() else None


def require_readable(checkpoint: Path, under_fsdp: bool) -> None:
    """Raise ``CheckpointError`` for a checkpoint of FSDP's continued without it, and the other way round."""
    written = _form_of(checkpoint) is not None
    if under_fsdp and checkpoint.is_dir() and not written:
        raise CheckpointError(
            "a checkpoint that was written without FSDP cannot be continued under it",
            where=str(checkpoint),
            expected=f"{FSDP_MODEL_NAME}.bin, or the folder {FSDP_MODEL_NAME}_0",
            found="neither",
            hint="continue without fsdp, or begin a new run from its weights",
        )
    if written and not under_fsdp:
        raise CheckpointError(
            "a checkpoint of FSDP's is continued under FSDP only",
            where=str(checkpoint),
            expected="fsdp=True, on any number of processes",
            found="no fsdp",
            hint="give fsdp again, or begin a new run from its weights",
        )


def _settle_layers(plugin: Any, model: nn.Module) -> None:
    """Name the layers that accelerate shards by themselves. Raises ``InputError`` for a class that torch refuses."""
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    # accelerate shards the embeddings by themselves, after the layers. A layer that holds them (BertEmbeddings) would
    # have sharded them before, which torch refuses. Composite models name layers that they do not have.
    getters = ("get_input_embeddings", "get_output_embeddings")
    shared = [getattr(model, getter)() for getter in getters if hasattr(model, getter)]
    asked, found = plugin.transformer_cls_names_to_wrap, []
    for name in getattr(model, "_no_split_modules", None) or [] if asked is None else asked:
        layers = [module for module in model.modules() if type(module).__name__ == name]
        holds = any(part is each for layer in layers for part in layer.modules() for each in shared if each is not None)
        if asked is not None and (holds or not layers):
            raise InputError(
                "this class cannot be sharded as a layer",
                where="fsdp_config['transformer_layer_cls_to_wrap']",
                expected="a class of layers of the model, without its embeddings",
                found=f"{name}, which {'holds the embeddings' if holds else 'is not in the model'}",
                hint=f"leave it out: {type(model).__name__} names its layers itself",
            )
        if layers and not holds:
            found.append(name)
    plugin.transformer_cls_names_to_wrap = found


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1", "yes", "on")
