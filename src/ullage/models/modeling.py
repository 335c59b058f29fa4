"""The backbone that all recurrent models share: embeddings and a stack of one-layer cells.

Tokens are put into run order (:mod:`ullage.models.schedule`) before they are embedded, the layers work in that order,
and what comes out is taken back to the order given, so nothing of the size of a hidden state is permuted on the way
in. A stack of one-layer cells, rather than one kernel of many layers, is what lets checkpointing, dropout,
normalisation and residuals come between layers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from ullage.errors import InputError
from ullage.models.cells import Cell, State, cell_class
from ullage.models.configuration import RecurrentConfig
from ullage.models.schedule import Schedule
from ullage.models.sequences import Lengths, Rows, Sequences
from ullage.models.state import LayerState, RecurrentState


class RecurrentLayer(GradientCheckpointingLayer):
    """One cell, or one in each direction, between a norm and a dropout."""

    def __init__(self, config: RecurrentConfig, input_size: int) -> None:
        super().__init__()
        cell = cell_class(config.cell)
        directions = 2 if config.bidirectional else 1
        self.norm = nn.LayerNorm(input_size) if config.layer_norm else nn.Identity()
        self.cells = nn.ModuleList(cell(input_size, config.hidden_size) for _ in range(directions))
        self.dropout = nn.Dropout(config.dropout)
        self.residual = config.residual and input_size == config.hidden_size * directions

    def forward(self, values: Tensor, schedule: Schedule, *state: Tensor) -> tuple[Tensor, ...]:
        """``values`` [size, input] in run order to [size, directions * hidden], and the final state behind it.

        ``state``: tensors [n, hidden], those of the forward direction first; none is zeros. The final state is none
        where the schedule does not keep it. Does not wait for the device.
        """
        normed = self.norm(values)
        parts = len(state) // len(self.cells)
        outputs: list[Tensor] = []
        final: list[Tensor] = []
        for direction, cell in enumerate(self.cells):
            start: State | None = state[direction * parts : (direction + 1) * parts] or None
            output, end = cast(Cell, cell)(schedule.flip(normed) if direction else normed, schedule, start)
            outputs.append(schedule.flip(output) if direction else output)
            final += end or ()
        output = self.dropout(outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))
        return (values + output if self.residual else output), *final


class RecurrentPreTrainedModel(PreTrainedModel):
    """What all recurrent models share: configuration, initial weights, and how a head runs the backbone."""

    config_class = RecurrentConfig
    config: RecurrentConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecurrentLayer"]  # noqa: RUF012  transformers' own attribute
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Cell):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def run_backbone(
        self,
        input_ids: Rows | None,
        inputs_embeds: Rows | None,
        *,
        attention_mask: Tensor | None,
        input_lengths: Lengths | None,
        cu_seq_lens: Tensor | None,
        position_ids: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Sequences, BaseModelOutputWithPast]:
        """What the sequences are, and the output of ``self.model`` with hidden states [1, T, D] of tokens alone.

        Heads run on those, so padding costs nothing and what it holds never matters. Raises ``InputError``.
        """
        rows = one_of(input_ids, inputs_embeds)
        sequences = Sequences.read(
            rows,
            attention_mask=attention_mask,
            input_lengths=input_lengths,
            cu_seq_lens=cu_seq_lens,
            position_ids=position_ids,
        )
        kwargs["input_ids" if inputs_embeds is None else "inputs_embeds"] = sequences.flatten(rows)[None]
        return sequences, self.model(sequences=sequences, return_dict=True, **kwargs)


class RecurrentModel(RecurrentPreTrainedModel):
    """Token ids to hidden states, and to final states where they are asked for."""

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
    def forward(
        self,
        input_ids: Rows | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens_q: Tensor | None = None,
        inputs_embeds: Rows | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        sequences: Sequences | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [N, L, directions * hidden] of the tokens in rows [N, L]; zeros in the padding.

        One of ``attention_mask`` [N, L] (padding on either side), ``input_lengths`` (N lengths, padding on the
        right), ``cu_seq_lens_q`` [n + 1] (one row of sequences end to end) or ``position_ids`` that start anew says
        what the sequences are; without any, each row is one. Or ``input_ids`` (or ``inputs_embeds``) are a
        ``PackedSequence``, and so are the hidden states. ``sequences``: the same, read before, for rows that hold
        nothing but their tokens end to end. ``past_key_values``: states to go on from. ``use_cache``: return the
        final states. ``output_hidden_states``: also the embeddings and what each layer makes of them. On CUDA waits
        once for the device where lengths lie there, else not. Raises ``InputError`` for lengths, masks, states and
        token ids that do not fit.
        """
        rows = one_of(input_ids, inputs_embeds)
        end_to_end = sequences is not None
        if sequences is None:
            sequences = Sequences.read(
                rows,
                attention_mask=attention_mask,
                input_lengths=input_lengths,
                cu_seq_lens=cu_seq_lens_q,
                position_ids=position_ids,
            )
            flat = sequences.flatten(rows)
        else:
            flat = cast(Tensor, rows).flatten(0, 1)
        keep_state = self.config.use_cache and not self.training if use_cache is None else use_cache
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        run_order = cell_class(self.config.cell).run_order(flat.device)
        schedule = sequences.schedule(self.config.hidden_size, flat.device, run_order, keep_state=keep_state)
        if inputs_embeds is None:
            require_tokens(flat, self.embed_tokens.num_embeddings, sequences)
            values = self.embed_tokens(schedule.place(flat))
        else:
            values = schedule.place(flat)
        states = self._given_states(past_key_values, sequences)
        final: list[LayerState] = []
        steps = [values] if output_hidden_states else []
        for layer, state in zip(self.layers, states, strict=True):
            values, *end = layer(values, schedule, *state)
            final.append(tuple(end))
            if output_hidden_states:
                steps.append(values)
        hidden = schedule.take(self.norm(values))

        def returned(flat: Tensor) -> Any:
            return flat[None] if end_to_end else sequences.unflatten(flat)

        every = (*(returned(schedule.take(step)) for step in steps[:-1]), returned(hidden)) if steps else None
        seen = sequences.shape[1] + (past_key_values.seen if past_key_values is not None else 0)
        return BaseModelOutputWithPast(
            last_hidden_state=returned(hidden),
            past_key_values=cast(Any, RecurrentState(tuple(final), seen) if keep_state else None),
            hidden_states=every,
        )

    def _given_states(self, past: RecurrentState | None, sequences: Sequences) -> tuple[LayerState, ...]:
        if past is None:
            return ((),) * len(self.layers)
        expected = (sequences.num_sequences, self.config.hidden_size)
        cells = cast(RecurrentLayer, self.layers[0]).cells  # an adapter around a cell does not tell its states
        parts = len(cells) * len(cell_class(self.config.cell).state_names)
        if len(past.layers) != len(self.layers) or any(len(layer) != parts for layer in past.layers):
            raise InputError(
                "the state is of another model",
                where="past_key_values",
                expected=f"{len(self.layers)} layers of {parts} tensors",
                found=f"{len(past.layers)} of {len(past.layers[0]) if past.layers else 0}",
            )
        for number, layer in enumerate(past.layers):
            for state in layer:
                if state.shape != expected:
                    raise InputError(
                        "the state is of another batch",
                        where=f"past_key_values, layer {number}",
                        expected=f"[{expected[0]} sequences, {expected[1]}]",
                        found=list(state.shape),
                    )
        return past.layers


def one_of(input_ids: Rows | None, inputs_embeds: Rows | None) -> Rows:
    """The one that is given. Raises ``InputError`` if neither is, or both."""
    if input_ids is not None and inputs_embeds is not None:
        raise InputError("a model takes input_ids or inputs_embeds", found="both")
    rows = input_ids if inputs_embeds is None else inputs_embeds
    if rows is None:
        raise InputError("a model needs input_ids or inputs_embeds", found="neither")
    return rows


def require_tokens(flat: Tensor, vocab_size: int, sequences: Sequences) -> None:
    """Raises ``InputError`` for the first token id that the embedding does not have.

    Looks on the CPU only, where reading costs nothing; CUDA asserts by itself, and looking would wait for it.
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
