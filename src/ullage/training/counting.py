"""What a batch holds, counted in real elements: tokens of the input, labels that a loss counts, ids in the vocabulary.

Everything here looks at a batch as the dataloader gave it, on the host, before it moves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ullage.batch import RaggedBatch
from ullage.columns import IGNORED_LABEL
from ullage.errors import InputError


def num_tokens(inputs: Any, main_input: str) -> int:
    """Real tokens of a batch: what is neither padding nor masked. 0 if the main input is absent."""
    if isinstance(inputs, RaggedBatch):
        return inputs.numel()
    value = inputs.get(main_input) if isinstance(inputs, Mapping) else inputs
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes.sum())
    if not isinstance(value, Tensor):
        return 0
    if value.is_nested:
        return value.values().shape[0] if value.layout == torch.jagged else sum(len(row) for row in value.unbind())
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return int((mask != 0).sum())
        lengths = inputs.get("input_lengths")
        if lengths is not None:
            return int(sum(int(length) for length in lengths))
    return value.numel()


def num_padded_tokens(inputs: Any, main_input: str) -> int:
    """What the same batch takes when padded to its longest sequence."""
    if isinstance(inputs, RaggedBatch):
        return inputs.layout.num_items * inputs.max_length
    value = inputs.get(main_input) if isinstance(inputs, Mapping) else inputs
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]) * len(value.batch_sizes)
    if isinstance(value, Tensor) and value.is_nested:
        lengths = [len(row) for row in value.unbind()]
        return len(lengths) * max(lengths, default=0)
    return value.numel() if isinstance(value, Tensor) else 0


def label_elements(inputs: Any, name: str, *, shifts: bool | None, flattened: bool = True) -> Tensor | None:
    """The label elements that a loss can count, as one flat tensor, -100 still in it; None if there are no labels.

    Labels of a ``PackedSequence`` or a nested tensor are taken as they are. Padded labels lose their first column if
    the loss ``shifts`` (None: not known). Those of a :class:`RaggedBatch` lose the first of each sequence where the
    model sees them without: if the loss shifts, and in ``flattened`` form unless it is known not to.
    """
    labels = inputs.get(name) if hasattr(inputs, "get") else None
    shifted = inputs.get("shift_labels") if name == "labels" and hasattr(inputs, "get") else None
    if isinstance(shifted, Tensor):
        return shifted.flatten()
    if isinstance(labels, PackedSequence):
        return labels.data.flatten()
    if not isinstance(labels, Tensor):
        return None
    if labels.is_nested:
        return torch.cat([row.flatten() for row in labels.unbind()])
    if isinstance(inputs, RaggedBatch):
        if name in inputs.per_sequence or name != "labels" or not (shifts or (flattened and shifts is None)):
            return labels.flatten()
        return inputs.to_flattened()["labels"].flatten()
    return (labels[..., 1:] if shifts and labels.ndim >= 2 else labels).flatten()


def count_labels(elements: Tensor) -> Tensor:
    """How many of them are not -100, int64 on their device. Does not wait for it."""
    return (elements != IGNORED_LABEL).sum()


def check_vocabulary(inputs: Any, name: str, vocab_size: int) -> None:
    """Raises ``InputError`` for an id outside ``[0, vocab_size)``, with its sample in the batch and its position.

    Reads the ids where they lie; host tensors do not wait for a device.
    """
    value = inputs.get(name) if hasattr(inputs, "get") else None
    ids = value.data if isinstance(value, PackedSequence) else value
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested or ids.numel() == 0:
        return
    low, high = ids.aminmax()
    if int(low) >= 0 and int(high) < vocab_size:
        return
    if isinstance(value, PackedSequence):
        samples = [sample["ids"] for sample in RaggedBatch.from_packed_sequence(value, "ids").samples()]
    elif isinstance(inputs, RaggedBatch):
        samples = [sample[name] for sample in inputs.samples()]
    else:
        samples = list(ids)
    for i, sample in enumerate(samples):
        bad = ((sample < 0) | (sample >= vocab_size)).flatten().nonzero()
        if len(bad):
            position = int(bad[0])
            raise InputError(
                "a token id is outside the vocabulary",
                where=f"sample {i} of the batch, {name} at position {position}",
                expected=f"0 to {vocab_size - 1}",
                found=int(sample.flatten()[position]),
                hint="tokenize with the model's own tokenizer, or give the model a larger vocab_size",
            )


class TokenMeter:
    """What went through the model since the last log, on this rank: real tokens, what they take, and FLOPs."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.real = self.taken = 0
        self.flops = 0.0
        self.imbalances: list[float] = []
        self.since = time.perf_counter()

    def add(self, real: int, taken: int) -> None:
        """Counts a batch: its real tokens, and what it takes in memory or would take when padded."""
        self.real += real
        self.taken += taken

    def add_plan(self, imbalance: float, flops: float) -> None:
        """Counts what a plan leaves between ranks, and this rank's FLOPs of it."""
        self.imbalances.append(imbalance)
        self.flops += flops

    def rates(self, accelerator: Any, device: torch.device) -> dict[str, float]:
        """Per second and over all ranks; empty if nothing was counted. One small reduction; starts anew."""
        sums = torch.tensor([self.real, self.taken, self.flops], device=device, dtype=torch.float64)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, "sum")
        real, taken, flops = sums.tolist()
        seconds, imbalances = time.perf_counter() - self.since, self.imbalances
        self._reset()
        if real == 0:
            return {}
        rates = {"tokens_per_second": round(real / seconds, 1), "ullage": round(1 - real / taken, 4)}
        if imbalances:
            rates |= {"imbalance": round(sum(imbalances) / len(imbalances), 4), "flops_per_second": flops / seconds}
        return rates
