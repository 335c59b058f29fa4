"""State of the 8-bit optimizers of bitsandbytes (``adamw_bnb_8bit`` and the like), found among a shard's tensors.

A parameter of such an optimizer, which is a rank's whole partition here, has up to two states. State *i* is

    state{i}     codes, uint8, one per element; or float32, in a partition of fewer than ``min_8bit_size`` elements
    qmap{i}      the 256 values of the codes, float32
    absmax{i}    one float32 scale per block of (today) 256 elements, from the first element of the partition

and all of them may lie one dict deeper, under a name that hides them from FSDP. The size of a block is not saved; it
follows from the number of scales. Two states are Adam's moments (AdamW, LAMB too) and get the names that DeepSpeed
has for them. One state may be a momentum, a second moment or a sum: nothing says which, so it keeps its name.
Source: ``bitsandbytes/optim/optimizer.py`` 0.50.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ullage.checkpoint.numbers import NUM_CODES, CodedPart, block_size
from ullage.checkpoint.zero.flat import FlatTensor

#: The entry of a state that holds what is quantised.
_WRAPPED = "__bnb_optimizer_quant_state__"
#: Two states of these optimizers, by the names that all others have for them.
_MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """The state of one parameter without the dict in it that hides tensors from FSDP."""
    inner = state.get(_WRAPPED)
    if not isinstance(inner, dict):
        return state
    return {key: value for key, value in state.items() if key != _WRAPPED} | inner


def decoded(flats: dict[str, FlatTensor]) -> dict[str, FlatTensor]:
    """The tensors of a group by key, where codes with their scales and table are one float32 tensor.

    What does not have the layout above stays as it is, to be refused by its name (``states``).
    """
    found = dict(flats)
    first, second = flats.get("state1"), flats.get("state2")
    # AdEMAMix keeps two moments in its first state, which then is no partition.
    if first is None or (second is not None and second.numel != first.numel):
        return found
    for number in "12" if second is not None else "1":
        codes, scales, table = (flats.get(f"{stem}{number}") for stem in ("state", "absmax", "qmap"))
        if codes is None or codes.dtype != "uint8" or scales is None or table is None:
            continue
        block = block_size(codes.numel, scales.numel)
        if block is None or table.numel != NUM_CODES or {scales.dtype, table.dtype} != {"float32"}:
            continue
        part = CodedPart(codes.offset, scales.offset, table.offset, codes.numel, block)
        found[f"state{number}"] = replace(codes, dtype="float32", digest=None, coded=part)
        del found[f"absmax{number}"], found[f"qmap{number}"]
    if second is None:
        return found
    # What is still codes keeps its name, by which it is refused.
    return {key if flat.dtype == "uint8" else _MOMENTS.get(key, key): flat for key, flat in found.items()}
