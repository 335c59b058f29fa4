"""Microbatches from the rank that has them to the ranks of its group that have none: :func:`share`.

Two broadcasts. A header says how many microbatches and sequences there are, which fields of which dtype, and how many
bytes follow, or what went wrong at the source; of fields by item it says which microbatch has them, and the shape of
each sequence's rows. One payload then carries the lengths, the slots and the chosen fields of
all microbatches, every block on a 16-byte boundary. Counts are explicit: nothing is found by looking for zeros, and a
rank in the middle of a pipeline that asks for no fields still learns every length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.columns import Schema, aligned
from ullage.core.errors import InputError
from ullage.core.items import in_shapes, join_items
from ullage.core.layout import Layout
from ullage.ranks import Axis, raise_failures, report, tried
from ullage.ranks.topology import require_axis
from ullage.ranks.wire import broadcast_bytes, broadcast_record, device_of, dumps


def share(
    microbatches: Sequence[RaggedBatch] | None,
    axis: Axis,
    source: int = 0,
    fields: Sequence[str] | None = None,
    per_item: Sequence[str] = (),
) -> list[RaggedBatch]:
    """Give the source's microbatches to every rank along the axis.

    Args:
        microbatches: what the source has; ignored elsewhere, where it may be ``None``.
        axis: of a topology, or ``Axis.from_group(group)``.
        source: its coordinate on the axis. It gets its own tensors back.
        fields: the names that the source sends, all if it is ``None``; with ``()`` only the layouts are sent.
        per_item: which of those a microbatch may lack, beside those of images: none of its sequences has rows of it.

    Collective over the axis; host tensors unless the group takes device tensors only. Raises ``InputError`` on the
    source if it cannot send, and then ``DistributedError`` on the others.
    """
    if not 0 <= source < require_axis(axis).size:
        raise InputError("no such source on the axis", expected=f"0 to {axis.size - 1}", found=source)
    return share_or_fail(microbatches, None, axis, source, fields, per_item)


def share_or_fail(
    microbatches: Sequence[RaggedBatch] | None,
    failure: Exception | None,
    axis: Axis,
    source: int = 0,
    fields: Sequence[str] | None = None,
    per_item: Sequence[str] = (),
) -> list[RaggedBatch]:
    """:func:`share` from a source that may have failed already: then every rank raises."""
    # The source does what may fail before the header, and tells its error in it.
    mine = axis.rank == source
    chosen: list[RaggedBatch] = []
    record: dict[str, Any] = {}
    if mine:
        if failure is None:
            prepared, failure = tried(lambda: _choose(microbatches, fields, per_item))
            if prepared is not None:
                chosen, record = prepared
        if failure is not None:
            record = {"failed": report(failure, axis)}
    if axis.size == 1:
        if failure is not None:
            raise failure
        return chosen
    # With the header every rank knows the size of the payload, and whether it comes at all.
    header = json.loads(broadcast_record(dumps(record) if mine else None, axis, source))
    raise_failures(failure if mine else None, [header.get("failed", [])], "sharing microbatches", axis)
    schema, counts = Schema.from_list(header["schema"]), header["sequences"]
    items = [_Items(*each) for each in header.get("items", [([], {})] * len(counts))]
    payload = _payload(chosen, schema, items, header["bytes"], axis) if mine else None
    received = broadcast_bytes(payload, header["bytes"], axis, source)
    return chosen if mine else _unpack(received, schema, items, counts)


class _Items:
    """The fields by item of a microbatch: ``fields`` as a schema lists them, ``shapes`` of each sequence's rows."""

    def __init__(self, fields: list[Any], shapes: Mapping[str, list[list[int]]]) -> None:
        self.schema = Schema.from_list(fields)
        self.shapes = {name: np.array(each, np.int64) for name, each in shapes.items()}
        self.elements = {name: int(each.prod(1).sum()) for name, each in self.shapes.items()}
        self.num_bytes = self.schema.num_bytes(0, 0, self.elements)


def _choose(
    microbatches: Sequence[RaggedBatch] | None, fields: Sequence[str] | None, per_item: Sequence[str]
) -> tuple[list[RaggedBatch], dict[str, Any]]:
    if microbatches is None:
        raise InputError("the source of a share must have microbatches", found="None")
    items = {name for batch in microbatches for name in batch.items}
    if fields is None:
        beside = [name for name in microbatches[0].names if name not in items] if microbatches else []
        fields = [*beside, *sorted(items)]
    chosen = [batch.select(fields, items.union(per_item)) for batch in microbatches]
    schema = chosen[0].schema.beside_items() if chosen else Schema()
    for i, batch in enumerate(chosen):
        if batch.schema.beside_items() != schema:
            raise InputError("microbatches have different fields", where=f"microbatch {i}", expected=schema.names)
    record: dict[str, Any] = {
        "schema": schema.to_list(),
        "sequences": [batch.layout.num_items for batch in chosen],
        "bytes": sum(_batch_bytes(schema, batch.layout) for batch in chosen),
    }
    if any(batch.items for batch in chosen):
        record["items"] = [_items_of(batch) for batch in chosen]
        record["bytes"] += sum(_Items(*each).num_bytes for each in record["items"])
    return chosen, record


def _items_of(batch: RaggedBatch) -> tuple[list[Any], dict[str, Any]]:
    if not batch.items:
        return [], {}
    columns = batch.select(batch.per_item).columns()
    assert columns.schema is not None
    return columns.schema.to_list(), {name: shapes.tolist() for name, shapes in columns.shapes.items()}


def _batch_bytes(schema: Schema, layout: Layout) -> int:
    return 2 * aligned(8 * layout.num_items) + schema.num_bytes(layout.num_items, layout.size)


def _payload(batches: list[RaggedBatch], schema: Schema, items: list[_Items], num_bytes: int, axis: Axis) -> Tensor:
    # Per microbatch: lengths, slots (int64 each), then the fields in the order of the schema, then those by item, every
    # block on an aligned boundary. ``_unpack`` walks the same order.
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=device_of(axis.require_group()))
    start = 0
    for batch, more in zip(batches, items):
        count = batch.layout.num_items
        for array in (batch.layout.lengths, batch.layout.slots):
            payload[start : start + 8 * count].view(torch.int64).copy_(torch.tensor(array))
            start += aligned(8 * count)
        for name, view in schema.blocks(payload, start, count, batch.layout.size).items():
            view.copy_(batch[name])
        start += schema.num_bytes(count, batch.layout.size)
        for name, view in more.schema.blocks(payload, start, 0, 0, more.elements).items():
            view.copy_(batch[name].reshape(-1))
        start += more.num_bytes
    return payload


def _unpack(payload: Tensor, schema: Schema, items: list[_Items], counts: list[int]) -> list[RaggedBatch]:
    batches, start = [], 0
    for count, more in zip(counts, items):
        # Lengths, then slots; the copy on the host does not keep the payload.
        arrays = []
        for _ in range(2):
            arrays.append(payload[start : start + 8 * count].view(torch.int64).cpu().numpy().astype(np.int64))
            start += aligned(8 * count)
        layout = Layout.from_slots(*arrays)
        views = schema.blocks(payload, start, count, layout.size)
        start += schema.num_bytes(count, layout.size)
        # Copies, so that one microbatch that is kept does not keep the payload of them all.
        values = {name: view.clone() for name, view in views.items()}
        blocks = more.schema.blocks(payload, start, 0, 0, more.elements)
        start += more.num_bytes
        joined = {name: join_items(in_shapes(view, more.shapes[name])) for name, view in blocks.items()}
        rows = {name: each for name, each in joined.items() if each is not None}
        values |= {name: tensor for name, (tensor, _) in rows.items()}
        batches.append(RaggedBatch(values, layout, schema.per_sequence, {name: r for name, (_, r) in rows.items()}))
    return batches
