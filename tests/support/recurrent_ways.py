"""The ways into a recurrent model, for tests: each makes a model's keywords of samples, padding poisoned.

A way gives the keywords, and how to find the real tokens' values [T, ...] in what the model puts out by token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ullage
from ullage.attention.releases import CACHE

Samples = list[dict[str, Tensor]]
Way = tuple[dict[str, Any], Callable[[Any], Tensor]]
#: Logits of the real tokens [T, ...] or sequences, the loss, and the gradients by name.
Result = tuple[Tensor, Tensor, dict[str, Tensor]]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients by name; the model has none afterwards."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_gives(model: Any, way: Way, expected: Result, tolerance: float, name: str = "") -> None:
    """Asserts that a training call gives the logits, the loss and every gradient of ``expected``, and no state."""
    logits, loss, wanted = expected
    keywords, real = way
    outputs = model(**keywords)
    outputs.loss.backward()
    found = gradients(model)
    assert torch.allclose(real(outputs.logits), logits, rtol=0, atol=tolerance), name
    assert abs(float(outputs.loss.detach() - loss)) < tolerance, name
    assert outputs.get(CACHE) is None
    assert found.keys() == wanted.keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in wanted.items():
        assert torch.allclose(found[parameter], gradient, rtol=0, atol=tolerance), (name, parameter)


def padded(samples: Samples, side: str, poison: int) -> tuple[dict[str, Tensor], Tensor]:
    """Padded rows whose padding holds ``poison``, labels' too, and the mask as booleans."""
    rows = ullage.RaggedBatch.from_samples(samples).to_padded(padding_value=poison, side=side)
    mask = rows["attention_mask"].bool()
    if rows["labels"].shape == mask.shape:
        rows["labels"] = rows["labels"].masked_fill(~mask, poison)
    return rows, mask


def _flat_keywords(batch: ullage.RaggedBatch) -> dict[str, Any]:
    """Every label kept: a loss that shifts leaves out each sequence's first by itself."""
    labels = batch["labels"] if "labels" in batch.per_sequence else batch["labels"][None]
    return {**batch.to_flattened(), "labels": labels}


def _flattened(samples: Samples) -> Way:
    return _flat_keywords(ullage.RaggedBatch.from_samples(samples)), lambda logits: logits[0]


def _flattened_with_host_lengths(samples: Samples) -> Way:
    keywords, real = _flattened(samples)
    return {**keywords, "input_lengths": [len(sample["input_ids"]) for sample in samples]}, real


def _flattened_slots(samples: Samples) -> Way:
    batch = ullage.RaggedBatch.from_samples(samples, pad_to_multiple_of=4)
    index = torch.tensor(batch.layout.token_index())
    lengths = torch.tensor(batch.layout.lengths)
    return {**_flat_keywords(batch), "input_lengths": lengths}, lambda logits: logits[0, index]


def _flattened_slots_told_by_positions(samples: Samples) -> Way:
    """Nothing beside the keywords that every padding-free model takes; what lies in the padding is poisoned."""
    batch = ullage.RaggedBatch.from_samples(samples, pad_to_multiple_of=4)
    index = torch.tensor(batch.layout.token_index())
    padding = torch.ones(batch.layout.size, dtype=torch.bool).index_fill(0, index, False)
    keywords = _flat_keywords(batch)
    keywords["input_ids"] = keywords["input_ids"].masked_fill(padding, 11)
    return keywords, lambda logits: logits[0, index]


def _positions(samples: Samples) -> Way:
    flat, real = _flattened(samples)
    return {name: flat[name] for name in ("input_ids", "labels", "position_ids")}, real


def _masked(side: str) -> Callable[[Samples], Way]:
    def way(samples: Samples) -> Way:
        rows, mask = padded(samples, side, poison=11)
        return rows, lambda logits: logits[mask]

    return way


def _lengths(as_tensor: bool) -> Callable[[Samples], Way]:
    def way(samples: Samples) -> Way:
        rows, mask = padded(samples, "right", poison=7)
        lengths = [len(sample["input_ids"]) for sample in samples]
        del rows["attention_mask"]
        return {**rows, "input_lengths": torch.tensor(lengths) if as_tensor else lengths}, lambda logits: logits[mask]

    return way


def _packed_sequence(samples: Samples) -> Way:
    batch = ullage.RaggedBatch.from_samples(samples)
    whole = "labels" in batch.per_sequence
    labels = batch["labels"] if whole else batch.to_packed_sequence("labels")

    def real(logits: Any) -> Tensor:
        return ullage.RaggedBatch.from_packed_sequence(logits, "logits")["logits"]

    return {"input_ids": batch.to_packed_sequence("input_ids"), "labels": labels}, real


WAYS: dict[str, Callable[[Samples], Way]] = {
    "flattened": _flattened,
    "flattened, lengths on the host": _flattened_with_host_lengths,
    "flattened, slots of 4": _flattened_slots,
    "flattened, slots of 4 told by positions": _flattened_slots_told_by_positions,
    "position_ids": _positions,
    "mask, right": _masked("right"),
    "mask, left": _masked("left"),
    "lengths, list": _lengths(False),
    "lengths, tensor": _lengths(True),
    "PackedSequence": _packed_sequence,
}
