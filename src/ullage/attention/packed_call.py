"""One layer's attention over a packed row: what it was asked for, whether that has an exact answer, and its kernel.

``PackedCall`` holds the arguments of a call with ``cu_seq_lens_q``. ``require_exact`` refuses whatever could make the
result differ from each sequence on its own: a mask, a filled cache, position biases, any keyword not known to be
harmless, and a model in which tokens meet elsewhere than in its attention. ``attend`` computes a whole row
with the fastest kernel that takes it. Context parallel calls the same two methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionMaskInterface, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    chunked_overlay,
    or_masks,
    sdpa_mask,
)

from ullage.attention.current import current_row, row_in_force
from ullage.attention.kernels import Scores, attend
from ullage.attention.releases import CACHE
from ullage.attention.segments import attention_of_row, autocast, lengths_of_row, packed_attention
from ullage.attention.support import (
    NAME,
    TRYING,
    USE_ANOTHER,
    given,
    reads_masks,
    refusal,
    require_known_keywords,
    require_packable,
)
from ullage.attention.ulysses import Slices
from ullage.attention.varlen import (
    BENT,
    BY_LENGTHS,
    BY_SEQUENCE,
    FLEX,
    OWN_PATTERN,
    VARLEN,
    chunked,
    flex_attention,
    flex_problem,
    host_lengths,
    varlen_attention,
    varlen_problem,
    warn_of_slower,
)
from ullage.core.errors import InputError

# Deferred attention masks: described when a model asks for one, built only by a layer that needs it.
#
# transformers asks for a mask before it knows whether the row is packed, and under sdpa would build one of T² elements.
# A packed row needs none: its lengths say everything. So the model carries a description to its layers instead. A
# layer with ``cu_seq_lens`` reads from it whether a mask was asked for; a layer without builds the same mask that sdpa
# would get, once for all layers of a forward. With a filled cache there is no packed row, and sdpa's mask is built at
# once. The mask is requested once per forward, so its description also keeps the arguments of the model's call.
# Source: ``transformers.masking_utils`` (``AttentionMaskInterface``).


#: The code of the functions that these make: of them a compiled graph can ask for the code, but not for the name.
_CHUNKED: CodeType = chunked_overlay(1, torch.zeros(1, dtype=torch.long, device="cpu")).__code__
_EITHER: CodeType = or_masks(bidirectional_mask_function, bidirectional_mask_function).__code__


class _NoHook(InputError, AttributeError):
    """Error for a use of a mask that is only described; an ``AttributeError`` too, so that ``hasattr`` gives False."""


def _no_hook(use: str) -> _NoHook:
    return _NoHook(
        "this model changes the attention mask itself, which attn_implementation='ullage' cannot take part in",
        expected="a model that hands its mask to the attention as it is",
        found=use,
        hint="load it with attn_implementation='sdpa' or 'eager', without packing",
    )


class DeferredMask:
    """Description of the mask that transformers asked for: queries and keys of equal number, no cache.

    Attributes:
        arguments: those of ``sdpa_mask``.
        padded: whether a mask of real tokens was given.
        both_ways: whether a token sees later ones too.
        window: how many tokens a query sees, if the mask is local: itself and those before it, in both ways itself and
            those on each side.
        chunk: tokens in each part of a sequence that sees itself alone, if the mask is chunked.
        altered: whether the pattern is neither of these.
        given: positions and lengths that the model was called with, whether or not they reach its layers; None under
            ``torch.compile``.
        checked: whether a layer of this forward has looked for lost lengths.
    """

    #: Of the mask that it describes: a model that is given one of four dims hands it on as it is.
    ndim = 4

    def __init__(self, arguments: dict[str, Any], make: Callable[..., Any] = sdpa_mask) -> None:
        self.arguments, self._make = arguments, make
        self.padded = arguments.get("attention_mask") is not None
        self.window: int | None = arguments.get("local_size")
        pattern: Callable[..., Any] = arguments["mask_function"]
        united = _united(pattern)
        self.both_ways = bidirectional_mask_function in united
        self.chunk: int | None = None
        if any(part.__code__ is _CHUNKED for part in united):
            self.chunk, self.window = self.window, None
        if self.both_ways and self.window is not None:
            # transformers counts the tokens on one side here, and the query itself where the mask is causal: 8 to each
            # side is a window of 9.
            self.window += 1
        # A pattern that a user or a model joined to the causal one is called through vmap, or is a union.
        self.altered = bool(arguments.get("use_vmap")) or any(part.__code__ is _EITHER for part in united)
        #: Whether all of the pattern is transformers' own, which takes indices of any shape and needs no vmap.
        self._is_indexed = all(part.__module__.startswith("transformers.") for part in united)
        # Read while the model's own call is on the stack. A layer that is recomputed in the backward pass has no model
        # around it, but still has this mask.
        self.given = given()
        self.checked = False
        # In a tuple, because None is a mask too.
        self._built: tuple[Tensor | None] | None = None
        self._of_sequences: dict[tuple[int, int], Tensor | None] = {}
        self._of_lengths: dict[tuple[int, int], Any] = {}
        #: Whether a row in force makes masks by sequence, and what its model does to them before.
        self._is_of_row, self._changes = current_row() is not None, ()

    @property
    def is_left_out(self) -> bool:
        """Whether a sequence alone gets no mask, so that its attention's own ``is_causal`` decides."""
        name = getattr(self.arguments.get("config"), "_attn_implementation", None)
        allowed = ("allow_is_bidirectional_skip", False) if self.both_ways else ("allow_is_causal_skip", True)
        return getattr(name, "before", "sdpa") == "sdpa" and self.window is None and self.arguments.get(*allowed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mask that it describes."""
        batch_size, q_length, kv_length = (self.arguments[name] for name in ("batch_size", "q_length", "kv_length"))
        return batch_size, 1, q_length, kv_length

    def build(self) -> Tensor | None:
        """The mask for sdpa: bool [batch, 1, T, T], or None where sdpa's own ``is_causal`` is enough."""
        if self._built is None:
            with row_in_force(None):
                self._built = (self._make(**self.arguments),)
        return self._built[0]

    def of_sequence(self, start: int, length: int) -> Tensor | None:
        """The mask of one sequence of a row, bool [1, 1, L, L]; None where it hides the later tokens and nothing else.

        Made once for all layers of a forward. Waits for the device. The pattern is asked about places in the row, so it
        may depend on what stands there, as an image does, and on distances.
        """
        key = (start, length)
        if key not in self._of_sequences:
            places = {"q_length": length, "kv_length": length, "q_offset": start, "kv_offset": start}
            asked = {**self.arguments, **places, "allow_is_causal_skip": False}
            if asked.get("use_vmap") and self._is_indexed:
                asked["use_vmap"] = False  # which took two fifths of a small Gemma 3's forward
            mask = sdpa_mask(**asked)
            assert mask is not None
            is_causal = torch.equal(mask, torch.ones_like(mask).tril())
            self._of_sequences[key] = None if is_causal else mask
        return self._of_sequences[key]

    def of_lengths(self, queries: int, keys: int) -> Any:
        """The mask of sequences with so many queries and keys, as they would get it alone: [1, 1, queries, keys].

        Made once for all layers of a forward. None where the attention's own ``is_causal`` is enough.
        """
        if (queries, keys) not in self._of_lengths:
            sizes = {"batch_size": 1, "q_length": queries, "kv_length": keys, "q_offset": 0, "kv_offset": 0}
            with row_in_force(None):  # of one sequence a row may have the size
                mask = self._make(**self.arguments | sizes)
            for change in self._changes:
                mask = mask if mask is None else change(mask)
            self._of_lengths[queries, keys] = mask
        return self._of_lengths[queries, keys]

    def restarts(self, position_ids: Tensor) -> Tensor | None:
        """Whether positions [rows, T] or [axes, rows, T] start again between two tokens that are not padding.

        One bool on their device, so this does not wait for it; None for positions of another shape than this row's.
        """
        if position_ids.ndim not in (2, 3) or position_ids.shape[-1] != self.arguments["q_length"]:
            return None
        if position_ids.ndim == 2:
            back = position_ids.diff() < 1
        else:
            # Image models: tokens of an image share positions, and behind a clip those of time may go back. A
            # sequence begins at 0 on every axis.
            begins = (position_ids == 0).all(0)
            back, position_ids = begins[:, 1:] & ~begins[:, :-1], position_ids[0]
        # Between padding and a token, or within padding, positions mean nothing.
        real = self.arguments.get("attention_mask")
        if real is not None:
            if real.ndim != 2 or real.shape[1] != position_ids.shape[1]:
                return None
            back = back & real[:, 1:].bool() & real[:, :-1].bool()
        return back.any()

    def _changed(self, change: Callable[[Tensor], Tensor]) -> DeferredMask:
        """What a model makes of the mask before it hands it on, for masks made by sequence."""
        if not self._is_of_row:
            raise _no_hook("a change of it")
        other = DeferredMask(self.arguments, self._make)
        other._is_of_row, other._changes, other.altered = True, (*self._changes, change), True
        return other

    def to(self, *arguments: Any, **keywords: Any) -> DeferredMask:
        """As ``Tensor.to``, done where the mask is made."""
        return self._changed(lambda mask: mask.to(*arguments, **keywords))

    def bool(self) -> DeferredMask:
        """As ``Tensor.bool``."""
        return self._changed(lambda mask: mask.bool())

    def __invert__(self) -> DeferredMask:
        return self._changed(lambda mask: ~mask)

    def contiguous(self) -> Tensor | None:
        """The built mask, contiguous: ``generate`` asks for it before the forward where a static cache has windows."""
        mask = self.build()
        return None if mask is None else mask.contiguous()

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and torch probe for such names, and expect a plain AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise _no_hook(f"a use of its {name}")

    def __getitem__(self, index: Any) -> Any:
        raise _no_hook("a slice of it")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _no_hook(f"{getattr(function, '__name__', function)} of it")


def _united(pattern: Callable[..., Any]) -> list[Any]:
    """A pattern of transformers, and those that it was made of: it keeps them in its closure, also as tuples."""
    cells = [cell.cell_contents for cell in getattr(pattern, "__closure__", None) or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else [cell])]
    return [pattern, *(each for part in parts if isinstance(part, FunctionType) for each in _united(part))]


def packed_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **arguments: Any
) -> DeferredMask | Tensor | None:
    """The mask function of attn_implementation="ullage"; arguments and waiting for the device as in ``sdpa_mask``."""
    # A model of images has made the mask of its text, which asks for one again.
    if isinstance(described := arguments.get("attention_mask"), DeferredMask):
        return described
    arguments.update(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset
    )
    # Parts of the model beside its attention take masks as well: those of the attention that it came with.
    name: Any = getattr(arguments.get("config"), "_attn_implementation", None)
    other = ALL_MASK_ATTENTION_FUNCTIONS.get(name.before, None) if getattr(name, "makes_masks", False) else None
    row = current_row()
    if row is not None and row.is_found and row.sides_of(_NOBODY, q_length, kv_length) is not None:
        return _noted(row, DeferredMask(arguments, other or sdpa_mask))
    if other is not None:
        return other(**arguments)
    # A cache lies in front of the queries. An offset that is a tensor counts as not zero, since its value lies on the
    # device.
    if any(isinstance(offset, torch.Tensor) or offset for offset in (q_offset, kv_offset)) or q_length != kv_length:
        return sdpa_mask(**arguments)
    return DeferredMask(arguments)


#: No layer: what transformers registers for masks is given none.
_NOBODY = nn.Module()


def _noted(row: Any, described: DeferredMask) -> Any:
    """A described mask; while parts are searched the mask itself, and a note of what it is."""
    if row.noted is None:
        return described
    mask = described.build()
    if isinstance(mask, Tensor):
        row.noted[id(mask)] = (mask, described)
    return mask


def described_mask(row: Any, mask: Any) -> Any:
    """The description of a mask that is noted; any other mask as it is."""
    noted = None if row is None or row.noted is None else row.noted.get(id(mask))
    return mask if noted is None else noted[1]


def _deferring(make: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function of transformers' own attention, which only describes the masks of a row that runs by lengths."""

    @functools.wraps(make)
    def made(batch_size: int, q_length: int, kv_length: int, *places: Any, **arguments: Any) -> Any:
        row = None if torch.compiler.is_compiling() else current_row()
        is_asked = row is not None and row.is_found and (row.defers_masks or row.noted is not None) and not places
        if row is None or not is_asked or row.sides_of(_NOBODY, q_length, kv_length) is None:
            return make(batch_size, q_length, kv_length, *places, **arguments)
        sizes = {"batch_size": 1, "q_length": q_length, "kv_length": kv_length}
        return _noted(row, DeferredMask(arguments | sizes, make))

    return made


def _unless_in_a_row(find: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' search for sequences in positions, which waits for the device: in a packed call lengths tell."""

    @functools.wraps(find)
    def found(*arguments: Any, **keywords: Any) -> Any:
        row = None if torch.compiler.is_compiling() else current_row()
        if row is not None and row.is_found:
            return None
        model: Any = asked.model if (asked := given()) is not None and asked.lengths else None
        is_ours = model is not None and model.config.get_text_config()._attn_implementation == NAME
        return None if is_ours else find(*arguments, **keywords)

    return found


def describe_masks() -> None:
    """Have transformers' own masks, and its search for sequences, ask whether a row is in force. Once a process."""
    for name in ("eager", "sdpa"):
        AttentionMaskInterface.register(name, _deferring(ALL_MASK_ATTENTION_FUNCTIONS[name]))
    masking_utils.find_packed_sequence_indices = _unless_in_a_row(masking_utils.find_packed_sequence_indices)


@dataclass(eq=False)
class PackedCall:
    """The arguments of one layer's attention over a packed row or over a slice of one.

    Attributes:
        module: the attention layer of the model.
        cu_seqlens: int32 [N + 1], cumulated lengths in tokens of the whole row; None if the caller gave none.
        key_cu_seqlens: the same of the keys, which must not differ.
        max_seqlen: tokens of the longest sequence, on the host; None if the caller gave none.
        mask: the model's mask, a ``DeferredMask`` if transformers made it.
        is_causal: whether a token sees only those before it; None leaves it to the module.
        window: how many tokens a query sees, itself included; None for all.
        scale: factor of the scores; 1/√dim if None.
        dropout: probability of dropping an attention weight.
        softcap: a score ``s`` becomes ``softcap·tanh(s / softcap)``; None leaves it.
        sinks: [query heads], a score more for each query, of a key without a value; None without.
        slices: the slice that this rank holds of the row, within ``context_parallel``.
        unknown: keywords of the call that have no parameter of their own.
    """

    module: nn.Module
    cu_seqlens: Tensor | None
    key_cu_seqlens: Tensor | None
    max_seqlen: int | None
    mask: Any
    is_causal: bool | None
    window: int | None
    scale: float | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    slices: Slices | None
    unknown: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return bool(self.is_causal if self.is_causal is not None else getattr(self.module, "is_causal", True))

    def require_exact(self, query: Tensor, key: Tensor) -> None:
        """Raise ``InputError`` for a call whose result could differ from each sequence on its own.

        ``query`` [batch, query heads, tokens, dim], ``key`` [batch, key heads, tokens, dim]. Waits for the device if
        the model's rotary frequencies depend on the lengths and ``max_seqlen`` is unknown or above their limit; and
        once per mask and forward if a token sees later ones.
        """
        module = self.module
        # What was asked for beside the lengths.
        require_known_keywords(module, self.unknown)
        mask = None if self._has_own_pattern else self.mask
        _refuse_unpackable(module, query, key, mask, causal=self.causal, window=self.window)
        if self.slices is not None and not self.causal:
            raise refusal(module, "an attention in both directions cannot be cut over ranks", hint="give it cp=1")
        # The lengths themselves.
        _refuse_other_keys(module, self.cu_seqlens, self.key_cu_seqlens)
        # The model around the layer: what it is, and what it was called with.
        # None for a mask of the model's own, for no mask, and under torch.compile.
        given = self.mask.given if isinstance(self.mask, DeferredMask) else None
        limit, dynamic = require_packable(module) if given is None else require_packable(module, given.model)
        if limit is not None:
            self._refuse_mixed_frequencies(limit, dynamic)
        if given is not None and not given.positions:
            raise refusal(
                module,
                "cu_seq_lens_q came without position_ids, so the model would count positions through the whole row",
                hint="pass what RaggedBatch.to_flattened() gives",
            )
        if given is not None and not self.causal and not self.mask.checked:
            self.mask.checked = True
            # The forward that pack_model puts in gives padding lengths of its own.
            if not getattr(vars(given.model or module).get("forward"), "keeps_padding_apart", False):
                self._refuse_padding(given.positions)

    @property
    def _has_own_pattern(self) -> bool:
        """Whether the mask has parts that see each other both ways, and is read by sequence."""
        return isinstance(self.mask, DeferredMask) and self.mask.altered and reads_masks(self.module)

    @property
    def _chunk(self) -> int | None:
        return self.mask.chunk if isinstance(self.mask, DeferredMask) else None

    @classmethod
    def of_row(cls, row: Any, sides: tuple[str, str], mask: Any, **options: Any) -> PackedCall | None:
        """The call of a row in force by its lengths alone; None where the mask has to be asked by sequence."""
        module = options["module"]
        is_causal = options["is_causal"]
        causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
        if sides[0] != sides[1]:
            return None
        if mask is not None:
            is_plain = isinstance(mask, DeferredMask) and not mask.altered and not mask.padded
            if not is_plain or mask.window != options["window"]:
                return None
            if not mask.is_left_out:
                causal = not mask.both_ways
        elif options["window"] is not None:
            return None
        bounds = row.bounds_of(sides[0], apart=not causal)
        options |= {"is_causal": causal, "cu_seqlens": bounds, "key_cu_seqlens": bounds, "slices": None}
        return cls(mask=mask, max_seqlen=row.longest_of(sides[0]), **options)

    def of_heads(self, size: int, rank: int) -> PackedCall:
        """The call for the heads of one of ``size`` ranks: as many neighbours for each, filled up at the end."""
        if self.sinks is None:
            return self
        sinks = F.pad(self.sinks, (0, -len(self.sinks) % size))
        return replace(self, sinks=sinks.unflatten(0, (size, -1))[rank])

    def kernel(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> tuple[str, str | None]:
        """The kernel of a whole row with heads of these dims, of keys and of values, and why not a faster one.

        ``dtype``: that of the kernel's tensors.
        """
        if self._has_own_pattern:
            return BY_SEQUENCE, OWN_PATTERN
        if device.type != "cuda":
            return BY_LENGTHS, None
        is_bent = self.softcap is not None or self.sinks is not None
        why = BENT if is_bent else varlen_problem(device, dtype, dims, self.dropout)
        if why is None:
            return VARLEN, None
        why_not_flex = flex_problem(device, dtype, dims, self.dropout)
        return (FLEX, why) if why_not_flex is None else (BY_LENGTHS, why_not_flex)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention within each sequence of a whole row, [T, query heads, value dim].

        ``query`` [T, query heads, dim], ``key`` and ``value`` [T, key heads, dim]; the heads may be a part of the
        module's. Waits for the device on CUDA only: where no kernel takes cumulated lengths, or without
        ``max_seqlen``, once per forward. Raises ``InputError`` if the lengths do not sum to T.
        """
        assert self.cu_seqlens is not None  # require_exact has refused a call without
        if self._has_own_pattern:
            return self._attend_by_mask(query, key, value)
        options: dict[str, Any] = {"window": self.window, "scale": self.scale, "causal": self.causal}
        scores: dict[str, Any] = {"softcap": self.softcap, "sinks": self.sinks}
        if query.is_cuda:
            query, key, value = autocast(query, key, value)
            cu_seqlens, longest = self.cu_seqlens.to(query.device, torch.int32), self.max_seqlen
            if self._chunk is not None:
                cu_seqlens, longest = chunked(cu_seqlens, self._chunk), self._chunk
            kernel, why = self.kernel(query.device, query.dtype, (query.shape[-1], value.shape[-1]))
            if why not in (None, BENT) and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not TRYING:
                warn_of_slower(type(self.module).__name__, kernel, why)
            if kernel == VARLEN:
                if longest is None:
                    longest = max(host_lengths(cu_seqlens))
                return varlen_attention(query, key, value, cu_seqlens, int(longest), **options)
            if kernel == FLEX:
                training = self.module.training
                return flex_attention(query, key, value, cu_seqlens, training=training, **options, **scores)
        # Everything else, the CPU first of all: by lengths.
        options |= {**scores, "chunk": self._chunk}
        if torch.compiler.is_compiling() and query.device.type == "cpu" and not self.dropout:
            return attention_of_row(query, key, value, self.cu_seqlens, **options)
        return _attend_by_lengths(query, key, value, self.cu_seqlens, dropout=self.dropout, **options)

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _attend_by_mask(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention within each sequence, as the mask of the model says for it."""
        assert self.cu_seqlens is not None
        assert isinstance(self.mask, DeferredMask)
        mixed: list[Tensor] = []
        start = 0
        for length in lengths_of_row(self.cu_seqlens, len(query)):
            some = (part[start : start + length].transpose(0, 1)[None] for part in (query, key, value))
            mask = self.mask.of_sequence(start, length) if length else None
            scores = Scores(causal=mask is None, scale=self.scale, softcap=self.softcap)
            part = attend(*some, scores, mask=mask, dropout=self.dropout, sinks=self.sinks)
            mixed.append(part[0].transpose(0, 1))
            start += length
        return torch.cat(mixed) if mixed else query.new_zeros(0, query.shape[1], value.shape[2])

    def _refuse_padding(self, positions: tuple[Tensor, ...]) -> None:
        """Refuse padding behind a sequence, which its tokens would see: positions do not rise. Waits for the device."""
        assert self.cu_seqlens is not None
        bounds = self.cu_seqlens.long()
        ends, starts = bounds[1:][bounds.diff() > 1] - 1, bounds[:-1][bounds.diff() > 1]
        for each in positions:
            if each.ndim == 2 and each.shape == (1, int(bounds[-1])) and bool((each[0, ends] <= each[0, starts]).any()):
                raise refusal(
                    self.module,
                    "a sequence is padded, and an attention in both directions would see the padding",
                    hint="pack the model with ullage.pack_model, or leave out pad_to_multiple_of",
                )

    def _refuse_mixed_frequencies(self, limit: int, dynamic: bool) -> None:
        """Refuse sequences that would get the rotary frequencies of a longer one in their row or slice of it."""
        assert self.cu_seqlens is not None
        # Nearly every call ends here, by a host integer and without waiting for the device.
        if self.max_seqlen is not None and self.max_seqlen <= limit:
            return
        lengths = [length for length in host_lengths(self.cu_seqlens) if length > 0]
        longest = max(lengths, default=0)
        is_cut = self.slices is not None and self.slices.size > 1
        # Above the limit a row is exact only if it holds one sequence, or, with longrope, if all of its sequences are
        # above it and so share frequencies. A cut row never is: transformers' dynamic_rope_update takes the largest
        # position that it finds, and each rank finds that of its own slice.
        if longest > limit and (is_cut or (len(lengths) > 1 and (dynamic or min(lengths) <= limit))):
            raise refusal(
                self.module,
                "this model's rotary frequencies change with the longest sequence of a row, so one sequence would "
                "change what the others get",
                expected=f"sequences of at most {limit} tokens, or a longer one in a row of its own",
                found=f"{len(lengths)} sequences of up to {longest} tokens" + (", cut over ranks" if is_cut else ""),
                hint="use another rope_type than dynamic or longrope, or shorter sequences",
            )


def attend_by_sequence(
    row: Any,
    sides: tuple[str, str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scores: Scores,
    **options: Any,
) -> Tensor:
    """Attention of a row in force by sequence, each with the mask that it would get alone: [1, T, heads, dim].

    Args:
        row: in force.
        sides: of queries and of keys.
        query: [1, query heads, T, dim].
        key, value: [1, key heads, S, dim].
        mask: a ``DeferredMask``, a tensor [1, heads, T, S] of the model's own, or None.
        scores: what is done with the scores; causal without a mask.
        **options: of :func:`~ullage.attention.kernels.attend`.
    """
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    if isinstance(mask, Tensor) or (isinstance(mask, DeferredMask) and mask.altered and sides[0] == sides[1]):
        return _attend_apart(row, sides, rows, mask, scores, **options)
    queries, keys = row.pairs_of(sides)
    mixed = []
    for parts in zip(queries.cut(rows[0]), keys.cut(rows[1]), keys.cut(rows[2])):
        some = [part.transpose(1, 2) for part in parts]
        own = None if mask is None else mask.of_lengths(some[0].shape[2], some[1].shape[2])
        is_causal = scores.causal and own is None
        mixed.append(
            attend(some[0], some[1], some[2], scores._replace(causal=is_causal), mask=own, **options).transpose(1, 2)
        )
    if not mixed:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    return queries.join(mixed)[None]


def _attend_apart(
    row: Any, sides: tuple[str, str], rows: list[Tensor], mask: Any, scores: Scores, **options: Any
) -> Tensor:
    """The same, one sequence after another: of a mask that says something else for each."""
    of_queries, of_keys = (row.layout_of(side) for side in sides)
    mixed = rows[0].new_zeros(len(rows[0]), rows[0].shape[1], rows[2].shape[2])
    parts = list(mixed.split(of_queries.slots.tolist()))
    places = (each.tolist() for each in (of_queries.starts, of_queries.lengths, of_keys.starts, of_keys.lengths))
    for number, (start, length, first, size) in enumerate(zip(*places)):
        if not length or not size:
            continue
        some = [
            each[at : at + n].transpose(0, 1)[None]
            for each, at, n in zip(rows, (start, first, first), (length, size, size))
        ]
        if isinstance(mask, Tensor):
            own = mask[:, :, start : start + length, first : first + size]
        else:
            own = mask.of_sequence(start, length)
        is_causal = scores._replace(causal=own is None)
        part = attend(some[0], some[1], some[2], is_causal, mask=own, **options)[0].transpose(0, 1)
        parts[number] = torch.cat([part, parts[number][length:]])
    return torch.cat(parts)[None] if parts else mixed[None]


@torch.compiler.disable(reason="the lengths of the sequences are data")
def _attend_by_lengths(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, chunk: int | None, **options: Any
) -> Tensor:
    return packed_attention(query, key, value, lengths_of_row(cu_seqlens, len(query), chunk), **options)


def _refuse_unpackable(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, *, causal: bool, window: int | None
) -> None:
    """Refuse what would let packed sequences see each other, or not see what the model means them to see.

    Args:
        module: the attention layer.
        query, key: [batch, heads, tokens, dim].
        mask: the mask that reached the layer.
        causal: whether a token sees only those before it.
        window: the layer's window in tokens, which must be that of the mask.
    """
    if query.shape[0] != 1:
        raise refusal(module, "packed sequences lie in one row", expected="batch size 1", found=query.shape[0])
    if query.shape[2] != key.shape[2]:
        raise refusal(
            module,
            "a packed row cannot continue a cache",
            expected="as many keys as queries",
            found=f"{key.shape[2]} keys, {query.shape[2]} queries",
            hint=f"pass no {CACHE} with cu_seq_lens",
        )
    if mask is None:
        return
    if not isinstance(mask, DeferredMask) or mask.padded:
        raise refusal(
            module,
            "an attention_mask was given together with cu_seq_lens",
            hint="pass one of them: the lengths say everything about a packed row",
        )
    if mask.altered or mask.both_ways == causal:
        raise refusal(module, "the model's own attention pattern cannot be packed", hint=USE_ANOTHER)
    if mask.window != window:
        raise refusal(
            module,
            "the window of the mask is not that of the attention",
            expected=mask.window,
            found=window,
            hint=USE_ANOTHER,
        )


def _refuse_other_keys(module: nn.Module, queries: Tensor | None, keys: Tensor | None) -> None:
    if queries is None:
        raise refusal(module, "a slice of a row came without cu_seq_lens_q", hint="pass all that shard_batch gives")
    if queries.ndim != 1 or queries.is_floating_point():
        raise refusal(
            module,
            "cu_seq_lens_q must hold cumulated lengths",
            expected="int32 [sequences + 1]",
            found=f"{str(queries.dtype)[6:]} {list(queries.shape)}",
        )
    if keys is None or keys is queries:
        return
    # On CUDA values are not compared, since that would wait for the device in each layer.
    same = keys.shape == queries.shape and (keys.is_cuda or torch.compiler.is_compiling() or torch.equal(keys, queries))
    if not same:
        raise refusal(module, "cu_seq_lens_k differs from cu_seq_lens_q: queries and keys must have equal lengths")
