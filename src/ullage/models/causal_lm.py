"""A recurrent language model: the backbone, a head over the vocabulary, and the loss of the next token.

Head and loss run on real tokens only. Padded rows are flattened first and their logits put back, so padding costs
nothing and what it holds never matters.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ullage.columns import IGNORED_LABEL
from ullage.errors import InputError
from ullage.models.configuration import RecurrentConfig
from ullage.models.generation import RecurrentGenerationMixin
from ullage.models.modeling import RecurrentModel, RecurrentPreTrainedModel
from ullage.models.sequences import Lengths, Rows, Sequences
from ullage.models.state import RecurrentState


class RecurrentForCausalLM(RecurrentPreTrainedModel, RecurrentGenerationMixin):
    """Predicts each sequence's next token. Raises ``InputError`` for a bidirectional configuration."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  transformers' own attribute

    def __init__(self, config: RecurrentConfig) -> None:
        if config.bidirectional:
            raise InputError(
                "a causal language model runs in one direction",
                where="RecurrentConfig",
                expected="bidirectional=False",
                found=True,
                hint="a bidirectional model sees the tokens that it is to predict",
            )
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = next_token_loss
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = cast(nn.Linear, new_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: Rows | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        inputs_embeds: Rows | None = None,
        labels: Rows | None = None,
        shift_labels: Rows | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [N, L, vocabulary] of the tokens in rows [N, L], zeros in the padding; the loss if there are labels.

        The ways in are those of :meth:`RecurrentModel.forward`; ``**batch.to_flattened()`` is the cheapest, and a
        ``PackedSequence`` comes out as it came in. ``labels`` lie as the input does: the state after a token predicts
        the next label of the same sequence, so a sequence's first label counts nowhere, and neither does -100 or what
        lies in the padding. ``shift_labels``, where given, are taken as they stand. ``logits_to_keep``: of only the
        last so many columns, or of those in an index; not with labels. Raises ``InputError`` as the backbone does.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None and cu_seq_lens_q is None
        sequences, outputs = self.run_backbone(
            input_ids,
            inputs_embeds,
            attention_mask=attention_mask,
            input_lengths=input_lengths,
            cu_seq_lens=cu_seq_lens_q,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        if isinstance(outputs.past_key_values, RecurrentState):
            outputs.past_key_values.remember(past_key_values, input_ids)
        hidden = cast(Tensor, outputs.last_hidden_state)
        has_labels = labels is not None or shift_labels is not None
        loss = None
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            logits = self.lm_head(hidden)
            if has_labels:
                loss = self.loss_function(
                    logits=logits,
                    labels=_flat_labels(labels, sequences, first=False),
                    shift_labels=_flat_labels(shift_labels, sequences, first=True),
                    vocab_size=logits.shape[-1],
                    **kwargs,
                )
            logits = sequences.unflatten(logits[0])
        else:
            rows = sequences.unflatten(hidden[0])
            if has_labels or isinstance(rows, PackedSequence):
                other = "labels" if has_labels else "a PackedSequence"
                raise InputError("logits_to_keep names columns of rows", where=f"{other} beside it")
            columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(rows[:, columns])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=cast(Any, logits),
            past_key_values=outputs.past_key_values,
            hidden_states=sequences.unflatten_states(outputs.hidden_states),
        )


def next_token_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Transformers' ``ForCausalLMLoss``, except that float64 stays float64: the sum over labels that count, divided
    by ``num_items_in_batch``, or their mean. Does not wait for the device.
    """
    counted = cast(Any, num_items_in_batch)
    if logits.dtype != torch.float64:
        return ForCausalLMLoss(logits, labels, vocab_size, counted, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = nn.functional.pad(cast(Tensor, labels), (0, 1), value=ignore_index)[..., 1:]
    logits, targets = logits.view(-1, vocab_size), shift_labels.reshape(-1)
    return fixed_cross_entropy(logits, targets, counted, ignore_index, **kwargs)


def _flat_labels(labels: Rows | None, sequences: Sequences, *, first: bool) -> Tensor | None:
    """Labels of the tokens alone, [1, T]; ``first``: whether a sequence's first label counts."""
    if labels is None:
        return None
    flat = sequences.flatten_labels(labels, "shift_labels" if first else "labels").long()
    if not first:
        flat = flat.index_fill(0, sequences.starts(flat.device), IGNORED_LABEL)
    return flat[None]
