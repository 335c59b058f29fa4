"""Lengths of a data set's sequences, where they are known without reading a sample.

=============================================  ==================================================================
data set                                       lengths
=============================================  ==================================================================
``datasets.Dataset``                           its length column, else the offsets of the Arrow list of tokens
:class:`~ullage.datasets.TokenDataset`         its layout
a list or tuple of mappings                    of the tokens, which lie in memory
``torch.utils.data.Subset``, ``ConcatDataset`` those of the data sets within
=============================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from ullage.datasets.arrow import is_list, list_lengths
from ullage.layout import Int64, Layout


def stored_lengths(dataset: Any, column: str = "input_ids", length_column: str = "length") -> Int64 | None:
    """The length of each sequence in tokens, int64 [n], in the order of the data set; ``None`` if not known.

    ``column`` holds a sequence's tokens, ``length_column`` its length, if it exists. Padding within a stored sample
    counts as tokens. Takes a fraction of a second for a million sequences.

    >>> stored_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]).tolist()
    [3, 1]
    """
    if isinstance(dataset, Subset):
        whole = stored_lengths(dataset.dataset, column, length_column)
        return None if whole is None else whole[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [stored_lengths(part, column, length_column) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if isinstance(dataset, (list, tuple)):
        # Samples that are no mappings, or have no such column, mean that the lengths are not known.
        with suppress(KeyError, TypeError):
            return np.fromiter((_length(sample, column) for sample in dataset), np.int64, len(dataset))
        return None
    layout = getattr(dataset, "layout", None)
    if isinstance(layout, Layout) and layout.num_items == len(dataset):
        return layout.lengths
    # By name, so that ``datasets`` need not be imported, or installed.
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "data"):
        return _of_arrow(dataset, column, length_column)
    return None


def _length(sample: Any, column: str) -> int:
    if not isinstance(sample, Mapping):
        raise TypeError
    return len(sample[column])


def _of_arrow(dataset: Any, column: str, length_column: str) -> Int64 | None:
    """Lengths of a ``datasets.Dataset``; not known under a transform, whose samples may differ from the stored ones."""
    import pyarrow as pa

    chosen = length_column if length_column in dataset.column_names else column
    if chosen not in dataset.column_names or dataset.format["type"] == "custom":
        return None
    # The table below the data set, whose list offsets give the lengths without reading a token.
    stored = dataset.data.column(chosen)
    lists = is_list(stored.type)
    if stored.null_count or not (lists or (chosen == length_column and pa.types.is_integer(stored.type))):
        return None
    lengths = list_lengths(stored) if lists else stored.to_numpy().astype(np.int64)
    # A shuffled or filtered data set is a table of row numbers over the table of rows.
    rows = getattr(dataset, "_indices", None)
    return lengths if rows is None else lengths[rows.column(0).to_numpy()]
