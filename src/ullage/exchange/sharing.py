"""Microbatches from the rank that has them to the ranks of its group that have none: :func:`share`.

Two broadcasts. A header says how many microbatches and sequences there are, which fields of which dtype, and how many
bytes follow, or what went wrong at the source. One payload then carries the lengths, the slots and the chosen fields of
all microbatches, every block on a 16-byte boundary. Counts are explicit: nothing is found by looking for zeros, and a
rank in the middle of a pipeline that asks for no fields still learns every length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.columns import Schema, aligned
from ullage.core.errors import InputError
from ullage.core.layout import Layout
from ullage.ranks import Axis, raise_failures, report, tried
from ullage.ranks.topology import require_axis
from ullage.ranks.wire import broadcast_bytes, broadcast_record, device_of, dumps


def share(
    microbatches: Sequence[RaggedBatch] | None,
    axis: Axis,
    source: int = 0,
    fields: Sequence[str] | None = None,
) -> list[RaggedBatch]:
    """Give the source's microbatches to every rank along the axis.

    Args:
        microbatches: what the source has; ignored elsewhere, where it may be ``None``.
        axis: of a topology, or ``Axis.from_group(group)``.
        source: its coordinate on the axis. It gets its own tensors back.
        fields: the names that the source sends, all if it is ``None``; with ``()`` only the layouts are sent.

    Collective over the axis; host tensors unless the group takes device tensors only. Raises ``InputError`` on the
    source if it cannot send, and then ``DistributedError`` on the others.
    """
    if not 0 <= source < require_axis(axis).size:
        raise InputError("no such source on the axis", expected=f"0 to {axis.size - 1}", found=source)
    return share_or_fail(microbatches, None, axis, source, fields)


def share_or_fail(
    microbatches: Sequence[RaggedBatch] | None,
    failure: Exception | None,
    axis: Axis,
    source: int = 0,
    fields: Sequence[str] | None = None,
) -> list[RaggedBatch]:
    """:func:`share` from a source that may have failed already: then every rank raises."""
    # The source does what may fail before the header, and tells its error in it.
    mine = axis.rank == source
    chosen: list[RaggedBatch] = []
    record: dict[str, Any] = {}
    if mine:
        if failure is None:
            prepared, failure = tried(lambda: _choose(microbatches, fields))
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
    payload = _payload(chosen, schema, header["bytes"], axis) if mine else None
    received = broadcast_bytes(payload, header["bytes"], axis, source)
    return chosen if mine else _unpack(received, schema, counts)


def _choose(
    microbatches: Sequence[RaggedBatch] | None, fields: Sequence[str] | None
) -> tuple[list[RaggedBatch], dict[str, Any]]:
    if microbatches is None:
        raise InputError("the source of a share must have microbatches", found="None")
    if fields is None:
        fields = microbatches[0].names if microbatches else ()
    chosen = [batch.select(fields) for batch in microbatches]
    schema = chosen[0].schema if chosen else Schema()
    for i, batch in enumerate(chosen):
        if batch.schema != schema:
            raise InputError("microbatches have different fields", where=f"microbatch {i}", expected=schema.names)
    record = {
        "schema": schema.to_list(),
        "sequences": [batch.layout.num_items for batch in chosen],
        "bytes": sum(_batch_bytes(schema, batch.layout) for batch in chosen),
    }
    return chosen, record


def _batch_bytes(schema: Schema, layout: Layout) -> int:
    return 2 * aligned(8 * layout.num_items) + schema.num_bytes(layout.num_items, layout.size)


def _payload(batches: list[RaggedBatch], schema: Schema, num_bytes: int, axis: Axis) -> Tensor:
    # Per microbatch: lengths, slots (int64 each), then the fields in the order of the schema, every block on an
    # aligned boundary. ``_unpack`` walks the same order.
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=device_of(axis.require_group()))
    start = 0
    for batch in batches:
        count = batch.layout.num_items
        for array in (batch.layout.lengths, batch.layout.slots):
            payload[start : start + 8 * count].view(torch.int64).copy_(torch.tensor(array))
            start += aligned(8 * count)
        for name, view in schema.blocks(payload, start, count, batch.layout.size).items():
            view.copy_(batch[name])
        start += schema.num_bytes(count, batch.layout.size)
    return payload


def _unpack(payload: Tensor, schema: Schema, counts: list[int]) -> list[RaggedBatch]:
    batches, start = [], 0
    for count in counts:
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
        batches.append(RaggedBatch(values, layout, schema.per_sequence))
    return batches
