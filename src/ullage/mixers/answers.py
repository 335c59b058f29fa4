"""Heads of question answering on a packed row whose answers lie behind their sequences, in part.

Such a head ignores a place behind the row, and its mean over none is nan. Sequences that share no call would then count
for nothing together, so the loss is computed here from the scores of all calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ullage.attention.heads import loss_author, package_of
from ullage.mixers.by_lengths import Groups

#: The places of an answer, and the scores that they are compared with.
_PLACES = {"start_positions": "start_logits", "end_positions": "end_logits"}


def loss_of_answers(model: nn.Module, outputs: Sequence[Any], groups: Groups, keywords: Mapping[str, Any]) -> Any:
    """The loss of a row in which answers lie behind their sequences; None where none does, and for another head.

    The mean of two means: over the places of starts that lie in their sequences, and over those of ends. Waits for the
    device. Source: ``transformers.loss.loss_utils.ForQuestionAnsweringLoss``.
    """
    found = [keywords.get(name) for name in _PLACES]
    is_known = isinstance(outputs[0], Mapping) and all(name in outputs[0] for name in _PLACES.values())
    if not is_known or any(each is None for each in found) or package_of(loss_author(model)[0]) != "transformers":
        return None
    parts: list[Tensor] = []
    is_behind = False
    for places, scores in zip(found, _PLACES.values()):
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
