"""Movement of samples to the ranks that a plan gives them to.

:func:`exchange` moves them between ranks; :func:`materialize` serves where every rank has them all.

A header goes round the data-parallel axis first: each rank's schema, the digest of its plan, and its error if it has
one, so that a disagreement raises on every rank before a byte of data moves; everything that can fail happens before
it, so that no rank is left waiting. Then the bytes move, see :mod:`ullage.exchange.transfer`. Values travel in their
rank's own dtype; where ranks differ, the receiver converts to what torch promotes them to.

Copies of a value on its way from the collator to the model, and the reason for each:

1. sample -> batch, in ``RaggedBatch.from_samples``: samples lie apart in memory, a batch is flat. None where samples
   are given to :func:`exchange` itself.
2. batch or sample -> block: who receives it finds it in one piece. None for what stays on its rank.
3. block -> received, by the network. None for what stays on its rank.
4. received (or, for what stays, the batch) -> microbatches: blocks arrive by source,
   microbatches are in the plan's order, with padding.
5. ``to_flattened`` adds views, and one copy of the labels, whose first entry per sequence becomes -100.

Replaces the reroute of Megatron-LM's ``wrap_data_iterator``, where the fields are fixed, ranks are computed from global
ids, and an empty send allocates an element of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.columns import Columns, Field, Schema, items_of, promoted
from ullage.core.errors import DistributedError, InputError
from ullage.core.items import join_items
from ullage.core.layout import Int64, Layout
from ullage.exchange.lengths import Lengths
from ullage.exchange.transfer import Parcel, route, unpack, write_blocks
from ullage.planning.plans import Plan
from ullage.ranks import Axis, Topology, gather_agreed, tried
from ullage.ranks.wire import settling

#: What holds samples: a batch, several batches one after another, or samples as mappings of names to values.
Samples = RaggedBatch | Sequence[RaggedBatch] | Sequence[Mapping[str, Any]]


def exchange(
    plan: Plan,
    batch: Samples,
    topology: Topology,
    gathered: Lengths,
    *,
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
    per_item: Iterable[str] = (),
) -> list[RaggedBatch]:
    """This rank's microbatches, the sequences of each in the order of ``plan.members``.

    A microbatch without sequences is an empty batch that knows its fields. Sequences that the plan cut short arrive
    cut, and those it dropped not at all. Items (images) go with their sequences, and a microbatch knows the fields of
    those that it has. Nothing has gradients.

    Args:
        plan: made from ``gathered.lengths``, the same on every rank.
        batch: this rank's own sequences, as they were when ``gathered`` was made: a :class:`RaggedBatch`, a list of
            them, or a list of samples (see :mod:`ullage.core.columns`). Never written to.
        topology: its dp axis is the one to exchange over.
        gathered: what :func:`gather_lengths` returned.
        per_sequence: for samples, the fields with one entry per sequence although they are arrays; numbers always are.
        fields: the names to exchange; all if it is ``None``.
        per_item: for samples, the fields with a number of rows for each, beside those of images.

    Collective over dp. Host tensors unless the group takes device tensors only. Raises ``InputError`` on the rank whose
    samples are at fault and ``DistributedError`` on the others, or on all where ranks disagree.
    """
    columns, failure = tried(
        lambda: _columns_of(batch, per_sequence, fields, lambda i: _local_sample(i, topology.dp), per_item)
    )
    return exchange_columns(plan, columns, failure, topology, gathered)


def _columns_of(
    batch: Samples,
    per_sequence: Iterable[str],
    fields: Sequence[str] | None,
    where: Callable[[int], str],
    per_item: Iterable[str] = (),
) -> Columns:
    """The sequences of a batch, of several batches, or of samples, by column. Raises ``InputError``."""
    batches = _batches(batch)
    if batches is None:
        samples = cast(Sequence[Mapping[str, Any]], batch)
        return Columns.read(samples, per_sequence, fields, where, per_item=per_item)
    chosen = batches if fields is None else [part.select(fields, per_item) for part in batches]
    columns = Columns.join([part.columns() for part in chosen])
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
    shapes = {} if columns is None or failure is not None else columns.shapes
    digest = "" if plan is None else plan.digest
    schemas, shapes = _agree(digest, own or Schema(), shapes, failure, axis, gathered)
    assert plan is not None  # or it would have raised
    assert parcel is not None
    schema = common_schema(schemas, axis.ranks or [0])
    # Views of where the values arrived, until the next exchange; packing copies them.
    values, device = unpack(parcel, plan.all_members(axis.rank), schemas, schema, axis, shapes)
    return _packed(schema, values, plan.layouts(axis.rank), device)


def _prepare(plan: Plan | None, columns: Columns | None, axis: Axis, gathered: Lengths) -> Parcel:
    if plan is None or columns is None:
        raise InputError("there is no plan or there are no samples to exchange")
    _check(plan, columns, axis, gathered)
    first = int(gathered.offsets[axis.rank])
    # Sequences that the plan drops are not cut.
    mine = slice(first, first + len(columns.lengths))
    kept = np.where(plan.bins[mine] < 0, columns.lengths, plan.lengths[mine])
    columns.require_uncut(kept, lambda i: _local_sample(i, axis))
    return write_blocks(columns, plan.lengths, route(plan, gathered, axis.rank), first, axis)


@torch.no_grad()
def materialize(
    plan: Plan,
    batch: Samples,
    rank: int,
    *,
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
    per_item: Iterable[str] = (),
) -> list[RaggedBatch]:
    """The microbatches that :func:`exchange` gives to ``rank``, made where every rank holds the whole batch.

    No communication.

    ``batch``: all sequences, in the order of the lengths that were planned; in batches it may be only those that
    ``rank`` runs, in the same order. The rest as for :func:`exchange`. Of samples, only those that ``rank`` runs are
    read, and dtypes are promoted over them. Raises ``InputError``.
    """
    if not 0 <= rank < plan.ranks:
        raise InputError("no such rank in the plan", expected=f"0 to {plan.ranks - 1}", found=rank)
    wanted = plan.all_members(rank)
    batches = _batches(batch)
    count = len(batch) if batches is None else sum(map(len, batches))
    if count != plan.num_sequences and (batches is None or count != len(wanted)):
        raise InputError("plan and samples disagree", expected=f"{plan.num_sequences} samples", found=count)
    if batches is None:
        # The first sample tells the schema where this rank has no sequence; the others' rows are not read.
        samples = cast(Sequence[Mapping[str, Any]], batch)
        ids = wanted if len(wanted) or not count else np.zeros(1, np.int64)
        read = [samples[i] for i in ids.tolist()]
        columns = Columns.read(read, per_sequence, fields, lambda i: f"sample {ids[i]}", per_item=per_item)
        rows = list(range(len(wanted)))
    else:
        # Views of all sequences cost little.
        ids = np.arange(count) if count == plan.num_sequences else np.sort(wanted)
        rows = np.searchsorted(ids, wanted).tolist()
        columns = _columns_of(batch, (), fields, lambda i: f"sample {i}", per_item)
    odd = np.flatnonzero(columns.lengths != plan.original_lengths[ids])
    if len(odd):
        i = int(odd[0])
        raise InputError(
            "a sample is not as long as planned",
            where=f"sample {ids[i]}",
            expected=int(plan.original_lengths[ids[i]]),
            found=int(columns.lengths[i]),
        )
    kept = columns.lengths.copy()
    kept[rows] = plan.lengths[wanted]
    columns.require_uncut(kept, lambda i: f"sample {ids[i]}")
    values = columns.rows(rows, plan.lengths[wanted])
    return _packed(columns.schema or Schema(), values, plan.layouts(rank))


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


def _agree(
    digest: str, schema: Schema, shapes: Mapping[str, Int64], failure: Exception | None, axis: Axis, gathered: Lengths
) -> tuple[list[Schema], dict[str, Int64]]:
    """The header: the schema of each rank and the shapes of items, or an error on every rank."""
    fields = schema.to_list()
    record: dict[str, Any] = {"plan": digest, "schema": fields}
    if shapes:
        record["items"] = {name: each.tolist() for name, each in shapes.items()}
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
        schemas = [schema if other["schema"] == fields else Schema.from_list(other["schema"]) for other in records]
        common_schema(schemas, names)  # raises before any rank sends
    # Of all sequences, by id; those of ranks without the field have no rows.
    everywhere = {
        name: np.zeros((len(gathered), fields[0].ndim), np.int64) for name, fields in items_of(schemas).items()
    }
    for k, other in enumerate(records):
        for name, rows in other.get("items", {}).items():
            if rows:
                everywhere[name][gathered.offsets[k] : gathered.offsets[k + 1]] = rows
    return schemas, everywhere


def common_schema(schemas: Sequence[Schema], names: Sequence[int]) -> Schema:
    """The schema of all ranks, each field in the dtype that torch promotes those of the ranks to.

    A rank without samples has no fields, and one without images none of theirs; ``names`` [ranks] are the global ranks.
    The order of fields is that of the first rank that has any. Raises ``DistributedError`` that names rank and field
    where one rank has other fields or shapes than most.
    """
    present = [(rank, schema) for rank, schema in zip(names, schemas) if schema.fields]
    if not present:
        return Schema()
    if all(schema is present[0][1] for _, schema in present):
        return present[0][1]
    beside = [(rank, schema.beside_items()) for rank, schema in present]
    kinds = [frozenset(field.untyped for field in schema.fields) for _, schema in beside]
    usual = kinds.index(Counter(kinds).most_common(1)[0][0])
    for (rank, schema), kind in zip(beside, kinds):
        if kind != kinds[usual]:
            _raise_difference(rank, schema, beside[usual][1])
    items = {name: fields[0] for name, fields in items_of(schema for _, schema in present).items()}
    for rank, schema in present:
        mine = tuple(field for field in schema.fields if field.per_item)
        theirs = tuple(items[field.name] for field in mine)
        if any(field.untyped != other.untyped for field, other in zip(mine, theirs)):
            _raise_difference(rank, Schema(mine), Schema(theirs))
    by_name: dict[str, list[Field]] = {name: [] for name in present[0][1].names}
    for _, schema in present:
        for field in schema.fields:
            by_name.setdefault(field.name, []).append(field)
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


def _packed(
    schema: Schema,
    values: Mapping[str, Sequence[Tensor]],
    layouts: Sequence[Layout],
    device: torch.device | None = None,
) -> list[RaggedBatch]:
    """The microbatches of these layouts from the values of their sequences, in packing order."""
    made = schema.pack(values, layouts, device)
    if not schema.per_item:
        return [RaggedBatch(tensors, layout, schema.per_sequence) for tensors, layout in zip(made, layouts)]
    packed, start = [], 0
    for tensors, layout in zip(made, layouts):
        joined = {name: join_items(values[name][start : start + layout.num_items]) for name in schema.per_item}
        items = {name: each for name, each in joined.items() if each is not None}
        tensors = tensors | {name: tensor for name, (tensor, _) in items.items()}
        packed.append(
            RaggedBatch(tensors, layout, schema.per_sequence, {name: rows for name, (_, rows) in items.items()})
        )
        start += layout.num_items
    return packed
