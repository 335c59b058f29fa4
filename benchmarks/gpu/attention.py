"""Attention of a packed row, forward and backward: ours by each kernel, torch's on padded rows, flash attention.

What a model makes once for all of its layers is made before the time is taken: the mask of a window on padded rows,
flex attention's mask of blocks, the order of sequences by length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring import TOLERANCE, LeftOut, Setting, Way, Work, compare, require

PADDED = "torch SDPA, padded"


@dataclass(frozen=True)
class Shape:
    """``window``: tokens that a query sees, with itself; None for all. ``softcap`` as Gemma 2, ``sinks`` as GPT-OSS."""

    heads: int
    key_heads: int
    dim: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def work(self, lengths: np.ndarray) -> Work:
        """Forward and backward: two products of the forward, five of the backward, over the pairs that are seen."""
        each = lengths.astype(np.int64)
        seen = np.minimum(each, self.window or each.max())
        pairs = int((seen * (seen + 1) // 2 + (each - seen) * seen).sum())
        rows = int(each.sum()) * self.dim * torch.empty(0, dtype=self.dtype).element_size()
        # Queries, outputs and their gradients; keys, values and theirs.
        return Work(
            14.0 * self.heads * self.dim * pairs, rows * (6.0 * self.heads + 6 * self.key_heads), str(self.dtype)[6:]
        )

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        window += f", soft cap {self.softcap:g}" if self.softcap else ""
        window += ", sinks" if self.sinks else ""
        return f"{self.heads} heads, {self.key_heads} of keys, dim {self.dim}, {str(self.dtype)[6:]}{window}"


LARGE = (
    Shape(32, 8, 128, torch.bfloat16),
    Shape(32, 8, 64, torch.bfloat16),
    Shape(32, 8, 64, torch.bfloat16, window=512),
    Shape(16, 8, 256, torch.bfloat16, softcap=50.0),
    Shape(64, 8, 64, torch.bfloat16, window=128, sinks=True),
    Shape(32, 8, 64, torch.float32),
)
_TINY = Shape(4, 2, 16, torch.float32)
SMALL = (
    replace(_TINY, dtype=torch.bfloat16), _TINY, replace(_TINY, window=8), replace(_TINY, softcap=2.0),
    replace(_TINY, window=8, sinks=True),
)  # fmt: skip


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    for shape in SMALL if setting.small else LARGE:
        # Scores in full, which sinks and soft caps have for a rival, take 20 GB at these lengths.
        longest = 4096 if shape.softcap is None and not shape.sinks else 1024
        yield _table(setting, shape, setting.lengths(*((6, 96) if setting.small else (16, longest))))


def _table(setting: Setting, shape: Shape, lengths: np.ndarray) -> dict[str, Any]:
    row = _Row(setting.device, shape, lengths)
    return compare(
        setting,
        f"Attention: {shape}",
        {
            PADDED: row.padded,
            "ullage, varlen kernel": partial(row.flat, _varlen),
            "ullage, flex attention": partial(row.flat, _flex),
            "ullage, SDPA by lengths": partial(row.flat, _by_lengths),
            "flash-attn, varlen": partial(row.flat, _flash),
        },
        lengths=lengths,
        alone=lambda: row.sequence_by_sequence(lengths.tolist()),
        mixed=lambda: row.sequence_by_sequence([int(lengths.sum())]),
        tolerance=TOLERANCE[shape.dtype],
        work=shape.work(lengths),
    )


class _Row:
    """Queries, keys, values and the weights of the output, [T, heads, dim], with their places in padded rows."""

    def __init__(self, device: torch.device, shape: Shape, lengths: np.ndarray) -> None:
        generator = torch.Generator(device).manual_seed(0)
        tokens, longest = int(lengths.sum()), int(lengths.max())
        sizes = [(heads, shape.dim) for heads in (shape.heads, shape.key_heads, shape.key_heads, shape.heads)]
        made = [torch.randn(tokens, *size, generator=generator, device=device).to(shape.dtype) for size in sizes]
        self.inputs, self.weights = [tensor.requires_grad_() for tensor in made[:3]], made[3]
        self.shape, self.lengths = shape, lengths
        #: A score more for each head, or none.
        self.sinks = torch.linspace(-1, 3, shape.heads, device=device) if shape.sinks else None
        self.longest, self.device = longest, device
        self.cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        #: Which places of padded rows [N, L] hold a token.
        self.real = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]

    def _mask(self, tokens: int) -> Tensor | None:
        """Which key each query sees through the window, bool [tokens, tokens]; None if it is every earlier one."""
        if self.shape.window is None or tokens <= self.shape.window:
            return None
        places = torch.arange(tokens, device=self.device)
        behind = places[:, None] - places
        return (behind >= 0) & (behind < self.shape.window)

    def _gradients(self, mixed: Tensor, weights: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(mixed, inputs, weights))

    def sequence_by_sequence(self, lengths: Sequence[int]) -> list[Tensor]:
        """Output and gradients in float32, each sequence in a call of torch's own attention."""
        inputs = [tensor.detach().float().requires_grad_() for tensor in self.inputs]
        outputs = []
        for query, key, value in zip(*(tensor.split(list(lengths)) for tensor in inputs)):
            outputs.append(self._torchs(query[None], key[None], value[None], self._mask(len(query)))[0])
        mixed = torch.cat(outputs)
        return [mixed, *self._gradients(mixed, self.weights.float(), inputs)]

    def flat(self, attend: Callable[[_Row, Tensor, Tensor, Tensor], Tensor]) -> Way:
        def results() -> list[Tensor]:
            mixed = attend(self, *self.inputs)
            if not _has_backward(attend, self.device):
                return [mixed]
            return [mixed, *self._gradients(mixed, self.weights, self.inputs)]

        return Way(run=results, results=results)

    def padded(self) -> Way:
        """Right-padded rows, whose causal tokens see no padding, so that the fastest kernel without a mask serves."""

        def spread(tensor: Tensor) -> Tensor:
            rows = tensor.new_zeros(len(self.lengths), self.longest, *tensor.shape[1:])
            return rows.masked_scatter(self.real[..., None, None], tensor)

        rows = [spread(tensor).detach().requires_grad_() for tensor in self.inputs]
        weights, mask = spread(self.weights), self._mask(self.longest)

        def results() -> list[Tensor]:
            mixed = self._torchs(*(spread(tensor) for tensor in self.inputs), mask)[self.real]
            return [mixed, *self._gradients(mixed, self.weights, self.inputs)]

        return Way(
            run=lambda: self._gradients(self._torchs(*rows, mask), weights, rows),
            results=results,
        )

    def _torchs(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """torch's attention; with the scores in full, as transformers' models do, where torch's takes no option."""
        if self.shape.softcap is None and self.sinks is None:
            return _torchs(query, key, value, mask)
        groups = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
        scores = torch.einsum("nqhd,nkhd->nhqk", query, key) * query.shape[-1] ** -0.5
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        places = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask
        scores = scores.masked_fill(~places, -torch.inf).float()
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[1]].to(value.dtype)
        return torch.einsum("nhqk,nkhd->nqhd", weights, value)


def _torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of rows [N, L, heads, dim], causal where there is no mask."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if mask is not None or query.dtype == torch.float32:  # only flash attention takes grouped heads as they are
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1
    )
    return mixed.transpose(1, 2)


def _has_backward(attend: Any, device: torch.device) -> bool:
    return attend is not _flex or device.type == "cuda"  # torch has no backward of flex attention on a CPU


def _varlen(row: _Row, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from ullage.attention.varlen import varlen_attention, varlen_problem

    if row.shape.softcap is not None or row.shape.sinks:
        raise LeftOut("torch's varlen kernel takes neither soft caps nor sinks")
    if varlen_problem(query.device, query.dtype, (query.shape[-1], value.shape[-1])):
        raise LeftOut("torch's varlen kernel takes half precision on CUDA, from Ampere on")
    return varlen_attention(query, key, value, row.cu_seqlens, row.longest, window=row.shape.window)


def _flex(row: _Row, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from ullage.attention.varlen import flex_attention, flex_problem

    if query.is_cuda and flex_problem(query.device, query.dtype, (query.shape[-1], value.shape[-1])):
        raise LeftOut("flex attention does not take this shape")
    options: dict[str, Any] = {"window": row.shape.window, "softcap": row.shape.softcap, "sinks": row.sinks}
    if query.is_cuda:
        return flex_attention(query, key, value, row.cu_seqlens, training=True, **options)
    if row.shape.sinks:
        raise LeftOut("torch has no sum of flex attention's weights on a CPU")
    parts = (tensor.detach() for tensor in (query, key, value))
    return flex_attention(*parts, row.cu_seqlens, training=True, **options)


def _by_lengths(row: _Row, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from ullage.attention import packed_attention

    options: dict[str, Any] = {"window": row.shape.window, "softcap": row.shape.softcap, "sinks": row.sinks}
    return packed_attention(query, key, value, row.lengths.tolist(), **options)


def _flash(row: _Row, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    require("flash_attn")
    if not query.is_cuda or query.dtype == torch.float32:
        raise LeftOut("flash-attn takes half precision on CUDA")
    if row.shape.sinks:
        raise LeftOut("flash-attn 2 takes no sinks")
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    window = (-1, -1) if row.shape.window is None else (row.shape.window - 1, 0)
    ends = (row.cu_seqlens, row.cu_seqlens, row.longest, row.longest)
    return flash_attn_varlen_func(
        query, key, value, *ends, causal=True, window_size=window, softcap=row.shape.softcap or 0.0
    )
