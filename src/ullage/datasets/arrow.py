"""Arrow columns of lists and of texts, as files and data sets hold them: their kind, their lengths, missing values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ullage.errors import InputError
from ullage.layout import Int64


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


def require_values(array: Any, where: str, first_row: int = 0) -> None:
    """Raise ``InputError`` for the first missing value of an array that begins at ``first_row`` of its file."""
    if array.null_count:
        row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise InputError("a value is missing", where=f"{where}, row {row}")
