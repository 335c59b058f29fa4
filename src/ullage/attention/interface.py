"""The attention function of ``attn_implementation="ullage"``, which a Hugging Face model calls in each layer.

With ``cu_seq_lens_q`` the row is packed: each sequence attends to itself alone, by the lengths and nothing else.
``packed_call`` refuses what has no exact answer and chooses the kernel; ``context`` shares the row over ranks.

Without ``cu_seq_lens_q`` the call is plain, padded or cached, and is sdpa's own, mask included, but for sinks and soft
caps, which sdpa does not know. Only a row whose
positions start again within it, or whose lengths were lost on the way, is refused, since its sequences would see each
other. Source: ``transformers.integrations.sdpa_attention`` and the keywords of ``TransformersKwargs``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ullage.attention.context import serving
from ullage.attention.current import IN_FORCE, current_row
from ullage.attention.kernels import Scores, attend
from ullage.attention.packed_call import DeferredMask, PackedCall, attend_by_sequence, described_mask
from ullage.attention.support import TRYING, refusal, require_known_keywords
from ullage.attention.ulysses import Slices

_RESTART = "position_ids restart within a row, but no cu_seq_lens_q came to keep its sequences apart"
_FLATTEN = "Pass what RaggedBatch.to_flattened() gives; a model that drops it on the way cannot be packed"


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, plain or packed: [batch, tokens, query heads, value dim], and None for its weights.

    Args:
        module: the attention layer, which names itself in errors.
        query: [batch, query heads, tokens, dim]; batch 1 if packed.
        key, value: [batch, key heads, tokens, dim].
        attention_mask: what ``packed_mask`` made, or a mask of the model's own.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores; 1/√dim if None.
        sliding_window: how many tokens a query sees, itself included; None for all.
        is_causal: None leaves it to the module.
        cu_seq_lens_q, cu_seq_lens_k: int32 [N + 1], cumulated lengths in tokens, equal; they make the row a packed one.
        max_length_q, max_length_k: tokens of the longest sequence, on the host.
        position_ids: [1, tokens], if the model hands them to its layers.
        context_slices: this rank's slice of the row, within ``context_parallel``; the lengths are the whole row's.
        softcap: a score ``s`` becomes ``softcap·tanh(s / softcap)``; None leaves it.
        s_aux: [query heads], attention sinks: a score more for each query, of a key without a value.

    Does not wait for the device, except on CUDA where no kernel takes cumulated lengths (dropout, a head dimension
    below 16, float64), or without ``max_length_q``: once per forward. Collective within ``context_parallel``. Raises
    ``InputError`` for what it does not honour.
    """
    if IN_FORCE[0] and context_slices is None:
        found = _of_row_in_force(
            query,
            key,
            value,
            attention_mask,
            unknown,
            module=module,
            is_causal=is_causal,
            window=sliding_window,
            scale=scaling,
            dropout=dropout,
            softcap=softcap,
            sinks=s_aux,
        )
        if found is not None:
            return found, None
    parallel = None if TRYING else serving(context_slices)
    # A plain call: padded rows, a cache, an encoder.
    if cu_seq_lens_q is None and parallel is None:
        require_known_keywords(module, unknown)
        if cu_seq_lens_k is not None:
            raise refusal(module, "cu_seq_lens_k came without cu_seq_lens_q", hint="pass both, as to_flattened does")
        mask = attention_mask
        if isinstance(mask, DeferredMask):
            _refuse_lost_lengths(module, position_ids, mask)
            mask = mask.build()
        if softcap is not None or s_aux is not None:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            scores = Scores(causal=bool(causal) and mask is None, scale=scaling, softcap=softcap)
            mixed = attend(query, key, value, scores, mask=mask, dropout=dropout, sinks=s_aux)
            return mixed.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal)
    call = PackedCall(
        module=module,
        cu_seqlens=cu_seq_lens_q,
        key_cu_seqlens=cu_seq_lens_k,
        max_seqlen=max_length_q,
        mask=attention_mask,
        is_causal=is_causal,
        window=sliding_window,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
        slices=context_slices,
        unknown=unknown,
    )
    # A slice of a packed row: the ranks check the call together, then exchange heads or keys.
    if parallel is not None:
        return parallel.attend(call, query, key, value), None
    # A whole packed row.
    if not torch.compiler.is_compiling():
        CALLS[0] += 1
    call.require_exact(query, key)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return call.attend(*rows)[None], None


#: How many calls of this attention were made on packed rows.
CALLS = [0]


@torch.compiler.disable(reason="the row in force is data")
def _of_row_in_force(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, unknown: dict[str, Any], **options: Any
) -> Tensor | None:
    """Attention of the row in force, [1, T, query heads, value dim]; None where none of found parts is."""
    row = current_row()
    if row is None or not row.is_found or len(query) != 1:
        return None
    module = options["module"]
    sides = row.sides_of(module, query.shape[2], key.shape[2])
    if sides is None:
        return None
    CALLS[0] += 1
    row.is_served = True
    row.note_sides(module, sides)
    require_known_keywords(module, unknown)
    mask = described_mask(row, mask)
    call = PackedCall.of_row(row, sides, mask, unknown={}, **options)
    if call is not None:
        return call.attend(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))[None]
    is_causal = options["is_causal"]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scores = Scores(causal=bool(causal) and sides[0] == sides[1], scale=options["scale"], softcap=options["softcap"])
    rest = {"dropout": options["dropout"], "sinks": options["sinks"]}
    return attend_by_sequence(row, sides, query, key, value, mask, scores, **rest)


def _refuse_lost_lengths(module: nn.Module, position_ids: Tensor | None, mask: DeferredMask) -> None:
    """Refuse a row that is packed, judged by what the model was given, but has no lengths. Looks once per forward.

    Eager, this waits for the device, unless the rows have a mask and no positions were given. A compiled graph looks at
    the positions that reach the layer, on a CPU alone, where its assertion ends the call and not the process.
    """
    if mask.checked:
        return
    # Before the look itself, which waits for the device: the layers of a forward share this object.
    mask.checked = True
    given = mask.given
    if given is not None and given.lengths:
        raise refusal(
            module,
            "cu_seq_lens_q was given to the model, but did not reach its attention",
            hint="leave packing_capacity out, and the Trainer pads its batches: this model drops lengths",
        )
    # What the model was given, or, compiled, only what reaches the layer: the stack cannot be read then.
    positions = () if given is None else given.positions
    # Positions that a model computes from a mask start again at padding only.
    own = given is not None and not positions and mask.padded
    # A layer may get other positions than the model was given; the same tensor needs no second look.
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
            raise refusal(module, _RESTART, hint=_FLATTEN)
