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
class _Batch:
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_samples: int = 0
    entries: dict[str, list[Any]] = field(default_factory=lambda: {"predictions": [], "labels": [], "inputs": []})


@dataclass
class Record:
    """What this rank has seen, batch by batch: mean losses with their counts; predictions, labels, inputs by sample."""

    batches: list[_Batch] = field(default_factory=list)
    has_loss: bool = False
    ragged: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Starts a batch of the dataset; what follows belongs to it."""
        self.batches.append(_Batch())

    def add(self, num_samples: int, loss: Tensor | None, count: Tensor | None) -> None:
        """Counts samples, and a loss that is a mean over ``count`` label elements."""
        self.batches[-1].num_samples += num_samples
        if loss is not None:
            self.has_loss = True
            self.batches[-1].losses.append((loss, torch.tensor(num_samples) if count is None else count))

    def keep(self, name: str, entries: list[Any], ragged: bool) -> None:
        """Adds entries to ``predictions``, ``labels`` or ``inputs``, as arrays on the host."""
        self.batches[-1].entries[name].extend(_as_array(entry) for entry in entries)
        if ragged:
            self.ragged.add(name)

    def cut(self, num_real: int) -> None:
        """Forgets the batches that were repetitions."""
        del self.batches[num_real:]

    def totals(self) -> Tensor:
        """Σ loss · n, Σ n and the number of samples, float64 [3] on the host; n = 0 counts nothing. Waits."""
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in self.batches:
            totals[2] += batch.num_samples
            for loss, count in batch.losses:
                n = float(count)
                if n > 0:
                    totals[:2] += torch.tensor([float(loss) * n, n], dtype=torch.float64)
        return totals

    def gathered(self, name: str, gather: Callable[[list[Any]], list[Any]], world: int) -> Any:
        """All entries of a kind in the order of the dataset; None if there are none.

        One array [N, ...] if every entry is one a sequence and of one shape, else a list of N arrays.
        """
        mine = [([batch.entries[name] for batch in self.batches], name in self.ragged)]
        ranks = gather(mine) if world > 1 else mine
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
