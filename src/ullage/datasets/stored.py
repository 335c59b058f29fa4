"""Lengths of a data set's sequences, where they are known without reading a sample.

=============================================  ==================================================================
data set                                       lengths
=============================================  ==================================================================
``datasets.Dataset``                           its length column, else the offsets of the Arrow list of tokens
:class:`~ullage.datasets.TokenDataset`         its layout
a list or tuple of mappings                    of the tokens, which lie in memory
``torch.utils.data.Subset``, ``ConcatDataset`` those of the data sets within
=============================================  ==================================================================

And Arrow columns of lists and of texts, as files and data sets hold them: their kind, their lengths, missing values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout


def stored_lengths(dataset: Any, column: str = "input_ids", length_column: str = "length") -> Int64 | None:
    """The length of each sequence in tokens, int64 [n], in the order of the data set; ``None`` if not known.

    ``column`` holds a sequence's tokens, ``length_column`` its length, if it exists. Padding within a stored sample
    counts as tokens. Takes a fraction of a second for a million sequences.

    >>> stored_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]).tolist()
    [3, 1]
    """
    from torch.utils.data import ConcatDataset, Subset  # which reading a file does without

    if isinstance(dataset, Subset):
        whole = stored_lengths(dataset.dataset, column, length_column)
        return None if whole is None else whole[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [stored_lengths(part, column, length_column) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if isinstance(dataset, (list, tuple)):
        # Samples that are not mappings, or lack the column, mean that the lengths are not known.
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


def is_text(kind: Any) -> bool:
    """True for an Arrow type of strings."""
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: Any) -> bool:
    """True for an Arrow type of lists, of fixed size too."""
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def list_lengths(array: Any) -> Int64:
    """The number of values of each list, int64 [n], read off the offsets."""
    import pyarrow.compute as pc

    return pc.call_function("list_value_length", [array]).to_numpy(zero_copy_only=False).astype(np.int64)


def is_json(kind: Any) -> bool:
    """True for the Arrow type that ``datasets`` gives a column of values that are not all of one kind."""
    return getattr(kind, "extension_name", None) == "arrow.json"


def odd_one(values: Sequence[Any]) -> int | None:
    """The place of the first value that is of another kind than the first one: of 5, 6, "x" it is 2."""
    return next((place for place, value in enumerate(values) if type(value) is not type(values[0])), None)


def of_json(array: Any) -> list[Any]:
    """The values of an array of JSON. ``datasets`` writes the text "5" among numbers as the number 5."""
    return [json.loads(text) for text in array.to_pylist()]


def require_values(array: Any, where: str) -> None:
    """Raise ``InputError`` for the first missing value of a column."""
    if array.null_count:
        raise InputError("a value is missing", where=f"{where}, row {_first(array.is_null())}")


def require_token_ids(array: Any, where: str) -> None:
    """Raise ``InputError`` for a column of lists that do not all hold integers, with the first row that does not."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, values = array.type.value_type, pc.call_function("list_flatten", [array])
    # Lists that are all empty have values of no type.
    if not len(values) or (pa.types.is_integer(kind) and not values.null_count):
        return
    place = 0
    if values.null_count:
        place = _first(values.is_null())
    elif pa.types.is_floating(kind):
        # Among them are the integers of other rows: 2.0 is one, 1.5 is not.
        broken = pc.call_function("not_equal", [values, pc.call_function("floor", [values])])
        place = _first(broken) if pc.call_function("any", [broken]).as_py() else 0
    elif is_json(kind):
        place = odd_one(of_json(values)) or 0
    # Rows of 2, 0 and 1 values: the places 0 and 1 are in the first, 2 is in the third.
    row = int(np.searchsorted(np.cumsum(list_lengths(array)), place, side="right"))
    raise InputError(
        "a column of lists holds no token ids",
        where=f"{where}, row {row}",
        expected="lists of integers",
        found=f"{str(values[place])[:60]} in lists of {str(kind)[:60]}",
        hint="name another column with --column",
    )


def _first(mask: Any) -> int:
    """The place of the first true value."""
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])
