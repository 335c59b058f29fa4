"""What packing does for a run: the padding that it saves at these lengths, and where it saves nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ullage.core.layout import Int64

#: Batches that are drawn to see how much padding they have.
_DRAWN = 256
#: Below this share of padding there is nothing to save; above the second a run that pads hears of it.
_NOTHING, _MUCH = 0.02, 0.2
#: Below this number of parameters a step on a CPU costs less than what packing does beside it.
_TINY = 1_000_000


def padding_share(lengths: Int64, batch_size: int) -> float:
    """The part of padded batches that is padding, for sequences of these lengths in random order.

    >>> padding_share(np.array([5, 5, 5]), 2), padding_share(np.array([1, 3]), 2)
    (0.0, 0.3333333333333333)
    """
    size = min(batch_size, len(lengths))
    number = max(1, min(_DRAWN, len(lengths) // size))
    drawn = np.random.default_rng(0).permutation(lengths)[: number * size].reshape(number, size)
    slots = int(drawn.max(axis=1).sum()) * size
    return 1 - int(drawn.sum()) / slots if slots else 0.0


def capacity_for(lengths: Int64, batch_size: int) -> int:
    """A capacity for these lengths: a power of 2 that holds the longest, and about a batch of the mean length."""
    wanted = max(int(lengths.max()), round(float(lengths.mean()) * batch_size))
    return 1 << max(0, wanted - 1).bit_length()


def may_hold_padding(dataset: Any, lengths: Int64) -> bool:
    """Whether stored samples of one length may hold padding themselves, told by a mask beside their tokens."""
    if int(lengths.min()) != int(lengths.max()):
        return False
    names = getattr(dataset, "column_names", None)
    if names is None and isinstance(dataset, (list, tuple)):
        names = dataset[0]
    return names is not None and "attention_mask" in names


def packing_advice(
    lengths: Int64,
    batch_size: int,
    *,
    packed: bool,
    pads: bool,
    num_parameters: int,
    device: Any,
    option: str = "packing_capacity={}",
) -> tuple[str | None, bool]:
    """A line on what packing brings or would bring, ``None`` where it does what it should; and whether it is urgent.

    Args:
        lengths: of the sequences, in tokens, at least one.
        batch_size: sequences of a batch on one rank.
        packed: whether the run packs.
        pads: whether batches are padded that are not packed.
        num_parameters: of the model.
        device: that it is trained on.
        option: how a capacity is asked for, in the words of who reads the line.
    """
    share = padding_share(lengths, batch_size)
    is_tiny = num_parameters < _TINY and getattr(device, "type", device) == "cpu"
    small = f"a model of {num_parameters:,} parameters may train faster padded, since its steps cost little"
    of_these = f"for these lengths ({int(lengths.min()):,} to {int(lengths.max()):,} tokens)"
    percent = f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"
    if packed:
        if share < _NOTHING:
            return f"packing brings nothing: padded batches of {batch_size} would be {percent} padding {of_these}", True
        return (f"packing brings little: {small} beside planning and exchange", False) if is_tiny else (None, False)
    if not pads:
        return f"nothing is packed, and nothing is padded: the model takes sequences {of_these} as they are", False
    if share < _NOTHING:
        line = f"nothing is packed, and packing would bring nothing: batches of {batch_size} are {percent} padding"
        return f"{line} {of_these}", False
    line = f"nothing is packed: batches of {batch_size} are {percent} padding {of_these}"
    line += f"; {option.format(capacity_for(lengths, batch_size))} would compute none"
    return f"{line}, but {small}" if is_tiny else line, share >= _MUCH and not is_tiny
