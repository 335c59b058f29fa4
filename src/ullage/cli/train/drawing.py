"""The weights of a new model: the same from one seed under ZeRO 3 as without it.

Under ZeRO 3 transformers builds a model within ``deepspeed.zero.Init``, which takes each layer apart as soon as it is
made, and draws the weights afterwards, from another place in the stream of random numbers. So a seed gave other weights
there than on one process, or under ZeRO 1 and 2. Here the first rank also builds the model as a whole, and its weights
take the place of those that were drawn in parts.

Source: ``PreTrainedModel._from_config`` and ``initialize_weights_zero3`` of transformers 5.23.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.integrations import deepspeed as integration

from ullage.training.agreement import agreement, rank_here, several_ranks


def drawn(make: Callable[[], Any]) -> Any:
    """The model that ``make`` makes, its weights drawn as without ZeRO 3. Collective under ZeRO 3.

    The first rank holds the whole model in the memory of its host for that time.
    """
    if not integration.is_deepspeed_zero3_enabled():
        return make()
    import deepspeed

    several, whole = several_ranks(), None
    with agreement(several, "drawing the weights of a new model"):
        if rank_here(several) == 0:
            # What the other ranks draw next, this one draws too.
            with torch.random.fork_rng(devices=[]), _without_zero3():
                whole = dict(make().named_parameters(remove_duplicate=False))
    model = make()
    for name, parameter in model.named_parameters():
        # Whole on every rank within the block; what rank 0 leaves in it is what all go on with.
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if whole is not None:
                parameter.copy_(whole[name])
    return model


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """Let transformers build as if no configuration of DeepSpeed were there."""
    held: Any = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration.set_hf_deepspeed_config(held())
