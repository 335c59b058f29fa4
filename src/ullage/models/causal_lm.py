"""Recurrent language model: the backbone, a head over the vocabulary, and the loss of the next token.

Head and loss run on tokens only. Padded rows are flattened first and their logits put back, so padding costs nothing
and its content never matters.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ullage.attention.releases import CACHE, with_cache
from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.models.configuration import RecurrentConfig
from ullage.models.generation import RecurrentGenerationMixin
from ullage.models.modeling import RecurrentModel, RecurrentPreTrainedModel
from ullage.models.sequences import RaggedInputs, Rows, Sequences, takes_ragged_inputs
from ullage.models.state import RecurrentState


class RecurrentForCausalLM(RecurrentPreTrainedModel, RecurrentGenerationMixin):
    """Causal language model. Raises ``InputError`` for a bidirectional configuration."""

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
    @takes_ragged_inputs
    def forward(
        self,
        inputs: RaggedInputs,
        *,
        labels: Rows | None = None,
        shift_labels: Rows | None = None,
        cache: RecurrentState | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [N, L, vocabulary] of the tokens in rows [N, L], zeros in the padding; the loss if there are labels.

        Args:
            inputs: the keywords of :class:`RaggedInputs`; ``**batch.to_flattened()`` costs least. Logits of a
                ``PackedSequence`` are one too
            labels: [N, L], where the input has its tokens, *not* shifted: a sequence's first label never counts, nor
                does -100, nor does padding
            shift_labels: [N, L], shifted already; all of them count except -100
            cache: the states to go on from
            use_cache: return the final states; by default where the model generates
            logits_to_keep: compute the last so many columns of the rows alone, or those of an index; not with labels
            output_hidden_states: also return the embeddings and the output of each layer

        Waits for the device and raises ``InputError`` as :meth:`RecurrentModel.forward`.
        """
        # Final states cost the CPU's LSTM a cut at every length (ullage.models.schedule), so they are kept where text
        # goes on.
        if use_cache is None:
            predicts = not self.training and labels is None and inputs.cu_seq_lens_q is None
            use_cache = self.config.use_cache and predicts
        sequences, outputs = self.run_backbone(
            inputs, cache=cache, use_cache=use_cache, output_hidden_states=output_hidden_states
        )
        state = getattr(outputs, CACHE)
        if isinstance(state, RecurrentState):
            state.remember(cache, inputs.input_ids)
        hidden = cast(Tensor, outputs.last_hidden_state)
        has_labels = labels is not None or shift_labels is not None
        loss = None
        # All logits: head and loss on tokens alone, and only then rows. Some columns: these are columns of rows, so
        # rows come first.
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
        return with_cache(
            CausalLMOutputWithPast,
            state,
            loss=loss,
            logits=cast(Any, logits),
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
    """Cross-entropy of the next token, as transformers' ``ForCausalLMLoss``, except that float64 stays float64.

    Args:
        logits: [..., T, vocab_size]
        labels: [..., T], to be shifted here; not read where ``shift_labels`` are given
        vocab_size: logits per token
        num_items_in_batch: divisor of the sum over labels; their mean if ``None``
        ignore_index: the label that does not count
        shift_labels: [..., T], shifted already

    Does not wait for the device. Source: ``transformers.loss.loss_utils``.
    """
    counted = cast(Any, num_items_in_batch)
    # Upstream casts logits to float32, which would make a gradient check in float64 fail.
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
        # In the flat row a sequence's first label would be predicted by the last token of the one before.
        flat = flat.index_fill(0, sequences.starts(flat.device), IGNORED_LABEL)
    return flat[None]
