"""The global stream of samples: which rank reads which sample, and where a run that stopped goes on.

The stream is what ``streams`` readers make together, one sample of each in turn: sample *j* of the stream is sample
``j // streams`` of reader ``j mod streams``. A step takes the next ``global_batch_size`` of them; a reader that has
ended is passed over and the others fill the step up, so that only the last step is short. All of it is a pure function
of how many samples each reader has given, and that is the state: numbers, no data.

A map-style dataset that is the same on every rank is read at every ``streams``-th index; where each rank has a dataset
of its own, sample *k* of reader *r* counts as sample ``k·streams + r`` of the stream, as if the ranks held
``dataset[r::streams]``. In both cases the state is a position in the stream, so that another number of readers can go
on from it. An iterable can only be read on by the reader that began it: its state holds for the same number of readers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ullage.core.columns import sample_value
from ullage.core.errors import InputError
from ullage.core.layout import Int64

MAP, ITERABLE = "map", "iterable"
_FORMAT = "ullage stream 1"
_PROBED = 8


def source_kind(samples: Any) -> str:
    """``"map"`` for what has a length and is read by index, ``"iterable"`` for the rest. Raises ``InputError``."""
    if isinstance(samples, Mapping) or not isinstance(samples, Iterable | Sized):
        raise InputError("samples must be an iterable or a map-style dataset of mappings", found=type(samples).__name__)
    by_index = hasattr(type(samples), "__getitem__") and not isinstance(samples, torch.utils.data.IterableDataset)
    return MAP if by_index and isinstance(samples, Sized) else ITERABLE


def fingerprint(samples: Any) -> str:
    """A digest of a map-style dataset's length and of a few of its samples: equal where datasets are the same.

    Empty where reading a sample twice gives two different ones, so that nothing can be told.
    """
    count = len(samples)
    digest = hashlib.blake2b(str(count).encode(), digest_size=16)
    for i in sorted(set(np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64).tolist())):
        # Read twice: random augmentation would make equal datasets look different.
        first, second = _digest(samples[i]), _digest(samples[i])
        if first != second:
            return ""
        digest.update(first)
    return digest.hexdigest()


def _digest(sample: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(sample) if isinstance(sample, Mapping) else ():
        if isinstance(sample[name], str):  # a column that is read past
            digest.update(f"{name} {sample[name]}".encode(errors="surrogatepass"))
            continue
        value = sample_value([sample], 0, name).detach().cpu()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.reshape(-1).clone(memory_format=torch.contiguous_format)  # a view as bytes wants stride 1
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def regular_counts(position: int, streams: int) -> Int64:
    """Number of samples that each reader has given after ``position`` samples of the stream, if none has ended."""
    return (position + streams - 1 - np.arange(streams, dtype=np.int64)) // streams


def deal(given: Int64, live: np.ndarray, wanted: int) -> Int64:
    """Number of the next ``wanted`` samples that come from each reader, int64 [streams].

    ``given`` [streams]: what each has given so far; ``live`` [streams]: which have not ended. Those go on in turn,
    from the one that is behind. Pure, the same on every rank.

    >>> deal(np.array([2, 1, 1]), np.array([True, True, True]), 4).tolist()
    [1, 2, 1]
    """
    quota = np.zeros(len(given), np.int64)
    readers = np.flatnonzero(live)
    if not len(readers):
        return quota
    # The least level at which the live readers have given enough; those in front at that level give one more.
    behind = given[readers]
    level = int(behind.min()) + wanted // len(readers)
    while int(np.maximum(level + 1 - behind, 0).sum()) <= wanted:
        level += 1
    while level > int(behind.min()) and int(np.maximum(level - behind, 0).sum()) > wanted:
        level -= 1
    # Give up to the level; what is left goes one each to the first readers in turn that stand at it or below.
    part = np.maximum(level - behind, 0)
    rest = wanted - int(part.sum())
    part[np.flatnonzero(behind <= level)[:rest]] += 1
    quota[readers] = part
    return quota


@dataclass(frozen=True)
class Stream:
    """The facts of the stream that all ranks know.

    Attributes:
        kind: ``"map"`` or ``"iterable"``, as :func:`source_kind` says; the same for all readers.
        streams: number of readers.
        sizes [streams]: samples of each reader; empty unless the datasets are map-style.
        shared: whether the readers read one dataset that all of them hold.
    """

    kind: str
    streams: int
    sizes: tuple[int, ...] = ()
    shared: bool = True

    def quotas(self, given: Int64, wanted: int) -> Int64:
        """Number of samples that each reader gives to the next step of a map-style stream, int64 [streams]."""
        sizes = np.array(self.sizes, np.int64)
        quota = np.zeros(self.streams, np.int64)
        while (missing := wanted - int(quota.sum())) > 0:
            # A reader that has less left than its share gives what it has; the next turn deals the rest among the
            # others.
            more = np.minimum(deal(given + quota, given + quota < sizes, missing), sizes - given - quota)
            if not more.any():
                break
            quota += more
        return quota

    def state(self, given: Int64) -> dict[str, Any]:
        """The state as plain numbers: ``position`` samples of the stream are gone, ``given`` by each reader."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "position": int(given.sum()),
            "given": [int(n) for n in given],
            "size": sum(self.sizes),
        }

    def restore(self, state: Mapping[str, Any]) -> Int64:
        """Number of samples that each reader had given in ``state``.

        Raises ``InputError`` for a state of something else, and for one that this number of readers cannot continue.
        """
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise InputError("this is not the state of a PackedIterator", expected=f"format {_FORMAT!r}", found=found)
        if state["kind"] != self.kind or state["size"] != sum(self.sizes):
            raise InputError(
                "the state is of another source",
                expected=f"{state['kind']} of {state['size']} samples" if state["size"] else state["kind"],
                found=f"{self.kind} of {sum(self.sizes)} samples" if self.sizes else self.kind,
            )
        # Another number of readers can go on if the state is a position of the whole stream.
        given = np.array(state["given"], np.int64)
        if len(given) != self.streams:
            given = self._redeal(given)
        if self.kind == MAP and (given > np.array(self.sizes)).any():
            raise InputError("the state lies behind the end of the samples", expected=list(self.sizes), found=given)
        return given

    def _redeal(self, given: Int64) -> Int64:
        """The counts of another number of readers at the same position of the stream."""
        position = int(given.sum())
        if self.kind == ITERABLE:
            raise InputError(
                "an iterable resumes only with as many readers",
                expected=f"{len(given)} data-parallel ranks",
                found=self.streams,
                hint="resume at the same dp, or use a map-style dataset",
            )
        if not np.array_equal(given, regular_counts(position, len(given))):
            raise InputError(
                "a stream of which one reader has ended resumes only with as many readers",
                expected=f"{len(given)} data-parallel ranks",
                found=self.streams,
            )
        return regular_counts(position, self.streams)


class Reader:
    """This rank's part of the stream, read in order from ``given`` on. Never writes to a sample."""

    def __init__(self, samples: Any, stream: Stream, rank: int) -> None:
        self._samples, self._stream, self._rank = samples, stream, rank
        self._given = self._skip = 0
        self._iterator: Iterator[Any] | None = None

    def seek(self, given: int) -> None:
        """Go on after the first ``given`` samples; an iterable starts over, and is read up to there when next asked."""
        self._given, self._skip, self._iterator = given, given, None

    def take(self, count: int) -> list[Any]:
        """The next ``count`` samples, fewer if an iterable ends. Raises ``InputError`` if it ends before it resumes."""
        if self._stream.kind == ITERABLE:
            if self._iterator is None:
                self._iterator = iter(self._samples)
                # The only way to a position in an iterable is to read up to it.
                skipped = sum(1 for _ in itertools.islice(self._iterator, self._skip))
                if skipped < self._skip:
                    raise InputError(
                        "the samples end before the state", expected=f"{self._skip} samples", found=skipped
                    )
            taken = list(itertools.islice(self._iterator, count))
        else:
            taken = [self._samples[self.position(k)] for k in range(self._given, self._given + count)]
        self._given += len(taken)
        return taken

    def position(self, k: int) -> int:
        """The index in the dataset of this reader's sample ``k``."""
        return k * self._stream.streams + self._rank if self._stream.shared else k
