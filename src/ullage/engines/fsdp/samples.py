"""Samples as the engine trains on them: columns that a model takes, labels of what is to be learnt, no padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ullage.batch import RaggedBatch
from ullage.engines.fsdp.objective import INDEX, SEQUENCE
from ullage.errors import InputError
from ullage.mixers.wrappers import bare
from ullage.schema import IGNORED_LABEL
from ullage.training.collators import SEQ_LENGTHS, RaggedCollator

#: Masks of a prepared conversation: where one is 0, nothing is learnt.
MASKS = ("completion_mask", "assistant_masks")
_LABELS = ("labels", "label", "label_ids", "attention_mask", SEQ_LENGTHS)


class PreparedSamples:
    """A dataset as a collator prepares it, one sample at a time.

    Args:
        dataset: the samples by index: dicts with ``input_ids``, and ``labels`` or masks (TRL's) of what counts.
        model: columns that its forward does not take are left out, unless ``every_column``.
        objective: of the model.
        collate: makes a batch of a list of one sample; None is ``RaggedCollator``, which cuts padding away.
        every_column: keep all columns.
        numbered: add the sample's number, so that outputs can be put in the order of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        model: Any,
        objective: str,
        collate: Callable[[list[Any]], RaggedBatch] | None = None,
        *,
        every_column: bool = False,
        numbered: bool = False,
    ) -> None:
        self._dataset, self._numbered = dataset, numbered
        by_sequence = ("labels",) if objective == SEQUENCE else ()
        self._collate: Callable[[list[Any]], Any] = collate or RaggedCollator(per_sequence=by_sequence)
        taken = {*inspect.signature(bare(model).forward).parameters, *_LABELS, *MASKS}
        self._taken = None if every_column or collate is not None else taken

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._dataset[index]
        if self._taken is not None:
            sample = {name: value for name, value in sample.items() if name in self._taken}
        found = self._collate([_masked(sample)]).samples()
        if len(found) != 1:
            raise InputError(
                "a row of several sequences: this engine packs steps by itself",
                where=f"sample {index}",
                expected="one sequence",
                found=f"{len(found)} of them",
                hint="give the sequences as samples of their own",
            )
        return {**found[0], INDEX: torch.tensor(index)} if self._numbered else found[0]


def _masked(sample: Any) -> Any:
    """The sample with -100 for a label where one of its masks is 0."""
    masks = [sample[name] for name in MASKS if sample.get(name) is not None]
    if not any(name in sample for name in MASKS):
        return sample
    sample = {name: value for name, value in sample.items() if name not in MASKS}
    ids = [int(i) for i in sample.get("input_ids", ())]
    labels = [int(i) for i in sample.get("labels", ids)]
    for mask in masks:
        if len(mask) != len(labels):
            raise InputError(
                "a mask has another length than its sample",
                expected=len(labels),
                found=len(mask),
                where="completion_mask",
            )
        labels = [label if kept else IGNORED_LABEL for label, kept in zip(labels, mask)]
    return {**sample, "labels": labels}
