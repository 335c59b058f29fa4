"""``generate()`` of recurrent models: prompts of unequal length, and a recurrent state as the cache.

transformers' loops append tokens at the right end of rows, so prompts of any form are padded on the left first. A
state is small and complete: once there is one, a call reads the new token alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ullage.attention.releases import CACHE, named_cache
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Layout
from ullage.core.rows import LENGTH_NAMES
from ullage.models.cells import cell_class
from ullage.models.sequences import Sequences
from ullage.models.state import RecurrentState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class _Base(PreTrainedModel, GenerationMixin):
        """The model that the mixin is part of."""
else:
    _Base = GenerationMixin

#: Keywords that describe where prompts lie; padded rows and their mask take their place.
_LAYOUT_NAMES = ("input_lengths", *LENGTH_NAMES, "position_ids")
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class RecurrentGenerationMixin(_Base):
    """``generate()`` for recurrent models, decoders alone and encoder-decoders."""

    @torch.no_grad()
    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """transformers' ``generate``, for prompts (of an encoder-decoder: sources) of unequal length.

        Args:
            inputs: the prompts, or else ``input_ids`` or ``inputs_embeds`` among the keywords: rows [N, L] with an
                ``attention_mask`` (padding on either side) or with ``input_lengths``, a list of prompts, a
                ``PackedSequence``, a ``RaggedBatch``, or ``**batch.to_flattened()``
            args: further positional arguments of transformers' ``generate``
            kwargs: its keywords. ``cache`` is a state to go on from: the prompts are then what follows it,
                unless they begin with what it has seen, as the rows that ``generate`` returns do

        Returns what transformers returns; a decoder's rows have their padding on the left. Raises ``InputError`` for
        prompts that do not fit, and for beam search with a cell whose state cannot be reordered.
        """
        name = "inputs_embeds" if kwargs.get("inputs_embeds") is not None else "input_ids"
        given = kwargs.pop(name, None) if inputs is None else inputs
        named_cache(kwargs)
        if given is not None:
            kwargs = self._lay_out(name, given, kwargs)
        if self.config.is_encoder_decoder:
            kwargs = self._encode_sources(kwargs)
        named_cache(kwargs, CACHE)
        return super().generate(None, *args, **kwargs)  # pyright: ignore

    def _lay_out(self, name: str, given: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords with prompts and mask in padded rows, and a state that knows whether the rows hold its past."""
        # Every form but rows becomes a ragged batch, in one row.
        if isinstance(given, PackedSequence):
            given = RaggedBatch.from_packed_sequence(given, name)
        if isinstance(given, (list, tuple)) and all(hasattr(prompt, "__len__") for prompt in given):
            given = RaggedBatch.from_samples([{name: prompt} for prompt in given])
        if isinstance(given, RaggedBatch):
            rows = given.map(lambda tensor: tensor.to(self.device))
            kwargs |= {name: rows[name][None], "cu_seq_lens_q": rows.cu_seqlens}
        else:
            kwargs[name] = torch.as_tensor(given)
            if kwargs[name].ndim < 2:
                raise InputError(
                    "prompts come in rows, or as a list of them",
                    expected="[N, L]",
                    found=f"shape {list(kwargs[name].shape)}",
                )
        # With a state, rows are either the whole text, which is cut by transformers, or only what follows it.
        side = "right" if self.config.is_encoder_decoder else "left"
        rows, mask = kwargs[name], kwargs.get("attention_mask")
        state = None if self.config.is_encoder_decoder else kwargs.get("cache")
        # A mask that is longer than the rows covers the past too, so the rows are only what follows it.
        only_new = state is not None and mask is not None and mask.shape[1] > rows.shape[1]
        if state is not None and not only_new and begins_with(rows, state):
            kwargs["cache"] = state.copy()
            kwargs.setdefault("attention_mask", torch.ones_like(rows))
            return kwargs
        if state is not None:
            kwargs["cache"] = state.without_past()
        # Rows without a description may still be padded; rows without padding are taken as they are.
        described = {key: kwargs.pop(key, None) for key in _LAYOUT_NAMES}
        if mask is None and described["input_lengths"] is None and described["cu_seq_lens_q"] is None:
            if name == "input_ids":
                mask = self._mask_of_padding(rows, kwargs)
            if mask is None:
                return kwargs
        # All others are flattened and padded again: a decoder's prompts on the left, for tokens are added on the right.
        sequences = Sequences.read(
            rows, attention_mask=mask, input_lengths=described["input_lengths"], cu_seq_lens=described["cu_seq_lens_q"]
        )
        batch = RaggedBatch({name: sequences.flatten(rows)}, Layout(sequences.host_lengths))
        padded = batch.to_padded(padding_value=self._special_token("pad_token_id", kwargs) or 0, side=side)
        if state is not None and len(state.layers[0][0]) != batch.layout.num_items:
            raise InputError(
                "the state is of another batch",
                where="cache",
                expected=f"{batch.layout.num_items} sequences",
                found=len(state.layers[0][0]),
            )
        return kwargs | padded

    def _mask_of_padding(self, rows: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The mask of rows without one, by the padding token at either end, unless it also ends sequences."""
        pad, end = self._special_token("pad_token_id", kwargs), self._special_token("eos_token_id", kwargs)
        ends = end if isinstance(end, (list, tuple)) else [end]
        if pad is None or pad in ends:
            return None
        real = rows != pad
        if bool(real.all()) or not bool(real.any(1).all()):
            return None
        # From the first token that is not padding to the last: a padding token between them belongs to the text.
        return (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)

    def _special_token(self, name: str, kwargs: dict[str, Any]) -> Any:
        settings = kwargs.get("generation_config") or self.generation_config
        value = kwargs.get(name, getattr(settings, name, None))
        return value.tolist() if isinstance(value, Tensor) else value

    def _encode_sources(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of an encoder-decoder, its sources encoded; nothing to do for a decoder."""
        return kwargs

    # Hooks of transformers' loops.

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own state

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        if getattr(generation_config, "is_assistant", None):
            raise InputError(
                "a recurrent model cannot assist another",
                where=type(self).__name__,
                hint="tokens that are rejected cannot be taken back out of its state",
            )
        cell = self.config.cell
        if generation_mode in _BEAMS and generation_config.use_cache and not cell_class(cell).reorderable:
            raise InputError(
                "beam search reorders states, and this cell says that its state cannot be",
                where=f"cell {cell!r}",
                hint="use num_beams=1, or use_cache=False, which runs every beam from its start",
            )
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # pyright: ignore

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        named_cache(model_kwargs)  # as ``forward`` calls it; transformers passes a copy
        super()._validate_model_kwargs(model_kwargs)  # pyright: ignore

    def _expand_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Repeat each prompt ``expand_size`` times, and each state of one; otherwise as transformers."""
        encoded = model_kwargs.get("encoder_outputs") or {}
        for holder in (model_kwargs, encoded):
            # transformers repeats tensors among the keywords, and leaves a state as it is.
            state = holder.get(CACHE)
            if isinstance(state, RecurrentState) and expand_size > 1:
                holder[CACHE] = repeated = state.copy()
                repeated.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(  # pyright: ignore
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool | None = False,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The keywords of one call of the model; without a mask once a state holds all before the new token."""
        inputs = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            next_sequence_length=next_sequence_length,
            is_first_iteration=is_first_iteration,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        named_cache(inputs)
        # transformers derives positions from the mask; this model would read them as a description of where sequences
        # begin.
        for name in ("position_ids", "decoder_position_ids"):
            inputs.pop(name, None)
        if inputs.get("cache") is not None and not is_first_iteration:
            inputs.pop("decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask", None)
        return inputs

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ):
        """The keywords of the next call, with the state that this one gave."""
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)  # pyright: ignore
        if outputs.get(CACHE) is not None:
            updated[CACHE] = outputs[CACHE]
        return updated


def begins_with(rows: Tensor, state: RecurrentState) -> bool:
    """True if rows [N, L] begin with all that the state has seen, and go on."""
    tail = state.tail
    if rows.ndim != 2 or tail is None or rows.shape[1] <= state.seen or len(rows) != len(tail):
        return False
    # Only the last tokens seen are compared, because a state keeps no others.
    return torch.equal(rows[:, state.seen - tail.shape[1] : state.seen], tail.to(rows.device))
