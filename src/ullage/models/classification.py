"""Recurrent classifiers: of whole sequences, and of each of their tokens.

Pooling, head and loss run on tokens only. Losses are divided by ``num_items_in_batch`` where a Trainer gives it, for
every kind of problem, so that a step's loss does not depend on how it was cut into batches.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from ullage.attention.releases import CACHE, with_cache
from ullage.core.errors import InputError
from ullage.models.configuration import RecurrentConfig
from ullage.models.modeling import RecurrentModel, RecurrentPreTrainedModel
from ullage.models.sequences import RaggedInputs, Rows, Sequences, takes_ragged_inputs
from ullage.models.state import RecurrentState

# Pooling of the hidden states of each sequence's own tokens, which lie end to end, to one vector per sequence.


class Pooling(nn.Module):
    """Hidden states [T, D] of tokens to one row per sequence [n, D], by ``config.pooling``.

    *last*: the state after the last token; in a bidirectional model the last one of each direction, which for the
    backward one is at the first token. *mean*: over the tokens. *attention*: a mean weighted by the softmax, over the
    sequence, of a learned score (Yang et al., "Hierarchical Attention Networks", 2016).
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.kind = config.pooling
        self.hidden_size = config.hidden_size
        width = config.hidden_size * (2 if config.bidirectional else 1)
        if self.kind == "attention":
            self.project = nn.Linear(width, width)
            self.score = nn.Linear(width, 1, bias=False)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Hidden states [T, D] to [n, D]. Does not wait for the device.

        Raises ``InputError`` for a sequence without tokens.
        """
        if self.kind == "last":
            last = hidden.index_select(0, sequences.ends(hidden.device))
            if hidden.shape[1] == self.hidden_size:
                return last
            first = hidden.index_select(0, sequences.starts(hidden.device))
            return torch.cat([last[:, : self.hidden_size], first[:, self.hidden_size :]], 1)
        items = sequences.items(hidden.device)
        if self.kind == "mean":
            return _sums(hidden, items, sequences.num_sequences) / _sums(
                torch.ones_like(hidden[:, :1]), items, sequences.num_sequences
            )
        # A softmax over each sequence, less its highest score so that nothing overflows.
        scores = self.score(torch.tanh(self.project(hidden)))
        highest = scores.new_full((sequences.num_sequences, 1), -torch.inf)
        # The highest score only shifts the exponents and cancels out, so it needs no gradient.
        highest = highest.scatter_reduce(0, items[:, None], scores.detach(), "amax")
        weights = (scores - highest.index_select(0, items)).exp()
        weights = weights / _sums(weights, items, sequences.num_sequences).index_select(0, items)
        return _sums(hidden * weights, items, sequences.num_sequences)


def _sums(values: Tensor, items: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, values.shape[1]).index_add(0, items, values)


class RecurrentForSequenceClassification(RecurrentPreTrainedModel):
    """Classification or regression of sequences, by ``config.num_labels`` and ``config.problem_type``."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RecurrentModel(config)
        self.pooling = Pooling(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = nn.Linear(config.hidden_size * (2 if config.bidirectional else 1), cast(int, config.num_labels))
        self.loss_function = sequence_loss
        self.post_init()

    @can_return_tuple
    @takes_ragged_inputs
    def forward(
        self,
        inputs: RaggedInputs,
        *,
        labels: Tensor | None = None,
        cache: RecurrentState | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Logits [n, num_labels], one row per sequence in the order given; the loss if there are labels.

        Args:
            inputs: the keywords of :class:`RaggedInputs`
            labels: classes [n] (-100 does not count), numbers [n] or [n, num_labels] for regression, or 0 and 1 [n,
                num_labels] for several labels at once; ``config.problem_type`` says which, else the first labels seen
            cache: the states to go on from
            use_cache: return the final states
            output_hidden_states: also return the embeddings and the output of each layer

        Waits for the device and raises ``InputError`` as :meth:`RecurrentModel.forward`.
        """
        sequences, outputs = self.run_backbone(
            inputs, cache=cache, use_cache=bool(use_cache), output_hidden_states=output_hidden_states
        )
        pooled = self.pooling(cast(Tensor, outputs.last_hidden_state)[0], sequences)
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            if labels.ndim == 0 or labels.shape[0] != sequences.num_sequences:
                raise InputError(
                    "labels and sequences disagree",
                    expected=f"{sequences.num_sequences} labels, one per sequence",
                    found=f"shape {list(labels.shape)}",
                )
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return with_cache(
            SequenceClassifierOutputWithPast,
            getattr(outputs, CACHE),
            loss=loss,
            logits=logits,
            hidden_states=sequences.unflatten_states(outputs.hidden_states),
        )


class RecurrentForTokenClassification(RecurrentPreTrainedModel):
    """Classification of tokens, by ``config.num_labels``."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RecurrentModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = nn.Linear(config.hidden_size * (2 if config.bidirectional else 1), cast(int, config.num_labels))
        self.loss_function = token_loss
        self.post_init()

    @can_return_tuple
    @takes_ragged_inputs
    def forward(
        self,
        inputs: RaggedInputs,
        *,
        labels: Rows | None = None,
        cache: RecurrentState | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits [N, L, num_labels] of the tokens in rows [N, L], zeros in the padding; the loss if there are labels.

        Args:
            inputs: the keywords of :class:`RaggedInputs`; logits of a ``PackedSequence`` are one too
            labels: [N, L], each under its own token; -100 does not count, nor does padding
            cache: the states to go on from
            output_hidden_states: also return the embeddings and the output of each layer

        ``batch.to_flattened()`` blanks each sequence's first label, for losses that shift: give
        ``labels=batch["labels"][None]`` beside it (the Trainer does). Waits for the device and raises ``InputError`` as
        :meth:`RecurrentModel.forward`.
        """
        sequences, outputs = self.run_backbone(
            inputs, cache=cache, use_cache=False, output_hidden_states=output_hidden_states
        )
        logits = self.score(self.dropout(cast(Tensor, outputs.last_hidden_state)[0]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, sequences.flatten_labels(labels), self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss,
            logits=cast(Any, sequences.unflatten(logits)),
            hidden_states=sequences.unflatten_states(outputs.hidden_states),
        )


def sequence_loss(
    labels: Tensor,
    pooled_logits: Tensor,
    config: RecurrentConfig,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Loss of sequence classifiers: a mean, or a sum divided by ``num_items_in_batch``.

    Args:
        labels: classes [n], or numbers [n] or [n, num_labels]
        pooled_logits: [n, num_labels]
        config: ``problem_type``, set here from the first labels where it is ``None``, and ``num_labels``
        num_items_in_batch: divisor of the sum over labels

    Kinds of problem are told apart as in transformers, by the same words; unlike its own losses, those of regression
    and of several labels are divided by the count too. float64 stays float64. Raises ``InputError`` for labels of
    another shape.
    """
    if config.problem_type is None:
        if config.num_labels == 1:
            config.problem_type = "regression"
        else:
            whole = not labels.is_floating_point()
            config.problem_type = "single_label_classification" if whole else "multi_label_classification"
    labels = labels.to(pooled_logits.device)
    counted = cast(Any, num_items_in_batch)
    if config.problem_type == "single_label_classification":
        if labels.numel() != len(pooled_logits):
            raise _shape_error(labels, f"[{len(pooled_logits)}] classes")
        return fixed_cross_entropy(_precise(pooled_logits), labels.view(-1), counted, **kwargs)
    # Labels [n] of a single output stand against logits [n, 1].
    scores = pooled_logits.view(-1) if labels.ndim == 1 and config.num_labels == 1 else pooled_logits
    if labels.shape != scores.shape:
        raise _shape_error(labels, list(scores.shape))
    scores, labels = _precise(scores), labels.to(_precise(scores).dtype)
    loss = mse_loss if config.problem_type == "regression" else binary_cross_entropy_with_logits
    if counted is None:
        return loss(scores, labels)
    return loss(scores, labels, reduction="sum") / counted


def token_loss(
    logits: Tensor,
    labels: Tensor,
    config: RecurrentConfig,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Cross-entropy of logits [T, num_labels] and labels [T]: a mean, or a sum over ``num_items_in_batch``."""
    return fixed_cross_entropy(_precise(logits), labels.to(logits.device), cast(Any, num_items_in_batch), **kwargs)


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _shape_error(labels: Tensor, expected: object) -> InputError:
    found = f"{str(labels.dtype)[6:]} of shape {list(labels.shape)}"
    hint = "config.problem_type says whether labels are classes, numbers, or several 0 and 1"
    return InputError("labels and logits disagree", expected=expected, found=found, hint=hint)
