"""Packed attention on CUDA: torch's varlen kernel, and flex attention where that kernel cannot serve.

``torch.nn.attention.varlen.varlen_attn`` is flash attention over cumulated lengths: float16 and bfloat16, a head
dimension that is a multiple of 8 and at most 256, Ampere or newer, no dropout. It takes the lengths on the device and
the longest one as a host integer, so nothing waits for the device. ``flex_attention`` takes float32 too, and head
dimensions from 16 on; its block mask is made from the cumulated lengths on the device, once for all layers of a
forward. Neither has dropout: for that, for what neither takes, and for other devices, use ``segments``. Source: the
signatures and checks of torch 2.13, ``torch/_inductor/kernel/flex/flex_attention.py`` for the smallest head dimension.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.attention.kernels import with_sinks
from ullage.attention.segments import host_lengths, in_chunks
from ullage.core.rows import on_device, remembered

_logger = logging.getLogger(__name__)

#: The kernels of a packed row, the fastest first.
VARLEN, FLEX, BY_LENGTHS = "torch's varlen kernel", "flex attention", "by lengths"
BY_SEQUENCE = "one sequence after another"
#: Why the fastest does not take a layer, in what no dtype and no release of torch would change.
BENT, OWN_PATTERN = "it has no soft caps and no sinks", "the mask is asked for by sequence"


@lru_cache(maxsize=64)
def warn_of_slower(kind: str, kernel: str, why: str) -> None:
    """Say once that a kind of layer runs a slower kernel than the fastest, and why."""
    _logger.warning(
        f"the attention of {kind} runs {kernel}, which is slower than {VARLEN}: {why}. "
        "ullage.attention.explain(model) lists all layers"
    )


def chunked(cu_seqlens: Tensor, chunk: int) -> Tensor:
    """Cumulated lengths of sequences as those of their chunks; waits for the device once per forward."""
    ends = np.cumsum([0, *in_chunks(host_lengths(cu_seqlens), chunk)], dtype=np.int32)
    return remembered(cu_seqlens, ("chunks", chunk), lambda: on_device(ends, cu_seqlens.device))


@lru_cache(maxsize=1)
def _varlen() -> tuple[Any, bool] | None:
    """torch's varlen kernel, and whether it has an argument for grouped heads; None if it takes no windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # The kernel's signature has changed between releases of torch: ask for the arguments, not for the version.
    parameters = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in parameters) if "window_size" in parameters else None


@lru_cache(maxsize=16)
def _is_ampere(device: torch.device) -> bool:
    is_asked = torch.version.hip is None and torch.cuda.is_available()  # what explain() tells of a GPU elsewhere
    return not is_asked or torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_problem(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], dropout: float = 0.0) -> str | None:
    """Why the varlen kernel does not take heads of these dims, of keys and of values; None where it does."""
    if device.type != "cuda":
        return "it runs on CUDA alone"
    if dropout:
        return "attention dropout"
    if dtype not in (torch.float16, torch.bfloat16):
        return "float16 and bfloat16 alone"
    if dims[0] != dims[1] or dims[0] % 8 or dims[0] > 256:
        return "head dims alike, multiples of 8 and at most 256 alone"
    if _varlen() is None:
        return "this torch has none with windows: 2.11 has"
    return None if _is_ampere(device) else "Ampere or newer alone"


def flex_problem(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], dropout: float = 0.0) -> str | None:
    """Why compiled flex attention does not take them: its products need 16 columns."""
    if device.type != "cuda":
        return "it runs on CUDA alone"
    if dropout:
        return "attention dropout"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "float16, bfloat16 and float32 alone"
    return "head dims of 16 and more alone" if min(dims) < 16 else None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    keys: tuple[Tensor, int] | None = None,
    window: int | None = None,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention within each sequence by torch's varlen kernel, [T, query heads, dim].

    Args:
        query: [T, query heads, dim].
        key, value: [T, key heads, dim], or [keys, key heads, dim] beside ``keys``.
        cu_seqlens: int32 [N + 1] on the tensors' device, cumulated lengths of the queries in tokens.
        longest: tokens of the longest sequence of queries.
        keys: (``cu_seqlens``, longest) of the keys, where a sequence has more keys than queries; its last query sees
            its last key. The queries' own if None.
        window: how many tokens a query sees, itself included, in both ways on each side; None for all.
        scale: factor of the scores; 1/√dim if None.
        causal: whether a token sees only those before it.

    Does not wait for the device.
    """
    known = _varlen()
    assert known is not None
    kernel, wants_gqa = known
    # The kernel counts the tokens to the left of a query, a window counts the query too.
    reach = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scale, "window_size": (reach, 0 if causal else reach)}
    if wants_gqa and query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    key_seqlens, longest_key = (cu_seqlens, longest) if keys is None else keys
    return kernel(query, key, value, cu_seqlens, key_seqlens, longest, longest_key, **options)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    training: bool = False,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention within each sequence by flex attention, [T, query heads, value dim].

    Args:
        query: [T, query heads, dim].
        key: [T, key heads, dim].
        value: [T, key heads, value dim].
        cu_seqlens: int32 [N + 1] on the tensors' device, cumulated lengths in tokens.
        window: how many tokens a query sees, itself included, in both ways on each side; None for all.
        scale: factor of the scores; 1/√dim if None.
        training: whether a backward pass may follow.
        causal: whether a token sees only those before it.
        softcap: a score ``s`` becomes ``softcap·tanh(s / softcap)``; None leaves it.
        sinks: [query heads], a score more for each query, of a key without a value.

    Does not wait for the device. torch has no backward of it on a CPU, and no sum of the weights, for sinks.
    """
    from transformers.integrations.flex_attention import compile_friendly_flex_attention, get_flex_attention_lse_kwargs

    num_tokens = len(query)
    name = (num_tokens, window, causal)
    _allow_kernels()
    mask = remembered(cu_seqlens, name, lambda: _block_mask(cu_seqlens, num_tokens, window, causal))
    mixed = compile_friendly_flex_attention(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        training=training,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        score_mod=None if softcap is None else _bending(softcap),
        # Not torch's kernel for fewer than 128 queries, which has no block for more than that times heads in a group.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        **({} if sinks is None else get_flex_attention_lse_kwargs(True)),
    )
    if sinks is None:
        assert isinstance(mixed, Tensor)
        return mixed[0].transpose(0, 1)
    output, sums = mixed
    # The log-sum-exp itself, or, from torch 2.9 on, what holds it.
    log_sums = sums if isinstance(sums, Tensor) else sums.lse
    return with_sinks(output[0].transpose(0, 1), log_sums[0].transpose(0, 1), sinks)


@lru_cache(maxsize=1)
def _allow_kernels() -> None:
    """Let torch compile a kernel for every combination of options; at its limit of 8 it would run without one."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)


@lru_cache(maxsize=8)
def _bending(softcap: float) -> Callable[..., Tensor]:
    """The change of a score by a soft cap; the same function each time, which is compiled once.

    The cap is a constant of its code: a float beside it would be one kernel's argument from the second cap on, of which
    torch makes no kernel on a CPU.
    """
    cap = float(softcap)
    return eval(f"lambda score, batch, head, query, key: {cap!r} * torch.tanh(score / {cap!r})", {"torch": torch})


#: Tokens in a block of flex attention, which looks up for each pair of blocks whether any tokens see each other.
_BLOCK = 128


def _block_mask(cu_seqlens: Tensor, num_tokens: int, window: int | None, causal: bool) -> Any:
    """Which blocks of tokens see each other: same sequence, within the window, not later if causal.

    Made on the device from the ends of the blocks, without a look at their pairs of tokens: torch's own
    ``create_block_mask`` looks at all, or is compiled for it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    positions = torch.arange(num_tokens, device=cu_seqlens.device)
    # The sequence of a position is the number of sequences that end at or before it: with ends 3 and 5, positions 0 to
    # 4 are of sequences 0, 0, 0, 1, 1.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = sequence[query] == sequence[key]
        if causal:
            near = near & (query >= key)
        elif window is not None:
            near = near & (key - query < window)
        return near if window is None else near & (query - key < window)

    first = positions[::_BLOCK]
    last = (first + _BLOCK - 1).clamp(max=num_tokens - 1)
    # Queries by row, keys by column. Some tokens of two blocks may see each other where their sequences and their reach
    # meet; all do where both are full, of one sequence, and the farthest two in reach.
    opens, closes, is_full = sequence[first], sequence[last], last - first == _BLOCK - 1
    some = (opens <= closes[:, None]) & (opens[:, None] <= closes)
    every = (opens[:, None] == closes) & (opens == closes[:, None]) & is_full & is_full[:, None]
    ahead = first[:, None] - first  # of a query's block before a key's, in tokens
    if causal:
        some, every = some & (ahead >= 0), every & (ahead > 0)
    if window is not None:
        for each in [ahead] if causal else [ahead, -ahead]:
            some, every = some & (each - _BLOCK + 1 < window), every & (each + _BLOCK - 1 < window)
    parts = []
    for blocks in (some & ~every, every):
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        parts += [blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]]
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(num_tokens, num_tokens))
