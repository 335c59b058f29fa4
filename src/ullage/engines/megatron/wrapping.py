"""Packed microbatches of one step (``wrap_data_iterator``): taken from the iterators, planned, exchanged, packed.

Collective over all ranks; a failure on one of them is raised on all. Tensor-parallel rank 0 of the first and of the
last pipeline stage pass the same samples, as in Megatron-LM; the stages between get the lengths, and the fields too if
they hold multi-token-prediction layers. With ``owners="stages"`` tensor-parallel rank 0 of every stage reads its own
samples, as in Megatron-LM's dev branch, and nothing is sent along pp. With ``owners="every"`` each rank passes the
samples of its data-parallel coordinate, and nothing is broadcast along tp and pp.

The maker of a step is told the samples or the failure to get them. Where samples are packed already it also gathers how
many sequences each packed row has, because the plan then is what the iterators give: microbatch *k* of a rank is the
*k*-th row of its iterator.

Source of signature and returned tuple: ``megatron/core/datasets/data_schedule.py`` of Megatron-LM (pull request 2924
and its successors).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError, require_one_of
from ullage.core.layout import Int64, Layout
from ullage.engines.megatron.dynamic import degree_groups
from ullage.engines.megatron.params import core_takes_groups
from ullage.engines.megatron.samples import FIELDS, pull, read_rows
from ullage.engines.megatron.settings import Settings, Tail, is_dynamic, tail_of
from ullage.exchange.iterator import compare_topologies
from ullage.exchange.lengths import Lengths, gather_or_fail
from ullage.exchange.source import ITERABLE, Stream
from ullage.exchange.steps import Options, PackedStep, StepMaker
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
            if self.topology.owns_data:
                rows, (samples, failure) = self.rows, self.taken
                self.all_rows, failed = tried(lambda: gather_or_fail(rows, failure, self.topology))
                self.taken = (samples, failure or failed)
                failure = failure or failed
            self.all_rows, failure = self.relay(self.all_rows, failure)
            if self.topology.owns_data and failure is not None:
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


class Microbatch(dict[str, Any]):
    """Packed microbatch under Megatron's keys, with its lengths on the host.

    Args:
        values: tensors by Megatron's keys.
        layout: lengths and slots of the sequences.
        everywhere: whether each tensor-parallel rank has the microbatch, so that nothing need be broadcast.
        rolled: whether a multi-token-prediction layer anywhere in the model makes the last stage roll its labels.
        clean: whether padding holds zeros.
        order: how context-parallel ranks cut the row.
        tail: how the row is filled up, by the rank that takes it; ``None`` if it is not.
    """

    def __init__(
        self,
        values: dict[str, Any],
        layout: Layout,
        *,
        everywhere: bool = False,
        rolled: bool = False,
        clean: bool = True,
        order: str = "zigzag",
        tail: Tail | None = None,
    ) -> None:
        super().__init__(values)
        self.layout, self.everywhere, self.rolled, self.clean = layout, everywhere, rolled, clean
        self.order, self.tail = order, tail


@dataclass(frozen=True)
class WrappedStep:
    """Packed step for Megatron's schedules.

    All but ``data_iterator`` is equal on every rank. The sums are exact integers over real tokens.

    Attributes:
        data_iterator: an iterator, ``None``, or a list of them, one per virtual stage.
        num_microbatches: microbatches that every rank runs.
        num_tokens: Σlength over all ranks.
        sum_squared_lengths: Σlength² over all ranks, for the FLOPs of attention.
        plan: which rank runs which sequences.
    """

    data_iterator: Any
    num_microbatches: int
    num_tokens: int
    sum_squared_lengths: int
    plan: Plan = field(repr=False)


def wrap_data_iterator(
    data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None, *, owners: str = "ends"
) -> tuple[Any, int, float, float]:
    """(data iterator, number of microbatches, Σlength, Σlength²) of one step.

    Megatron-LM's signature; arguments, collectives and errors are those of :func:`packed_step`. The sums are floats, as
    Megatron-LM's are, so beyond 2⁵³ they are rounded; :func:`packed_step` has them as integers.
    """
    step = packed_step(data_iterator, config, num_microbatches, pg_collection, owners=owners)
    return step.data_iterator, step.num_microbatches, float(step.num_tokens), float(step.sum_squared_lengths)


def packed_step(
    data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None, *, owners: str = "ends"
) -> WrappedStep:
    """Take a step's samples from the iterators and make packed microbatches of them, planned over all ranks.

    Args:
        data_iterator: on a rank that passes samples, an iterator of samples or of lists of samples, or with virtual
            stages a list with one iterator and ``None`` otherwise; ``None`` on other ranks. With ``"ends"``, what
            tensor-parallel rank 0 of a stage between them has is left unread.
        config: has ``max_seqlen_per_dp_cp_rank``, ``sequence_packing_scheduler``,
            ``virtual_pipeline_model_parallel_size``, and with virtual stages ``microbatch_group_size_per_vp_stage``.
        num_microbatches: number of items to take from each iterator.
        pg_collection: process groups; Megatron's parallel state if ``None``.
        owners: ``"ends"``; ``"stages"`` where tensor-parallel rank 0 of every stage passes samples; or ``"every"``
            where every rank does.

    Collective over all ranks. Iterators that end within the step make it a shorter one. Raises ``StopIteration`` on
    every rank if no rank has a sample left, and otherwise ``InputError`` on a rank at fault and ``DistributedError`` on
    the others.
    """
    # A failure is kept until maker.make, in which all ranks meet and raise together. Until then each rank goes the
    # same way: the topology depends on one field, which is read whether or not the others are valid.
    settings, failure = tried(lambda: Settings.of(config))
    require_one_of(owners, ("ends", "stages", "every"), "owners")
    dynamic = is_dynamic(config)
    topology = Topology.from_megatron(pg_collection, owners=owners, flatten_cp=dynamic)
    _compare_once(topology)
    source = None
    if settings is not None:
        source, failure = tried(lambda: source_of(data_iterator, settings, topology))
    # With dp flattened over cp each of these ranks counts as one that owns data, but the ranks of one context-parallel
    # group all bring the same samples, which count once.
    first_copy = not dynamic or Topology.from_megatron(pg_collection, owners=owners).cp.rank == 0
    maker = step_maker(topology, settings, source, num_microbatches, failure, first_copy)
    made = maker.make(failure)
    if made is None:
        raise StopIteration("no rank has any sample left for this step")
    assert settings is not None
    # Groups are made here, where all ranks are.
    if settings.dynamic:
        degree_groups(topology.dp, needed_groups(made.plan))
    tail = tail_of(config, topology.tp.size)
    iterators = _iterators(made, settings, topology, tail)
    return WrappedStep(iterators, made.num_microbatches, made.num_tokens, made.sum_squared_lengths, made.plan)


def needed_groups(plan: Plan) -> list[int]:
    """The degrees of a plan for which groups are needed: above one, and one where the model asks for its group."""
    return [degree for degree in np.unique(plan.degrees).tolist() if degree > 1 or core_takes_groups()]


_compared: dict[tuple[Any, ...], object] = {}


def _compare_once(topology: Topology) -> None:
    """Check, on the first step with these groups, that they form a grid. Collective then; raises on every rank."""
    world = dist.group.WORLD if dist.is_initialized() else None
    key = (topology.owners, *(tuple(axis.ranks) for axis in topology.axes))
    if key not in _compared or _compared[key] is not world:
        compare_topologies(topology, {"settings": {}, "source": None}, None)
        _compared[key] = world


def _iterators(step: PackedStep, settings: Settings, topology: Topology, tail: Tail | None) -> Any:
    everywhere = topology.owners == "every"
    if topology.tp.rank and not everywhere:
        return [None] * settings.virtual if settings.virtual > 1 else None
    from megatron.core.rerun_state_machine import RerunDataIterator

    rows = microbatches_of(step.microbatches, step.plan, settings, topology, tail)
    # Megatron's rerun state machine asserts this class, by which it replays a step. Each virtual stage reads all
    # microbatches of the step, so each gets an iterator of its own over the same tensors.
    iterators = [RerunDataIterator(iter([copy.copy(row) for row in rows])) for _ in range(settings.virtual)]
    return iterators if settings.virtual > 1 else iterators[0]


def microbatches_of(
    batches: Sequence[RaggedBatch], plan: Plan, settings: Settings, topology: Topology, tail: Tail | None
) -> list[Microbatch]:
    """A rank's batches of a plan under Megatron's keys. Pure, but for the device that the values are put on."""
    device = home_device(topology)
    rows = []
    for k, batch in enumerate(batches):
        degree = plan.degree(k, topology.dp.rank) if settings.dynamic else None
        # A tail makes the row a multiple of everything, so that without it only an empty row is filled.
        multiple = 1 if tail is not None and batch.layout.size else settings.row_multiple(topology, degree)
        full = _fill_up(batch, multiple)
        rows.append(
            Microbatch(
                _values(full, device, degree),
                full.layout,
                everywhere=topology.owners == "every",
                rolled=bool(settings.mtp_stages),
                order=settings.order,
                tail=tail,
            )
        )
    return rows


def _fill_up(batch: RaggedBatch, multiple: int) -> RaggedBatch:
    """The batch with a last slot of padding, if its row is empty or not a multiple of ``multiple``."""
    size = batch.layout.size
    # An empty row gets a slot of padding, because every rank runs as many microbatches as the others and a kernel needs
    # elements.
    rest = multiple if size == 0 else -size % multiple
    if not rest:
        return batch
    layout = Layout.from_slots([*batch.layout.lengths, 0], [*batch.layout.slots, rest])
    values = {
        name: torch.cat(
            [batch[name], batch[name].new_zeros(1 if name in batch.per_sequence else rest, *batch[name].shape[1:])]
        )
        for name in batch.names
    }
    return RaggedBatch(values, layout, batch.per_sequence)


def home_device(topology: Topology) -> torch.device | None:
    """Device for Megatron's data: this process's GPU if its groups are NCCL's; otherwise ``None``, to leave it."""
    groups = [axis.group for axis in topology.axes if axis.group is not None]
    if torch.cuda.is_available() and any("nccl" in dist.get_backend_config(group) for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return None


def _values(batch: RaggedBatch, device: torch.device | None, degree: int | None) -> dict[str, Any]:
    """Tensors of a batch by Megatron's keys, with its lengths."""
    values, layout = {name: batch[name] for name in batch.names}, batch.layout
    if device is not None:
        values = {name: value.to(device, non_blocking=True) for name, value in values.items()}
    if "labels" in values and layout.num_tokens < layout.size:
        # Kernels of the loss index by label before the mask is applied, so a label of padding must be a token id.
        values["labels"] = values["labels"].masked_fill(padding_mask(layout, values["labels"].device), 0)
    where = device or next((value.device for value in values.values()), torch.device("cpu"))
    described: dict[str, Tensor] = {
        "cu_seqlens": torch.from_numpy(layout.cu_seqlens).to(where),
        "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded).to(where),
        "max_seqlen": torch.tensor(int(layout.slots.max()), dtype=torch.int32, device=where),
    }
    if degree is not None:
        described["local_cp_size"] = torch.tensor(degree, dtype=torch.int32, device=where)
    missing = {name: None for name in FIELDS if name not in values}
    return {**values, **missing, **described}


def padding_mask(layout: Layout, device: torch.device | str = "cpu") -> Tensor:
    """Mask of the padding of a row, bool [layout.size], true on padding."""
    return torch.from_numpy(layout.padding_mask()).to(device)
