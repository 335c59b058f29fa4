"""Records of an evaluation: a mean loss with its count for each batch, and predictions and labels.

Losses are means over the label elements that count, so Σ loss · n / Σ n is the same at every batch size. Sums are
float64 and reduced over ranks once. Predictions are put back in the order of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.errors import InputError
from ullage.training.padded_rows import concatenated
from ullage.training.trl.metrics import Taken

#: Whether an entry has one value per token; a tuple or dict of such where the entry is a tuple or dict.
Ragged = Any
#: Parts in which ranks send what they kept.
_ROUNDS = 64


@dataclass
class _Batch:
    # Of one batch of the dataset: (mean, number of elements it is over) of each microbatch, samples of all of them, by
    # kind one array per sample, and what the trainer's own loss appended to its metrics.
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_samples: int = 0
    entries: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[Taken] = field(default_factory=list)


@dataclass
class Record:
    """Results of this rank: mean losses with their counts by batch; predictions, labels and inputs by sample.

    Attributes:
        batches: in the order in which they were begun.
        in_rows: what is kept are rows of batches [n, ...] (:meth:`keep_rows`), not arrays by sample (:meth:`keep`).
        has_loss: whether any batch had a loss.
        ragged: by kind of entry, whether its parts have one value per token.
    """

    batches: list[_Batch] = field(default_factory=list)
    in_rows: bool = False
    has_loss: bool = False
    ragged: dict[str, Ragged] = field(default_factory=dict)

    def begin(self) -> None:
        """Start a batch of the dataset; what follows belongs to it."""
        self.batches.append(_Batch())

    def add(self, num_samples: int, loss: Tensor | None, count: Tensor | None) -> None:
        """Count samples, and a loss that is a mean over ``count`` label elements."""
        self.batches[-1].num_samples += num_samples
        if loss is not None:
            self.has_loss = True
            self.batches[-1].losses.append((loss, torch.tensor(num_samples) if count is None else count))

    def keep(self, name: str, entries: list[Any], ragged: Ragged) -> None:
        """Add entries to ``predictions``, ``labels``, ``inputs`` or ``losses``, as arrays on the host."""
        self.batches[-1].entries.setdefault(name, []).extend(_as_array(entry) for entry in entries)
        self.ragged[name] = _either(self.ragged.get(name), ragged)

    def keep_rows(self, name: str, rows: Any) -> None:
        """Add the rows of a batch [n, ...], as arrays on the host; tuples and dicts of such."""
        self.batches[-1].entries.setdefault(name, []).append(_as_array(rows))

    def cut(self, num_real: int) -> None:
        """Drop all batches after the first ``num_real``: they repeated samples to keep the ranks in step."""
        del self.batches[num_real:]

    def totals(self) -> Tensor:
        """Σ loss · n, Σ n and the number of samples, float64 [3] on the host; n = 0 counts nothing. Waits."""
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in self.batches:
            totals[2] += batch.num_samples
            for loss, count in batch.losses:
                # nan times zero is nan, so a mean over no labels is left out, not weighed by zero.
                n = float(count)
                if n > 0:
                    totals[:2] += torch.tensor([float(loss) * n, n], dtype=torch.float64)
        return totals

    def metrics(self) -> list[Taken]:
        """What the trainer's own loss appended to its metrics, call by call."""
        return [call for batch in self.batches for call in batch.metrics]

    def of_batch(self, name: str) -> tuple[list[Any], Ragged]:
        """The entries of a kind in the batch that was begun last, and which of their parts are ragged."""
        return self.batches[-1].entries.get(name, []), self.ragged.get(name)

    def forget_batch(self) -> None:
        """Drop the entries of the batch that was begun last; its losses stay."""
        self.batches[-1].entries.clear()

    def gathered(
        self, name: str, gather: Callable[[list[Any]], list[Any]], world: int, *, concatenate: bool = True
    ) -> Any:
        """All entries of a kind in the order of the dataset, as :meth:`combined` gives them; None if there are none.

        Without ``concatenate``, a list with one such result per step, each of all ranks' batches. Collective for
        ``world > 1``. The entries are given away.
        """
        if world == 1:
            steps = [[self._give(batch, name)] for batch in self.batches]
        else:
            # Each rank sends what it has batch by batch, a few at a time, so that no rank holds all of it twice. Batch
            # b belongs to rank b mod world: the k-th batches of all ranks, in rank order, follow one another.
            rounds = max(gather([len(self.batches)]))
            each = max(1, rounds // _ROUNDS)
            steps = []
            for first in range(0, rounds, each):
                ranks = gather([[self._give(batch, name) for batch in self.batches[first : first + each]]])
                steps += [[held[k] for held in ranks if k < len(held)] for k in range(max(map(len, ranks)))]
        if concatenate:
            parts = [part for step in steps for part in step]
            steps.clear()
            return self.combined(parts)
        return [one for one in map(self.combined, steps) if one is not None] or None

    def _give(self, batch: _Batch, name: str) -> tuple[list[Any], Ragged]:
        return batch.entries.pop(name, []), self.ragged.get(name)

    def combined(self, parts: list[tuple[list[Any], Ragged]]) -> Any:
        """Entries of several batches as one thing, in their order; None if there are none. ``parts`` is emptied.

        Rows: one array, filled with -100 up to the largest. Entries by sample: an array [N, ...] where there is one per
        sequence, all of one shape, else a list of N arrays. Tuples and dicts of such where the entries are such.
        """
        entries = [entry for some, _ in parts for entry in some]
        ragged = None
        for _, each in parts:
            ragged = _either(ragged, each)
        parts.clear()
        if not entries:
            return None
        return concatenated(entries) if self.in_rows else _combined(entries, ragged)


def _combined(entries: list[Any], ragged: Ragged) -> Any:
    first = entries[0]
    if isinstance(first, tuple):
        return tuple(_combined([entry[k] for entry in entries], ragged[k]) for k in range(len(first)))
    if isinstance(first, dict):
        return {name: _combined([entry[name] for entry in entries], ragged[name]) for name in first}
    return entries if ragged or any(entry.shape != first.shape for entry in entries) else np.stack(entries)


def _either(one: Ragged, other: Ragged) -> Ragged:
    """Part by part, whether one of them is ragged; None says nothing."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tuple):
        return tuple(map(_either, one, other))
    if isinstance(one, dict):
        return {name: _either(one[name], other[name]) for name in one}
    return one or other


def _as_array(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(_as_array(part) for part in entry)
    if isinstance(entry, Mapping):
        return {name: _as_array(part) for name, part in entry.items()}
    if isinstance(entry, Tensor):
        entry = entry.detach().cpu()
        if entry.untyped_storage().nbytes() > entry.nbytes:  # a part of a larger tensor, which would be kept with it
            entry = entry.clone()
        return (entry.float() if entry.dtype == torch.bfloat16 else entry).numpy()
    return np.asarray(entry)


def as_tensors(value: Any, device: torch.device | None = None) -> Any:
    """The result of :meth:`Record.combined` with tensors in the place of arrays; on the host without ``device``."""
    if isinstance(value, (tuple, list)):
        return type(value)(as_tensors(part, device) for part in value)
    if isinstance(value, dict):
        return {name: as_tensors(part, device) for name, part in value.items()}
    return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value


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
