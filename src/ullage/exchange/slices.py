"""The exchange for context parallelism: each rank receives its slices and nothing else.

The ranks along a data-parallel axis have one context-parallel coordinate, so each of them wants the same chunks of
every sequence. The chunks are cut where the samples lie; of the bytes that :func:`ullage.exchange.exchange` would move,
1/``cp`` are sent. Both ends know the chunks from the plan, as they know the sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ullage.columns import Columns
from ullage.errors import InputError
from ullage.exchange.lengths import Lengths
from ullage.exchange.reroute import Samples, columns_of, local_sample, move, packed
from ullage.exchange.sharding import Shard, shard_parts, shifts_labels, slice_layout
from ullage.layout import Int64
from ullage.planning.plans import Plan
from ullage.ranks import Topology, tried
from ullage.schema import IGNORED_LABEL, Field, Schema, holding_ignored

#: The name under which labels travel that were shifted for the cut; no field of a sample is called so.
_SHIFTED = "shift_labels\0"


def exchange_shards(
    plan: Plan,
    batch: Samples,
    topology: Topology,
    gathered: Lengths,
    *,
    order: str = "zigzag",
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
    shift_labels: bool | None = None,
) -> list[Shard]:
    """This rank's slice of each of its microbatches: ``exchange``, then ``shard``, without moving the other slices.

    ``order`` and ``shift_labels`` are those of :func:`ullage.exchange.shard`, the rest and the errors those of
    :func:`ullage.exchange.exchange`; the slices are those of ``topology.cp``. Collective over dp.
    """
    columns, failure = tried(lambda: columns_of(batch, per_sequence, fields, lambda i: local_sample(i, topology.dp)))
    return shards_of_columns(plan, columns, failure, topology, gathered, order, shift_labels)


def shards_of_columns(
    plan: Plan | None,
    columns: Columns | None,
    failure: Exception | None,
    topology: Topology,
    gathered: Lengths,
    order: str = "zigzag",
    shift_labels: bool | None = None,
) -> list[Shard]:
    """:func:`exchange_shards` of samples already read, by a rank that may have failed: then every rank raises."""
    cp, rank = topology.cp, topology.dp.rank

    def parts() -> tuple[Int64, Int64]:
        assert plan is not None
        for layout in plan.layouts(rank):
            slice_layout(layout, cp.size, cp.rank, order)  # refuses what cannot be cut, before anything is sent
        return shard_parts(plan, cp.size, cp.rank, order)

    if failure is None and columns is not None and plan is not None:
        columns, failure = tried(partial(_with_shifted, columns, plan, gathered, rank, shift_labels))
    schema, values, device = move(plan, columns, failure, topology, gathered, parts)
    assert plan is not None  # or it would have raised
    added = _SHIFTED in schema.names
    if added:
        schema, values = _renamed(schema, values)
    shards = []
    layouts = plan.layouts(rank)
    cut = [slice_layout(layout, cp.size, cp.rank, order) for layout in layouts]
    for whole, (_, positions), batch in zip(layouts, cut, packed(schema, values, [local for local, _ in cut], device)):
        at = torch.from_numpy(positions).to(batch.device)
        names = ("shift_labels",) if added else ()
        shards.append(Shard(batch, at, whole, cp.size, cp.rank, order, names))
    return shards


def _with_shifted(columns: Columns, plan: Plan, gathered: Lengths, rank: int, asked: bool | None) -> Columns:
    """The columns with their labels shifted by a token, before a cut takes a chunk's last label from it."""
    schema = columns.schema
    if schema is None or "shift_labels" in schema.names:
        return columns
    if not (shifts_labels(schema.names, schema.per_sequence) if asked is None else asked):
        return columns
    if not any(field.name == "labels" and not field.per_sequence for field in schema.fields):
        raise InputError("there are no labels of tokens to shift", found=list(schema.names))
    first = int(gathered.offsets[rank])
    lengths = plan.lengths[first : first + len(columns.lengths)].tolist()
    shifted = []
    for labels, length in zip(columns.values["labels"], lengths):
        # Of a sequence that the plan cuts short, the last token that is left has no next one.
        moved = torch.full_like(holding_ignored(labels[:length]), IGNORED_LABEL)
        moved[:-1] = labels[1:length]
        shifted.append(torch.cat([moved, moved.new_full((len(labels) - length, *labels.shape[1:]), IGNORED_LABEL)]))
    [labels] = [field for field in schema.fields if field.name == "labels"]
    dtype = shifted[0].dtype if shifted else labels.dtype
    field = Field(_SHIFTED, dtype, labels.shape)
    return Columns(Schema((*schema.fields, field)), {**columns.values, _SHIFTED: shifted}, columns.lengths)


def _renamed(schema: Schema, values: dict[str, list[torch.Tensor]]) -> tuple[Schema, dict[str, list[torch.Tensor]]]:
    """The shifted labels under their own name, last, in the dtype that the labels of all ranks have together."""
    [labels] = [field for field in schema.fields if field.name == "labels"]
    dtype = labels.dtype if labels.dtype.is_signed else torch.int64
    kept = [field for field in schema.fields if field.name != _SHIFTED]
    values["shift_labels"] = [value.to(dtype) for value in values.pop(_SHIFTED)]
    return Schema((*kept, replace(labels, name="shift_labels", dtype=dtype))), values
