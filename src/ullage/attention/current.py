"""The packed row of the call that is running in this thread: one context variable, and who may ask it.

A packed model puts its row in force around its own forward. Whatever runs within finds it here: attention, which is
handed one layer and no lengths, parts that run by lengths, towers, checkpointed layers. Within a call of a few
sequences as the rows of a batch no row is in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ROW: ContextVar[Any] = ContextVar("ullage_packed_row", default=None)
#: How many rows of found parts are in force, in whatever thread: a compiled graph can read a number, and no context
#: variable.
IN_FORCE = [0]


def current_row() -> Any:
    """The row in force; None outside packed calls."""
    return _ROW.get()


@contextmanager
def row_in_force(row: Any) -> Iterator[None]:
    """Put a row in force within the block; None for none."""
    token, number = _ROW.set(row), int(row is not None and row.is_found)
    IN_FORCE[0] += number
    try:
        yield
    finally:
        IN_FORCE[0] -= number
        _ROW.reset(token)
