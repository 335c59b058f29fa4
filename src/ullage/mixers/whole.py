"""A whole model run by lengths, head and loss included: each call computes the loss of its sequences.

The losses of the calls are means over labels or over sequences, so their mean weighed by what they count is the loss
of the packed row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ullage.attention.heads import (
    loss_author,
    loss_divides_by_count,
    package_of,
    works_by_sequence,
)
from ullage.errors import InputError
from ullage.mixers.by_lengths import Groups, PackedRow, call_by_lengths, join_outputs
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
    if not by_sequence:
        require_one_loss(model, labels_by_sequence(keywords, row))
    config = getattr(model, "config", None)
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
    """The mean of losses by weight: losses 2 and 5 of 3 labels and 1 are 2.75. One of weight 0 may even be nan."""
    counted = [loss * (weight / sum(weights)) for loss, weight in zip(losses, weights) if weight]
    return torch.stack(counted).sum() if counted else losses[0]


# Heads of question answering on a packed row whose answers lie behind their sequences, in part.
#
# Such a head ignores a place behind the row, and its mean over none is nan. Sequences that share no call would then
# count for nothing together, so the loss is computed here from the scores of all calls.


#: The places of an answer, and the scores that they are compared with.
_PLACES = {"start_positions": "start_logits", "end_positions": "end_logits"}


def loss_of_answers(model: nn.Module, outputs: Sequence[Any], groups: Groups, keywords: Mapping[str, Any]) -> Any:
    """The loss of a row in which answers lie behind their sequences; None where none does, and for another head.

    The mean of two means: over the places of starts that lie in their sequences, and over those of ends. Waits for the
    device. Source: ``transformers.loss.loss_utils.ForQuestionAnsweringLoss``.
    """
    answers = [keywords.get(name) for name in _PLACES]
    is_known = isinstance(outputs[0], Mapping) and all(name in outputs[0] for name in _PLACES.values())
    if not is_known or any(each is None for each in answers) or package_of(loss_author(model)[0]) != "transformers":
        return None
    parts: list[Tensor] = []
    is_behind = False
    for places, scores in zip(answers, _PLACES.values()):
        assert isinstance(places, Tensor)
        total: Any = 0
        number: Any = 0
        for output, part in zip(outputs, groups.select(places.reshape(-1))):
            width = output[scores].shape[1]
            wanted = part.clamp(0, width)
            total = total + cross_entropy(output[scores], wanted, ignore_index=width, reduction="sum")
            number = number + (wanted < width).sum()
        is_behind = is_behind or int(number) < sum(len(part) for part in groups.members)
        parts.append(total / torch.as_tensor(number).clamp(min=1))
    return torch.stack(parts).mean() if is_behind else None


# Labels by sequence beside labels by token.


def require_one_loss(model: nn.Module, by_sequence: Iterable[str]) -> None:
    """Raise ``InputError`` for labels by sequence beside ``labels`` by token, where the sum of their losses is unknown.

    ``by_sequence``: the fields of the batch with one entry per sequence; those that ``forward`` names are looked at.
    """
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in by_sequence if "label" in name and name in taken), None)
    if name is not None:
        raise InputError(
            "a loss per sequence beside one per token cannot be packed: each is a mean over another number, and their "
            "sum does not tell them apart",
            where=type(model).__name__,
            expected="labels of one kind",
            found=f"labels by token, and {name} by sequence",
            hint=f"leave {name} or packing out",
        )


def labels_by_sequence(keywords: Mapping[str, Any], row: PackedRow) -> list[str]:
    """The keywords of a packed call with one entry per sequence, beside ``labels`` by token; none without those."""
    labels = keywords.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.shape[0] != 1 or labels.shape[1] == len(row):
        return []
    tensors = {name: value for name, value in keywords.items() if isinstance(value, Tensor) and value.ndim}
    return [name for name, value in tensors.items() if value.shape[0] == len(row) and value.ndim == 1]
