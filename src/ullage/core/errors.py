"""Errors of the library: what went wrong, where, expected, found, and what to do about it.

Every error of this library is an :class:`UllageError` and also the built-in error a caller would
expect (``ValueError`` or ``RuntimeError``), so that code that knows nothing of us catches it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TypeVar

_Value = TypeVar("_Value")

#: The most tokens that a capacity may have: an integer of 64 bits, which some give for none.
MOST_TOKENS = (1 << 63) - 1


class UllageError(Exception):
    """An error whose message is one line: ``what (where): expected X, found Y. What to do.``

    Only ``what`` is required. The parts stay readable as attributes, so that tests and tools need
    not parse the line. A copy that crosses a process boundary keeps its message and its parts.
    """

    #: Exit status of the command line: 1, a problem with the data.
    exit_status = 1
    #: Whether the other ranks raise an error that carries this one's message, so that one of them may speak for all.
    told_to_all = False

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.found, self.hint = what, where, expected, found, hint
        line = what if where is None else f"{what} ({where})"
        # One line, whatever the parts hold: it is quoted in the errors of other ranks.
        facts = [f"{word} {fact}" for word, fact in (("expected", expected), ("found", found)) if fact is not None]
        if facts:
            line += ": " + ", ".join(facts)
        if hint is not None:
            hint = hint if hint.startswith("ullage ") else hint[:1].upper() + hint[1:]
            line = f"{line.removesuffix('.')}. {hint}"
        super().__init__(" ".join(line.split()))


class InputError(UllageError, ValueError):
    """The user's data or arguments cannot be used."""

    def at(self, where: str) -> InputError:
        """The same error in another place, for a caller that knows more of it: a file, a sample, a page."""
        return InputError(self.what, where=where, expected=self.expected, found=self.found, hint=self.hint)


class UsageError(InputError):
    """A command was called in a way it does not understand."""

    exit_status = 2


class CheckpointError(UllageError, ValueError):
    """A checkpoint is incomplete, contradicts itself, or is not a checkpoint."""


class TrainingError(UllageError, RuntimeError):
    """Training cannot go on, for example after a loss that is not a number."""


class DistributedError(UllageError, RuntimeError):
    """Ranks disagree, or another rank failed; raised on every rank."""

    #: Where other ranks failed: each of those ranks and its error in one line.
    failures: tuple[tuple[int, str], ...] = ()


def root_cause(error: BaseException) -> BaseException:
    """The error of a library that the layers above it raised theirs from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """The first line of a library's message, as a part of ours; of an error without one, its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def listed(names: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """The first ``most`` of ``names`` and how many more there are.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = separator.join(map(str, names[:most]))
    if len(names) <= most:
        return shown
    return f"{shown}{';' if separator == '; ' else ''} and {len(names) - most:,} more"


def require_int(value: object, name: str, *, least: int, most: int | None = None) -> int:
    """``value`` as an ``int``, if it is an integer from ``least`` to ``most``; numpy's count, ``bool`` does not.

    Raises ``InputError`` that calls the argument ``name``.
    """
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):  # pyright: ignore[reportOperatorIssue]
        expected = f">= {least}" if most is None else f"{least} to {most}"
        raise InputError(f"{name} must be an integer", expected=expected, found=repr(value))
    return int(value)  # pyright: ignore[reportArgumentType]


def require_one_of(value: _Value, names: Iterable[object], what: str) -> _Value:
    """``value`` if it is one of ``names``. Raises ``InputError``: ``no such {what}``, with the names."""
    names = list(names)
    if value not in names:
        raise InputError(f"no such {what}", expected=" or ".join(map(repr, names)), found=repr(value))
    return value
