"""Mixers by kernels that take lengths: a whole packed row in one call.

transformers' mixers call functions of fla, mamba-ssm and causal-conv1d where these are installed, and torch's own
elsewhere. Most of the installed functions take the lengths of a row, torch's take none. Where every function that a
mixer calls takes them, the mixer gets the row as it is, and runs by lengths otherwise: one that is told nothing mixes
the tokens of neighbours, without a word.

A function takes ``cu_seqlens`` int64 [n + 1], the bounds of the slots of the row, or ``seq_idx`` int32 [1, T], the
number of each token's slot. Padding behind a sequence belongs to its slot, where no token sees it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class MixerCalls:
    """What the forward of a mixer calls without a cache.

    Attributes:
        functions: those in the file of its class that mix tokens, with the keyword by which each is told the lengths.
        keywords: of the forward, which hands them on. A keyword that a function does not name is not handed to it.
        shares_chunks: whether sequences that meet in a chunk share its sums: other tokens in one change the others by
            rounding, and nan reaches them.
    """

    functions: dict[str, str]
    keywords: tuple[str, ...]
    shares_chunks: bool = False


_CONVOLUTION = {"causal_conv1d_fn": "seq_idx"}
_MAMBA_2 = MixerCalls(
    {**_CONVOLUTION, "mamba2_split_conv1d_scan_combined": "seq_idx", "mamba2_chunk_scan": "seq_idx"}, ("seq_idx",), True
)
#: By the ending of the class name, as ``ways`` names mixers. Mamba 1's own (``mamba_inner_fn``, ``selective_scan_fn``)
#: take no lengths, and the mixers that are missing here call torch alone.
_CALLS = {
    "GatedDeltaNet": MixerCalls(
        {**_CONVOLUTION, "torch_chunk_gated_delta_rule": "cu_seqlens"}, ("seq_idx", "cu_seq_lens_q")
    ),
    "DeltaAttention": MixerCalls(
        {**_CONVOLUTION, "chunk_kimi_delta_attention": "cu_seqlens"}, ("seq_idx", "cu_seqlens")
    ),
    "BambaMixer": _MAMBA_2,
    "FalconH1Mixer": _MAMBA_2,
    "GraniteMoeHybridMambaLayer": _MAMBA_2,
    "Mamba2Mixer": _MAMBA_2,
    "Zamba2MambaMixer": _MAMBA_2,
    "ShortConv": MixerCalls(_CONVOLUTION, ("seq_idx",)),
    "ShortConvolution": MixerCalls(_CONVOLUTION, ("seq_idx",)),
}


def length_keywords(mixer: nn.Module) -> tuple[str, ...]:
    """The keywords by which a mixer is told the lengths of a row in one call; none where that is not exact.

    Reads the signatures of the functions that its forward will call, and runs nothing.
    """
    kind, calls = type(mixer), _calls_of(mixer)
    # A forward that takes no further keywords, as of an older transformers, hands none on.
    taken = inspect.signature(kind.forward).parameters.values()
    if calls is None or not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken):
        return ()
    of_file = inspect.unwrap(kind.forward).__globals__
    takes_all = all(keyword in _taken_by(of_file.get(name)) for name, keyword in calls.functions.items())
    return calls.keywords if takes_all else ()


def shares_chunks(model: nn.Module) -> bool:
    """Whether kernels of a model that is packed compute sequences that meet in a chunk together."""
    mixers = ((_calls_of(module), module) for module in model.modules())
    return any(calls is not None and calls.shares_chunks and length_keywords(module) for calls, module in mixers)


def _calls_of(mixer: nn.Module) -> MixerCalls | None:
    return next((calls for ending, calls in _CALLS.items() if type(mixer).__name__.endswith(ending)), None)


def _taken_by(function: Any) -> tuple[str, ...]:
    """The keywords of what is called in the place of one of transformers' functions; none for torch's own.

    ``function``: as ``use_kernel_func_from_hub_with_fallback`` leaves it. Where the package ``kernels`` is installed it
    is a module around that, whose forward ``kernelize`` may have replaced by a kernel from the hub.
    """
    if isinstance(function, nn.Module):
        if "forward" in vars(function):
            return tuple(inspect.signature(function.forward).parameters)
        function = _enclosed(type(function).forward).get("func")
    enclosed = _enclosed(function)
    return tuple(enclosed.get("applicable_params", ())) if enclosed.get("is_new_implementation") else ()


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables that a function has from around it."""
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
