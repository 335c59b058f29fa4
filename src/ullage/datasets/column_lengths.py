"""Lengths of the values of a column: integers as they are, lists counted, texts measured by a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.datasets.arrow import is_list, is_text, list_lengths, no_tokens, require_tokens, require_values
from ullage.datasets.lengths import LENGTH_NAMES
from ullage.datasets.measuring import BYTES, measure
from ullage.errors import InputError
from ullage.layout import Int64, as_lengths

#: Names of a column of text among several.
TEXT_NAMES = ("text", "content", "document")
#: Columns that an error names before it only counts: a table may have hundreds.
_NAMED = 16


@dataclass(frozen=True, eq=False)
class Measured:
    """Lengths with their source.

    Attributes:
        lengths: int64 [n]
        column: the column that they were read from; ``None`` where there are no columns
        unit: what a length counts
    """

    lengths: Int64
    column: str | None = None
    unit: str = "tokens"


def choose_column(names: Sequence[str], column: str | None, where: str) -> str:
    """The column among ``names`` to measure: ``column``, or by name, of lengths, ``input_ids``, the only one, of text.

    Raises ``InputError`` that lists them.
    """
    if column is not None:
        if column not in names:
            raise InputError("a column is missing", where=where, expected=column, found=_listed(names))
        return column
    # The first rule that leaves a single name decides.
    for wanted in (
        [name for name in names if name.lower() in LENGTH_NAMES],
        [name for name in names if name == "input_ids"],
        names,
        [name for name in names if name.lower() in TEXT_NAMES],
    ):
        if len(wanted) == 1:
            return wanted[0]
    raise InputError(
        "no single column holds lengths or text",
        where=where,
        expected="length, input_ids or text",
        found=_listed(names),
        hint="name one of them with --column",
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) or "none"
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def checked_lengths(values: Any, where: str) -> Int64:
    """``values`` as lengths, int64 [n]. Raises ``InputError`` that names ``where`` and the item."""
    try:
        return as_lengths(values)
    except InputError as error:
        place = where if error.where is None else f"{where}, {error.where}"
        raise error.at(place) from error


def of_texts(texts: Sequence[str], column: str | None, tokenizer: str | None) -> Measured:
    """Lengths of texts in tokens of a tokenizer, or in bytes."""
    return Measured(np.array(measure(tokenizer)(texts), np.int64), column, BYTES if tokenizer is None else "tokens")


def of_values(values: Sequence[Any], column: str | None, where: str, tokenizer: str | None) -> Measured:
    """Lengths of a column's values, which are of one kind. Raises ``InputError`` that names the row of another."""
    if values and isinstance(values[0], str):
        _all_of(values, str, column, where)
        return of_texts(values, column, tokenizer)
    if values and isinstance(values[0], list):
        _all_of(values, list, column, where)
        for row, value in enumerate(values):
            # A bool is an int to isinstance, but no token.
            others = [item for item in value if type(item) is not int]
            if others:
                place = f"{where}, column {column}, row {row}" if column else f"{where}, row {row}"
                raise no_tokens(place, f"a list with {repr(others[0])[:60]}")
        return Measured(np.array([len(value) for value in values], np.int64), column)
    _all_of(values, (int, float), column, where)
    return Measured(checked_lengths(np.array(values), where), column)


def _all_of(values: Sequence[Any], kind: Any, column: str | None, where: str) -> None:
    for row, value in enumerate(values):
        # A bool is an int to isinstance, but no length.
        if not isinstance(value, kind) or isinstance(value, bool):
            place = f"{where}, row {row}" + (f", column {column}" if column else "")
            raise InputError(
                "a value is neither a length nor tokens nor text, as the first is", where=place, found=repr(value)[:60]
            )


def of_arrow(
    names: Sequence[str],
    arrays: Callable[[str], Iterable[Any]],
    where: str,
    column: str | None,
    tokenizer: str | None,
) -> Measured:
    """Lengths of an Arrow column, one that :func:`choose_column` chooses; ``arrays`` gives the parts of one by name."""
    chosen = choose_column(names, column, where)
    place, row = f"{where}, column {chosen}", 0
    parts: list[Measured] = []
    for array in arrays(chosen):
        parts.append(_of_chunk(array, chosen, place, row, tokenizer))
        row += len(array)
    if not parts:
        raise InputError("a file holds no lengths", where=where)
    # Checked as a whole, so that an error counts from the beginning of the file.
    return Measured(checked_lengths(np.concatenate([part.lengths for part in parts]), place), chosen, parts[0].unit)


def _of_chunk(array: Any, column: str, place: str, first_row: int, tokenizer: str | None) -> Measured:
    """Lengths of a part of a column, which begins at ``first_row`` of its file; numbers are not checked yet."""
    import pyarrow as pa
    import pyarrow.compute as pc

    require_values(array, place, first_row)
    kind = array.type
    if is_text(kind):
        if tokenizer is None:
            return Measured(
                # Arrow counts the bytes of UTF-8 itself; one more for the end.
                pc.call_function("binary_length", [array]).to_numpy(zero_copy_only=False).astype(np.int64) + 1,
                column,
                BYTES,
            )
        return of_texts(array.to_pylist(), column, tokenizer)
    if is_list(kind):
        require_tokens(array, place, first_row)
        return Measured(list_lengths(array), column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return Measured(array.to_numpy(zero_copy_only=False), column)
    raise InputError("a column holds neither lengths nor tokens nor text", where=place, found=str(kind))
