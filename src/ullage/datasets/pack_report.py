"""The report of a packing: what became of every sequence and every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ullage.display import Shown, counted


@dataclass(frozen=True, repr=False)
class PackReport(Shown):
    """Counts of a packing.

    ``tokens_in = num_tokens + truncated_tokens + dropped_tokens``, and ``capacity_tokens = num_tokens +
    padding_tokens``. ``num_sequences`` are in the rows, ``num_empty`` had no tokens and were left out, ``lower_bound``
    is the least possible number of rows, and ``ullage`` the share of the capacity that is padding.
    """

    num_rows: int
    lower_bound: int
    num_sequences: int
    num_empty: int
    num_truncated: int
    num_dropped: int
    tokens_in: int
    num_tokens: int
    truncated_tokens: int
    dropped_tokens: int
    capacity_tokens: int
    padding_tokens: int
    ullage: float

    def _facts(self) -> Iterator[str]:
        yield counted(self.num_rows, "row")
        yield counted(self.num_sequences, "sequence")
        yield counted(self.num_tokens, "token")
        yield f"ullage {100 * self.ullage:.1f} %"
