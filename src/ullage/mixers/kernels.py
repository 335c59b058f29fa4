"""Mixers by kernels that take lengths: a whole packed row in one call.

transformers' mixers call functions of fla, mamba-ssm and causal-conv1d where these are installed, and torch's own
elsewhere. Most of the installed functions take the lengths of a row, torch's take none. Where every function that a
mixer calls takes them, the mixer gets the row as it is, and runs by lengths otherwise: one that is told nothing mixes
the tokens of neighbours, without a word.

A function takes ``cu_seqlens`` int64 [n + 1], the bounds of the slots of the row, or ``seq_idx`` int32 [1, T], the
number of each token's slot. Padding behind a sequence belongs to its slot, where no token sees it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
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


#: By which kernels are told.
_KERNELS = ("cu_seqlens", "seq_idx")
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

    Reads the signatures of the functions that its forward calls, and runs nothing.
    """
    calls = _calls_of(mixer)
    if calls is None:
        return ()
    forward = inspect.unwrap(type(mixer).forward)
    named = [(forward.__globals__.get(name), name, keyword) for name, keyword in calls.functions.items()]
    takes_all = all(keyword in _taken_by(function) and _is_told(forward, name) for function, name, keyword in named)
    return calls.keywords if takes_all else ()


@functools.lru_cache(maxsize=256)
def _is_told(forward: Callable[..., Any], name: str) -> bool:
    """Whether each call of a function in a forward hands further keywords on, or lengths: older releases do not."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except OSError:  # there is no source
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
    given = [[each for each in call.keywords if ast.unparse(each.value) != "None"] for call in calls]
    return bool(calls) and all(any(each.arg in (None, *_KERNELS) for each in keywords) for keywords in given)


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
    implementation = _enclosed(function).get("implementation")
    if implementation is None or implementation is getattr(function, "__wrapped__", None):
        return ()
    return tuple(inspect.signature(implementation).parameters)


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables that a function has from around it."""
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
