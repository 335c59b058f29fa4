"""Attention of sequences of one length, [n, heads, L, dim], with what some models do to its scores.

*Soft caps* bend a score ``s`` to ``cap·tanh(s / cap)`` (Gemma 2). A *sink* is a score per head that every query has
beside those of its keys, and that has no value (GPT-OSS): the weights of the keys then sum to less than one.

:func:`attend` is differentiable by itself, for every device and with dropout. On a CPU the scores of a capped or sunk
attention would take L² numbers a head, so :class:`Flash` has a forward and a backward of its own: torch's CPU kernel
where nothing is capped, blocks of queries where something is. Both give the logarithm of the sum of a query's weights,
from which a sink follows exactly: with it, an output is ``sigmoid(log_sum - sink)`` times what it is without.

The backward of such an attention needs nothing new. With ``y = s·o``, ``s`` the factor of the sink, the gradient of a
score is ``p·(s·g·v - s²·(g·o))``, which is what the kernel computes for the gradient ``s·g`` and the output ``y``.
Source: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` for the kernel's backward, and the attention functions of
transformers' ``modeling_gemma2`` and ``modeling_gpt_oss``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries whose scores are held at once where scores are capped.
_QUERIES = 256


class Scores(NamedTuple):
    """What an attention does with its scores.

    Attributes:
        causal: whether a token sees only those before it.
        scale: their factor; 1/√dim if None.
        softcap: the most that a score can be; None for any.
    """

    causal: bool = True
    scale: float | None = None
    softcap: float | None = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [n, query heads, L, value dim], differentiable on every device.

    Args:
        query: [n, query heads, L, dim]; the number of query heads is a multiple of that of key heads.
        key, value: [n, key heads, S, dim].
        scores: what is done with the scores.
        mask: bool, true where a query sees a key, or numbers to add; broadcast to [n, query heads, L, S].
        dropout: probability of dropping an attention weight.
        sinks: [query heads], a score more for each query.
    """
    causal = scores.causal and query.shape[2] > 1
    if sinks is None and scores.softcap is None:
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, scale=scores.scale, enable_gqa=is_grouped
        )
    groups = query.shape[1] // key.shape[1]
    weights = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * _scale(scores, query)
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    # The least number, and not minus infinity: a query of padding may see no key.
    least = torch.finfo(weights.dtype).min
    if causal:
        later = torch.ones(weights.shape[2:], dtype=torch.bool, device=query.device).triu(1)
        weights = weights.masked_fill(later, least)
    if mask is not None:
        weights = weights.masked_fill(~mask, least) if mask.dtype == torch.bool else weights + mask
    if sinks is not None:
        column = sinks.to(weights.dtype).view(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, column], -1)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    weights = weights.softmax(-1, dtype=dtype)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout) @ value.repeat_interleave(groups, 1)


def with_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Outputs [..., heads, dim] of an attention with a sink in each head, from those without and their log-sum-exp."""
    return output * torch.sigmoid(log_sums - sinks.to(log_sums.dtype)).to(output.dtype)[..., None]


class Flash:
    """Attention on a CPU and its backward, with the log-sum-exp of each query's scores, without a sink."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs [n, query heads, L, dim] and log-sum-exp [n, query heads, L]; all dims are equal, a mask is added."""
        if scores.softcap is not None:
            return _capped(query, key, value, scores, mask)
        if not _kernel_groups():
            key, value = _repeated(query, key, value)
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, scores.causal, attn_mask=mask, scale=scores.scale)

    @staticmethod
    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sums: Tensor,
        scores: Scores,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; with a sink, of ``gradient`` times its factor and the output with it."""
        if scores.softcap is not None:
            return _capped_backward(gradient, query, key, value, output, log_sums, scores, mask)
        heads = key.shape[1]
        if not _kernel_groups():
            key, value = _repeated(query, key, value)
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        rest = {"attn_mask": mask, "scale": scores.scale}
        of_query, of_key, of_value = kernel(gradient, query, key, value, output, log_sums, 0.0, scores.causal, **rest)
        if of_key.shape[1] != heads:
            of_key, of_value = (each.unflatten(1, (heads, -1)).sum(2) for each in (of_key, of_value))
        return of_query, of_key, of_value


@lru_cache(maxsize=1)
def _kernel_groups() -> bool:
    """Whether torch's CPU kernel takes fewer key heads than query heads, which releases of torch differ in."""
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key = torch.eye(2, 8).view(1, 2, 1, 8).repeat(1, 2, 1, 1), torch.eye(2, 8).view(1, 2, 1, 8)
    try:
        found = kernel(query, key, key, 0.0, False)[0]
    except RuntimeError:
        return False
    return torch.equal(found, key.repeat_interleave(2, 1))


def _repeated(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in tensors]


def _scale(scores: Scores, query: Tensor) -> float:
    return query.shape[-1] ** -0.5 if scores.scale is None else scores.scale


# Capped scores, by blocks of queries: those of a block, [n, key heads, queries of all heads of a group, keys], are made
# in the forward and once more in the backward, and a causal block has no later keys.


class _Block(NamedTuple):
    """Some queries of each sequence, with the keys that they may see."""

    rows: slice
    keys: slice
    mask: Tensor | None


def _blocks(num_queries: int, num_keys: int, causal: bool, mask: Tensor | None, like: Tensor) -> list[_Block]:
    """The blocks, with their masks [.., 1, 1, queries, keys] to add."""
    blocks = []
    for start in range(0, num_queries, _QUERIES):
        rows = slice(start, min(start + _QUERIES, num_queries))
        if causal:
            keys = slice(0, rows.stop)
            hidden = torch.full((rows.stop - start, rows.stop), float("-inf"), dtype=like.dtype).triu(1 + start)
        else:
            keys = slice(0, num_keys)
            hidden = None if mask is None else mask[..., rows, :].to(like.dtype)
            hidden = hidden.unsqueeze(1) if hidden is not None and hidden.ndim == 4 else hidden
        blocks.append(_Block(rows, keys, hidden))
    return blocks


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    """[n, query heads, ...] as [n, key heads, query heads of each, ...]."""
    return tensor.unflatten(1, (heads, -1))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """[n, heads, group, L, a] times [n, heads, a, S], as [n, heads, group, L, S]."""
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _bent(query: Tensor, key: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
    """``tanh`` of the scores over their cap, [n, key heads, group, L, S]."""
    assert scores.softcap is not None
    return _products(query, key.transpose(2, 3)).to(dtype).mul_(_scale(scores, query) / scores.softcap).tanh_()


def _capped(query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    assert scores.softcap is not None
    heads = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    output, log_sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=dtype)
    queries, outputs, sums = (_grouped(each, heads) for each in (query, output, log_sums))
    for rows, keys, hidden in _blocks(query.shape[2], key.shape[2], scores.causal, mask, log_sums):
        weights = _bent(queries[..., rows, :], key[:, :, keys], scores, dtype).mul_(scores.softcap)
        if hidden is not None:
            weights += hidden
        sums[..., rows] = weights.logsumexp(-1)
        weights = weights.sub_(sums[..., rows, None]).exp_().to(value.dtype)
        outputs[..., rows, :] = _products(weights, value[:, :, keys])
    return output, log_sums


def _capped_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scores: Scores,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert scores.softcap is not None
    heads, dtype = key.shape[1], log_sums.dtype
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros(each.shape, dtype=dtype) for each in (key, value))
    queries, gradients, of_queries, sums = (_grouped(each, heads) for each in (query, gradient, of_query, log_sums))
    #: What every weight's gradient has too much, since the weights of a query sum to one.
    excess = _grouped((gradient.to(dtype) * output.to(dtype)).sum(-1), heads)
    for rows, keys, hidden in _blocks(query.shape[2], key.shape[2], scores.causal, mask, log_sums):
        asking, wanted = queries[..., rows, :], gradients[..., rows, :]
        bent = _bent(asking, key[:, :, keys], scores, dtype)
        weights = bent * scores.softcap
        if hidden is not None:
            weights += hidden
        weights = weights.sub_(sums[..., rows, None]).exp_()
        of_scores = _products(wanted, value[:, :, keys].transpose(2, 3)).to(dtype)
        of_scores.sub_(excess[..., rows, None]).mul_(weights).mul_(bent.square_().neg_().add_(1))
        of_scores = of_scores.mul_(_scale(scores, query)).to(query.dtype)
        of_queries[..., rows, :] = _products(of_scores, key[:, :, keys])
        of_key[:, :, keys] += of_scores.flatten(2, 3).transpose(2, 3) @ asking.flatten(2, 3)
        of_value[:, :, keys] += weights.to(value.dtype).flatten(2, 3).transpose(2, 3) @ wanted.flatten(2, 3)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)
