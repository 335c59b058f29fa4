"""Layer spec for megatron-core whose attention takes packed rows without Transformer Engine.

megatron-core's own local spec asserts that no sequence is packed and that its norms see no sequence parallelism.
Here the core attention is ullage's: on CUDA torch's varlen kernel, elsewhere scaled dot product attention by lengths.
Under context parallelism each rank gathers keys and values along the group and computes its two chunks of every
sequence.

megatron-core 0.16.1 applies rotary positions by the model's context-parallel group even where a microbatch comes with a
group of its own (``PackedSeqParams.cp_group``); :class:`PackedSelfAttention` gives it that group for the call.
"""

import copy
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from ullage.attention.segments import packed_attention
from ullage.attention.varlen import host_lengths, varlen_attention, varlen_problem
from ullage.core.layout import Int64, Layout
from ullage.engines.megatron.settings import TAKES_GROUPS
from ullage.exchange.sharding import shard_index

# torch renames these collectives; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def packed_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of this stage's layers and last norm, for packed rows: ``GPTModel``'s ``transformer_layer_spec``.

    ``config``: a ``TransformerConfig``, which is marked as that of a model that takes any context-parallel degree. Its
    attention is plain: without a window, sinks, latents, or slices in another order than zigzag.
    """
    layer, norm = packed_layer_spec(config), cast(Any, PackedNorm)
    count = get_num_layers_to_build(config, vp_stage)
    setattr(config, TAKES_GROUPS, True)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def packed_layer_spec(config: Any) -> Any:
    """``ModuleSpec`` of one layer of :func:`packed_block_spec`, for example for ``get_gpt_mtp_block_spec``."""
    # megatron-core's local spec, less the parts that refuse packed rows or sequence parallelism.
    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )  # fmt: skip
    inner = layer.submodules.self_attention
    inner.module = PackedSelfAttention
    inner.submodules.core_attention = PackedCoreAttention
    layer.submodules.input_layernorm = PackedNorm
    layer.submodules.pre_mlp_layernorm = PackedNorm
    if config.qk_layernorm:
        inner.submodules.q_layernorm = inner.submodules.k_layernorm = PackedNorm
    return layer


class PackedNorm:
    """torch's LayerNorm or RMSNorm, with parameters marked for the all-reduce of sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
        norm = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization]
        made = norm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made


class _Alone:
    """Group of this rank only, with the two methods that rotary positions call."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class PackedSelfAttention(SelfAttention):
    """Self-attention that applies rotary positions by the context-parallel group of its microbatch."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        if packed_seq_params is None or packed_seq_params.local_cp_size is None:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        # SelfAttention.forward hands pg_collection.cp to its rotary positions. A copy, for this call alone, because
        # layers share the collection.
        usual: Any = self.pg_collection
        self.pg_collection = own = copy.copy(usual)
        own.cp = packed_seq_params.cp_group or _Alone()
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.pg_collection = usual


class PackedCoreAttention(MegatronModule):
    """Causal attention of one layer over packed rows, or over plain batches without ``packed_seq_params``."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        assert (attention_type, attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)) == ("self", True)
        self.group: Any = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention: [T, heads·dim] for packed rows, [tokens, batch, heads·dim] for plain ones. Collective."""
        dropout = self.dropout if self.training else 0.0
        if packed_seq_params is None:
            # Megatron's [tokens, batch, heads, dim] as [batch, heads, tokens, dim], and back.
            rows = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
            mixed = F.scaled_dot_product_attention(
                *rows, is_causal=True, dropout_p=dropout, scale=self.scale, enable_gqa=True
            )
            return mixed.permute(2, 0, 1, 3).flatten(2)
        # Where sequences begin in the row, so padded lengths where given. Padding is computed as the end of its
        # sequence: no token looks back on it, and the loss mask leaves it out.
        places = packed_seq_params.cu_seqlens_q_padded
        places = packed_seq_params.cu_seqlens_q if places is None else places
        group = packed_seq_params.cp_group if packed_seq_params.local_cp_size else self.group
        if group is not None and group.size() > 1:
            mixed = _over_slices(query, key, value, host_lengths(places), group, dropout, self.scale)
        elif varlen_problem(query.device, query.dtype, (query.shape[-1], value.shape[-1]), dropout) is None:
            longest = int(packed_seq_params.max_seqlen_q)
            mixed = varlen_attention(query, key, value, places, longest, scale=self.scale)
        else:
            mixed = packed_attention(query, key, value, host_lengths(places), dropout=dropout, scale=self.scale)
        return mixed.flatten(1)


class _GatherRow(torch.autograd.Function):
    """All-gather of [T, ...] to [ranks·T, ...]; the backward pass sums the ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
        _all_gather(whole, mine.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, group = gradients[0].contiguous(), ctx.group
        # gloo sums the whole row; this rank keeps its part.
        if dist.get_backend(group) == "gloo":
            dist.all_reduce(gradient, group=group)
            return gradient.chunk(group.size())[group.rank()], None
        mine = gradient.new_empty(len(gradient) // group.size(), *gradient.shape[1:])
        _reduce_scatter(mine, gradient, group=group)
        return mine, None


@lru_cache(maxsize=8)
def _place_of(slots: tuple[int, ...], size: int) -> Int64:
    """Index of each element of the whole row in the ranks' slices laid end to end."""
    layout = Layout(slots)
    order = np.concatenate([shard_index(layout, size, rank) for rank in range(size)])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def _over_slices(
    query: Tensor, key: Tensor, value: Tensor, slots: list[int], group: Any, dropout: float, scale: float | None
) -> Tensor:
    """Attention of this rank's zigzag slice over keys and values of the whole row, [T, heads, dim].

    ``slots``: padded tokens of each sequence of the whole row; multiples of 2·cp.
    """
    # Keys and values of the whole row, in its own order.
    size, rank = group.size(), group.rank()
    place = torch.from_numpy(_place_of(tuple(slots), size)).to(query.device)
    both = _GatherRow.apply(torch.cat([key, value], -1), group)
    both = both.index_select(0, place)  # type: ignore[union-attr]
    keys, values = both.split([key.shape[-1], value.shape[-1]], -1)
    # This rank's two chunks of every sequence, each against the keys from the sequence's start to the chunk's end.
    outputs, mine, start = [], 0, 0
    for slot in slots:
        chunk = slot // (2 * size)
        for number in (rank, 2 * size - 1 - rank) if chunk else ():
            end = (number + 1) * chunk
            part = query[mine : mine + chunk], keys[start : start + end], values[start : start + end]
            outputs.append(_prefix(*part, dropout, scale))
            mine += chunk
        start += slot
    return torch.cat(outputs) if outputs else query[:0]


def _prefix(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None) -> Tensor:
    """Causal attention of queries that are the last tokens of the keys, [tokens, heads, dim]."""
    count, seen = len(query), len(key)
    # Query i is key seen - count + i.
    mask = torch.ones(count, seen, dtype=torch.bool, device=query.device).tril(seen - count)
    rows = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    mixed = F.scaled_dot_product_attention(
        *rows, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed[0].transpose(0, 1)
