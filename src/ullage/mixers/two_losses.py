"""Heads that add a loss per sequence to one per token, as BERT's for pretraining: each part divided by its own number.

Each part is a mean, over labels or over sequences. The sum of the two does not tell them apart, so neither calls nor
microbatches can be weighed by one number: the loss is computed here, from the outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ullage.attention.heads import second_label
from ullage.errors import InputError
from ullage.mixers.by_lengths import PackedRow, call_by_lengths, join_outputs
from ullage.schema import IGNORED_LABEL

#: The keyword of a call with the number of sequences by which the loss per sequence is divided.
NUM_SEQUENCES = "num_sequences_in_batch"


def has_two_losses(model: nn.Module, fields: Any) -> bool:
    """Whether a head of transformers finds both kinds of its labels among the fields of a batch, or the keywords."""
    found = second_label(model)
    return found is not None and all(fields.get(name) is not None for name in ("labels", found[0]))


def call_with_two_losses(model: nn.Module, own: Callable[..., Any], row: PackedRow, keywords: Mapping[str, Any]) -> Any:
    """Outputs of a packed call of a model that :func:`has_two_losses`.

    Each loss is divided by its number of the step, ``num_items_in_batch`` and ``num_sequences_in_batch``, where the
    keywords have it, else by that of the row. The other parameters are those of ``call_whole``.
    """
    found = second_label(model)
    assert found is not None
    (name, output), kept = found, dict(keywords)
    labels = {"prediction_logits": kept.pop("labels"), output: kept.pop(name)}
    divisors = [kept.pop("num_items_in_batch", None), kept.pop(NUM_SEQUENCES, None)]
    joined = join_outputs(call_by_lengths(own, row.alike, (), kept), row.alike)
    is_tuple = isinstance(joined, tuple)
    loss: Any = 0
    for place, (logits, divisor) in enumerate(zip(labels, divisors)):
        scores, wanted = joined[place if is_tuple else logits], labels[logits].flatten()
        total = cross_entropy(scores.flatten(0, -2), wanted, reduction="sum", ignore_index=IGNORED_LABEL)
        loss = loss + total / ((wanted != IGNORED_LABEL).sum().clamp(min=1) if divisor is None else divisor)
    return (loss, *joined) if is_tuple else type(joined)(loss=loss, **joined)


def require_one_loss(model: nn.Module, by_sequence: Iterable[str]) -> None:
    """Raise ``InputError`` for labels by sequence beside ``labels`` by token, where the sum of their losses is unknown.

    ``by_sequence``: the fields of the batch with one entry per sequence; those that ``forward`` names are looked at.
    """
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in by_sequence if "label" in name and name in taken), None)
    if name is not None and (second_label(model) or (None,))[0] != name:
        raise InputError(
            "a loss per sequence beside one per token cannot be packed: each is a mean over another number, and their "
            "sum does not tell them apart",
            where=type(model).__name__,
            expected="labels of one kind, or a head of transformers for pretraining such as BertForPreTraining",
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
