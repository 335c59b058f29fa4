"""Attention by lengths: the forwards of attention that knows nothing of packed rows, and of the positions before it.

Everything else of such a model works on the row at once: projections, MLPs, norms, the head. Only where tokens meet,
sequences go by lengths, in the finest way that the attention allows:

- its projections are modules of their own, as in BART, T5 and their kin: queries, keys and values of all sequences come
  from one product over the row, and :class:`ProjectedForward` computes the attention itself;
- its scores have a method, as in GPT-J: :class:`ScoresForward` calls that method with sequences in rows;
- else :class:`MaskedForward` calls the attention as a whole, with the mask that it would get for its sequences.

Cross attention takes pairs that are alike in source and target. A bias that depends on the distance of two tokens alone
is computed once, for the longest sequence: that of a shorter one is its corner. Sources:
``transformers.models.t5.modeling_t5.T5Attention``, ``transformers.models.bart.modeling_bart.BartAttention``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ullage.attention.packed_call import DeferredMask
from ullage.attention.releases import causal_mask
from ullage.core.rows import Calls
from ullage.mixers.by_lengths import PackedRow, join_outputs
from ullage.mixers.forwards import CurrentRow, Forward, PartForward, RowForward
from ullage.mixers.ways import is_mixer, is_positions, is_projected, sees_later_tokens

#: The names of the projections of queries, keys and values and of the output, and of the size of a head.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj", "out_proj", "head_dim"), ("q", "k", "v", "o", "key_value_proj_dim"))
#: Endings of the class names of attention whose mask is true for what must not be seen.
_HIDING = ("MptAttention",)
#: Attributes of attention that chooses the keys of each query, or joins some: the indexers of DeepSeek and others.
_CHOOSING = ("indexer", "compressor", "prepare_dynamic_mask")
#: Arguments that depend on the distance to the first token alone, the same for all sequences.
_OF_DISTANCE = ("alibi", "position_bias")


def attending_forwards(model: nn.Module, paths: Sequence[str], current: CurrentRow) -> list[Forward]:
    """The forwards of the parts of a model whose attention runs by lengths."""
    made: list[Forward] = []
    is_causal = not sees_later_tokens(model)
    for path in paths:
        part = model.get_submodule(path)
        if hasattr(part, AlibiForward.name):
            made.append(AlibiForward(part, current))
        elif is_positions(part):
            made.append(PositionsForward(part, current, of_targets="decoder" in path.split(".")))
        elif is_projected(part):
            made.append(ProjectedForward(part, current))
        elif is_mixer(part):
            made.append(PartForward(part, current, is_causal=True))
        else:
            kind = ScoresForward if _has_scores(part) else MaskedForward
            made.append(kind(part, current, is_causal=is_causal, config=_config_around(model, path)))
    return made


def _has_scores(part: nn.Module) -> bool:
    """Whether a method of an attention takes queries, keys and values alike; GPT-1's takes its keys transposed."""
    method = getattr(type(part), ScoresForward.name, None)
    return method is not None and "query" in inspect.signature(method).parameters


def _config_around(model: nn.Module, path: str) -> Any:
    """The config of a module, or of the innermost one around it that has one."""
    while True:
        config = vars(model.get_submodule(path)).get("config")
        if config is not None or not path:
            return config
        path = path.rpartition(".")[0]


class ProjectedForward(RowForward):
    """The forward of an attention of BART's or T5's kind: by lengths within a packed call, its own in any other.

    T5's takes and returns a bias [1, heads, L, L], of the longest sequence; its cross attention has none.
    """

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _run_packed(self, row: PackedRow, named: dict[str, Any]) -> tuple[Any, ...]:
        module: Any = self.module
        hidden_states, other = named["hidden_states"], named.get("key_value_states", named.get("encoder_hidden_states"))
        names = next(each for each in _PROJECTIONS if hasattr(module, each[0]))
        to_query, to_key, to_value, to_output, head_dim = (getattr(module, name) for name in names)
        states = hidden_states if other is None else other
        products = ((to_query, hidden_states), (to_key, states), (to_value, states))
        query, key, value = (product(tokens).squeeze(0).unflatten(-1, (-1, head_dim)) for product, tokens in products)
        queries, keys = self._calls(row, is_cross=other is not None)
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
        joined = to_output((queries.join(mixed) if mixed else query.flatten(1))[None])
        # T5 hands the bias of its first layer on.
        return (joined, bias, None) if "position_bias" in self.parameters else (joined, None)

    def _calls(self, row: PackedRow, *, is_cross: bool) -> tuple[Calls, Calls]:
        """The calls of queries and of keys."""
        if is_cross:
            groups = row.alike_pairs
            assert groups.targets is not None
            return groups.targets, groups.sources
        calls = row.alike_side(of_targets=bool(self.module.is_decoder))
        return calls, calls

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


class MaskedForward(PartForward):
    """The forward of an attention that is called with a mask: by lengths, each call with that of its sequences.

    Attributes:
        chooses: whether it chooses the keys of each query.
        has_mask: whether the mask hides later tokens.
        config: of the model around, whose implementation of attention tells the form of a mask.
    """

    keeps_positions = True

    def __init__(self, module: nn.Module, current: CurrentRow, *, is_causal: bool, config: Any) -> None:
        self.chooses = any(hasattr(module, name) for name in _CHOOSING)
        # The best of equal scores are other ones in a longer row, so that what chooses keys takes no padding.
        super().__init__(module, current, is_causal=is_causal and not self.chooses)
        self.has_mask, self.config = is_causal, config

    def _function(self, row: PackedRow, keywords: dict[str, Any]) -> Callable[..., Any]:
        of_distance = {name: keywords.pop(name) for name in _OF_DISTANCE if keywords.get(name) is not None}

        def with_mask(*arguments: Any, **named: Any) -> Any:
            rows = next(each for each in (*arguments, *named.values()) if isinstance(each, Tensor) and each.ndim == 3)
            for name, value in of_distance.items():
                # [heads, 1, T] as [n · heads, 1, L]; MPT's counts from its end, and cuts it itself.
                named[name] = value if name == "position_bias" else value[..., : rows.shape[1]].repeat(len(rows), 1, 1)
            if "attention_mask" in named:
                named["attention_mask"] = self._mask(row, rows)
            outputs = self.own(*arguments, **named)
            if not self.chooses or not isinstance(outputs, tuple):
                return outputs
            # A later layer may take the choice of this one.
            return tuple(_widened(each, widest) for each in outputs)

        longest = max(row.alike_sources.widths, default=0)
        widest = min(longest, getattr(self.config, "index_topk", longest))
        return with_mask

    def _mask(self, row: PackedRow, rows: Tensor) -> Any:
        """The mask [n, 1, L, L] that the model makes for sequences in rows [n, L, ...]; None where it needs none."""
        if not self.has_mask:
            return None
        window = getattr(self.module, "sliding_window", None)
        key = (id(self.config), type(self.module), self.chooses, window, rows.shape[1], rows.dtype)
        if key not in row.masks:
            # What chooses keys does so on top of the mask.
            mask: Any = causal_mask(self.config, rows[:1], window, may_skip=not self.chooses)
            if isinstance(mask, DeferredMask):
                mask = mask.build()
            # In a tuple, because None is a mask too.
            row.masks[key] = (mask.bool() if type(self.module).__name__.endswith(_HIDING) else mask,)
        mask = row.masks[key][0]
        return None if mask is None else mask.expand(len(rows), -1, -1, -1)


def _widened(output: Any, widest: int) -> Any:
    """The keys [n, L, k] that were chosen for each token, as [n, L, widest]: the last is named again."""
    if not isinstance(output, Tensor) or output.is_floating_point() or output.shape[-1] >= widest:
        return output
    return torch.cat([output, output[..., -1:].expand(*output.shape[:-1], widest - output.shape[-1])], -1)


class ScoresForward(MaskedForward):
    """The method ``_attn`` of an attention of GPT-J's kind, of queries, keys and values: by lengths in packed calls."""

    name = "_attn"

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _by_lengths(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        row = self.current.get()
        assert row is not None
        row.is_served = True
        groups = row.padded_behind if self.is_causal else row.alike
        named = self.named(arguments, keywords)
        cut = [groups.sources.cut(named[name][0].transpose(0, 1)) for name in ("query", "key", "value")]
        mixed = []
        for parts in zip(*cut):
            query, key, value = (part.transpose(1, 2).contiguous() for part in parts)
            mask = self._mask(row, parts[0].flatten(2))
            mixed.append(self.own(query, key, value, mask)[0].transpose(1, 2))
        joined = join_outputs(mixed, groups)
        return joined.transpose(1, 2), None


class PositionsForward(RowForward):
    """The forward of an embedding that counts positions by itself: from 0 in each sequence of a packed row.

    ``of_targets``: whether it stands in a decoder, whose sequences are the targets where there are such.
    """

    def __init__(self, module: nn.Module, current: CurrentRow, *, of_targets: bool) -> None:
        super().__init__(module, current)
        self.of_targets = of_targets

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _run_packed(self, row: PackedRow, named: dict[str, Any]) -> Any:
        calls, positions = row.alike_side(of_targets=self.of_targets), row.positions(of_targets=self.of_targets)
        if "position_ids" in self.parameters:
            # Positions that the caller gave to the model have come here.
            given = named.get("position_ids")
            if given is None or not row.has_own_positions:
                named["position_ids"] = positions if given is None else positions.expand_as(given)
            return self.own(**named)
        longest = max(calls.widths, default=0)
        if not hasattr(self.module, "create_position_ids_from_input_ids"):
            # By the length alone: that of the longest sequence.
            shortened = {
                name: each[..., :longest] if isinstance(each, Tensor) else each for name, each in named.items()
            }
            return self.own(**shortened).index_select(-2, positions)
        # It reads which tokens are padding.
        cut = {name: calls.cut(each[0]) for name, each in named.items() if isinstance(each, Tensor)}
        rest = {name: each for name, each in named.items() if name not in cut}
        parts = [dict(zip(cut, values)) for values in zip(*cut.values())]
        return calls.join([self.own(**part, **rest) for part in parts])[None]


class AlibiForward(Forward):
    """The method of BLOOM that makes its bias of a mask: in a packed call that of the longest sequence."""

    name = "build_alibi_tensor"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = self.current.get()
        named = self.named(arguments, keywords)
        if row is not None:
            longest = max(row.alike_sources.widths, default=0)
            named["attention_mask"] = torch.ones(1, longest, device=row.device)
        return self.own(**named)
