"""One step, from this rank's samples to its microbatches: the steps of this folder in a row, for every regime.

The ranks whose data-parallel groups own data take samples, gather the lengths and exchange by the plan, which every
rank of the topology makes by itself: ranks without data learn the lengths first. Then the microbatches are shared along
the axes whose ranks own nothing. A failure anywhere is carried along instead of being raised on the spot, so that no
rank is left waiting in a collective; all ranks agree along every axis, and either all have the step or all raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ullage.core.batch import RaggedBatch
from ullage.core.columns import Columns
from ullage.core.errors import DistributedError
from ullage.core.layout import Int64
from ullage.exchange.lengths import Lengths, gather_or_fail
from ullage.exchange.reroute import exchange_columns
from ullage.exchange.sharding import Shard, shard
from ullage.exchange.sharing import share_or_fail
from ullage.exchange.source import ITERABLE, Reader, Stream, deal
from ullage.planning.plans import Plan, sum_of_squares
from ullage.ranks import Axis, Topology, agree, raise_failures, report, tried
from ullage.ranks.wire import broadcast_record, dumps, gather_int64, gather_records, settle

StageFields = Callable[[int, int], Sequence[str] | None]


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The microbatches that one rank runs until the optimizer's next step.

    Attributes:
        microbatches: the whole packed microbatches of this data-parallel coordinate; one without sequences is an empty
            batch whose ``placeholder()`` a rank can run.
        num_microbatches: the same on every rank.
        num_tokens: real tokens of the global batch, an exact integer, equal on every rank.
        sum_squared_lengths: Σlength² of the global batch, likewise.
        plan: where every sequence went.
        shards: this rank's context-parallel slices, one per microbatch; none without cp.
    """

    microbatches: list[RaggedBatch]
    num_microbatches: int
    num_tokens: int
    sum_squared_lengths: int
    plan: Plan = field(repr=False)
    shards: list[Shard] = field(default_factory=list, repr=False)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedStep:
        """The same step on ``device``: the slices where there are any, the whole microbatches otherwise."""
        if self.shards:
            return replace(self, shards=[part.to(device, non_blocking) for part in self.shards])
        return replace(self, microbatches=[batch.to(device, non_blocking) for batch in self.microbatches])


@dataclass(frozen=True)
class Options:
    """Options of making steps, the same on every rank.

    Attributes:
        global_batch_size: sequences per step over all readers.
        make_plan: from the gathered lengths to a plan; must give equal plans on all ranks.
        per_sequence, per_item, fields: of samples, as :meth:`ullage.core.columns.Columns.read` takes them.
        stage_fields: from pipeline stage and number of stages to the fields that the stage gets; ``None`` for all.
        cp_order: how slices are cut, see :meth:`ullage.Layout.cut`; ``None`` cuts none.
    """

    global_batch_size: int
    make_plan: Callable[[Int64], Plan]
    per_sequence: tuple[str, ...] = ()
    per_item: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    stage_fields: StageFields | None = None
    cp_order: str | None = "zigzag"

    def fields_of(self, topology: Topology, stage: int) -> Sequence[str] | None:
        """The fields that a pipeline stage gets, ``None`` for all."""
        if self.stage_fields is not None:
            return self.stage_fields(stage, topology.pp.size)
        # Stages between the ends work on hidden states: without other instructions they get lengths only.
        inner = topology.owners in ("ends", "stages") and 0 < stage < topology.pp.size - 1
        return () if inner else None


class StepMaker:
    """Makes one :class:`PackedStep` after another. ``reader`` is ``None`` on a rank that owns no data.

    :meth:`make` is collective over all axes of the topology; ``given`` is the state after the last step made.
    """

    def __init__(self, topology: Topology, stream: Stream, reader: Reader | None, options: Options) -> None:
        self.topology, self.stream, self.options = topology, stream, options
        self._reader = reader
        #: Of the step being made: samples of each reader, and the places in the stream of those that this rank read.
        self._counts = np.zeros(stream.streams, np.int64)
        self._places: list[int] = []
        self.given = np.zeros(stream.streams, np.int64)
        self._live = np.ones(stream.streams, bool)

    def seek(self, given: Int64) -> None:
        """Go on after what each reader had given."""
        if self._reader is not None:
            self._reader.seek(given)
        self.given, self._live = given.copy(), np.ones(len(given), bool)

    def make(self, failure: Exception | None = None) -> PackedStep | None:
        """The next step, ``None`` at the end of the stream. Raises on every rank if any rank failed.

        ``failure``: of a rank that owns no data and has failed already.
        """
        topology = self.topology
        # Every rank joins the same collectives in the same order, failed or not: gather over dp, lengths to the ranks
        # without data, agreement, exchange, microbatches to the ranks without data, agreement.
        columns, gathered = None, None
        if topology.owns_data:
            taken, failure = tried(self._take_and_gather)
            if taken is not None:
                columns, gathered = taken
        gathered, failure = self.relay(gathered, failure)
        given = gathered
        if self.stream.ranks is not None:  # what each shard gave, of which a rank reads several, or none
            given = None if gathered is None or failure is not None else Lengths(gathered.lengths, self._counts)
            given, failure = self.relay(given, failure)
        _agree_on(failure, "" if gathered is None else gathered.digest, topology)
        assert gathered is not None
        assert given is not None
        # The end of the stream, known to all. Nobody leaves before everybody has heard, see :func:`settle`.
        if not len(gathered):
            for axis in topology.axes:
                settle(axis)
            return None
        step, failure = self._place(columns, gathered)
        _agree_on(failure, "" if step is None else step.plan.digest, topology)
        # Only now: a step that failed anywhere leaves the state where it was.
        self.given = self.given + given.counts
        return step

    def relay(self, gathered: Lengths | None, failure: Exception | None) -> tuple[Lengths | None, Exception | None]:
        """What the ranks that exchange have gathered, or their failure, to all other ranks. Collective."""
        for axis in self._ways():
            gathered, failure = _relay_lengths(gathered, failure, axis)
        return gathered, failure

    def _place(self, columns: Columns | None, gathered: Lengths) -> tuple[PackedStep | None, Exception | None]:
        """The samples to where the plan wants them. Joins every collective, also after a failure of its own."""
        topology = self.topology
        plan, failure = tried(lambda: self.options.make_plan(gathered.lengths))
        microbatches = None
        # Where each stage exchanges for itself, one that gets no fields exchanges none, all of its ranks alike.
        idle = topology.owners == "stages" and self.options.fields_of(topology, topology.pp.rank) == ()
        if topology.owns_data and not idle:
            microbatches, failure = tried(lambda: exchange_columns(plan, columns, failure, topology, gathered))
        for axis in self._ways():
            fields = self._fields_along(axis)
            if fields != ():  # lengths alone need not travel: the plan gives them
                microbatches, failure = _relay_microbatches(microbatches, failure, axis, fields, self.options.per_item)
        if failure is not None or plan is None:
            return None, failure
        return tried(lambda: self._finish(microbatches, plan))

    def _take_and_gather(self) -> tuple[Columns, Lengths]:
        samples, failure = self.take()
        columns: Columns | None = None
        if failure is None:
            options = self.options
            columns, failure = tried(
                lambda: Columns.read(
                    samples, options.per_sequence, options.fields, self._where, per_item=options.per_item
                )
            )
        gathered = gather_or_fail(None if columns is None else columns.lengths, failure, self.topology)
        assert columns is not None  # or it would have raised
        return columns, gathered

    def take(self) -> tuple[list[Any], Exception | None]:
        """This rank's samples of the step, or why it has none; other sources of samples override it.

        Collective over dp for iterables, whose ends are not known beforehand.
        """
        axis, stream, wanted = self.topology.dp, self.stream, self.options.global_batch_size
        self._places = []
        if stream.kind != ITERABLE:
            samples, _, failure = self._read(self.given, stream.quotas(self.given, wanted))
            return samples, failure
        # Ask each live reader for its share; those that end give less, and the others are asked for the rest. All
        # ranks see the counts (−1: failed), so all make the same turns of this loop.
        given, taken = self.given.copy(), []
        while wanted and self._live.any():
            quota = deal(given, self._live, wanted)
            samples, mine, failure = self._read(given, quota)
            rows = gather_int64(mine, axis)
            if (rows < 0).any():
                agree(failure, axis, "reading its samples")
            taken += samples
            # A reader's samples are counted by the rank that reads it, and by no other.
            counts = rows.sum(0)
            given += counts
            wanted -= int(counts.sum())
            # A reader that gave less than it was asked for has ended.
            self._live &= counts == quota
        self._counts = given - self.given
        return taken, None

    def _read(self, given: Int64, quota: Int64) -> tuple[list[Any], Int64, Exception | None]:
        """This rank's samples, how many of each reader, -1 after a failure, and the failure."""
        nothing: tuple[list[Any], Int64] = ([], np.zeros_like(quota))
        read, failure = tried(lambda: nothing if self._reader is None else self._reader.take(quota))
        if read is None:
            return [], np.full_like(quota, -1), failure
        samples, counts = read
        for reader in np.flatnonzero(counts):
            self._places += (np.arange(given[reader], given[reader] + counts[reader]) * len(given) + reader).tolist()
        return samples, counts, None

    def _where(self, i: int) -> str:
        axis = self.topology.dp
        # Samples that another source gave are counted by rank.
        place = self._places[i] if self._places else i * axis.size + axis.rank
        return f"rank {axis.global_rank}, sample {place} of the stream"

    def _ways(self) -> list[Axis]:
        """The axes along which this rank hears from those that exchange, or tells others, from coordinate 0 on."""
        # In the end every rank has heard once. An axis is used by a whole group of it or not at all. "ends": the
        # first stage tells the other stages along pp (tp rank 0 only), then tp rank 0 of every stage tells its peers.
        # "stages": every stage knows already, and its tp rank 0 tells its peers.
        tp, pp = self.topology.tp, self.topology.pp
        if self.topology.owners == "every":
            ways = []
        elif self.topology.owners == "ends":
            ways = [pp, tp] if tp.rank == 0 else [tp]
        else:
            ways = [tp]
        return [axis for axis in ways if axis.size > 1]

    def _fields_along(self, axis: Axis) -> Sequence[str] | None:
        """The fields that travel along an axis of :meth:`_ways`: all that anyone behind it wants, ``None`` for all."""
        topology = self.topology
        # Along pp both ends have their own; only the stages between may want some of the first one's.
        stages = range(1, topology.pp.size - 1) if axis is topology.pp else [topology.pp.rank]
        return _union([self.options.fields_of(topology, stage) for stage in stages])

    def _finish(self, microbatches: list[RaggedBatch] | None, plan: Plan) -> PackedStep:
        topology, order = self.topology, self.options.cp_order
        own = self.options.fields_of(topology, topology.pp.rank)
        # A stage that gets no fields: the plan gives its layouts.
        if microbatches is None:
            rank = topology.dp.rank
            microbatches = [RaggedBatch({}, plan.layout(k, rank)) for k in range(plan.num_microbatches)]
        elif own is not None:
            microbatches = [batch.select(own, self.options.per_item) for batch in microbatches]
        cp = topology.cp
        sliced = [shard(batch, cp.size, cp.rank, order) for batch in microbatches] if cp.size > 1 and order else []
        placed = plan.lengths[plan.order]
        return PackedStep(microbatches, plan.num_microbatches, int(placed.sum()), sum_of_squares(placed), plan, sliced)


def _union(choices: Sequence[Sequence[str] | None]) -> tuple[str, ...] | None:
    if any(choice is None for choice in choices):
        return None
    return tuple(dict.fromkeys(name for choice in choices for name in choice or ()))


def _relay_microbatches(
    microbatches: list[RaggedBatch] | None,
    failure: Exception | None,
    axis: Axis,
    fields: Sequence[str] | None,
    per_item: Sequence[str],
) -> tuple[list[RaggedBatch] | None, Exception | None]:
    """From coordinate 0 of the axis to those that have none; whoever has its own keeps them."""
    source = axis.rank == 0
    # The last stage has its own microbatches, and joins because a broadcast needs the whole group.
    got, error = tried(lambda: share_or_fail(microbatches, failure if source else None, axis, 0, fields, per_item))
    return (got if microbatches is None else microbatches), failure or error


def _relay_lengths(
    gathered: Lengths | None, failure: Exception | None, axis: Axis
) -> tuple[Lengths | None, Exception | None]:
    """From coordinate 0 of the axis; whoever gathered lengths of its own compares."""
    # One byte says what follows: ``E`` an error, as JSON; ``L`` int64: the number of counts, counts, lengths.
    record = None
    if axis.rank == 0:
        if gathered is None or failure is not None:
            record = b"E" + dumps(report(failure, axis))
        else:
            numbers = [np.array([len(gathered.counts)]), gathered.counts, gathered.lengths]
            record = b"L" + np.concatenate(numbers).astype(np.int64).tobytes()
    text = broadcast_record(record, axis, 0)
    if axis.rank == 0:
        return gathered, failure
    if text[:1] == b"E":
        _, heard = tried(lambda: raise_failures(None, [json.loads(text[1:])], "gathering the lengths of this step"))
        return None, failure or heard
    numbers = np.frombuffer(text[1:], np.int64)
    ranks = int(numbers[0])
    received = Lengths(numbers[1 + ranks :], numbers[1 : 1 + ranks])
    if gathered is not None and not np.array_equal(gathered.lengths, received.lengths):
        failure = failure or DistributedError(
            "the pipeline stages that own data are out of step",
            where=f"rank {axis.global_rank} against rank {axis.ranks[0]}",
            hint="give them the same samples in the same order",
        )
    return received, failure


def _agree_on(failure: Exception | None, digest: str, topology: Topology) -> None:
    """Collective over all axes: raises on every rank if any failed, or if ranks do not have the same plan."""
    axes = [axis for axis in topology.axes if axis.size > 1]
    known = [list(entry) for entry in report(failure, axes[0])] if axes else []
    for axis in axes:
        # Axis by axis what is known so far goes on, so that an error reaches the ranks of every other axis too.
        records = [json.loads(text) for text in gather_records(dumps({"failed": known, "plan": digest}), axis)]
        known = [entry for record in records for entry in record["failed"]]
        odd = next((i for i, record in enumerate(records) if record["plan"] != records[0]["plan"]), None)
        if not known and odd is not None:
            rank = axis.ranks[odd]
            known = [[rank, f"rank {rank} has other lengths, or made another plan of them, than rank {axis.ranks[0]}"]]
    raise_failures(failure, [known], "making this step", *axes)
