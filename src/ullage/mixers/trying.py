"""Ways tried on the model itself, from the finest on: the first that the proof accepts is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from ullage.errors import InputError
from ullage.mixers.placing import put_in, take_out
from ullage.mixers.ways import Way

_logger = logging.getLogger(__name__)


class SequencesMeet(InputError):
    """In every way in which a model could be packed, its sequences do not get what they get alone."""


def first_accepted(
    model: nn.Module, ways: Sequence[Way], problem_of: Callable[[], str | None], *, current: Way | None = None
) -> Way:
    """Pack a model in the first of some ways that has no problem, and return that way.

    Args:
        model: bare; packed in one of the ways or not at all.
        ways: finest first.
        problem_of: proves the model as it is then packed: why it does not pack in this way, in one clause; None if it
            does. The same on every rank, which then try the same ways.
        current: the way in which it is packed, if it is.

    Logs what was tried. Raises ``SequencesMeet``, with the model unpacked, if no way is accepted.
    """
    refused: list[tuple[Way, str]] = []
    for way in ways:
        if way != current:
            take_out(model)
            put_in(model, way, is_proved=True)
        current = way
        problem = problem_of()
        if problem is None:
            for each, reason in refused:
                _logger.info("%s is not packed %s: %s", type(model).__name__, _adverb(each), reason)
            if refused:
                _logger.warning("%s is packed %s: finer ways do not pass", type(model).__name__, _adverb(way))
            return way
        refused.append((way, problem))
    take_out(model)
    raise SequencesMeet(
        "packed, the sequences of this model do not get what they get alone",
        where=type(model).__name__,
        expected="outputs, loss and gradients of each sequence alone",
        found=_told(refused),
        hint="train it on padded batches (leave packing out), or take from that module what looks at other tokens of "
        "the row; packing_verify=False packs it all the same",
    )


def _told(refused: Sequence[tuple[Way, str]]) -> str:
    """The finest way with its reason, and the others with theirs where that is another."""
    told, place = [f"{refused[0][0]}: {refused[0][1]}"], _place(refused[0][1])
    for way, reason in refused[1:]:
        same = place is not None and _place(reason) == place
        told.append(f"{way}: in the same module" if same else f"{way}: {reason}")
    return "; ".join(told)


def _place(reason: str) -> str | None:
    _, found, place = reason.partition(", first in ")
    return place if found else None


def _adverb(way: Way) -> str:
    return (
        "natively"
        if way.kind == "native"
        else f"with its {way.kind} by lengths"
        if way.kind != "whole"
        else "as a whole"
    )
