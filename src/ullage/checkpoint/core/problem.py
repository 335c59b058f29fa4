"""One thing that is wrong with a checkpoint, and where."""

from __future__ import annotations

from dataclasses import dataclass

from ullage.core.errors import UllageError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where. ``str(problem)`` is one line."""

    what: str
    file: str | None = None
    rank: int | None = None
    group: int | None = None
    parameter: str | None = None
    expected: str | None = None
    found: str | None = None
    hint: str | None = None

    @classmethod
    def of_error(
        cls, error: UllageError, file: str | None = None, rank: int | None = None, parameter: str | None = None
    ) -> Problem:
        """The problem of a file that cannot be read, or of a tensor that cannot be put together."""
        expected, found = (None if fact is None else str(fact)[:300] for fact in (error.expected, error.found))
        return cls(error.what, file, rank, parameter=parameter, expected=expected, found=found, hint=error.hint)

    @property
    def where(self) -> str | None:
        """File, rank, group and parameter, as far as they are known."""
        parts = [("", self.file), ("rank ", self.rank), ("group ", self.group), ("parameter ", self.parameter)]
        return ", ".join(f"{word}{value}" for word, value in parts if value is not None) or None

    def __str__(self) -> str:
        facts = [f"{w} {v}" for w, v in (("expected", self.expected), ("found", self.found)) if v is not None]
        line = self.what + (f" ({self.where})" if self.where else "") + (": " + ", ".join(facts) if facts else "")
        return " ".join((line + (f". {self.hint}" if self.hint else "")).split())
