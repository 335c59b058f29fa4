"""Sources and targets of an encoder-decoder as one sequence each, so that both are planned and exchanged together.

A batch of ``Seq2SeqCollator`` has the layout of its sources, and targets of other lengths as nested fields. A plan
needs one length per sequence, the tokens of both; an exchange needs fields with one entry per token. ``join_targets``
lays each target behind its source, every field filled where it has no tokens, and ``split_targets`` undoes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.columns import fill_value, holding_ignored, is_target
from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout, ranges

#: The field of a joined batch with the tokens of each target.
TARGET_LENGTH = "ullage_target_length"


def target_names(batch: RaggedBatch) -> list[str]:
    """The fields of a batch that hold targets: nested, one row per sequence.

    Raises ``InputError`` for one that is not named as a decoder's.
    """
    names = [name for name in batch.per_sequence if batch[name].is_nested]
    for name in names:
        if not is_target(name):
            raise InputError(
                "only targets have lengths of their own beside the sources",
                where=f"field {name!r}",
                expected="labels, or a name that begins with decoder_",
            )
    return names


def is_joined(batch: RaggedBatch) -> bool:
    """Whether a batch came out of :func:`join_targets`."""
    return TARGET_LENGTH in batch


def num_tokens_each(batch: RaggedBatch) -> Int64:
    """Tokens of each sequence, int64 [N], those of its target included. Host values only."""
    names = target_names(batch)
    return batch.layout.lengths + (_lengths(batch[names[0]]) if names else 0)


def join_targets(batch: RaggedBatch) -> RaggedBatch:
    """The batch with each target behind its source; one without targets as it is. Host values only."""
    names = target_names(batch)
    if not names:
        return batch
    # Sources of [3, 2] tokens and targets of [1, 4] are sequences of [4, 6]: the first target's token is at 3, those of
    # the second are at 6 to 9.
    sources, targets = batch.layout.lengths, _lengths(batch[names[0]])
    layout = Layout(sources + targets)
    there = {False: ranges(layout.starts, sources), True: ranges(layout.starts + sources, targets)}
    values: dict[str, Tensor] = {}
    for name in batch.names:
        is_behind = name in names
        if name in batch.items or (name in batch.per_sequence and not is_behind):
            values[name] = batch[name]
            continue
        index = torch.from_numpy(batch.layout.token_index())
        tokens = torch.cat(batch[name].unbind()) if is_behind else batch[name][index]
        tokens = holding_ignored(tokens) if name == "labels" else tokens
        row = tokens.new_full((layout.size, *tokens.shape[1:]), fill_value(name, tokens.dtype))
        values[name] = row.index_copy(0, torch.from_numpy(there[is_behind]), tokens)
    values[TARGET_LENGTH] = torch.from_numpy(targets)
    whole = [name for name in batch.per_sequence if name not in names]
    return RaggedBatch(values, layout, (*whole, TARGET_LENGTH), batch.items)


def split_targets(batch: RaggedBatch) -> RaggedBatch:
    """A joined batch with its targets as nested fields again; any other as it is. Host values only."""
    if not is_joined(batch):
        return batch
    targets = batch[TARGET_LENGTH].numpy()
    sources = batch.layout.lengths - targets
    starts = batch.layout.starts
    offsets = torch.from_numpy(np.append(0, targets.cumsum()))
    whole, values = [], {}
    for name in batch.names:
        if name in batch.items:
            values[name] = batch[name]
        elif name in batch.per_sequence:
            values[name] = batch[name]
            whole.append(name)
        elif is_target(name):
            tokens = batch[name][torch.from_numpy(ranges(starts + sources, targets))]
            values[name] = torch.nested.nested_tensor_from_jagged(tokens, offsets)
            whole.append(name)
        else:
            values[name] = batch[name][torch.from_numpy(ranges(starts, sources))]
    del values[TARGET_LENGTH]
    return RaggedBatch(values, Layout(sources), whole, batch.items)


def placeholder(batch: RaggedBatch, lengths: list[int] | None = None, **options: Any) -> RaggedBatch:
    """:meth:`RaggedBatch.placeholder`; of a joined batch it is one source token and one target token."""
    if is_joined(batch):
        return batch.placeholder([2], **{TARGET_LENGTH: 1}, **options)
    return batch.placeholder(lengths, **options)


def _lengths(rows: Tensor) -> Int64:
    return np.array([len(row) for row in rows.unbind()], np.int64)
