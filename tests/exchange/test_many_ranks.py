"""The bytes of 768 ranks in one process: each rank's blocks are written, carried and unpacked by the exchange's code."""

import numpy as np
import pytest
import torch

import ullage
from ullage.core.columns import Columns, Schema
from ullage.exchange import Lengths, materialize, route, transfer
from ullage.ranks import Topology


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "dp", "per_rank"), [(768, 768, 1.5), (768, 96, 3), (7, 7, 9)])
def test_every_byte_that_is_sent_arrives_where_the_plan_wants_it(monkeypatch, ranks, dp, per_rank):
    random = np.random.default_rng(ranks + dp)
    lengths = random.integers(1, 65, int(per_rank * dp))
    counts = random.multinomial(len(lengths), np.full(dp, 1 / dp))  # some ranks bring nothing
    samples = [{"input_ids": torch.arange(n) + 100 * i, "mask": torch.ones(n, dtype=torch.bool), "id": i} for i, n in
               enumerate(lengths.tolist())]  # fmt: skip
    gathered = Lengths(lengths, counts)
    plan = ullage.plan(lengths, ranks=dp, capacity=64, pad_to_multiple_of=8)
    # dp·tp ranks: those of one dp coordinate do the same, and the first of them stands for all.
    axes = [Topology.grid(rank, dp=dp, tp=ranks // dp).dp for rank in range(0, ranks, ranks // dp)]
    assert [axis.rank for axis in axes] == list(range(dp))
    parcels, schemas, in_transit = [], [], {}
    for axis in axes:
        first = int(gathered.offsets[axis.rank])
        mine = Columns.read(samples[first : first + int(counts[axis.rank])])
        parcel = transfer.write_blocks(mine, plan.lengths, route(plan, gathered, axis.rank), first, axis)
        parcels.append(parcel)
        schemas.append(mine.schema or Schema())
        for to, block in enumerate(parcel.payload.clone().split(parcel.sizes)):
            if len(block):
                in_transit[axis.rank, to] = block

    def carried(payload, sends, receives, axis):
        blocks = [in_transit.pop((source, axis.rank)) for source in range(dp) if receives[source]]
        assert [len(block) for block in blocks] == [size for size in receives if size]
        return torch.cat([torch.zeros(0, dtype=torch.uint8), *blocks])

    monkeypatch.setattr(transfer, "all_to_all_bytes", carried)
    schema = next(s for s in schemas if s.fields)
    arrived = []
    for axis, parcel in zip(axes, parcels):
        wanted = plan.all_members(axis.rank)
        columns, _ = transfer.unpack(parcel, wanted, schemas, schema, axis)
        arrived += [int(i) for i in columns["id"]]
        assert arrived[len(arrived) - len(wanted) :] == wanted.tolist()
        for i, values in zip(wanted.tolist(), columns["input_ids"], strict=True):
            assert torch.equal(values, samples[i]["input_ids"])
        if axis.rank % 97 == 0:
            for batch, layout in zip(materialize(plan, samples, axis.rank), plan.layouts(axis.rank), strict=True):
                assert batch.layout == layout
    assert sorted(arrived) == list(range(len(lengths)))
    assert in_transit == {}, "sent, and received by nobody"
