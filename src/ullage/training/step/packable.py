"""Models, labels and data that packed training can take, and what it does to models first."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set

from torch import nn
from transformers import PreTrainedModel

from ullage.attention import packing_problem, require_packing
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.mixers import call_equally_often, is_packed, run_towers_always
from ullage.mixers.items import PIXELS, takes_items
from ullage.mixers.packed_model import forward_of, put_in, ways_of
from ullage.mixers.towers import features_of, tower_parameters
from ullage.mixers.ways import Way, require_independent_rows
from ullage.ranks.world import gather
from ullage.training.batches.amounts import items_in


def make_packable(model: nn.Module, *, is_sharded: bool = False) -> tuple[Way, ...] | None:
    """Make a bare model keep the sequences of a packed row apart, in place; one that does so already stays as it is.

    Args:
        model: bare.
        is_sharded: whether ranks gather its parameters in each call, so that only some ways will do.

    Returns the ways that it may be packed in; None for one that was packed before, or that is nobody's but the user's.
    Raises ``InputError`` for a transformers model whose sequences compete by design, and for a model of anybody else
    whose ``forward`` names no ``cu_seq_lens_q``.
    """
    if is_packed(model):
        return None
    if not isinstance(model, PreTrainedModel):
        require_independent_rows(model)
        problem = packing_problem(model)
        if problem is not None and "attn_implementation" not in problem:
            # Whatever its own collator gives it, PackedSequence for example, is what it trains on.
            raise InputError(
                f"this model would let packed sequences see each other: {problem}",
                where=type(model).__name__,
                hint="leave packing_capacity out, and it trains on the batches of its collator; or, where it takes "
                "rows of input_ids, call ullage.pack_model(model) first",
            )
        require_packing(model)
        return None
    ways = ways_of(model)
    if "cu_seq_lens_q" in inspect.signature(model.forward).parameters:
        return ways
    # The first step proves it, unless the caller believes what was found.
    equal = [way for way in ways if way.is_one_row] if is_sharded else []
    put_in(model, (equal or ways)[0])
    return ways


def require_equal_calls(model: nn.Module) -> None:
    """Make a packed model call its layers equally often on every rank, where parameters are sharded.

    Ranks gather them in each call. Raises ``InputError`` for a model that runs all its layers once per length of a row.
    """
    if call_equally_often(model):
        return
    forward = forward_of(model)
    raise InputError(
        "this model cannot be packed where its parameters are sharded: its layers run once per length of a row, so "
        "ranks would gather them unequally often",
        where=type(model).__name__,
        expected="DDP, or ZeRO 1 or 2",
        found=f"{None if forward is None else forward.way}, under ZeRO 3 or FSDP",
        hint="leave packing_capacity and pack_model out: the batches are padded then",
    )


#: What items there are in each microbatch of each rank: the field of their pixels, and the patches of one.
StepItems = Sequence[Sequence[Set[tuple[str, int]]]]


def items_of_step(model: nn.Module, microbatches: Sequence[RaggedBatch], *, several: bool) -> StepItems:
    """The images and clips in the microbatches of every rank. Collective for a model that takes any."""
    if not takes_items(model):
        return []
    config = getattr(model, "config", None)
    return gather([{(name, size) for _, name, size in items_in(each, config)} for each in microbatches], several)


def meet_in_towers(model: nn.Module, items: StepItems, *, is_sharded: bool) -> list[nn.Parameter]:
    """Make several ranks run the towers of a packed model equally often in a step, images or none.

    Args:
        model: bare.
        items: of the step, the same on every rank.
        is_sharded: whether ranks gather parameters in each call, also those that are not trained.

    Returns the parameters of the towers where no rank has an image in the step: what has no gradient on one process
    has none on several, so that an optimizer leaves it as it is. Raises ``InputError`` on every rank for a model whose
    towers run by sequence, where a microbatch has no image and another one has.
    """
    if not takes_items(model):
        return []
    towers = [each for each in tower_parameters(features_of(model)) if each.requires_grad]
    found = [microbatch for rank in items for microbatch in rank]
    can_stand_in = True
    if is_sharded or towers:
        # A row with images and clips runs the tower once for each kind: then every row does.
        kinds = PIXELS if any(name == PIXELS["video"] for each in found for name, _ in each) else ("image",)
        can_stand_in = run_towers_always(model, tuple(kinds))
    if not any(found):
        return towers
    if not can_stand_in and not all(found):
        raise InputError(
            "a microbatch without images would leave out the tower, where ranks wait for each other in it",
            where=type(model).__name__,
            expected="a model that takes the images of a row at once, or images in every microbatch",
            found="a microbatch of text alone",
            hint="train on one process, freeze the tower (under DDP, ZeRO 1 or 2), or leave packing_capacity out",
        )
    return []


def truncation_problem(model: nn.Module) -> InputError | None:
    """The error where a plan would cut an encoder-decoder's targets; None for any other model."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    return InputError(
        "packing_oversize='truncate' would cut targets: source and target count as one length",
        where=type(model).__name__,
        expected="'error' or 'drop'",
        found="'truncate'",
        hint="cut samples before they are collated",
    )
