"""A whole model run by lengths, head and loss included: each call computes the loss of its sequences.

The losses of the calls are means over labels or over sequences, so their mean weighed by what they count is the loss
of the packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ullage.attention.heads import is_multiple_choice, loss_divides_by_count, works_by_sequence
from ullage.mixers.answers import loss_of_answers
from ullage.mixers.by_lengths import Groups, PackedRow, call_by_lengths, join_outputs
from ullage.mixers.choices import of_one_choice
from ullage.mixers.two_losses import call_with_two_losses, has_two_losses, labels_by_sequence, require_one_loss
from ullage.schema import IGNORED_LABEL

#: Fields that hold one entry per sequence, whatever their shape.
_SEQUENCE_FIELDS = frozenset({"start_positions", "end_positions", "next_sentence_label", "sentence_order_label"})


def call_whole(model: nn.Module, own: Callable[..., Any], row: PackedRow, keywords: dict[str, Any]) -> Any:
    """Outputs of a packed call of a model that runs by lengths as a whole: [1, T, ...] by token, [N, ...] by sequence.

    Args:
        model: whose class tells what its head returns.
        own: its forward, of sequences in rows.
        row: the packed row.
        keywords: of the call, without lengths and masks.

    Waits for the device where there are labels. Raises ``InputError`` for a field that is neither by token nor by
    sequence.
    """
    by_sequence = works_by_sequence(model)
    if has_two_losses(model, keywords):
        return call_with_two_losses(model, own, row, keywords)
    if not by_sequence:
        require_one_loss(model, labels_by_sequence(keywords, row))
    config = getattr(model, "config", None)
    if is_multiple_choice(model):
        own = of_one_choice(own)
    # Heads that look for a sequence's last token take one sequence at a time where padding has no id.
    alone = by_sequence and getattr(config, "pad_token_id", None) is None
    groups = row.one_by_one if alone else row.alike
    # Each call gives a mean, which is weighed below.
    num_items = keywords.pop("num_items_in_batch", None)
    fields = _SEQUENCE_FIELDS | ({"labels"} if by_sequence else frozenset())
    outputs = call_by_lengths(own, groups, (), keywords, per_sequence=fields)
    joined = join_outputs(outputs, groups, per_sequence=frozenset({"logits"} if by_sequence else ()))
    losses = [_loss_of(each) for each in outputs]
    if losses[0] is None:
        return joined
    counts = _counts(keywords.get("labels"), groups, by_sequence=by_sequence)
    loss = loss_of_answers(model, outputs, groups, keywords)
    if loss is None:
        loss = _weighted(losses, counts)
    if num_items is not None and loss_divides_by_count(model):
        loss = loss * (sum(counts) / num_items)
    if isinstance(joined, tuple):
        return (loss, *joined[1:])
    joined["loss"] = loss
    return type(joined)(**{name: joined[name] for name in outputs[0] if name in joined})


def _loss_of(outputs: Any) -> Tensor | None:
    first = outputs.get("loss") if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else None
    return first if isinstance(first, Tensor) and first.ndim == 0 else None


def _counts(labels: Any, groups: Groups, *, by_sequence: bool) -> list[int]:
    """How much the mean of each call counts: its labels that are not -100, or its sequences where labels are values."""
    calls = groups.sources if groups.targets is None else groups.targets
    if isinstance(labels, Tensor) and not by_sequence and tuple(labels.shape[:2]) == (1, calls.num_slots):
        is_label = labels[0] != IGNORED_LABEL
        return [int(part.sum()) for part in calls.cut(is_label.reshape(calls.num_slots, -1).any(1).long())]
    if isinstance(labels, Tensor) and by_sequence and labels.ndim == 1 and not labels.is_floating_point():
        is_label = (labels != IGNORED_LABEL).cpu()
        return [int(is_label[torch.as_tensor(part)].sum()) for part in groups.members]
    return [len(part) for part in groups.members]


def _weighted(losses: Sequence[Any], weights: Sequence[int]) -> Tensor:
    """The mean of losses by weight. A loss of weight 0 does not count, not even as nan."""
    counted = [loss * (weight / sum(weights)) for loss, weight in zip(losses, weights) if weight]
    return torch.stack(counted).sum() if counted else losses[0]
