"""Checked reading of the entries of a file: each in the type and within the size that it must have.

A file can be damaged, or made by hand. Every entry that is computed with passes through here first, so that a
malformed one is one ``CheckpointError`` that names the file and the entry, and no size is believed that no tensor could
have.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ullage.checkpoint.files.unpickling import MAX_BYTES, Inert, TensorRef
from ullage.core.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]

#: Elements of the largest tensor, of 16 bytes each.
_MAX_NUMEL = MAX_BYTES // 16


def malformed(entry: str, where: str, expected: str, found: Any) -> CheckpointError:
    """The error for an entry of the wrong kind."""
    return CheckpointError(f"{entry} is malformed", where=where, expected=expected, found=brief(found))


def brief(value: Any) -> str:
    """A value as text of at most 80 characters, without walking through all of it."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    # The digits of an int are cut by arithmetic: ``str`` of a very long one is slow, and CPython refuses it.
    text = value[:80] if isinstance(value, str) else repr(value)[:80] if type(value) is not int else str(value % 10**60)
    return f"{type(value).__name__} {text}"


def comparable(value: Any) -> Any:
    """A small value in a form that can be hashed and compared; of any other value, its kind."""
    # NaN is not equal to itself, and two files that both have it agree.
    if isinstance(value, float) and value != value:
        return "nan"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= 64:
        return tuple(brief(v) if isinstance(v, (list, tuple)) else comparable(v) for v in value)
    if isinstance(value, TensorRef):
        return f"a tensor of {list(value.shape)}"
    return brief(value)


def integer(value: Any, entry: str, where: str, least: int = 0) -> int:
    """A whole number from ``least`` on, below what could overflow."""
    if isinstance(value, Inert) and value.args:  # a member of an enum
        value = value.args[0]
    if type(value) is not int or not least <= value < _MAX_NUMEL:
        raise malformed(entry, where, f"a number from {least} on", value)
    return value


def mapping(value: Any, entry: str, where: str) -> dict[Any, Any]:
    """A dict; an entry that is absent is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed(entry, where, "a dict", value)
    return value


def sequence(value: Any, entry: str, where: str) -> list[Any]:
    """A list; an entry that is absent is an empty one."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise malformed(entry, where, "a list", value)
    return list(value)


def integers(value: Any, entry: str, where: str) -> list[int]:
    """A list of whole numbers, the sum of which does not overflow either."""
    found = [integer(v, entry, where) for v in sequence(value, entry, where)]
    integer(sum(found), f"the sum of {entry}", where)
    return found


def names(value: Any, entry: str, where: str) -> list[str]:
    """A list of names."""
    found = sorted(value) if isinstance(value, (set, frozenset)) else sequence(value, entry, where)
    for name in found:
        if not isinstance(name, str):
            raise malformed(entry, where, "names", name)
    return found


def shape(value: Any, entry: str, where: str) -> tuple[int, ...]:
    """A shape that a tensor can have."""
    if not isinstance(value, (list, tuple)):
        raise malformed(entry, where, "a shape", value)
    found = tuple(integer(d, entry, where) for d in value)
    if math.prod(found) >= _MAX_NUMEL:
        raise malformed(entry, where, "a shape that a tensor can have", str(list(found)))
    return found


def shapes(value: Any, entry: str, where: str) -> Shapes:
    """Shapes by name."""
    found = mapping(value, entry, where)
    named = zip(names(list(found), entry, where), found.values())
    made = {name: shape(given, f"{entry} of {name[:80]}", where) for name, given in named}
    if sum(map(math.prod, made.values())) >= _MAX_NUMEL:
        raise malformed(entry, where, "shapes that tensors can have", f"{len(made)} of them")
    return made


def shared_params(value: Any, where: str) -> dict[str, str]:
    """``shared_params``: tied name -> the name that is stored. A dict, or a list of pairs."""
    entry = "shared_params"
    pairs = list(value.items()) if isinstance(value, dict) else sequence(value, entry, where)
    if any(len(sequence(pair, entry, where)) != 2 for pair in pairs):
        raise malformed(entry, where, "pairs of names", value)
    listed = [names(pair, entry, where) for pair in pairs]
    return {alias: owner for alias, owner in listed if alias != owner}


def tensors(value: Any, entry: str, where: str) -> dict[str, TensorRef]:
    """Tensors by name."""
    found = mapping(value, entry, where)
    for name, ref in found.items():
        if not isinstance(name, str) or not isinstance(ref, TensorRef):
            raise malformed(entry, where, "tensors by name", ref)
    return found


def regexes(value: Any, entry: str, where: str) -> list[str]:
    """Regular expressions."""
    found = names(value, entry, where)
    for pattern in found:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise malformed(entry, where, f"regular expressions ({error})", pattern) from None
    return found
