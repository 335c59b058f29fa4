"""The global stream of samples: which rank reads which sample, and where a run that stopped goes on.

The stream is what ``streams`` readers make together, one sample of each in turn: sample *j* of the stream is sample
``j // streams`` of reader ``j mod streams``. A step takes the next ``global_batch_size`` of them; a reader that has
ended is passed over and the others fill the step up, so that only the last step is short. All of it is a pure function
of how many samples each reader has given, and that is the state: numbers, no data.

Who the readers are depends on the samples:

===============================================  =======================================================================
samples                                          readers
===============================================  =======================================================================
a map-style dataset that all ranks hold          the ranks: reader *r* of *n* has every *n*-th sample, from *r* on
an iterable that all ranks hold                  likewise: each rank reads it through and keeps its samples
one of ``datasets`` with shards, held by all     its shards, whatever number of ranks there is: of *n* ranks, rank *r*
                                                 reads shards *r*, *r* + *n*, ... and nothing of the others
a dataset or an iterable of each rank's own      the ranks: sample *k* of reader *r* is sample ``k·n + r`` of the stream
===============================================  =======================================================================

In the first two the state is a position of the stream, in the third it counts by shard: another number of ranks takes
the same samples in the same steps. So it does in the last if the ranks' map-style datasets are ``dataset[r::n]``. An
iterable of a rank's own (files by rank) is read on only by the rank that has it: its state holds for as many ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ullage.core.columns import is_media, sample_value
from ullage.core.errors import InputError
from ullage.core.layout import Int64

MAP, ITERABLE = "map", "iterable"
_FORMAT = "ullage stream 1"
_PROBED = 8
#: Shards of one iterable that are open at a time, over all ranks; of more, several make one reader.
_MAX_SHARDS = 64


def source_kind(samples: Any) -> str:
    """``"map"`` for what has a length and is read by index, ``"iterable"`` for the rest. Raises ``InputError``."""
    if isinstance(samples, Mapping) or not isinstance(samples, Iterable | Sized):
        raise InputError("samples must be an iterable or a map-style dataset of mappings", found=type(samples).__name__)
    by_index = hasattr(type(samples), "__getitem__") and not isinstance(samples, torch.utils.data.IterableDataset)
    return MAP if by_index and isinstance(samples, Sized) else ITERABLE


def hub_stream(samples: Any) -> bool:
    """Whether samples are an iterable of ``datasets``, which need not be installed."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(samples, module.IterableDataset)


def num_shards(samples: Any) -> int:
    """Number of readers that an iterable which all ranks hold is divided into by its shards; 0 where it has none.

    Raises ``InputError`` for one that ``split_dataset_by_node`` has divided already.
    """
    if not hub_stream(samples):
        return 0
    if samples._distributed is not None:
        raise InputError(
            "a shared iterable is divided already",
            expected="the whole of it on every rank",
            found="a part that split_dataset_by_node has made",
            hint="pass it undivided: each sample is read by one rank",
        )
    return min(samples.num_shards, _MAX_SHARDS) if samples.num_shards > 1 else 0


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
        if is_media(name) and sample[name] is None:  # a sample without images
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
        ranks: that the readers are dealt to where they are shards of one iterable; ``None`` where each rank is one.
    """

    kind: str
    streams: int
    sizes: tuple[int, ...] = ()
    shared: bool = True
    ranks: int | None = None

    def readers_of(self, rank: int) -> range:
        """The readers whose samples a rank reads: itself, or its shards, of which a rank may have none."""
        return range(rank, rank + 1) if self.ranks is None else range(rank, self.streams, self.ranks)

    @property
    def by_index(self) -> bool:
        """Whether the index of a sample in one dataset, that all ranks hold, says which rank reads it."""
        return self.shared and self.ranks is None

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
            "readers": "samples" if self.by_index else "shards" if self.ranks is not None else "ranks",
        }

    def restore(self, state: Mapping[str, Any]) -> Int64:
        """Number of samples that each reader had given in ``state``, whatever number of ranks wrote it.

        Raises ``InputError`` for a state of something else, and for one of ranks that had samples of their own, if
        there are not as many now.
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
        given = np.array(state["given"], np.int64)
        given = self._of_iterable(given, state) if self.kind == ITERABLE else self._of_dataset(given)
        if self.kind == MAP and (given > np.array(self.sizes)).any():
            raise InputError("the state lies behind the end of the samples", expected=list(self.sizes), found=given)
        return given

    def _of_dataset(self, given: Int64) -> Int64:
        """The counts of these readers at the same position of a map-style stream."""
        position = int(given.sum())
        if len(given) == self.streams:
            return given
        # Another number of readers can go on if the state is a position of the whole stream.
        if not np.array_equal(given, regular_counts(position, len(given))):
            raise InputError(
                "a stream of ranks' own datasets, of which one has ended, resumes only with as many of them",
                expected=f"{len(given)} data-parallel ranks",
                found=self.streams,
                hint="give every rank the whole dataset, and shared=True: then any number of ranks resumes",
            )
        return regular_counts(position, self.streams)

    def _of_iterable(self, given: Int64, state: Mapping[str, Any]) -> Int64:
        """The counts of these readers at the same position of an iterable."""
        if not given.any():
            return np.zeros(self.streams, np.int64)
        before = state.get("readers", "ranks")
        # One rank with an iterable of its own has read it in order.
        if len(given) == 1 and before == "ranks":
            before = "samples"
        if self.by_index and before == "samples":
            return regular_counts(int(given.sum()), self.streams)
        # Files that ranks had of their own may be the shards of one stream now, and the other way round.
        if not self.by_index and before != "samples" and len(given) == self.streams:
            return given
        expected, hint = {
            "samples": (
                "an iterable that all ranks hold, read in order",
                "pass the same iterable as a whole on every rank, with shared=True",
            ),
            "shards": (
                f"{len(given)} shards of an iterable that all ranks hold",
                "pass the same datasets.IterableDataset on every rank, with shared=True",
            ),
            "ranks": (
                f"{len(given)} data-parallel ranks with iterables of their own",
                f"resume with as many, or pass on every rank one datasets.IterableDataset whose {len(given)} shards "
                "are what the ranks had, in their order, with shared=True",
            ),
        }[before]
        own = "data-parallel ranks with iterables of their own" if self.ranks is None else "shards"
        raise InputError(
            "an iterable of each rank's own resumes only with as many ranks"
            if before == "ranks" and not self.shared
            else "the state is of an iterable that was read in another way",
            expected=expected,
            found="an iterable that all ranks hold, read in order" if self.by_index else f"{self.streams} {own}",
            hint=hint,
        )


class Reader:
    """This rank's part of the stream, read in order from what was given on. Never writes to a sample."""

    def __init__(self, samples: Any, stream: Stream, rank: int) -> None:
        self._samples, self._stream = samples, stream
        self._readers = stream.readers_of(rank)
        self._given = np.zeros(stream.streams, np.int64)
        self._iterators: dict[int, Iterator[Any]] = {}

    def seek(self, given: Int64) -> None:
        """Go on after what each reader has given; an iterable starts over, and is read up to there when next asked."""
        self._given, self._iterators = given.copy(), {}

    def take(self, quota: Int64) -> tuple[list[Any], Int64]:
        """The next samples of this rank's readers, and how many each gave, int64 [streams]; fewer if an iterable ends.

        ``quota`` [streams]: asked of each reader. Raises ``InputError`` if an iterable ends before it resumes.
        """
        taken: list[Any] = []
        counts = np.zeros_like(quota)
        for reader in self._readers:
            part = self._take(reader, int(quota[reader])) if quota[reader] else []
            counts[reader] = len(part)
            taken += part
        self._given += counts
        return taken, counts

    def _take(self, reader: int, count: int) -> list[Any]:
        given = int(self._given[reader])
        if self._stream.kind == MAP:
            return [self._samples[self.position(k, reader)] for k in range(given, given + count)]
        if reader not in self._iterators:
            self._iterators[reader] = self._open(reader, given)
        return list(itertools.islice(self._iterators[reader], count))

    def _open(self, reader: int, given: int) -> Iterator[Any]:
        """A reader's samples of an iterable, behind the first ``given``. Raises ``InputError`` where it has fewer."""
        stream, samples, position = self._stream, self._samples, given
        if stream.by_index:
            # The last sample given must be there; those of other readers behind it may be missing.
            position = self.position(given - 1, reader) + 1 if given else 0
        elif stream.ranks is not None:
            samples = shard_of(samples, stream.streams, reader)
        iterator, is_there = read_from(samples, position)
        if not is_there:
            raise InputError("the samples end before the state", expected=f"{position} samples", found="fewer")
        if not stream.by_index:
            return iterator
        return itertools.islice(iterator, stream.streams - 1 if given else reader, None, stream.streams)

    def position(self, k: int, reader: int) -> int:
        """The index in the dataset of a reader's sample ``k``."""
        return k * self._stream.streams + reader if self._stream.by_index else k


def shard_of(samples: Any, shards: int, index: int) -> Any:
    """One of ``shards`` parts of an iterable of ``datasets``, in the epoch of the whole."""
    part = samples.shard(shards, index, contiguous=False)
    part.set_epoch(samples.epoch)
    return part


def read_from(samples: Any, position: int) -> tuple[Iterator[Any], bool]:
    """What an iterable gives behind its first ``position`` samples, and whether it has as many."""
    left = position
    # ``datasets`` skips rows of a table without making samples of them. Not in a later epoch: what was told to skip is
    # no longer shuffled then. The last one is read, or nobody would know whether it was there.
    can_skip = hub_stream(samples) and not (samples.epoch or samples._distributed or samples._starting_state_dict)
    if position > 1 and can_skip:
        samples, left = samples.skip(position - 1), 1
    iterator = iter(samples)
    # In any other iterable the only way to a position is to read up to it.
    return iterator, sum(1 for _ in itertools.islice(iterator, left)) == left
