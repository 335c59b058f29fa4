"""The attention of ``attn_implementation="ullage"``, as a Hugging Face model calls it in each layer.

With ``cu_seq_lens_q`` the row is packed: each sequence attends to itself alone, by the lengths and nothing else. So
whatever else could shape the attention is refused with an error that names it: a mask, a filled cache, two
directions, sinks, soft caps, position biases, any keyword not known to be harmless, and a model in which tokens meet
elsewhere than in its attention. Without it the call is plain, padded or cached, and is sdpa's own, mask included; only
a row whose positions start anew, or whose lengths were lost on the way, is refused, since its sequences would see each
other. Source: ``transformers.integrations.sdpa_attention`` and the keywords of ``TransformersKwargs``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ullage.attention.context import serving
from ullage.attention.masks import DeferredMask
from ullage.attention.segments import packed_attention
from ullage.attention.slices import Slices
from ullage.attention.support import require_packable
from ullage.attention.varlen import flex_attention, host_lengths, serves_flex, serves_varlen, varlen_attention
from ullage.errors import InputError

#: Keywords that reach a layer and change nothing in it: of the loss, of the outputs, of the cache already applied.
_HARMLESS = frozenset(
    (
        *("position_embeddings", "use_cache", "cache_position", "past_key_value", "past_key_values"),
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "shift_labels"),
        *("logits_to_keep", "deterministic", "layer_idx", "target_dtype", "seq_idx"),
    )
)
#: What the ones that change it are called.
_MEANINGS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "a soft cap of the attention scores",
    "position_bias": "a position bias",
    "alibi": "a position bias",
    "output_attentions": "attention weights as an output",
    "cache": "a paged cache",
}
_RESTART = "position_ids start anew within a row, but no cu_seq_lens_q came to keep its sequences apart"
_FLATTEN = "Pass what RaggedBatch.to_flattened() gives; a model that drops it on the way cannot be packed"
_USE_ANOTHER = "load the model with attn_implementation='eager', without packing"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    context_slices: Slices | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: [batch, tokens, query heads, value dim], and None for its weights.

    ``query`` [batch, query heads, tokens, dim], ``key`` and ``value`` [batch, key heads, tokens, dim]; one row if
    packed. ``cu_seq_lens_q`` int32 [N + 1] in tokens, ``max_length_q`` a host integer; keys have the same lengths.
    ``context_slices``: what the row is a slice of, within ``context_parallel``; the lengths are those of the whole.
    Does not wait for the device, except on CUDA where no kernel by cumulated lengths serves (dropout, a head dimension
    below 16, float64), or without ``max_length_q``: once a forward. Raises
    ``InputError`` for what it does not honour.
    """
    parallel = serving(context_slices)
    if cu_seq_lens_q is None and parallel is None:
        _refuse_unknown(module, unknown)
        if cu_seq_lens_k is not None:
            raise _refusal(module, "cu_seq_lens_k came without cu_seq_lens_q", hint="pass both, as to_flattened does")
        mask = attention_mask
        if isinstance(mask, DeferredMask):
            _refuse_lost_lengths(module, position_ids, mask)
            mask = mask.build()
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal)
    options = {"window": sliding_window, "scale": scaling}
    check = partial(
        _refuse_packed,
        module,
        query,
        key,
        attention_mask,
        is_causal,
        sliding_window,
        (cu_seq_lens_q, cu_seq_lens_k, max_length_q),
        context_slices,
        unknown,
    )
    kernel = partial(_packed, cu_seq_lens_q, max_length_q, dropout, options, module)
    if parallel is None:
        check()
        return kernel(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))[None], None
    options = {**options, "dropout": dropout}
    return parallel.attend(query, key, value, context_slices, check=check, kernel=kernel, **options), None


def _packed(
    cu_seqlens: Tensor | None,
    longest: int | None,
    dropout: float,
    options: dict[str, Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """The kernel that serves these tensors [T, heads, dim] on their device."""
    assert cu_seqlens is not None
    if serves_varlen(query, value, dropout):
        cu_seqlens = cu_seqlens.to(query.device, torch.int32)
        if longest is None:
            longest = max(host_lengths(cu_seqlens))
        return varlen_attention(query, key, value, cu_seqlens, int(longest), **options)
    if serves_flex(query, value, dropout):
        cu_seqlens = cu_seqlens.to(query.device, torch.int32)
        return flex_attention(query, key, value, cu_seqlens, training=module.training, **options)
    return _by_lengths(query, key, value, cu_seqlens, dropout, options)


@torch.compiler.disable(reason="the lengths of the sequences are data")
def _by_lengths(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, dropout: float, options: dict[str, Any]
) -> Tensor:
    lengths = host_lengths(cu_seqlens)
    if sum(lengths) != len(query) or min(lengths, default=0) < 0:
        raise InputError(
            "cu_seq_lens_q does not tile the row",
            expected=f"lengths that sum to {len(query)} tokens",
            found=f"{sum(lengths)} in {len(lengths)} sequences",
        )
    return packed_attention(query, key, value, lengths, dropout=dropout, **options)


def _refusal(module: nn.Module, what: str, **facts: Any) -> InputError:
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f", layer {layer}")
    return InputError(what, where=where, **facts)


def _refuse_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    is_causal: bool | None,
    window: int | None,
    lengths: tuple[Tensor | None, Tensor | None, int | None],
    slices: Slices | None,
    unknown: dict[str, Any],
) -> None:
    """Refuses a packed call that could not be answered right."""
    _refuse_unknown(module, unknown)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    _refuse_unpackable(module, query, key, mask, causal=causal, window=window)
    cu_seqlens, keys, longest = lengths
    _refuse_other_keys(module, cu_seqlens, keys)
    assert cu_seqlens is not None
    given = mask.given if isinstance(mask, DeferredMask) else None
    limit, dynamic = require_packable(module) if given is None else require_packable(module, given.model)
    if limit is not None:
        _refuse_mixed_frequencies(module, cu_seqlens, longest, limit, dynamic, slices)
    if given is not None and not given.positions:
        raise _refusal(
            module,
            "cu_seq_lens_q came without position_ids, so the model would count positions through the whole row",
            hint="pass what RaggedBatch.to_flattened() gives",
        )


def _refuse_unknown(module: nn.Module, unknown: dict[str, Any]) -> None:
    """Keywords that are not None, not False and not harmless ask for something that is not done here."""
    for name, asked in unknown.items():
        if name in _HARMLESS or asked is None or asked is False:
            continue
        meaning = f": {_MEANINGS[name]}" if name in _MEANINGS else ""
        hint = _USE_ANOTHER if name in _MEANINGS else f"drop {name!r} from the batch, or {_USE_ANOTHER}"
        raise _refusal(module, f"attn_implementation='ullage' does not honour the keyword {name!r}{meaning}", hint=hint)


def _refuse_lost_lengths(module: nn.Module, position_ids: Tensor | None, mask: DeferredMask) -> None:
    """Refuses a row that is packed, by what the model was given, without lengths. Looks once per forward.

    Eager, this waits for the device, unless the rows have a mask and no positions were given. A compiled graph looks at
    the positions that reach the layer, on a CPU alone, where its assertion ends the call and not the process.
    """
    if mask.checked:
        return
    mask.checked = True
    given = mask.given
    if given is not None and given.lengths:
        raise _refusal(
            module,
            "cu_seq_lens_q was given to the model, but did not reach its attention",
            hint="give this model padded batches: it drops the lengths on the way",
        )
    positions = () if given is None else given.positions
    # Positions that a model makes itself of a mask start anew at padding only
    own = given is not None and not positions and mask.padded
    if position_ids is not None and not own and all(position_ids is not other for other in positions):
        positions = (*positions, position_ids)
    for tensor in positions:
        restarts = mask.restarts(tensor)
        if restarts is None:
            continue
        if torch.compiler.is_compiling():
            if tensor.device.type == "cpu":
                torch._assert_async(~restarts, f"{_RESTART}. {_FLATTEN}")  # pyright: ignore[reportPrivateImportUsage]
        elif bool(restarts):
            raise _refusal(module, _RESTART, hint=_FLATTEN)


def _refuse_unpackable(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, *, causal: bool, window: int | None
) -> None:
    """Whatever would let packed sequences see each other, or not see what the model means them to see."""
    if query.shape[0] != 1:
        raise _refusal(module, "packed sequences lie in one row", expected="batch size 1", found=query.shape[0])
    if not causal:
        raise _refusal(
            module,
            "an attention in both directions cannot be packed",
            hint="give this model padded batches, without cu_seq_lens",
        )
    if query.shape[2] != key.shape[2]:
        raise _refusal(
            module,
            "a packed row cannot continue a cache",
            expected="as many keys as queries",
            found=f"{key.shape[2]} keys, {query.shape[2]} queries",
            hint="pass no past_key_values with cu_seq_lens",
        )
    if mask is None:
        return
    if not isinstance(mask, DeferredMask) or mask.padded:
        raise _refusal(
            module,
            "an attention_mask was given together with cu_seq_lens",
            hint="pass one of them: the lengths say everything about a packed row",
        )
    if mask.altered:
        raise _refusal(module, "the model's own attention pattern cannot be packed", hint=_USE_ANOTHER)
    if mask.window != window:
        raise _refusal(
            module,
            "the window of the mask is not that of the attention (chunked attention, for example)",
            expected=mask.window,
            found=window,
            hint=_USE_ANOTHER,
        )


def _refuse_mixed_frequencies(
    module: nn.Module, cu_seqlens: Tensor, longest: int | None, limit: int, dynamic: bool, slices: Slices | None
) -> None:
    """Sequences that would get the rotary frequencies of a longer one in their row, or in their slice of it."""
    if longest is not None and longest <= limit:
        return
    lengths = [length for length in host_lengths(cu_seqlens) if length > 0]
    longest = max(lengths, default=0)
    is_cut = slices is not None and slices.size > 1
    if longest > limit and (is_cut or (len(lengths) > 1 and (dynamic or min(lengths) <= limit))):
        raise _refusal(
            module,
            "this model's rotary frequencies change with the longest sequence of a row, so one sequence would change "
            "what the others get",
            expected=f"sequences of at most {limit} tokens, or a longer one in a row of its own",
            found=f"{len(lengths)} sequences of up to {longest} tokens" + (", cut over ranks" if is_cut else ""),
            hint="use another rope_type than dynamic or longrope, or shorter sequences",
        )


def _refuse_other_keys(module: nn.Module, queries: Tensor | None, keys: Tensor | None) -> None:
    if queries is None:
        raise _refusal(module, "a slice of a row came without cu_seq_lens_q", hint="pass all that shard_batch gives")
    if queries.ndim != 1 or queries.is_floating_point():
        raise _refusal(
            module,
            "cu_seq_lens_q must hold cumulated lengths",
            expected="int32 [sequences + 1]",
            found=f"{str(queries.dtype)[6:]} {list(queries.shape)}",
        )
    if keys is None or keys is queries:
        return
    same = keys.shape == queries.shape and (keys.is_cuda or torch.compiler.is_compiling() or torch.equal(keys, queries))
    if not same:
        raise _refusal(module, "cu_seq_lens_k differs from cu_seq_lens_q: queries and keys must have equal lengths")
