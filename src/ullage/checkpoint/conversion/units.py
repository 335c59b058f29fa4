"""Units of the work of a conversion: each is a line in the journal, and can be done by any process.

A unit is a range of one large tensor, small tensors that lie side by side in a large file, or some small files.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.checkpoint.dtypes import ITEM_BYTES
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.reading import row_elements

#: Targets and tensors up to this size are composed in memory, many together, and written at once.
SMALL_BYTES = 1 << 20
#: Tensors that are composed together at most.
_TOGETHER = 2048
#: A unit of a large file, and of small files together.
UNIT_BYTES = 32 << 20


@dataclass(frozen=True)
class Unit:
    """Part of the work: small targets ``[first, last)`` whole, or a part of target ``first``.

    Attributes:
        number: place of the unit among all units; its name in the journal.
        first: number of the first target.
        last: number after that of the last target.
        payload: None for small targets, -1 for a plain copy, else number of the (first) payload of target ``first``.
        start: first of the range: a byte of a plain copy, an element of a payload.
        stop: end of the range, in the same unit.
        num_bytes: bytes that are written.
        neighbours: of small payloads, those, and where they lie.
    """

    number: int
    first: int
    last: int
    payload: int | None = None
    start: int = 0
    stop: int = 0
    num_bytes: int = 0
    neighbours: SideBySide | None = None


@dataclass(frozen=True)
class SideBySide:
    """Bytes ``[begin, end)`` of target number ``target``: payloads ``[first, last)`` and all texts between them."""

    target: int
    first: int
    last: int
    begin: int
    end: int


def neighbours_in(index: int, target: Target) -> list[SideBySide]:
    """The stretches of a large target in which small payloads lie side by side, in order."""
    found: list[SideBySide] = []
    first, begin, end = 0, 0, 0  # of the stretch that is being made; the end of the last payload

    def close(last: int) -> None:
        if last > first:
            found.append(SideBySide(index, first, last, begin, end))

    for number, payload in enumerate(target.payloads):
        size = payload.tensor.numel * ITEM_BYTES[payload.dtype]
        if size > SMALL_BYTES:
            close(number)
            first, begin = number + 1, payload.offset + size
        elif number > first and (payload.offset - begin > UNIT_BYTES // 4 or number - first >= _TOGETHER):
            close(number)
            first, begin = number, end
        end = payload.offset + size
    close(len(target.payloads))
    return found


def is_small(target: Target) -> bool:
    """Whether the target is composed in memory and written at once."""
    return target.num_bytes <= SMALL_BYTES and target.copy_of is None


def split(targets: list[Target]) -> list[Unit]:
    """The units of work for ``targets``; the same in every process for the same targets."""
    units: list[Unit] = []
    first = held = 0

    def close(last: int) -> None:
        nonlocal first, held
        if last > first:
            units.append(Unit(len(units), first, last, num_bytes=held))
        first, held = last + 1, 0  # target ``last`` is a large one, with units of its own

    for index, target in enumerate(targets):
        # Small targets are gathered into a unit until it is worth a line in the journal.
        if is_small(target):
            held += target.num_bytes
            # At most 256 files: their time is that of opening them, not of their bytes.
            if held >= UNIT_BYTES // 4 or index - first >= 255:
                close(index + 1)
                first = index + 1  # no large target stands between
            continue
        # A large target closes the unit of small ones and is cut into ranges, at whole rows of each payload.
        close(index)
        if target.copy_of is not None:
            for start in range(0, max(1, target.num_bytes), UNIT_BYTES):
                stop = min(start + UNIT_BYTES, target.num_bytes)
                units.append(Unit(len(units), index, index + 1, -1, start, stop, stop - start))
        together = neighbours_in(index, target)
        for part in together:
            units.append(
                Unit(len(units), index, index + 1, part.first, num_bytes=part.end - part.begin, neighbours=part)
            )
        composed = {number for part in together for number in range(part.first, part.last)}
        for number, payload in enumerate(target.payloads):
            if number in composed:
                continue
            row = row_elements(payload.tensor)
            step = max(1, UNIT_BYTES // (row * ITEM_BYTES[payload.dtype])) * row
            for start in range(0, payload.tensor.numel, step):
                stop = min(start + step, payload.tensor.numel)
                size = (stop - start) * ITEM_BYTES[payload.dtype]
                units.append(Unit(len(units), index, index + 1, number, start, stop, size))
    close(len(targets))
    return units
