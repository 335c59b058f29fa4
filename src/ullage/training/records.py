"""What evaluation keeps: a mean loss with its count for each batch, and predictions and labels sample by sample.

Losses are means over the label elements that count, so Σ loss · n / Σ n is the same at every batch size. Sums are
float64 and reduced over ranks once. Predictions are put back in the order of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.errors import InputError


@dataclass
class Record:
    """What this rank has seen: a mean loss with its count, and predictions, labels and inputs by sample."""

    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    has_loss: bool = False
    samples: list[int] = field(default_factory=list)
    predictions: list[list[Any]] = field(default_factory=list)
    labels: list[list[Any]] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)
    ragged: set[str] = field(default_factory=set)

    def keep(self, name: str, entries: list[Any], ragged: bool) -> None:
        """Adds a batch's entries to ``predictions``, ``labels`` or ``inputs``, as arrays on the host."""
        getattr(self, name).append([_as_array(entry) for entry in entries])
        if ragged:
            self.ragged.add(name)

    def cut(self, num_real: int) -> None:
        """Forgets the batches that were repetitions; whether the model gives a loss they have told all the same."""
        self.has_loss = bool(self.losses)
        for kept in (self.losses, self.samples, self.predictions, self.labels, self.inputs):
            del kept[num_real:]

    def loss_and_count(self, device: torch.device) -> Tensor:
        """Σ loss · n, Σ n and the number of samples, float64 [3] on ``device``; n = 0 counts nothing."""
        totals = torch.zeros(3, dtype=torch.float64)
        for loss, count in self.losses:
            n = float(count)
            if n > 0:
                totals += torch.tensor([float(loss) * n, n, 0.0], dtype=torch.float64)
        totals[2] = sum(self.samples)
        return totals.to(device)

    def gathered(self, name: str, gather: Callable[[list[Any]], list[Any]], world: int) -> Any:
        """All entries of a kind in the order of the dataset; None if there are none.

        One array [N, ...] if every entry is one a sequence and of one shape, else a list of N arrays.
        """
        by_rank = gather([(getattr(self, name), name in self.ragged)]) if world > 1 else None
        ranks = by_rank if by_rank is not None else [(getattr(self, name), name in self.ragged)]
        entries: list[Any] = []
        for k in range(max(len(batches) for batches, _ in ranks)):
            for batches, _ in ranks:
                entries.extend(batches[k] if k < len(batches) else [])
        if not entries:
            return None
        ragged = any(flag for _, flag in ranks)
        if isinstance(entries[0], tuple):
            return tuple(_combined([entry[k] for entry in entries], ragged) for k in range(len(entries[0])))
        return _combined(entries, ragged)


def _as_array(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(_as_array(part) for part in entry)
    if isinstance(entry, Tensor):
        entry = entry.detach().cpu()
        return (entry.float() if entry.dtype == torch.bfloat16 else entry).numpy()
    return np.asarray(entry)


def _combined(entries: list[np.ndarray], ragged: bool) -> Any:
    return entries if ragged or any(entry.shape != entries[0].shape for entry in entries) else np.stack(entries)


def missing_labels(label_names: list[str], parameters: list[str], fields: list[str], main_input: str) -> InputError:
    """Why ``evaluate()`` can compute no loss: which parameter is at fault, and which ``label_names`` to set."""
    absent = [name for name in label_names if name not in fields]
    present = [name for name in label_names if name in fields]
    if label_names and absent:
        return InputError(
            "evaluate() would report no loss: a parameter of forward is taken for labels and is not in the batch",
            where=", ".join(absent),
            expected=f"all of {label_names}, because their names contain 'label'",
            found=f"a batch of {fields}",
            hint=f"set label_names={present or ['<your labels>']} in TrainingArguments",
        )
    known = {main_input, "attention_mask", "input_lengths", "lengths", "position_ids", "token_type_ids"}
    named = [name for name in parameters[1:] if name in fields and name not in known]
    candidates = named or [name for name in fields if name not in known and name != next(iter(parameters), None)]
    return InputError(
        "evaluate() would report no loss: no parameter of forward is recognised as labels",
        where=f"forward({', '.join(parameters)})",
        expected="a parameter whose name contains 'label'",
        found=f"a batch of {fields}",
        hint=f"set label_names={candidates[:1] or ['<your labels>']} in TrainingArguments",
    )
