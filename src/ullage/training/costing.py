"""Cost of a model per sequence, and its FLOPs, read off the model itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.planning import RecurrentCost, TransformerCost
from ullage.planning.cost import Cost


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model; ZeRO-3 leaves the full count of one that it has sharded beside it."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def cost_of(model: nn.Module) -> TransformerCost | RecurrentCost:
    """Cost of a sequence in this model: its FLOPs, or time steps and rows."""
    config = getattr(model, "config", None)
    if getattr(config, "cell", None) is not None:
        return RecurrentCost()
    try:
        return TransformerCost.from_config(config)
    except InputError:  # a model we have no formula for: its matrices cost every token the same
        return TransformerCost(linear=2 * num_parameters(model), quadratic=0)


def model_flops(cost: Cost, num_parameters: int, microbatches: Sequence[RaggedBatch]) -> int:
    """FLOPs of microbatches, forward and backward: of real tokens, with the causal half of attention.

    Without a formula for the model, six times parameters times tokens.
    """
    tokens = sum(microbatch.numel() for microbatch in microbatches)
    if not isinstance(cost, TransformerCost):
        # Two FLOPs per parameter and token forward, four backward.
        return 6 * tokens * num_parameters
    squares = sum(int((microbatch.layout.lengths**2).sum()) for microbatch in microbatches)
    return int(cost.training_flops(tokens, squares))
