"""Arguments of transformers' Trainer in the engine's: what it refuses, and the optimizer that they ask for."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ullage.checkpoint.formats.torch_optimizer import decaying_first
from ullage.errors import InputError
from ullage.training.arguments import AUTO

#: Arguments that the loop does not implement, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "deepspeed": (None,),
    "fsdp": (None, "", [], False),
    "fp16": (False,),
    "torch_compile": (False,),
    "label_smoothing_factor": (0, 0.0),
    "group_by_length": (False,),
    "push_to_hub": (False,),
    "enable_jit_checkpoint": (False,),
    "dataloader_drop_last": (False,),
    "batch_eval_metrics": (False,),
    "neftune_noise_alpha": (None,),
    "auto_find_batch_size": (False,),
    "empty_step": ("warn",),
    "async_save": (False,),
    "packing_loss_weighting": ("token",),
}


def require_supported(arguments: Any) -> None:
    """Raise ``InputError`` for an argument that the engine's loop does not implement."""
    if getattr(arguments, "packing_capacity", None) == AUTO:
        raise InputError(
            "a capacity is not found by itself over ullage.engines.fsdp, which --dp, --cp and --tp use",
            where="packing_capacity",
            expected="a number",
            found=AUTO,
        )
    for name, harmless in UNSUPPORTED.items():
        value = getattr(arguments, name, harmless[0])
        if value not in harmless:
            raise InputError(
                f"{name} is not supported over ullage.engines.fsdp, which --dp, --cp and --tp use",
                expected=harmless[0],
                found=value,
                hint="leave it out",
            )


def make_optimizer(model: Any, arguments: Any) -> torch.optim.Optimizer:
    """Trainer's optimizer of these arguments, with Trainer's two groups."""
    parameters = dict(model.named_parameters())
    # Both, even where one has no parameters: then a checkpoint has the groups of Trainer's.
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(decaying_first(model), (arguments.weight_decay, 0.0), strict=True)
    ]
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    # Factories, and optimizers that want more than groups of parameters (GaLore, LOMO, layer-wise ones), are made by
    # code of Trainer that is not taken over here.
    if not issubclass(kind, torch.optim.Optimizer) or {"params", "model", "optimizer_dict"} & set(options):
        raise InputError("this optim is not supported over ullage.engines.fsdp", found=str(arguments.optim))
    return kind(groups, **options)
