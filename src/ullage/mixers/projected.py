"""T5's attention by lengths: projections over the row, and only its scores by sequence.

Its scores have a bias that depends on the distance of two tokens alone: it is computed once, for the longest sequence,
and that of a shorter one is its corner. Cross attention takes pairs that are alike in source and target. A search finds
the attention as a whole (:mod:`ullage.mixers.finding`); its projections are nine tenths of the work, and under sharded
parameters a call of each has to be made equally often. Source: ``transformers.models.t5.modeling_t5.T5Attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ullage.core.rows import Calls
from ullage.mixers.by_lengths import SOURCES, TARGETS, PackedRow
from ullage.mixers.forwards import RowForward

#: Attention whose scores alone run by lengths: as of transformers 5.4 to 5.24.
_SCORES = ("MT5Attention", "T5Attention")


def is_projected(module: nn.Module) -> bool:
    """Whether a module is an attention of T5's kind."""
    return type(module).__module__.startswith("transformers.") and type(module).__name__ in _SCORES


class ProjectedForward(RowForward):
    """The forward of T5's attention: by lengths within a packed call, its own in any other.

    It takes and returns a bias [1, heads, L, L], of the longest sequence; its cross attention has none.
    """

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _run_packed(self, row: PackedRow, named: dict[str, Any]) -> tuple[Any, ...]:
        module: Any = self.module
        hidden_states, other = named["hidden_states"], named.get("key_value_states")
        head_dim = module.key_value_proj_dim
        states = hidden_states if other is None else other
        products = ((module.q, hidden_states), (module.k, states), (module.v, states))
        query, key, value = (product(tokens).squeeze(0).unflatten(-1, (-1, head_dim)) for product, tokens in products)
        side = TARGETS if module.is_decoder and row.targets is not None else SOURCES
        queries, keys = row.pairs_of((side, side if other is None else SOURCES))
        is_causal = module.is_decoder and other is None
        bias = self._bias(queries, named) if other is None else None
        options: dict[str, Any] = {
            "dropout_p": module.dropout if module.training else 0.0,
            "scale": getattr(module, "scaling", 1.0),
        }
        row.is_served = True
        mixed = []
        for places in zip(queries.cut(query), keys.cut(key), keys.cut(value)):
            some, seen, taken = (part.transpose(1, 2) for part in places)
            length = some.shape[2]
            if bias is None:
                options["is_causal"] = is_causal and length > 1
            else:
                options["attn_mask"] = _corner(bias, length, is_causal=is_causal)
            mixed.append(F.scaled_dot_product_attention(some, seen, taken, **options).transpose(1, 2).flatten(2))
        joined = module.o((queries.join(mixed) if mixed else query.flatten(1))[None])
        return joined, bias, None  # the bias of the first layer is handed on

    def _bias(self, calls: Calls, named: dict[str, Any]) -> Tensor | None:
        """The bias that was given, or, where the module has one of its own, that of the longest sequence."""
        if named.get("position_bias") is not None or not getattr(self.module, "has_relative_attention_bias", False):
            return named.get("position_bias")
        longest = max(calls.widths, default=0)
        return self.module.compute_bias(longest, longest, device=named["hidden_states"].device)  # type: ignore[operator]


def _corner(bias: Tensor, length: int, *, is_causal: bool) -> Tensor:
    """The bias of a sequence, minus infinity where a decoder must not look."""
    part = bias[:, :, :length, :length]
    if not is_causal:
        return part
    later = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(1)
    return part.masked_fill(later, float("-inf"))
