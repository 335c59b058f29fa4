"""What a model costs, read off the model itself."""

from __future__ import annotations

from torch import nn

from ullage.errors import InputError
from ullage.planning import RecurrentCost, TransformerCost


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model; ZeRO-3 leaves the full count of one that it has sharded beside it."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def cost_of(model: nn.Module) -> TransformerCost | RecurrentCost:
    """What a sequence costs this model: its FLOPs, or time steps and rows."""
    config = getattr(model, "config", None)
    if getattr(config, "cell", None) is not None:
        return RecurrentCost()
    try:
        return TransformerCost.from_config(config)
    except InputError:  # a model we have no formula for: its matrices cost every token the same
        return TransformerCost(linear=2 * num_parameters(model), quadratic=0)
