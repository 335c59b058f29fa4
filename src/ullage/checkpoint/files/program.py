"""The program of a pickle, looked through before it is run: bounded in memory and in time, with checked keys.

CPython's machine keeps results by number in a table as long as the largest number, and hashes what becomes a key.
Tuples that hold each other twice take 2^n steps to hash, and equal hashes make a dict quadratic. So the instructions
that make dicts and sets are replaced by calls of this module's, which look at every key first.
"""

from __future__ import annotations

import pickle
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: A run of instructions whose size is fixed or ends at a line break; ``*+``: no backtracking, so the time is linear.
#: Then, for the others, the bytes of the length that follows the opcode.
_FIXED_SIZE = re.compile(
    rb"(?:[(012NR\])abelostuQ\x81\x85-\x89\x92-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|r..\0\0"
    rb"|G.{8}|[ci][^\n]*\n[^\n]*\n|[FILSVPg][^\n]*\n)*+",
    re.DOTALL,
)
_LENGTH_BYTES = {code: n for n, codes in ((1, b"UC\x8a\x8c"), (4, b"TXB\x8b"), (8, b"\x8d\x8e\x96")) for code in codes}

#: The module of the names that the replacements below call; no package has this name.
OWN = "<checked>"
#: What replaces an instruction. A made object comes from a call without arguments. The items of a dict (``d``) or
#: frozenset that lie on the stack become a tuple or a list, alone in another tuple, which goes to ``persistent_load``.
_REPLACED = {
    b"}": f"c{OWN}\ndict\n)R".encode(),
    b"\x8f": f"c{OWN}\nset\n)R".encode(),
    b"\x90": b"e",
    b"d": b"t\x85Q",
    b"\x91": b"l\x85Q",
}
#: Parts of a key at most: numbers and texts in tuples within it.
_MOST_PARTS = 64
#: Keys in a file that are neither text nor a number below 2^32; as many of one hash take about a second.
_MOST_ODD_KEYS = 4096
#: Entries that calls may copy, by byte of the program.
_COPIES = 16
_PLAIN_KEYS = frozenset((str, bytes, bool, type(None)))


def checked(program: bytes) -> bytes:
    """The program to run. Raises ``UnpicklingError`` for one that would take memory out of proportion to its size."""
    # Walk over the instructions. Only those with a length or a result number need a look, and those that are replaced;
    # the pattern skips the rest.
    at, size, done = 0, len(program), 0
    parts: list[bytes] = []
    while at < size:
        at = _FIXED_SIZE.match(program, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if at >= size or program[at : at + 1] == b".":
            break
        code = program[at]
        if code in _LENGTH_BYTES:
            begin = at + 1 + _LENGTH_BYTES[code]
            at = begin + int.from_bytes(program[at + 1 : begin], "little")
            if at > size:
                raise pickle.UnpicklingError("an instruction goes beyond the end")
        elif (new := _REPLACED.get(program[at : at + 1])) is not None:
            parts += program[done:at], new
            at = done = at + 1
        elif code == 0x95:  # FRAME: a promise of so many bytes, which the replacements change; no reader needs it
            parts.append(program[done:at])
            at = done = at + 9
        elif code == ord("r"):
            number = int.from_bytes(program[at + 1 : at + 5], "little")
            at += 5
            if number > size:
                raise pickle.UnpicklingError(f"result number {number} in a program of {size} bytes")
        elif code == ord("p"):
            end = program.find(b"\n", at)
            number = program[at + 1 : end]
            if end < 0 or len(number) > 9 or not number.isdigit() or int(number) > size:
                raise pickle.UnpicklingError("a result without a number")
            at = end + 1
        else:
            raise pickle.UnpicklingError(f"an unknown instruction {code}")
    return b"".join([*parts, program[done:]])


class _Left(threading.local):
    """What the program of this thread may still use: odd keys, and entries copied by calls. No end while none runs."""

    odd: float = float("inf")
    entries: float = float("inf")


_left = _Left()


@contextmanager
def limit_costs(num_bytes: int) -> Iterator[None]:
    """A context in which one program of so many bytes runs, and its keys and copies are counted."""
    _left.odd, _left.entries = _MOST_ODD_KEYS, _COPIES * (num_bytes + 4096)
    try:
        yield
    finally:
        _left.odd = _left.entries = float("inf")


def require_copy(source: Any) -> Any:
    """The source of a call that copies it; of a small program that copies a large one often, an ``UnpicklingError``."""
    _left.entries -= len(source)
    if _left.entries < 0:
        raise pickle.UnpicklingError("copies out of proportion to the program")
    return source


def require_key(key: Any) -> None:
    """Raise ``UnpicklingError`` for a key that would take long to hash, or for too many that may have one hash."""
    kind = type(key)
    if kind in _PLAIN_KEYS or (kind is int and -0x100000000 < key < 0x100000000):
        return
    # The hash of a stand-in is its address.
    if kind.__hash__ is object.__hash__:
        return
    waiting, count = [key], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if isinstance(part, tuple):
            if len(part) > _MOST_PARTS or count + len(waiting) > _MOST_PARTS:
                raise pickle.UnpicklingError(f"a key of more than {_MOST_PARTS} parts")
            waiting += part
        elif type(part) is int and part.bit_length() > 4096:
            raise pickle.UnpicklingError(f"a key of {part.bit_length()} bits")
    _left.odd -= 1
    if _left.odd < 0:
        raise pickle.UnpicklingError(f"more than {_MOST_ODD_KEYS} keys that are no text and no number below 2^32")


class Dict(dict):
    """A ``dict`` of a file."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        require_key(key)
        dict.__setitem__(self, key, value)


class Ordered(OrderedDict):
    """An ``OrderedDict`` whose attributes (torch adds ``_metadata``) are left out."""

    def __setitem__(self, key: Any, value: Any) -> None:
        require_key(key)
        OrderedDict.__setitem__(self, key, value)

    def __setstate__(self, state: Any) -> None:
        pass


class Defaults(defaultdict):
    """A ``defaultdict`` of a file."""

    def __setitem__(self, key: Any, value: Any) -> None:
        require_key(key)
        defaultdict.__setitem__(self, key, value)

    def __setstate__(self, state: Any) -> None:
        pass


class Set(set):
    """A ``set`` of a file, which its instructions fill as they fill a list."""

    __slots__ = ()

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            require_key(item)
            set.add(self, item)


# Messages name the kinds of values by the words that people know.
Dict.__name__, Ordered.__name__, Defaults.__name__, Set.__name__ = "dict", "OrderedDict", "defaultdict", "set"


def dict_of(source: Any = ()) -> Dict:
    """``dict(source)``."""
    made = Dict()
    for key, value in source.items() if isinstance(require_copy(source), dict) else source:
        made[key] = value
    return made


def defaults_of(factory: Any = None, source: Any = ()) -> Defaults:
    """``defaultdict(factory, source)``."""
    made = Defaults(factory)
    for key, value in source.items() if isinstance(require_copy(source), dict) else source:
        made[key] = value
    return made


def set_of(items: Any = ()) -> set[Any]:
    """``set(items)``."""
    made = Set()
    made.extend(require_copy(items))
    return set(made)


def frozenset_of(items: Any = ()) -> frozenset[Any]:
    """``frozenset(items)``."""
    return frozenset(set_of(items))


def from_stack(pid: Any) -> Any:
    """What stands for an instruction that makes a dict or a frozenset of the stack; None for the id of a storage."""
    if type(pid) is not tuple or len(pid) != 1:
        return None
    (items,) = pid
    if type(items) is list:
        return frozenset_of(items)
    if type(items) is not tuple or len(items) % 2:
        raise pickle.UnpicklingError("a dict of half an item")
    return dict_of(list(zip(items[::2], items[1::2])))
