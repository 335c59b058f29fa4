"""Samples of one step as Megatron's iterators give them: which rank passes them, and how they become a plan.

The maker of a step is told the samples or the failure to get them. Where samples are packed already it also gathers how
many sequences each packed row has, because the plan then is what the iterators give: microbatch *k* of a rank is the
*k*-th row of its iterator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ullage.engines.megatron.samples import pull, read_rows
from ullage.engines.megatron.settings import Settings
from ullage.errors import InputError
from ullage.exchange.lengths import Lengths, gather_or_fail
from ullage.exchange.source import ITERABLE, Stream
from ullage.exchange.steps import Options, PackedStep, StepMaker
from ullage.layout import Int64
from ullage.planning.plans import Plan
from ullage.ranks import Topology, tried


def source_of(data_iterator: Any, settings: Settings, topology: Topology) -> Any:
    """This rank's iterator, ``None`` on a rank that passes no samples. Raises ``InputError`` if that is not so."""
    # With virtual stages a list, of which one entry is the iterator.
    given, count = data_iterator, 1
    if isinstance(given, (list, tuple)):
        count = len(given)
        given = next((one for one in given if one is not None), None)
    if count != settings.virtual and data_iterator is not None:
        raise InputError(
            "data_iterator must have one entry per virtual stage",
            expected=f"a list of {settings.virtual}" if settings.virtual > 1 else "one iterator",
            found=f"{type(data_iterator).__name__} of {count}" if count > 1 else type(data_iterator).__name__,
        )
    where = ", ".join(f"{axis.name} rank {axis.rank} of {axis.size}" for axis in topology.axes)
    if given is None and topology.owns_data:
        raise InputError("this rank must have a data iterator", where=where, found="None")
    if given is not None and not topology.owns_data:
        if topology.tp.rank == 0:
            return None  # a stage between the ends, which hears from the first one: what it has stays unread
        raise InputError(
            "this rank should have no data iterator",
            where=where,
            expected="None, except on tensor-parallel rank 0",
            hint='pass owners="every" if every rank brings samples of its own',
        )
    if given is not None and not hasattr(given, "__next__"):
        raise InputError("data_iterator must be an iterator", found=type(given).__name__, hint="pass iter(...) of it")
    return given


class StepOfSamples(StepMaker):
    """Step of samples that are given, or of the failure to get them.

    Attributes:
        taken: this rank's samples, or why it has none.
        rows: sequences in each packed row of this rank, where rows are packed already.
        all_rows: the same of all ranks, once gathered.
    """

    taken: tuple[list[Any], Exception | None] = ([], None)
    rows: Int64 | None = None
    all_rows: Lengths | None = None

    def take(self) -> tuple[list[Any], Exception | None]:
        return self.taken

    def make(self, failure: Exception | None = None) -> PackedStep | None:
        if self.rows is not None:
            # Lengths alone do not tell where a row ends. An error goes on with the samples, which all ranks wait for.
            if self.topology.exchanges:
                rows, (samples, failure) = self.rows, self.taken
                self.all_rows, failed = tried(lambda: gather_or_fail(rows, failure, self.topology))
                self.taken = (samples, failure or failed)
                failure = failure or failed
            self.all_rows, failure = self.relay(self.all_rows, failure)
            if self.topology.exchanges and failure is not None:
                self.taken = ([], failure)
        return super().make(failure)


def step_maker(
    topology: Topology,
    settings: Settings | None,
    source: Any,
    num_microbatches: int,
    failure: Exception | None,
    first_copy: bool,
) -> StepOfSamples:
    """The maker of one step.

    Args:
        topology: with dp flattened over cp if the degree is dynamic.
        settings: ``None`` where the config could not be read.
        source: this rank's iterator; ``None`` on a rank that passes no samples.
        num_microbatches: items to take.
        failure: what went wrong so far; nothing is taken then, and the maker reports it to all ranks.
        first_copy: whether this rank's samples count, and are no copy of another's.
    """
    packed_already = settings is not None and settings.packed_already

    def stage_fields(stage: int, stages: int) -> tuple[str, ...] | None:
        # None asks for all fields, () for the lengths alone, from which a stage derives the plan.
        mtp = settings.mtp_stages if settings is not None else frozenset()
        ends = stage in (0, stages - 1) or topology.owners == "every"
        return None if ends or stage in mtp else ()

    def make_plan(lengths: np.ndarray) -> Plan:
        assert settings is not None  # or it would have raised before
        planner = settings.planner(topology)
        if maker.all_rows is None:
            return planner(lengths)
        return planner(lengths, assignment_of(maker.all_rows, settings.multiple))

    options = Options(global_batch_size=0, make_plan=make_plan, stage_fields=stage_fields, cp_order=None)
    maker = StepOfSamples(topology, Stream(ITERABLE, topology.dp.size, shared=False), None, options)
    if packed_already:
        maker.rows = np.zeros(0, np.int64)
    if topology.owns_data and failure is None:
        rows, failure = tried(lambda: read_rows(pull(source, num_microbatches)))
        rows = rows if rows is not None and first_copy else []
        maker.taken = ([sequence for row in rows for sequence in row], failure)
        if packed_already:
            maker.rows = np.array([len(row) for row in rows], np.int64)
    elif topology.owns_data:
        maker.taken = ([], failure)
    return maker


def assignment_of(rows: Lengths, multiple: int) -> list[list[list[int]]]:
    """The schedule in which microbatch *k* of a rank is its *k*-th row.

    ``rows``: the number of sequences in each row, and of rows on each rank. A rank with fewer rows than others runs
    empty microbatches in the end, and so do all up to a ``multiple``.

    >>> assignment_of(Lengths(np.array([2, 1, 3]), np.array([2, 1])), 1)
    [[[0, 1], [3, 4, 5]], [[2], []]]
    """
    ends = np.cumsum(rows.lengths)
    ids = [list(range(end - size, end)) for end, size in zip(ends.tolist(), rows.lengths.tolist())]
    most = -(-int(rows.counts.max(initial=0)) // multiple) * multiple
    places = list(zip(rows.offsets.tolist(), rows.counts.tolist()))
    return [[ids[first + k] if k < count else [] for first, count in places] for k in range(max(most, multiple))]
