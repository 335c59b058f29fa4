"""Backbone of all recurrent models: embeddings and a stack of one-layer cells.

Tokens are put into run order (:mod:`ullage.models.schedule`) before they are embedded, the layers work in that order,
and their output is taken back to the order given; so nothing of the size of a hidden state is permuted at the
beginning. Cells have one layer each, because checkpointing, dropout, normalisation and residuals come between layers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from ullage.attention.releases import with_cache
from ullage.core.errors import InputError
from ullage.models.cells import Cell, State, cell_class
from ullage.models.configuration import RecurrentConfig
from ullage.models.schedule import Schedule
from ullage.models.sequences import RaggedInputs, Sequences, takes_ragged_inputs
from ullage.models.state import LayerState, RecurrentState


class RecurrentLayer(GradientCheckpointingLayer):
    """A cell, or one per direction, between a norm and a dropout."""

    def __init__(self, config: RecurrentConfig, input_size: int) -> None:
        super().__init__()
        cell = cell_class(config.cell)
        directions = 2 if config.bidirectional else 1
        self.norm = nn.LayerNorm(input_size) if config.layer_norm else nn.Identity()
        self.cells = nn.ModuleList(cell(input_size, config.hidden_size) for _ in range(directions))
        self.dropout = nn.Dropout(config.dropout)
        self.residual = config.residual and input_size == config.hidden_size * directions

    def forward(self, values: Tensor, schedule: Schedule, *state: Tensor) -> tuple[Tensor, ...]:
        """Output [size, directions * hidden] of ``values`` [size, input], both in run order; then the final state.

        ``state``: tensors [n, hidden] of the states to start from, those of the forward direction first; zeros where
        none are given. No final state is returned where the schedule does not keep it. Does not wait for the device.
        """
        normed = self.norm(values)
        # ``state`` lists as many tensors for each direction.
        parts = len(state) // len(self.cells)
        outputs: list[Tensor] = []
        final: list[Tensor] = []
        for direction, cell in enumerate(self.cells):
            start: State | None = state[direction * parts : (direction + 1) * parts] or None
            # The backward direction runs forwards over reversed sequences.
            output, end = cast(Cell, cell)(schedule.flip(normed) if direction else normed, schedule, start)
            outputs.append(schedule.flip(output) if direction else output)
            final += end or ()
        output = self.dropout(outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))
        return (values + output if self.residual else output), *final


class RecurrentPreTrainedModel(PreTrainedModel):
    """Base of all recurrent models: configuration, initial weights, and a head's call of the backbone."""

    config_class = RecurrentConfig
    config: RecurrentConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecurrentLayer"]  # noqa: RUF012  transformers' own attribute
    # transformers then refuses assisted decoding, whose rejected tokens cannot be taken back out of a state.
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Cell):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def run_backbone(self, inputs: RaggedInputs, **kwargs: Any) -> tuple[Sequences, BaseModelOutputWithPast]:
        """The sequences in ``inputs``, and the output of ``self.model`` with hidden states [1, T, D] of tokens alone.

        Heads run on those, so padding costs nothing and what it holds never matters. Raises ``InputError``.
        """
        given = inputs.read_for_backbone()
        return given["sequences"], self.model(**given, return_dict=True, **kwargs)


class RecurrentModel(RecurrentPreTrainedModel):
    """Backbone: token ids to hidden states, and to final states where they are asked for."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        width = config.hidden_size * (2 if config.bidirectional else 1)
        sizes = [config.hidden_size] + [width] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(RecurrentLayer(config, size) for size in sizes)
        self.norm = nn.LayerNorm(width) if config.layer_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = cast(nn.Embedding, value)

    @can_return_tuple
    @takes_ragged_inputs
    def forward(
        self,
        inputs: RaggedInputs,
        *,
        cache: RecurrentState | None = None,
        use_cache: bool | None = None,
        sequences: Sequences | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [N, L, directions * hidden] of the tokens in rows [N, L]; zeros in the padding.

        Args:
            inputs: the keywords of :class:`RaggedInputs`; hidden states of a ``PackedSequence`` are one too
            cache: the states to go on from
            use_cache: return the final states; by default outside of training, if the configuration says so
            sequences: what ``inputs`` describe, read before; then rows [1, T] hold nothing but tokens end to end
            output_hidden_states: also return the embeddings and the output of each layer

        On CUDA waits once for the device where lengths lie there, else not. Raises ``InputError`` for lengths, masks,
        states and token ids that do not fit.
        """
        # Tokens alone, end to end, whatever they came in.
        end_to_end = sequences is not None
        if sequences is None:
            sequences, flat = inputs.read()
        else:
            flat = cast(Tensor, inputs.rows()).flatten(0, 1)
        keep_state = self.config.use_cache and not self.training if use_cache is None else use_cache
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        # In the order in which the cells run; ids are permuted before they are embedded, which costs less.
        run_order = cell_class(self.config.cell).run_order(flat.device)
        schedule = sequences.schedule(self.config.hidden_size, flat.device, run_order, keep_state=keep_state)
        if inputs.inputs_embeds is None:
            require_tokens(flat, self.embed_tokens.num_embeddings, sequences)
            values = self.embed_tokens(schedule.place(flat))
        else:
            values = schedule.place(flat)
        # Layer by layer, each from its own state and to its own final state.
        states = self._given_states(cache, sequences)
        final: list[LayerState] = []
        steps = [values] if output_hidden_states else []
        for layer, state in zip(self.layers, states, strict=True):
            values, *end = layer(values, schedule, *state)
            final.append(tuple(end))
            if output_hidden_states:
                steps.append(values)
        # Back to the order and the form that were given.
        hidden = schedule.take(self.norm(values))

        def returned(flat: Tensor) -> Any:
            return flat[None] if end_to_end else sequences.unflatten(flat)

        every = (*(returned(schedule.take(step)) for step in steps[:-1]), returned(hidden)) if steps else None
        # In columns of the rows, padding included, as transformers' caches count.
        seen = sequences.shape[1] + (cache.seen if cache is not None else 0)
        return with_cache(
            BaseModelOutputWithPast,
            cast(Any, RecurrentState(tuple(final), seen) if keep_state else None),
            last_hidden_state=returned(hidden),
            hidden_states=every,
        )

    def _given_states(self, past: RecurrentState | None, sequences: Sequences) -> tuple[LayerState, ...]:
        if past is None:
            return ((),) * len(self.layers)
        expected = (sequences.num_sequences, self.config.hidden_size)
        cells = cast(RecurrentLayer, self.layers[0]).cells  # an adapter around a cell hides its state_names
        parts = len(cells) * len(cell_class(self.config.cell).state_names)
        if len(past.layers) != len(self.layers) or any(len(layer) != parts for layer in past.layers):
            raise InputError(
                "the state is of another model",
                where="cache",
                expected=f"{len(self.layers)} layers of {parts} tensors",
                found=f"{len(past.layers)} of {len(past.layers[0]) if past.layers else 0}",
            )
        for number, layer in enumerate(past.layers):
            for state in layer:
                if state.shape != expected:
                    raise InputError(
                        "the state is of another batch",
                        where=f"cache, layer {number}",
                        expected=f"[{expected[0]} sequences, {expected[1]}]",
                        found=list(state.shape),
                    )
        return past.layers


def require_tokens(flat: Tensor, vocab_size: int, sequences: Sequences) -> None:
    """Raise ``InputError`` for the first of the token ids ``flat`` [T] outside ``range(vocab_size)``.

    Looks on the CPU only: CUDA asserts by itself, and looking there would wait for it.
    """
    if flat.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = flat.aminmax()
    if int(low) >= 0 and int(high) < vocab_size:
        return
    token = int(((flat < 0) | (flat >= vocab_size)).nonzero()[0])
    sequence, position = sequences.locate(token)
    raise InputError(
        "a token id lies outside the vocabulary",
        where=f"sequence {sequence}, position {position}",
        expected=f"0 to {vocab_size - 1}",
        found=int(flat[token]),
        hint="use the tokenizer that the model was made for, or resize_token_embeddings",
    )
