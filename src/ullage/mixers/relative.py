"""T5's attention on packed rows: by the lengths, with its bias computed once for the longest sequence.

Scores get a bias that depends on the distance of two tokens alone, so the bias of a short sequence is a corner of that
of the longest. Queries, keys and values of all sequences come from one product over the row; sequences of one length
share a call of scaled dot product attention, in the cross attention pairs that are alike in source and target. A bias
over the row itself would have T² entries per head. Source: ``transformers.models.t5.modeling_t5.T5Attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ullage.mixers.by_lengths import PackedRow
from ullage.mixers.forwards import Forward
from ullage.rows import Calls


class BiasedForward(Forward):
    """The forward of a T5 attention: by lengths within a packed call, its own in any other.

    It takes and returns the bias [1, heads, L, L] of the longest sequence; the cross attention has none.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = self.current.get()
        if row is None:
            return self.own(*arguments, **keywords)
        return self._packed(row, *arguments, **keywords)

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _packed(
        self,
        row: PackedRow,
        hidden_states: Tensor,
        mask: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        module: Any = self.module
        is_cross = key_value_states is not None
        states = hidden_states if key_value_states is None else key_value_states
        query, key, value = (
            product(tokens)[0].unflatten(-1, (module.n_heads, module.key_value_proj_dim))
            for product, tokens in ((module.q, hidden_states), (module.k, states), (module.v, states))
        )
        queries, keys = self._calls(row, is_cross)
        if not is_cross and position_bias is None:
            longest = max(queries.widths, default=0)
            position_bias = module.compute_bias(longest, longest, device=hidden_states.device)
        dropout = module.dropout if module.training else 0.0
        row.is_served = True
        mixed = []
        for places in zip(queries.cut(query), keys.cut(key), keys.cut(value)):
            parts = [part.transpose(1, 2) for part in places]
            bias = None if position_bias is None else self._masked(position_bias, parts[0].shape[2])
            found = F.scaled_dot_product_attention(
                *parts, attn_mask=bias, dropout_p=dropout, scale=getattr(module, "scaling", 1.0)
            )
            mixed.append(found.transpose(1, 2).flatten(2))
        joined = queries.join(mixed) if mixed else query.flatten(1)
        return module.o(joined[None]), position_bias, None

    def _calls(self, row: PackedRow, is_cross: bool) -> tuple[Calls, Calls]:
        """The calls of queries and of keys."""
        if is_cross:
            groups = row.alike_pairs
            assert groups.targets is not None
            return groups.targets, groups.sources
        calls = row.alike_targets if self.module.is_decoder else row.alike_sources
        return calls, calls

    def _masked(self, bias: Tensor, length: int) -> Tensor:
        """The bias of a sequence, minus infinity where a decoder must not look."""
        part = bias[:, :, :length, :length]
        if not self.module.is_decoder:
            return part
        later = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(1)
        return part.masked_fill(later, float("-inf"))
