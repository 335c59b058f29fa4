"""One rank failed, so all raise: the one way in which ranks tell each other of an error.

A rank that raises alone leaves the others waiting in their next collective. So work that may fail on one rank is done
within :func:`together`: at the end of the block the ranks gather their errors, and each raises its own, or a
``DistributedError`` that names the ranks that failed and their errors.

>>> with together(Axis.world(), doing="reading the samples"):
...     total = sum([1, 2, 3])

Where ranks exchange a header anyway, their errors travel in it, and no collective is added: :func:`tried` catches what
a rank raised, :func:`report` makes the entry of the header, and :func:`raise_failures` raises for all entries at once.
:func:`gather_agreed` does these three for a header of JSON. Every path ends in the same sentence, written once here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ullage.core.errors import DistributedError, UllageError, listed
from ullage.ranks.groups import PeerLost
from ullage.ranks.topology import Axis, Topology
from ullage.ranks.wire import dumps, gather_records, settling

T = TypeVar("T")

#: What one rank tells the others: the rank that failed and its error in one line; empty if none did.
Report = Sequence[Sequence[Any]]

#: How many different errors one sentence quotes, and how much of each, in characters.
_QUOTED, _LONGEST = 8, 2000


@contextmanager
def together(ranks: Axis | Topology, doing: str) -> Iterator[None]:
    """Let all ranks leave the block, or none: if one raises within it, every rank raises after it.

    Args:
        ranks: those that meet, along one axis or all axes of a topology; each of them must enter the block.
        doing: what the block does, for the sentence "another rank failed while ...", for example ``"saving a model"``.

    Collective at the end of the block: one small all-gather for each axis of more than one rank, and nothing on a
    single rank. A rank raises its own error, whatever its kind, ``KeyboardInterrupt`` and ``SystemExit`` included, and
    ``DistributedError`` if others failed. ``PeerLost`` passes at once, because a lost peer comes to no further meeting.
    """
    if not _axes(ranks):
        yield
        return
    failure: BaseException | None = None
    try:
        yield
    except PeerLost:
        raise
    except BaseException as error:  # whatever it is, the other ranks have to hear of it
        failure = error
    try:
        agree(failure, ranks, doing)
    finally:
        # The traceback of an error refers to each frame that it passes. A frame that in turn holds the error closes a
        # cycle, which would keep the tensors of the block until the next collection.
        failure = None


def agree(failure: BaseException | None, ranks: Axis | Topology, doing: str) -> None:
    """Raise on every rank if any rank has a ``failure``: :func:`together` for an error that was caught before.

    Collective, one small all-gather for each axis of more than one rank. Raises as :func:`together` does.
    """
    axes = _axes(ranks)
    known = [list(entry) for entry in report(failure, axes[0])] if axes else []
    try:
        # Axis by axis what is known so far goes on, so that an error reaches the ranks of every other axis too.
        for axis in axes:
            parts = [json.loads(text) for text in gather_records(dumps(known), axis)]
            known = [entry for part in parts for entry in part]
    except PeerLost:
        if failure is None:
            raise
    try:
        raise_failures(failure, [known], doing, *axes)
    finally:
        failure = None  # see together


def gather_agreed(record: Any, axis: Axis, doing: str, failure: Exception | None = None) -> list[Any]:
    """The record of each rank along the axis, by coordinate, or an error on every rank if one has a ``failure``.

    Args:
        record: what JSON can write; it is not looked at where any rank failed.
        doing: as for :func:`together`.

    Collective, one all-gather if the records are short and two if not; none on a single rank.
    """
    if axis.size == 1:
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # see together
        return [record]
    entry = {"failed": report(failure, axis), "record": record}
    entries = [json.loads(text) for text in gather_records(dumps(entry), axis)]
    try:
        raise_failures(failure, [entry["failed"] for entry in entries], doing, axis)
    finally:
        failure = None  # see together
    return [entry["record"] for entry in entries]


def tried(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of ``step``, or its error: local work before a collective must not keep others waiting.

    A lost peer is raised at once, because the others will not come to the next collective either.
    """
    try:
        return step(), None
    except PeerLost:
        raise
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        return None, error


def report(failure: BaseException | None, axis: Axis) -> list[tuple[int, str]]:
    """The entry for this rank's ``failure`` in a header: the ranks that failed and their errors; empty without one.

    A ``DistributedError`` made here is handed on as the failures that it tells of, so that the sentence names the rank
    where the error arose and not the one that heard of it first. Plain data, as JSON takes it.
    """
    if failure is None:
        return []
    if isinstance(failure, DistributedError) and failure.failures:
        return list(failure.failures)
    line = " ".join(f"{type(failure).__name__}: {failure}".split()).removesuffix(":")
    return [(axis.global_rank, line if len(line) <= _LONGEST else line[:_LONGEST] + "…")]


def raise_failures(failure: BaseException | None, reports: Iterable[Report], doing: str, *axes: Axis) -> None:
    """Raise if this rank has a ``failure``, or if one is among the ``reports`` of the others; else do nothing.

    Args:
        reports: what :func:`report` gave on each rank, the same on every rank of the axes.
        doing: as for :func:`together`.
        axes: the ranks that raise now; before they part they wait for each other, which is collective.

    Raises ``failure`` itself where there is one, and ``DistributedError`` elsewhere.
    """
    # An error may come by several ways (axes, headers): one entry of each, by rank.
    failures = sorted({(int(rank), str(line)) for entries in reports for rank, line in entries})
    if failure is None and not failures:
        return
    with settling(*axes):
        if failure is None:
            raise _another_rank_failed(failures, doing)
        # The others raise an error that quotes this one, so one rank's message is enough for a log.
        if isinstance(failure, UllageError) and axes:
            failure.told_to_all = True
        try:
            raise failure
        finally:
            failure = None  # see together


def _another_rank_failed(failures: Sequence[tuple[int, str]], doing: str) -> DistributedError:
    """The error of the ranks that did not fail themselves."""
    ranks = list(dict.fromkeys(rank for rank, _ in failures))
    lines = list(dict.fromkeys(line for _, line in failures))
    found = lines[0]
    if len(lines) > 1:
        # Several ranks with one error are one line; with several errors each is quoted beside its rank.
        found = listed([f"on rank {rank} {line}" for rank, line in failures], _QUOTED, "; ")
    named = listed(ranks, _QUOTED)
    error = DistributedError(
        f"another rank failed while {doing}",
        where=f"rank {named}" if len(ranks) == 1 else f"ranks {named}",
        found=found,
        hint=f"the log of rank {ranks[0]} has the whole error",
    )
    error.failures = tuple(failures)
    return error


def _axes(ranks: Axis | Topology) -> list[Axis]:
    return [axis for axis in (ranks.axes if isinstance(ranks, Topology) else (ranks,)) if axis.size > 1]
