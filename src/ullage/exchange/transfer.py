"""Bytes of samples from where their rows lie to where they are wanted, by a route that every rank knows.

A rank's block for another holds, field by field, the values of the sequences that go there, in the order in which they
will be packed; every field starts on a 16-byte boundary. Both ends know the plan, the counts and the schema, so they
know the size of every block: nothing is parsed, and a block may be empty. Of fields by item, whose sizes no plan knows,
the shapes went round with the schema. All blocks go by ONE all-to-all of bytes. What stays on its rank is not written
anywhere.

:func:`write_blocks` and :func:`unpack` are each one copy of every value: rows to blocks, and blocks to microbatches
with their padding. Between them the ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ullage.core.columns import NO_ITEMS, Columns, Schema
from ullage.core.items import in_shapes
from ullage.core.layout import Int64, counting
from ullage.exchange.lengths import Lengths
from ullage.planning.plans import Plan
from ullage.ranks import Axis
from ullage.ranks.wire import all_to_all_bytes, block_order, scratch


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

    def sent_to(self, rank: int) -> Int64:
        """The ids that go to ``rank``."""
        return self.sends[self.send_cuts[rank] : self.send_cuts[rank + 1]]

    def received_from(self, rank: int) -> Int64:
        """The ids that come from ``rank``."""
        return self.receives[self.receive_cuts[rank] : self.receive_cuts[rank + 1]]


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
    wanted = plan.all_members(rank)
    # The rank whose range of ids holds each wanted id: the last one that begins at or before it.
    source = np.searchsorted(gathered.offsets, wanted, side="right") - 1
    return Route(
        sends=ids[order],
        send_cuts=_cuts(destination, plan.ranks),
        receives=wanted[np.argsort(source, kind="stable")],
        receive_cuts=_cuts(source, plan.ranks),
    )


def _cuts(of: Int64, ranks: int) -> Int64:
    return np.concatenate([[0], np.cumsum(np.bincount(of, minlength=ranks))]).astype(np.int64)


def tokens_between(lengths: Int64, ids: Int64, cuts: Int64) -> Int64:
    """Tokens of each part that ``cuts`` makes of ``ids``."""
    return np.diff(np.concatenate([[0], np.cumsum(lengths[ids])])[cuts])


def elements_between(shapes: Mapping[str, Int64], ids: Int64, cuts: Int64) -> dict[str, Int64]:
    """Elements of each part that ``cuts`` makes of ``ids``, for each field by item of which ``shapes`` tells them."""
    return {name: tokens_between(each.prod(1), ids, cuts) for name, each in shapes.items()}


@dataclass(frozen=True, eq=False)
class Parcel:
    """The data that a rank has ready when it meets the others.

    Attributes:
        path: which sequences go where.
        lengths [all sequences]: tokens of each sequence that travel.
        payload: the blocks, in the order of :func:`ullage.ranks.wire.block_order`.
        sizes: bytes of each of them, by coordinate; 0 for this rank itself.
        own: the values that stay, by field, in packing order.
    """

    path: Route
    lengths: Int64
    payload: Tensor
    sizes: list[int]
    own: dict[str, list[Tensor]]


def write_blocks(columns: Columns, lengths: Int64, path: Route, first: int, axis: Axis) -> Parcel:
    """The blocks of one rank. ``first``: id of its first sequence; ``lengths`` [all]: tokens of each that travel."""
    # Ranks may hold their fields in different orders; the order of the names is one.
    schema = (columns.schema or Schema()).by_name()
    tokens = tokens_between(lengths, path.sends, path.send_cuts)
    elements = elements_between(columns.shapes, path.sends - first, path.send_cuts)
    sizes = schema.block_bytes(np.diff(path.send_cuts), tokens, elements).tolist()
    sizes[axis.rank] = 0
    payload, start = scratch("payload", sum(sizes), columns.device), 0
    for destination in block_order(axis):
        if not sizes[destination]:
            continue
        ids = path.sent_to(destination)
        pieces = columns.rows((ids - first).tolist(), lengths[ids])
        counts = len(ids), int(tokens[destination]), {name: each[destination] for name, each in elements.items()}
        for name, view in schema.blocks(payload, start, *counts).items():
            join = torch.stack if name in schema.per_sequence else torch.cat
            if name in elements:
                pieces[name] = [value.reshape(-1) for value in pieces[name]]
            join(pieces[name], out=view)
        start += sizes[destination]
    own = path.received_from(axis.rank)
    return Parcel(path, lengths, payload, sizes, columns.rows((own - first).tolist(), lengths[own]))


def unpack(
    parcel: Parcel,
    wanted: Int64,
    schemas: Sequence[Schema],
    schema: Schema,
    axis: Axis,
    shapes: Mapping[str, Int64] = NO_ITEMS,
) -> tuple[dict[str, list[Tensor]], torch.device]:
    """The values of the sequences ``wanted``, by field, in that order: views of where they arrived; and their device.

    ``schemas``: of each rank; ``schema``: of the result; ``shapes`` [all sequences, dims]: of the rows of each sequence
    in each field by item. The views last until the next transfer.
    """
    path = parcel.path
    counts = np.diff(path.receive_cuts)
    tokens = tokens_between(parcel.lengths, path.receives, path.receive_cuts)
    elements = elements_between(shapes, path.receives, path.receive_cuts)
    sizes = _sizes(schemas, counts, tokens, elements, axis.rank)
    received = all_to_all_bytes(parcel.payload, parcel.sizes, sizes, axis)
    device = received.device
    dtypes = {field.name: field.dtype for field in schema.fields}
    values: dict[str, list[Tensor]] = {name: [] for name in schema.names}
    start, arrived = 0, [np.zeros(0, np.int64)]
    for source in block_order(axis):
        if not sizes[source]:
            continue
        ids = path.received_from(source)
        arrived.append(ids)
        lengths = parcel.lengths[ids].tolist()
        some = {name: int(each[source]) for name, each in elements.items()}
        views = schemas[source].by_name().blocks(received, start, len(ids), int(tokens[source]), some)
        start += sizes[source]
        for name, view in views.items():
            # Each source's blocks are in its own dtypes; conversion copies only where they differ.
            view = view if view.dtype == dtypes[name] else view.to(dtypes[name])
            if name in shapes:
                values[name].extend(in_shapes(view, shapes[name][ids]))
            else:
                values[name].extend(view.unbind() if name in schema.per_sequence else view.split(lengths))
        _fill_up(values, shapes.keys() - views.keys(), len(ids))
    own = path.received_from(axis.rank)
    if len(own):
        arrived.append(own)
        for name, column in parcel.own.items():
            there = (device, dtypes[name])
            values[name].extend(v if (v.device, v.dtype) == there else v.to(*there) for v in column)
        _fill_up(values, shapes.keys() - parcel.own.keys(), len(own))
    # From the order of arrival to the order of packing.
    place = np.full(len(parcel.lengths), -1, np.int64)
    ids = np.concatenate(arrived)
    place[ids] = np.arange(len(ids))
    rows = place[wanted].tolist()
    return {name: [column[row] for row in rows] for name, column in values.items()}, device


def _fill_up(values: dict[str, list[Tensor]], names: Iterable[str], count: int) -> None:
    """No rows of the fields by item that a source has not, for so many sequences of it."""
    for name in names:
        values[name].extend([torch.empty(0)] * count)


def _sizes(
    schemas: Sequence[Schema], counts: Int64, tokens: Int64, elements: Mapping[str, Int64], own: int
) -> list[int]:
    """Bytes of the block from each rank, none from this one."""
    sizes = [0] * len(schemas)
    # Ranks of one schema at once: usually there is one.
    whose: dict[Schema, list[int]] = {}
    for i, schema in enumerate(schemas):
        if counts[i] and i != own:
            whose.setdefault(schema, []).append(i)
    for schema, ranks in whose.items():
        some = {name: each[ranks] for name, each in elements.items()}
        for i, size in zip(ranks, schema.block_bytes(counts[ranks], tokens[ranks], some).tolist()):
            sizes[i] = size
    return sizes
