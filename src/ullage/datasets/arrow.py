"""Arrow columns of lists and of texts, as files and data sets hold them: their kind, their lengths, missing values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ullage.errors import InputError, first_line
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


def read_arrow(path: Path) -> Any:
    """The table in an Arrow file, a stream as ``datasets`` writes it or a file with a footer.

    Raises ``InputError`` where it cannot be read.
    """
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            footed = file.read(6) == b"ARROW1"
        source = pa.memory_map(str(path))
        reader = pa.ipc.open_file(source) if footed else pa.ipc.open_stream(source)
        return reader.read_all()
    except (OSError, pa.ArrowException) as error:
        raise InputError("an .arrow file cannot be read", where=str(path), found=first_line(error)) from error


def require_tokens(array: Any, where: str, first_row: int = 0) -> None:
    """Raise ``InputError`` for an array of lists that do not all hold integers; it begins at ``first_row``."""
    import pyarrow as pa

    kind = array.type.value_type
    # Lists that are all empty have values of no type.
    if not (pa.types.is_integer(kind) or (pa.types.is_null(kind) and not len(array.flatten()))):
        raise no_tokens(where, f"lists of {kind}")
    values = array.flatten()
    if values.null_count:
        missing = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        row = int(np.searchsorted(np.cumsum(list_lengths(array)), missing, side="right"))
        raise no_tokens(f"{where}, row {first_row + row}", "a missing value in a list")


def no_tokens(where: str, found: str) -> InputError:
    """The error for lists of anything but token ids: of messages, of numbers with a fraction, of lists."""
    return InputError(
        "a column of lists holds no token ids",
        where=where,
        expected="lists of integers",
        found=found,
        hint="name another column with --column; a chat is measured with its template by ullage train --dry_run",
    )
