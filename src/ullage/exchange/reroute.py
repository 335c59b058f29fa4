"""Samples to where a plan wants them: :func:`exchange` between ranks, :func:`materialize` where each rank has them all.

The exchange is two collectives over the data-parallel axis. A header goes round first: each rank's schema, the digest
of its plan, and its error if it has one, so that a disagreement raises on every rank before a byte of data moves. Then
ONE ``all_to_all_single`` of bytes carries all fields together. Each rank's block for another holds, field by field, the
values of the sequences that go there, in the order in which they will be packed; every field starts on a 16-byte
boundary. Both ends know the plan, the counts and the schema, so they know the size of every block: nothing is parsed,
and a block may be empty. Everything that can fail happens before the header, so that no rank is left waiting.

Replaces the reroute of Megatron-LM's ``wrap_data_iterator``, where the fields are fixed, ranks are computed from global
ids, and an empty send allocates an element of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.errors import DistributedError, InputError
from ullage.exchange.fields import Columns, Schema, common_schema, read_columns, schema_record
from ullage.exchange.lengths import Lengths
from ullage.layout import Int64, counting
from ullage.planning.plans import Plan
from ullage.ranks import Axis, Topology, tried
from ullage.ranks.wire import aligned, all_to_all_bytes, block_order, dumps, gather_records, scratch, settling

Samples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank sends and receives, as ids of sequences; a pure function of plan and counts.

    ``sends``: ids by destination, and for each destination in packing order; ``send_cuts`` [ranks + 1] cuts them.
    ``receives``: ids by source, and from each source in packing order; ``receive_cuts`` [ranks + 1] cuts them.
    """

    sends: Int64
    send_cuts: Int64
    receives: Int64
    receive_cuts: Int64


def route(plan: Plan, gathered: Lengths, rank: int) -> Route:
    """The route of data-parallel ``rank``. No communication, no groups: works for any number of ranks."""
    mine = np.arange(gathered.offsets[rank], gathered.offsets[rank + 1])
    mine = mine[plan.bins[mine] >= 0]
    degrees = plan.degrees.reshape(-1)[plan.bins[mine]]
    ids = np.repeat(mine, degrees)
    # A sequence of a microbatch of degree k goes to k consecutive ranks.
    destination = plan.bins[ids] % plan.ranks + counting(degrees)
    order = np.lexsort((plan.inverse[ids], destination))
    wanted = members_of(plan, rank)
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
    samples: Samples,
    topology: Topology,
    gathered: Lengths,
    *,
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
) -> list[RaggedBatch]:
    """This rank's microbatches, the sequences of each in the order of ``plan.members``.

    ``samples``: this rank's own, as they were when ``gathered`` was made; never written to. A microbatch without
    sequences is an empty batch that knows its fields. ``per_sequence``: fields with one entry a sequence although they
    are arrays; numbers always are. ``fields``: only these; all if it is ``None``. Sequences that the plan cut short
    arrive cut, and those it dropped not at all.

    Collective over dp. Host tensors unless the group takes device tensors only. Raises ``InputError`` on the rank whose
    samples are at fault and ``DistributedError`` on the others, or on all where ranks disagree.
    """
    columns, failure = tried(
        lambda: read_columns(samples, per_sequence, fields, lambda i: _local_sample(i, topology.dp))
    )
    return exchange_columns(plan, columns, failure, topology, gathered)


def exchange_columns(
    plan: Plan | None, columns: Columns | None, failure: Exception | None, topology: Topology, gathered: Lengths
) -> list[RaggedBatch]:
    """:func:`exchange` of samples already read, by a rank that may have failed already: then every rank raises."""
    axis = topology.dp
    parcel = None
    if failure is None:
        parcel, failure = tried(lambda: _prepare(plan, columns, axis, gathered))
    own = None if columns is None else columns.schema
    digest = "" if plan is None else plan.digest
    schema = _agree({"failure": failure and str(failure), "plan": digest, "schema": schema_record(own)}, failure, axis)
    assert plan is not None  # or it would have raised
    assert parcel is not None
    return _send(plan, parcel, schema, axis)


@dataclass(frozen=True, eq=False)
class _Parcel:
    """What a rank has ready when it meets the others: the bytes to send, their sizes, and what stays."""

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
    kept = _cut(columns, plan, own, (own - first).tolist())
    return _Parcel(path, *_fill(plan, columns, path, axis, first), kept)


def materialize(
    plan: Plan,
    samples: Samples,
    rank: int,
    *,
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
) -> list[RaggedBatch]:
    """What :func:`exchange` gives to ``rank``, where every rank holds the whole global batch. No communication.

    ``samples``: all of them, in the order of the lengths that were planned; never written to. Raises ``InputError``.
    """
    if not 0 <= rank < plan.ranks:
        raise InputError("no such rank in the plan", expected=f"0 to {plan.ranks - 1}", found=rank)
    wanted = members_of(plan, rank)
    if len(samples) != plan.num_sequences:
        raise InputError("plan and samples disagree", expected=f"{plan.num_sequences} samples", found=len(samples))
    # The first sample tells the schema where this rank has no sequence; the others' rows are not read.
    read = wanted if len(wanted) or not len(samples) else np.zeros(1, np.int64)
    columns = read_columns([samples[i] for i in read.tolist()], per_sequence, fields, lambda i: f"sample {read[i]}")
    odd = np.flatnonzero(columns.lengths != plan.original_lengths[read])
    if len(odd):
        i = int(odd[0])
        raise InputError(
            "a sample is not as long as planned",
            where=f"sample {read[i]}",
            expected=int(plan.original_lengths[read[i]]),
            found=int(columns.lengths[i]),
        )
    place = np.full(plan.num_sequences, -1, np.int64)
    place[read] = np.arange(len(read))
    return assemble(columns.schema or Schema(), _cut(columns, plan, read, list(range(len(read)))), place, plan, rank)


def _local_sample(i: int, axis: Axis) -> str:
    return f"rank {axis.ranks[axis.rank] if axis.ranks else axis.rank}, sample {i}"


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


def _agree(record: dict[str, Any], failure: Exception | None, axis: Axis) -> Schema:
    """The header: the schema of all, or an error on every rank."""
    if axis.size == 1:
        if failure is not None:
            raise failure
        return Schema.from_list(record["schema"] or [])
    records = [json.loads(text) for text in gather_records(dumps(record), axis)]
    names = list(axis.ranks)
    with settling(axis):
        return _common(records, names, failure)


def _common(records: list[dict[str, Any]], names: list[int], failure: Exception | None) -> Schema:
    if failure is not None:
        raise failure
    for rank, other in zip(names, records):
        if other["failure"]:
            raise DistributedError("another rank cannot send its samples", where=f"rank {rank}", found=other["failure"])
    odd = next((i for i, other in enumerate(records) if other["plan"] != records[0]["plan"]), None)
    if odd is not None:
        raise DistributedError(
            "ranks made different plans",
            where=f"rank {names[odd]} against rank {names[0]}",
            hint="call plan() with the same gathered lengths and options on every rank",
        )
    schemas = [None if r["schema"] is None else Schema.from_list(r["schema"]) for r in records]
    return common_schema(schemas, names)


def _send(plan: Plan, parcel: _Parcel, schema: Schema, axis: Axis) -> list[RaggedBatch]:
    """The one all-to-all. What stays on this rank does not travel: it is taken from the samples themselves."""
    path, cuts = parcel.route, parcel.route.receive_cuts.tolist()
    tokens = _tokens(plan, path.receives, path.receive_cuts).tolist()
    receives = [schema.num_bytes(cuts[i + 1] - cuts[i], tokens[i]) for i in range(axis.size)]
    receives[axis.rank] = 0
    received = all_to_all_bytes(parcel.payload, parcel.sizes, receives, axis)
    values: dict[str, list[Tensor]] = {name: [] for name in schema.names}
    start, arrived = 0, [np.zeros(0, np.int64)]
    for source in block_order(axis):
        ids = path.receives[cuts[source] : cuts[source + 1]]
        if not len(ids):
            continue
        arrived.append(ids)
        if source == axis.rank:
            for name, column in parcel.own.items():
                values[name].extend(value.to(received.device) for value in column)
            continue
        lengths = plan.lengths[ids].tolist()
        for name, view in schema.by_name().blocks(received, start, len(ids), tokens[source]).items():
            values[name].extend(view.unbind() if name in schema.per_sequence else view.split(lengths))
        start += receives[source]
    place = np.full(plan.num_sequences, -1, np.int64)
    ids = np.concatenate(arrived)
    place[ids] = np.arange(len(ids))
    return assemble(schema, values, place, plan, axis.rank, received.device)


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
        pieces = _cut(columns, plan, ids, (ids - first).tolist())
        for name, view in schema.blocks(payload, start, len(ids), tokens[destination]).items():
            join = torch.stack if name in schema.per_sequence else torch.cat
            join(pieces[name], out=view)
        start += sizes[destination]
    return payload, sizes


def _cut(columns: Columns, plan: Plan, ids: Int64, rows: list[int]) -> dict[str, list[Tensor]]:
    """The values of sequences ``ids``, which stand at ``rows``, as long as the plan keeps them: views."""
    pieces = {name: [column[row] for row in rows] for name, column in columns.values.items()}
    short = np.flatnonzero(plan.lengths[ids] < plan.original_lengths[ids]).tolist()
    for field in columns.schema.fields if short and columns.schema is not None else ():
        if not field.per_sequence:
            column = pieces[field.name]
            for i in short:
                column[i] = column[i][: int(plan.lengths[ids[i]])]
    return pieces


def assemble(
    schema: Schema,
    values: Mapping[str, list[Tensor]],
    place: Int64,
    plan: Plan,
    rank: int,
    device: torch.device | None = None,
) -> list[RaggedBatch]:
    """The microbatches of ``rank``. One copy of each field: microbatches are parts of it, and share nothing with
    ``values``.

    ``values``: one tensor a sequence for each field, as long as the plan keeps it; ``place`` [n]: where in those lists
    each id stands.
    """
    layouts = [plan.layout(microbatch, rank) for microbatch in range(plan.num_microbatches)]
    rows = place[members_of(plan, rank)].tolist()
    if not rows:
        return [schema.empty(device) for _ in layouts]
    gaps = np.concatenate([layout.slots - layout.lengths for layout in layouts])
    room = _allocate(schema, len(rows), sum(layout.size for layout in layouts), values)
    parts: dict[str, Sequence[Tensor]] = {}
    for field in schema.fields:
        pieces = [values[field.name][row] for row in rows]
        if field.per_sequence:
            whole, sizes = torch.stack(pieces, out=room[field.name]), [layout.num_items for layout in layouts]
        else:
            padded = _with_padding(pieces, gaps, field.padding)
            whole, sizes = torch.cat(padded, out=room[field.name]), [layout.size for layout in layouts]
        parts[field.name] = whole.split(sizes)
    return [
        RaggedBatch({name: parts[name][k] for name in schema.names}, layout, schema.per_sequence)
        for k, layout in enumerate(layouts)
    ]


def _allocate(
    schema: Schema, num_sequences: int, num_elements: int, values: Mapping[str, list[Tensor]]
) -> dict[str, Tensor]:
    """Room for every field, fields of one dtype in one allocation.

    Large allocations come back from the heap with their pages in place; many small ones are returned to the system and
    faulted in again at every step, which costs more than the copy into them.
    """
    room: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(field.dtype for field in schema.fields):
        fields = [field for field in schema.fields if field.dtype == dtype]
        counts = [num_sequences if field.per_sequence else num_elements for field in fields]
        sizes = [aligned(count * field.entry_bytes) // dtype.itemsize for field, count in zip(fields, counts)]
        block = torch.empty(sum(sizes), dtype=dtype, device=values[fields[0].name][0].device)
        for field, count, part in zip(fields, counts, block.split(sizes)):
            room[field.name] = part[: count * math.prod(field.shape)].view(count, *field.shape)
    return room


def _with_padding(pieces: list[Tensor], gaps: Int64, padding: int) -> list[Tensor]:
    """The pieces, each followed by its slot's padding."""
    if not gaps.any():
        return pieces
    blank = pieces[0].new_full((int(gaps.max()), *pieces[0].shape[1:]), padding)
    return [part for piece, gap in zip(pieces, gaps.tolist()) for part in (piece, blank[:gap])]
