"""Movement of samples to the ranks that a plan gives them to.

:func:`exchange` moves them between ranks; :func:`materialize` serves where every rank has them all.

The exchange is two collectives over the data-parallel axis. A header goes round first: each rank's schema, the digest
of its plan, and its error if it has one, so that a disagreement raises on every rank before a byte of data moves. Then
ONE ``all_to_all_single`` of bytes carries all fields together. Each rank's block for another holds, field by field, the
values of the sequences that go there, in the order in which they will be packed; every field starts on a 16-byte
boundary. Both ends know the plan, the counts and the schema, so they know the size of every block: nothing is parsed,
and a block may be empty. Everything that can fail happens before the header, so that no rank is left waiting. Values
travel in their rank's own dtype; where ranks differ, the receiver converts to what torch promotes them to.

Copies of a value on its way from the collator to the model, and the reason for each:

1. sample -> batch, in ``RaggedBatch.from_samples``: samples lie apart in memory, a batch is flat. None where samples
   are given to :func:`exchange` itself.
2. batch or sample -> payload: an all-to-all sends contiguous blocks by destination. None for what stays on its rank.
3. payload -> received: the collective. None for what stays on its rank.
4. received (or, for what stays, the batch) -> microbatches: blocks arrive by source, microbatches are in the plan's
   order, with padding.
5. ``to_flattened`` adds views, and one copy of the labels, whose first entry per sequence becomes -100.

Replaces the reroute of Megatron-LM's ``wrap_data_iterator``, where the fields are fixed, ranks are computed from global
ids, and an empty send allocates an element of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.columns import Columns
from ullage.errors import DistributedError, InputError
from ullage.exchange.lengths import Lengths
from ullage.layout import Int64, counting
from ullage.planning.plans import Plan
from ullage.ranks import Axis, Topology, gather_agreed, tried
from ullage.ranks.wire import all_to_all_bytes, block_order, scratch, settling
from ullage.schema import Field, Schema, promoted

#: What holds samples: a batch, several batches one after another, or samples as mappings of names to values.
Samples = RaggedBatch | Sequence[RaggedBatch] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Route:
    """Ids of the sequences that one rank sends and receives; a pure function of plan and counts.

    ``sends``: ids by destination, and for each destination in packing order; ``send_cuts`` [ranks + 1] cuts them.
    ``receives``: ids by source, and from each source in packing order; ``receive_cuts`` [ranks + 1] cuts them.
    """

    sends: Int64
    send_cuts: Int64
    receives: Int64
    receive_cuts: Int64


def route(plan: Plan, gathered: Lengths, rank: int) -> Route:
    """The route of data-parallel ``rank``. No communication, no groups: works for any number of ranks."""
    # Ids are positions among the gathered lengths, so a rank's own are a range; dropped ones go nowhere.
    mine = np.arange(gathered.offsets[rank], gathered.offsets[rank + 1])
    mine = mine[plan.bins[mine] >= 0]
    degrees = plan.degrees.reshape(-1)[plan.bins[mine]]
    ids = np.repeat(mine, degrees)
    # A sequence of a microbatch of degree k goes to k consecutive ranks.
    destination = plan.bins[ids] % plan.ranks + counting(degrees)
    # By destination, then in packing order: ``lexsort`` sorts by its last key first.
    order = np.lexsort((plan.inverse[ids], destination))
    wanted = members_of(plan, rank)
    # The rank whose range of ids holds each wanted id: the last one that begins at or before it.
    source = np.searchsorted(gathered.offsets, wanted, side="right") - 1
    return Route(
        sends=ids[order],
        send_cuts=_cuts(destination, plan.ranks),
        receives=wanted[np.argsort(source, kind="stable")],
        receive_cuts=_cuts(source, plan.ranks),
    )


def members_of(plan: Plan, rank: int) -> Int64:
    """The ids of all sequences that ``rank`` runs, microbatch by microbatch, in packing order."""
    parts = [plan.members(microbatch, rank) for microbatch in range(plan.num_microbatches)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _cuts(of: Int64, ranks: int) -> Int64:
    return np.concatenate([[0], np.cumsum(np.bincount(of, minlength=ranks))]).astype(np.int64)


def _tokens(plan: Plan, ids: Int64, cuts: Int64) -> Int64:
    """Tokens of each part that ``cuts`` makes of ``ids``."""
    return np.diff(np.concatenate([[0], np.cumsum(plan.lengths[ids])])[cuts])


def exchange(
    plan: Plan,
    batch: Samples,
    topology: Topology,
    gathered: Lengths,
    *,
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
) -> list[RaggedBatch]:
    """This rank's microbatches, the sequences of each in the order of ``plan.members``.

    A microbatch without sequences is an empty batch that knows its fields. Sequences that the plan cut short arrive
    cut, and those it dropped not at all. Nothing has gradients.

    Args:
        plan: made from ``gathered.lengths``, the same on every rank.
        batch: this rank's own sequences, as they were when ``gathered`` was made: a :class:`RaggedBatch`, a list of
            them, or a list of samples (see :mod:`ullage.columns`). Never written to.
        topology: its dp axis is the one to exchange over.
        gathered: what :func:`gather_lengths` returned.
        per_sequence: for samples, the fields with one entry per sequence although they are arrays; numbers always are.
        fields: the names to exchange; all if it is ``None``.

    Collective over dp. Host tensors unless the group takes device tensors only. Raises ``InputError`` on the rank whose
    samples are at fault and ``DistributedError`` on the others, or on all where ranks disagree.
    """
    columns, failure = tried(lambda: columns_of(batch, per_sequence, fields, lambda i: _local_sample(i, topology.dp)))
    return exchange_columns(plan, columns, failure, topology, gathered)


def columns_of(
    batch: Samples, per_sequence: Iterable[str], fields: Sequence[str] | None, where: Callable[[int], str]
) -> Columns:
    """The sequences of a batch, of several batches, or of samples, by column. Raises ``InputError``."""
    batches = _batches(batch)
    if batches is None:
        return Columns.read(cast(Sequence[Mapping[str, Any]], batch), per_sequence, fields, where)
    columns = Columns.join([part.columns() if fields is None else part.select(fields).columns() for part in batches])
    columns.require_tokens(where)
    return columns


def _batches(batch: Samples) -> list[RaggedBatch] | None:
    """The batches that hold the sequences; ``None`` where these are samples."""
    if isinstance(batch, RaggedBatch):
        return [batch]
    if len(batch) and isinstance(batch[0], RaggedBatch):
        return list(cast(Sequence[RaggedBatch], batch))
    return None


@torch.no_grad()
def exchange_columns(
    plan: Plan | None, columns: Columns | None, failure: Exception | None, topology: Topology, gathered: Lengths
) -> list[RaggedBatch]:
    """:func:`exchange` of samples already read, by a rank that may have failed already: then every rank raises."""
    axis = topology.dp
    parcel = None
    if failure is None:
        parcel, failure = tried(lambda: _prepare(plan, columns, axis, gathered))
    own = None if columns is None else columns.schema
    schemas = _agree("" if plan is None else plan.digest, own or Schema(), failure, axis)
    assert plan is not None  # or it would have raised
    assert parcel is not None
    return _send(plan, parcel, schemas, axis)


@dataclass(frozen=True, eq=False)
class _Parcel:
    """The data that a rank has ready when it meets the others: the bytes to send, their sizes, and what stays."""

    route: Route
    payload: Tensor
    sizes: list[int]
    own: dict[str, list[Tensor]]


def _prepare(plan: Plan | None, columns: Columns | None, axis: Axis, gathered: Lengths) -> _Parcel:
    if plan is None or columns is None:
        raise InputError("there is no plan or there are no samples to exchange")
    _check(plan, columns, axis, gathered)
    path = route(plan, gathered, axis.rank)
    first = int(gathered.offsets[axis.rank])
    own = path.receives[path.receive_cuts[axis.rank] : path.receive_cuts[axis.rank + 1]]
    kept = columns.rows((own - first).tolist(), plan.lengths[own])
    return _Parcel(path, *_fill(plan, columns, path, axis, first), kept)


@torch.no_grad()
def materialize(
    plan: Plan,
    batch: Samples,
    rank: int,
    *,
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
) -> list[RaggedBatch]:
    """The microbatches that :func:`exchange` gives to ``rank``, made where every rank holds the whole batch.

    No communication.

    ``batch``: all sequences, in the order of the lengths that were planned; the rest as for :func:`exchange`. Of
    samples, only those that ``rank`` runs are read, and dtypes are promoted over them. Raises ``InputError``.
    """
    if not 0 <= rank < plan.ranks:
        raise InputError("no such rank in the plan", expected=f"0 to {plan.ranks - 1}", found=rank)
    wanted = members_of(plan, rank)
    batches = _batches(batch)
    count = len(batch) if batches is None else sum(map(len, batches))
    if count != plan.num_sequences:
        raise InputError("plan and samples disagree", expected=f"{plan.num_sequences} samples", found=count)
    if batches is None:
        # The first sample tells the schema where this rank has no sequence; the others' rows are not read.
        samples = cast(Sequence[Mapping[str, Any]], batch)
        ids = wanted if len(wanted) or not count else np.zeros(1, np.int64)
        columns = Columns.read([samples[i] for i in ids.tolist()], per_sequence, fields, lambda i: f"sample {ids[i]}")
        rows = list(range(len(wanted)))
    else:
        # Views of all sequences cost little.
        ids, rows = np.arange(count), wanted.tolist()
        columns = columns_of(batch, (), fields, lambda i: f"sample {i}")
    odd = np.flatnonzero(columns.lengths != plan.original_lengths[ids])
    if len(odd):
        i = int(odd[0])
        raise InputError(
            "a sample is not as long as planned",
            where=f"sample {ids[i]}",
            expected=int(plan.original_lengths[ids[i]]),
            found=int(columns.lengths[i]),
        )
    values = columns.rows(rows, plan.lengths[wanted])
    return _microbatches(columns.schema or Schema(), values, plan, rank)


def _local_sample(i: int, axis: Axis) -> str:
    return f"rank {axis.global_rank}, sample {i}"


def _check(plan: Plan, columns: Columns, axis: Axis, gathered: Lengths) -> None:
    """Plan, lengths and samples belong together."""
    if plan.ranks != axis.size or len(gathered.counts) != axis.size:
        raise InputError(
            "the plan is for another number of ranks",
            expected=f"{axis.size}, the size of the dp axis",
            found=plan.ranks if plan.ranks != axis.size else len(gathered.counts),
            hint="plan over dp with capacity·cp, or over dp·cp with a topology whose dp axis spans both",
        )
    if not np.array_equal(plan.original_lengths, gathered.lengths):
        raise InputError("the plan was made for other lengths than were gathered")
    planned = gathered.lengths[gathered.offsets[axis.rank] : gathered.offsets[axis.rank + 1]]
    if len(columns.lengths) != len(planned):
        raise InputError(
            "this rank has not as many samples as it said",
            where=f"dp rank {axis.rank}",
            expected=len(planned),
            found=len(columns.lengths),
        )
    odd = np.flatnonzero(columns.lengths != planned)
    if len(odd):
        i = int(odd[0])
        raise InputError(
            "a sample is not as long as gathered",
            where=_local_sample(i, axis),
            expected=int(planned[i]),
            found=int(columns.lengths[i]),
        )


def _agree(digest: str, schema: Schema, failure: Exception | None, axis: Axis) -> list[Schema]:
    """The header: the schema of each rank, or an error on every rank."""
    record = {"plan": digest, "schema": schema.to_list()}
    records = gather_agreed(record, axis, "preparing its samples for the exchange", failure)
    names = list(axis.ranks)
    with settling(axis):
        odd = next((i for i, other in enumerate(records) if other["plan"] != records[0]["plan"]), None)
        if odd is not None:
            raise DistributedError(
                "ranks made different plans",
                where=f"rank {names[odd]} against rank {names[0]}",
                hint="call plan() with the same gathered lengths and options on every rank",
            )
        schemas = [Schema.from_list(other["schema"]) for other in records]
        common_schema(schemas, names)  # raises before any rank sends
    return schemas


def common_schema(schemas: Sequence[Schema], names: Sequence[int]) -> Schema:
    """The schema of all ranks, each field in the dtype that torch promotes those of the ranks to.

    A rank without samples has no fields; ``names`` [ranks] are the global ranks. The order of fields is that of the
    first rank that has any. Raises ``DistributedError`` that names rank and field where one rank has other fields or
    shapes than most.
    """
    present = [(rank, schema) for rank, schema in zip(names, schemas) if schema.fields]
    if not present:
        return Schema()
    kinds = [frozenset(field.untyped for field in schema.fields) for _, schema in present]
    usual = kinds.index(Counter(kinds).most_common(1)[0][0])
    for (rank, schema), kind in zip(present, kinds):
        if kind != kinds[usual]:
            _raise_difference(rank, schema, present[usual][1])
    by_name: dict[str, list[Field]] = {name: [] for name in present[0][1].names}
    for _, schema in present:
        for field in schema.fields:
            by_name[field.name].append(field)
    try:
        return Schema(tuple(promoted(fields) for fields in by_name.values()))
    except TypeError as error:
        raise DistributedError("ranks have dtypes that cannot be joined", found=error) from error


def _raise_difference(rank: int, mine: Schema, usual: Schema) -> None:
    mine_by, usual_by = ({field.untyped: field for field in schema.fields} for schema in (mine, usual))
    name = min(kind[0] for kind in mine_by.keys() ^ usual_by.keys())
    found, expected = (next((f for f in schema.fields if f.name == name), "no such field") for schema in (mine, usual))
    raise DistributedError(
        "a rank has other fields than the rest",
        where=f"rank {rank}, field {name!r}",
        expected=expected,
        found=found,
        hint="give every rank samples of the same fields and shapes",
    )


def _send(plan: Plan, parcel: _Parcel, schemas: list[Schema], axis: Axis) -> list[RaggedBatch]:
    """The one all-to-all. What stays on this rank does not travel: it is taken from the samples themselves."""
    path, cuts = parcel.route, parcel.route.receive_cuts.tolist()
    tokens = _tokens(plan, path.receives, path.receive_cuts).tolist()
    receives = [schemas[i].num_bytes(cuts[i + 1] - cuts[i], tokens[i]) for i in range(axis.size)]
    receives[axis.rank] = 0
    received = all_to_all_bytes(parcel.payload, parcel.sizes, receives, axis)
    schema = common_schema(schemas, axis.ranks or [0])
    dtypes = {field.name: field.dtype for field in schema.fields}
    values: dict[str, list[Tensor]] = {name: [] for name in schema.names}
    start, arrived = 0, [np.zeros(0, np.int64)]
    for source in block_order(axis):
        ids = path.receives[cuts[source] : cuts[source + 1]]
        if not len(ids):
            continue
        arrived.append(ids)
        if source == axis.rank:
            for name, column in parcel.own.items():
                values[name].extend(value.to(received.device, dtypes[name]) for value in column)
            continue
        # Each source's blocks are in its own dtypes; conversion copies only where they differ.
        lengths = plan.lengths[ids].tolist()
        for name, view in schemas[source].by_name().blocks(received, start, len(ids), tokens[source]).items():
            view = view.to(dtypes[name])
            values[name].extend(view.unbind() if name in schema.per_sequence else view.split(lengths))
        start += receives[source]
    # From the order of arrival to the order of packing.
    place = np.full(plan.num_sequences, -1, np.int64)
    ids = np.concatenate(arrived)
    place[ids] = np.arange(len(ids))
    rows = place[members_of(plan, axis.rank)].tolist()
    packed = {name: [column[row] for row in rows] for name, column in values.items()}
    return _microbatches(schema, packed, plan, axis.rank, received.device)


def _fill(plan: Plan, columns: Columns, path: Route, axis: Axis, first: int) -> tuple[Tensor, list[int]]:
    """The bytes to send, and the size of each destination's block. ``first``: id of this rank's first sample."""
    cuts = path.send_cuts.tolist()
    tokens = _tokens(plan, path.sends, path.send_cuts).tolist()
    # Ranks may hold their fields in different orders; the order of the names is one.
    schema = (columns.schema or Schema()).by_name()
    sizes = [schema.num_bytes(cuts[i + 1] - cuts[i], tokens[i]) for i in range(axis.size)]
    sizes[axis.rank] = 0
    host = torch.device("cpu")
    device = next((column[0].device for column in columns.values.values() if column), host)
    payload = scratch("payload", sum(sizes), device)
    start = 0
    for destination in block_order(axis):
        if not sizes[destination]:
            continue
        ids = path.sends[cuts[destination] : cuts[destination + 1]]
        pieces = columns.rows((ids - first).tolist(), plan.lengths[ids])
        for name, view in schema.blocks(payload, start, len(ids), tokens[destination]).items():
            join = torch.stack if name in schema.per_sequence else torch.cat
            join(pieces[name], out=view)
        start += sizes[destination]
    return payload, sizes


def _microbatches(
    schema: Schema,
    values: Mapping[str, Sequence[Tensor]],
    plan: Plan,
    rank: int,
    device: torch.device | None = None,
) -> list[RaggedBatch]:
    """The microbatches of ``rank`` from the values of its sequences in packing order."""
    layouts = [plan.layout(microbatch, rank) for microbatch in range(plan.num_microbatches)]
    packed = schema.pack(values, layouts, device)
    return [RaggedBatch(tensors, layout, schema.per_sequence) for tensors, layout in zip(packed, layouts)]
