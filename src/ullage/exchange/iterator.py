"""Packed steps, one after another, made while the last one trains: :class:`PackedIterator`.

The iterator checks at its construction that all ranks mean the same thing, makes gloo groups that nobody else uses, and
lets one thread run the steps of this folder on host tensors. Only the caller's thread touches a device, and only the
iterator's thread its groups: a collective issued from two threads on one group gives wrong sums without an error.

One thread makes the next step while this one trains, in step with the threads of all other ranks. Every step that it
makes is collective, so two ranks must never make different numbers of them: a thread runs at most ``ahead`` steps
beyond those that were taken, and makes all of these even when it is being closed. Ranks that took the same number of
steps have then made the same number, whatever their timing.

Process groups of one iterator's own are lent to the next when it is done. A group must never be used by two threads,
and to close one while a slower rank still reads from it loses that rank's data. So groups are not closed but kept: an
iterator that ended well gives its groups back, and the next iterator over the same ranks gets them. Whether it does is
decided together, so that all ranks use the same ones. At the end of the process they are dropped: a group that is kept
here would outlive ``destroy_process_group``.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

from ullage.core.errors import DistributedError, InputError, require_int, require_one_of
from ullage.core.layout import ORDERS
from ullage.exchange.source import MAP, Reader, Stream, fingerprint, num_shards, source_kind
from ullage.exchange.steps import Options, PackedStep, StageFields, StepMaker
from ullage.planning import plan
from ullage.ranks import Axis, Topology, agree, tried
from ullage.ranks.ending import before_the_end, end_groups_at_exit
from ullage.ranks.groups import timeout_of
from ullage.ranks.wire import gather_objects

# Comparison of settings, coordinates and sources of all ranks, once before the first step.
#
# One gather of small objects over the whole world, on the caller's thread. What does not agree raises on every rank and
# names the one that differs.


def describe(samples: Any, topology: Topology, shared: bool | None) -> dict[str, Any] | None:
    """This rank's source, for the other ranks to compare."""
    if not topology.owns_data:
        return None
    if samples is None:
        raise InputError("a rank that owns data must have samples", where=f"owners {topology.owners!r}", found="None")
    kind = source_kind(samples)
    record = {"kind": kind, "dp": topology.dp.rank, "shared": shared}
    if kind != MAP:
        return record | {"shards": num_shards(samples) if shared else 0}
    # A fingerprint reads samples, so only where it decides something: several readers, and no answer from the caller.
    digest = fingerprint(samples) if shared is None and topology.dp.size > 1 else None
    return record | {"size": len(samples), "digest": digest}


def compare_topologies(
    topology: Topology, record: dict[str, Any] | None, failure: Exception | None
) -> list[dict[str, Any]]:
    """Gather what every rank was given, by global rank; raise on every rank if one failed or if they do not agree.

    Collective over the world. ``record``: this rank's, or its ``failure``.
    """
    places = {axis.name: (axis.size, axis.rank, axis.ranks) for axis in topology.axes}
    mine = {"coordinates": [axis.rank for axis in topology.axes], "sizes": [axis.size for axis in topology.axes]}
    mine |= {"owners": topology.owners, **(record or {})}
    world = Axis("world") if topology.world_size == 1 else Axis.world()
    if topology.world_size > 1:
        for axis in topology.axes:
            if axis.size > 1:
                axis.require_group()
    # Errors first: a rank that failed has no record to compare.
    agree(failure, world, "describing its samples and settings")
    records = gather_objects(mine, world)
    _require_same(records)
    _require_grid(records, places)
    return records


def _require_same(records: Sequence[Mapping[str, Any]]) -> None:
    first = records[0]
    for rank, other in enumerate(records):
        for name, value in other["settings"].items():
            if value != first["settings"][name]:
                raise DistributedError(
                    f"ranks were given different {name}",
                    where=f"rank {rank}",
                    expected=f"{first['settings'][name]} as on rank 0",
                    found=value,
                )
        for name in ("sizes", "owners"):
            if other[name] != first[name]:
                raise DistributedError(
                    f"ranks have topologies of different {name}",
                    where=f"rank {rank}",
                    expected=first[name],
                    found=other[name],
                )


def _require_grid(records: Sequence[Mapping[str, Any]], places: Mapping[str, tuple[int, int, Sequence[int]]]) -> None:
    """Every coordinate is there once, and this rank's axes list the ranks that stand along them."""
    # As many ranks as the grid has places: if no two share one, all places are taken.
    by_place = {tuple(record["coordinates"]): rank for rank, record in enumerate(records)}
    if len(by_place) != len(records):
        raise DistributedError("two ranks have the same coordinates in the topology", expected=f"{len(records)} places")
    here = [place[1] for place in places.values()]
    for number, (name, (size, _, ranks)) in enumerate(places.items()):
        # Walk the axis through this rank: all other coordinates stay.
        along = tuple(by_place[(*here[:number], k, *here[number + 1 :])] for k in range(size))
        if ranks and along != tuple(ranks):
            raise DistributedError(f"ranks disagree on the {name} axis", expected=list(along), found=list(ranks))


def stream_of(records: Sequence[Mapping[str, Any]], topology: Topology) -> Stream:
    """The stream that all owners read together. Raises ``DistributedError`` on every rank if they cannot."""
    sources = [(rank, record["source"]) for rank, record in enumerate(records) if record["source"] is not None]
    # Ranks with one dp coordinate read the same samples (tensor-parallel peers, pipeline ends); they count as one
    # reader and must describe the same source.
    by_reader: dict[int, dict[str, Any]] = {}
    for rank, source in sources:
        other = by_reader.setdefault(source["dp"], source)
        first = sources[0][1]
        if {**source, "digest": None} != {**other, "digest": None} or any(
            source.get(name) != first.get(name) for name in ("kind", "shared", "shards")
        ):
            raise DistributedError("ranks have different sources", where=f"rank {rank}", expected=first, found=source)
    streams = topology.dp.size
    first = sources[0][1]
    kind, shared = first["kind"], first["shared"]
    if kind != MAP:
        if first["shards"]:
            return Stream(kind, first["shards"], ranks=streams)
        # One rank's own is read in order, as one that all ranks hold is.
        return Stream(kind, streams, shared=bool(shared) or streams == 1)
    # Sizes per reader: of its own dataset, or of every ``streams``-th sample of the shared one.
    readers = [by_reader[k] for k in range(streams)]
    sizes = [reader["size"] for reader in readers]
    if shared is None:
        shared = _found_shared([reader["digest"] for reader in readers])
    if shared:
        if len(set(sizes)) > 1:
            raise DistributedError("a shared dataset is not the same on every rank", found=f"lengths {sizes}")
        sizes = [len(range(k, sizes[0], streams)) for k in range(streams)]
    return Stream(kind, streams, tuple(sizes), shared)


def _found_shared(digests: Sequence[str | None]) -> bool:
    if len(digests) == 1:
        return True
    # A digest is empty where two readings of a sample differ, for example by augmentation.
    if "" in digests:
        raise DistributedError(
            "it cannot be told whether ranks hold the same dataset",
            found="samples that differ from one reading to the next",
            hint="pass shared=True if they do, shared=False if each rank has its own",
        )
    return len(set(digests)) == 1


T = TypeVar("T")

# Weak: an iterator that nobody holds must not be kept alive by the handler at the end of the process.
_running: WeakSet[Background[Any]] = WeakSet()


class Background(Generic[T]):
    """Calls ``make`` in a thread, at most ``ahead`` results beyond those taken; ``None`` is the end.

    What ``make`` raises is raised by :meth:`take` in its turn. Neither it nor ``None`` is followed by another call.
    """

    def __init__(self, make: Callable[[], T | None], ahead: int) -> None:
        self._make, self._ahead = make, ahead
        self._results: deque[tuple[T | None, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._made, self._allowed, self._closing = 0, ahead, False
        self._thread = threading.Thread(target=self._run, name="ullage exchange", daemon=True)
        _running.add(self)
        self._thread.start()

    def take(self) -> T | None:
        """The next result; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._results)
            result, error = self._results[0]
            # An error stays first in the queue too: every later call raises it again.
            if error is not None:
                raise error
            if result is not None:  # the end stays where it is, for whoever asks again
                self._results.popleft()
                self._allowed += 1
                self._changed.notify_all()
            return result

    @property
    def runs(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def close(self, timeout: float | None = None) -> None:
        """Wait until the thread has made what it may, drop that, and end it. ``timeout``: seconds to wait at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._results.clear()

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                # Closing does not stop the thread early: it makes all it may, as the other ranks do, and ends then.
                self._changed.wait_for(lambda: self._made < self._allowed or self._closing)
                if self._made >= self._allowed:
                    return
            # Without the lock, so that a result can be taken while the next one is made.
            result, error = None, None
            try:
                result = self._make()
            except BaseException as caught:  # handed to the thread that takes, whatever it is
                error = caught
            last = error is not None or result is None
            with self._changed:
                self._made += 1
                self._results.append((result, error))
                self._changed.notify_all()


@before_the_end
def _close_all(until: float) -> bool:
    """A thread that nobody closed may be in the middle of a step while the interpreter ends."""
    for background in list(_running):
        background.close(timeout=max(until - time.monotonic(), 0.0))
    return not any(background.runs for background in list(_running))


Key = tuple[tuple[tuple[int, ...], ...], timedelta | None]


@dataclass
class Lease:
    """A topology whose groups nobody else uses until it is given back.

    Attributes:
        topology: with gloo groups of its own.
        number: of the lease, the same on every rank; 0 for a single rank, which has no groups.
        key: the ranks along each axis, and the timeout; groups are lent again for an equal one.
        world: the default process group at that time; ``None`` for a single rank.
    """

    topology: Topology
    number: int
    key: Key
    world: object

    def give_back(self, clean: bool) -> None:
        """Lend the groups to whoever comes next, unless a collective on them failed."""
        if clean and self.number:
            _idle.append(self)


_idle: list[Lease] = []
_last = 0


def lease(topology: Topology, timeout: timedelta | None) -> Lease:
    """Gloo groups over the ranks of ``topology``. Collective over the world where it has more than one rank."""
    global _last
    key = (tuple(tuple(axis.ranks) for axis in topology.axes), timeout)
    if topology.world_size == 1:
        return Lease(topology, 0, key, None)
    end_groups_at_exit()
    world = dist.group.WORLD
    # Groups of a world that was destroyed and initialised again are dead, even for equal ranks.
    _idle[:] = [held for held in _idle if held.world is world]
    mine = next((held for held in _idle if held.key == key), None)
    # Each rank offers the lease that it would reuse. It is reused only if all ranks offer the same one: some may
    # still have it in use, or may have failed on it.
    offers: list[tuple[int, int]] = gather_objects((0 if mine is None else mine.number, _last), Axis.world())
    _last = max(last for _, last in offers)
    if mine is not None and all(number == mine.number for number, _ in offers):
        _idle.remove(mine)
        return Lease(topology.with_groups({a.name: a.group for a in mine.topology.axes}), mine.number, key, world)
    # One more than any rank has used, so that a number is never used for two sets of groups.
    _last += 1
    return Lease(topology.on_gloo(timeout), _last, key, world)


@before_the_end
def _drop_idle(until: float) -> bool:
    _idle.clear()
    return True


#: What the iterator decides itself, or what would have to be another list for every step.
_NOT_OPTIONS = ("lengths", "ranks", "capacity", "pad_to_multiple_of", "keep_together", "assignment", "context_parallel")


class PackedIterator:
    """Iterator of :class:`PackedStep`: one global batch per step, planned, exchanged and packed ahead of its use.

    Args:
        samples: on a rank that owns data an iterable, or a map-style dataset; ``None`` on the others. Samples are
            mappings of names to values as ``RaggedBatch.from_samples`` takes them, and are never written to.
        topology: of all ranks that make steps together; by default of this process alone.
        global_batch_size: sequences per step over all data-parallel ranks; the last step may be shorter.
        capacity: slots (padded tokens) that a rank holds in one microbatch, so that with context parallelism a
            microbatch has ``cp`` times as many.
        pad_to_multiple_of: what each rank's part of a slot is a multiple of, in tokens.
        prefetch: steps made ahead; 0 makes them when they are asked for.
        shared: whether all ranks pass the same samples, each reading its part of them, or each rank its own. ``None``
            compares map-style datasets to find out, and takes an iterable, which cannot be compared, as the rank's own.
            One of ``datasets`` with shards is then read by shards, a sample of each in turn.
        fields: the names to carry, which every sample must have; ``None`` carries all.
        per_sequence: names of fields with one entry per sequence although they are arrays.
        per_item: names of fields with a number of rows for each sequence, beside those of images, which are known. A
            step's microbatch has those of which its sequences have rows.
        stage_fields: function of pipeline stage and number of stages to the fields that this stage gets.
        cp_order: how ``shards`` are cut, see :meth:`ullage.Layout.cut`; ``None`` cuts none.
        device: where steps are put when they are taken; ``None`` leaves them on the host.
        timeout: of the iterator's own process groups, in seconds or as timedelta; by default the topology's.
        plan_options: go to :func:`ullage.plan`.

    Construction, every step and ``close`` are collective over the topology: every rank must make as many steps. An
    error on any rank is raised on every rank by the ``next()`` that it concerns. Raises ``InputError`` for arguments
    that cannot be met and ``DistributedError`` where ranks disagree or another rank failed.
    """

    def __init__(
        self,
        samples: Any,
        topology: Topology | None = None,
        *,
        global_batch_size: int,
        capacity: int,
        pad_to_multiple_of: int = 1,
        prefetch: int = 1,
        shared: bool | None = None,
        fields: Sequence[str] | None = None,
        per_sequence: Sequence[str] = (),
        per_item: Sequence[str] = (),
        stage_fields: StageFields | None = None,
        cp_order: str | None = "zigzag",
        device: torch.device | str | int | None = None,
        timeout: timedelta | float | None = None,
        **plan_options: Any,
    ) -> None:
        topology = topology or Topology.single()
        numbers = {
            "global_batch_size": global_batch_size,
            "capacity": capacity,
            "pad_to_multiple_of": pad_to_multiple_of,
        }

        # All that can fail on one rank alone runs inside ``tried``: its error reaches the others in the comparison.
        def local() -> dict[str, Any]:
            _require_numbers(numbers, prefetch, cp_order, plan_options)
            options = {name: _plain(value) for name, value in sorted(plan_options.items())}
            settings = numbers | {"prefetch": prefetch, "cp_order": cp_order, "plan options": options}
            settings |= {"fields": fields and list(fields), "per_sequence": sorted(per_sequence)}
            settings |= {"per_item": sorted(per_item)}
            return {"settings": settings, "source": describe(samples, topology, shared)}

        records = compare_topologies(topology, *tried(local))
        # From here on every rank has the same records, so all make the same groups or raise alike.
        stream = stream_of(records, topology)
        self._device = device
        self._prefetch = prefetch
        self._lease = lease(topology, _timeout(timeout, topology))
        reader = Reader(samples, stream, topology.dp.rank) if topology.owns_data else None
        options = Options(
            global_batch_size=global_batch_size,
            make_plan=_planner(topology, capacity, pad_to_multiple_of, cp_order, plan_options),
            per_sequence=tuple(per_sequence),
            per_item=tuple(per_item),
            fields=None if fields is None else tuple(fields),
            stage_fields=stage_fields,
            cp_order=cp_order,
        )
        self._maker = StepMaker(self._lease.topology, stream, reader, options)
        self._given = self._maker.given
        self._background: Background[tuple[PackedStep, np.ndarray]] | None = None
        self._closed = self._ended = self._failed = False

    @property
    def shared(self) -> bool:
        """Whether samples are read as those that every rank holds."""
        return self._maker.stream.shared

    @property
    def position(self) -> int:
        """Samples of the global stream in the steps yielded so far."""
        return int(self._given.sum())

    def __iter__(self) -> PackedIterator:
        return self

    def __next__(self) -> PackedStep:
        if self._ended:
            raise StopIteration
        if self._closed:
            raise InputError("the iterator is closed")
        if self._prefetch == 0:
            made = self._make()
        else:
            # Nothing is made before it is asked for; ``load_state_dict`` ends the thread, the next call starts one.
            if self._background is None:
                self._background = Background(self._make, self._prefetch)
            made = self._background.take()
        if made is None:
            self._ended = True
            self.close()
            raise StopIteration
        # The position of this step, not that of the maker, which is ahead by what is prefetched.
        step, self._given = made
        return step if self._device is None else step.to(self._device, non_blocking=True)

    def _make(self) -> tuple[PackedStep, np.ndarray] | None:
        self._failed = True  # unless it comes back from the collectives
        step = self._maker.make()
        self._failed = False
        return None if step is None else (step, self._maker.given)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was yielded, whatever was made ahead: plain numbers, no data.

        The same on every rank, so that any one of them can save it.
        """
        return self._maker.stream.state(self._given)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. Every rank must call it, after the same number of steps.

        Samples that all ranks hold are resumed exactly at any dp, whatever dp the state is of; each rank's own at the
        same dp. An iterable is read up to there. Raises ``InputError`` for a state of another source, and for iterables
        of the ranks' own at another dp.
        """
        if self._closed:
            raise InputError("the iterator is closed", hint="make a new one to resume")
        given = self._maker.stream.restore(state)
        # What was made ahead is dropped; only then may the maker be moved.
        self._join()
        self._maker.seek(given)
        self._given, self._ended = given, False

    def close(self) -> None:
        """Wait for what is being made, end the thread and give the groups back. May be called twice."""
        if not self._closed:
            self._closed = True
            self._join()
            self._lease.give_back(clean=not self._failed)

    def _join(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None

    def __enter__(self) -> PackedIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _planner(
    topology: Topology, capacity: int, pad_to_multiple_of: int, cp_order: str | None, options: Mapping[str, Any]
):
    cp = topology.cp.size
    # Zigzag gives a rank two chunks of one size from each slot, so its part of a slot must be even. The plan is over
    # dp: a microbatch of a dp coordinate lies on cp ranks and has cp times their capacity and alignment.
    part = pad_to_multiple_of
    if cp > 1 and cp_order != "contiguous" and part % 2:
        part *= 2
    multiple = cp * part

    def make_plan(lengths: np.ndarray):
        return plan(lengths, ranks=topology.dp.size, capacity=capacity * cp, pad_to_multiple_of=multiple, **options)

    return make_plan


def _require_numbers(numbers: Mapping[str, Any], prefetch: Any, cp_order: Any, plan_options: Mapping[str, Any]) -> None:
    for name, value, least in [*((name, value, 1) for name, value in numbers.items()), ("prefetch", prefetch, 0)]:
        require_int(value, name, least=least)
    if cp_order is not None:
        require_one_of(cp_order, ORDERS, "order of slices")
    known = [name for name in inspect.signature(plan).parameters if name not in _NOT_OPTIONS]
    for name in plan_options:
        if name not in known:
            raise InputError("PackedIterator has no such option", expected=", ".join(known), found=name)


def _plain(value: Any) -> Any:
    """An option as ranks can compare it: functions by their names."""
    return getattr(value, "__qualname__", None) or repr(value)


def _timeout(timeout: timedelta | float | None, topology: Topology) -> timedelta | None:
    # A number is seconds. Without either, the iterator waits as long as the groups of the topology do.
    if timeout is not None:
        return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    group = next((axis.group for axis in topology.axes if axis.group is not None), None)
    return None if group is None else timeout_of(group)
