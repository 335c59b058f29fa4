"""The packed row of the call that is running in this thread: one context variable, and who may ask it.

A packed model puts its row in force around its own forward. Whatever runs within finds it here: attention, which is
handed one layer and no lengths, parts that run by lengths, towers, checkpointed layers. Within a call of a few
sequences as the rows of a batch no row is in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

from ullage.core.layout import Layout


class LengthsInForce(Protocol):
    """What attention asks of a row."""

    is_found: bool
    is_served: bool
    defers_masks: bool
    noted: dict[int, Any] | None

    def sides_of(self, module: nn.Module, queries: int, keys: int) -> tuple[str, str] | None:
        """The sides of the row that so many queries and keys are of; None for a call that is none of the row's."""
        ...

    def note_sides(self, module: nn.Module, sides: tuple[str, str]) -> None:
        """While parts are searched: note the sides of a layer."""
        ...

    def layout_of(self, side: str) -> Layout:
        """The sequences of a side."""
        ...

    def bounds_of(self, side: str, *, apart: bool) -> Tensor:
        """int32, the cumulated slots of a side; where padding is to be kept ``apart``, as sequences of its own."""
        ...

    def pairs_of(self, sides: tuple[str, str]) -> Any:
        """The sequences of equal lengths on both sides, in calls that they share."""
        ...


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
