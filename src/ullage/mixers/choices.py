"""Heads of multiple choice on a packed row, in which each choice is a sequence, and those of one question are in order.

Such a head gives every choice a score by itself, and compares the scores of one question. So the choices run by
lengths, as questions of one choice, and the scores are compared here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ullage.attention.heads import is_multiple_choice, loss_author, package_of
from ullage.errors import InputError
from ullage.schema import IGNORED_LABEL

#: The keyword of a packed call with the cumulated numbers of choices of its questions, int32 [questions + 1].
CU_CHOICES = "cu_choices"


def call_choices(model: nn.Module, call: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Outputs of a packed call on questions: ``logits`` [questions, choices], and their loss where there are labels.

    Where questions have unequal numbers of choices, the logits of those that are not there are ``-inf``.

    Args:
        model: whose class names the head.
        call: the packed call of the choices alone, which gives each a score.
        keywords: of the call, with the bounds of the questions, and ``labels`` [questions] if there are any.

    Waits for the device. Raises ``InputError`` for another head, and for bounds that are not those of the row.
    """
    kept = dict(keywords)
    bounds, labels = kept.pop(CU_CHOICES), kept.pop("labels", None)
    kept.pop("num_items_in_batch", None)  # the loss is a mean, whoever asked weighs it
    require_multiple_choice(model)
    outputs = call(kept)
    is_tuple = isinstance(outputs, tuple)
    logits = by_question(outputs[0] if is_tuple else outputs["logits"], bounds)
    # As in a head of transformers; a mean over no labels is left to whoever weighs it.
    loss = None if labels is None else cross_entropy(logits, labels, ignore_index=IGNORED_LABEL)
    if is_tuple:
        return (logits, *outputs[1:]) if loss is None else (loss, logits, *outputs[1:])
    return type(outputs)(**{**outputs, "loss": loss, "logits": logits})


def by_question(scores: Tensor, bounds: Tensor) -> Tensor:
    """Scores [choices, 1] as [questions, most choices], ``-inf`` where a question has fewer."""
    numbers = bounds.diff().to(scores.device)
    if scores.shape != (int(bounds[-1]), 1) or bool((numbers < 1).any()):
        raise InputError(
            f"{CU_CHOICES} does not bound the choices of a packed row",
            expected=f"integers that rise from 0 to {len(scores)}, the number of its sequences",
            found=bounds.tolist()[:8],
        )
    is_there = torch.arange(int(numbers.max()), device=scores.device) < numbers[:, None]
    return scores.new_full(is_there.shape, -torch.inf).masked_scatter(is_there, scores[:, 0])


def of_one_choice(own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a head of multiple choice for rows [n, L], each a question with one choice."""

    def forward(**keywords: Any) -> Any:
        return own(**{
            name: value.unsqueeze(1) if isinstance(value, Tensor) and value.ndim > 1 else value
            for name, value in keywords.items()
        })  # fmt: skip

    return forward


def require_multiple_choice(model: nn.Module) -> None:
    """Raise ``InputError`` for a model whose head does not score choices as those of transformers do."""
    if not is_multiple_choice(model) or package_of(loss_author(model)[0]) != "transformers":
        raise InputError(
            "questions with several choices are packed for the heads of multiple choice of transformers only",
            where=type(model).__name__,
            expected="a model such as BertForMultipleChoice",
            found="samples of several sequences each",
            hint="leave packing out, or give each sequence as a sample of its own",
        )
