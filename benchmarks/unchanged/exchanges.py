"""Exchanges drawn by a seed on 2 and 3 processes: the digest of what each rank gets, and the iterator's steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.unchanged.forks import Task, run_all
from benchmarks.unchanged.records import Cases, digest, digest_of_tensors, said

EXCHANGES = 100
ITERATORS = 12


def sample(chance: random.Random, i: int, length: int) -> dict[str, Any]:
    """A sample that no other equals, with fields of several dtypes, per token and per sequence."""
    import torch

    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    wide = torch.randint(0, 2**31, (length, 2), generator=generator)
    dtypes = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64)
    return {
        "input_ids": 10_000 * i + torch.arange(length),
        "labels": wide[:, 1],
        **{str(dtype)[6:]: wide[:, 0].to(dtype) for dtype in dtypes},
        "hidden": wide.to(torch.float32),
        "reward": float(i) / 7,
        "id": i,
        "logits": torch.full((3,), float(i), dtype=torch.float64),
    }


def digest_of_batch(batch: Any) -> str:
    """Layout, names, and every field, padding included."""
    fields = {name: batch[name] for name in batch.names}
    layout = f"{batch.layout.lengths.tolist()} {batch.layout.slots.tolist()} {sorted(batch.per_sequence)}"
    return digest(layout, digest_of_tensors(fields))


def one(seed: int, number: int, topology: Any) -> dict[str, Any]:
    """One exchange, what a shard of its first microbatch holds, and the same microbatches without communication."""
    import numpy as np

    import ullage
    from ullage.exchange import exchange, gather_lengths, materialize, shard

    world, rank = topology.dp.size, topology.dp.rank
    chance = random.Random(f"exchange {seed} {number} {world}")
    count = chance.choice([0, 1, world, 7, 30])
    everything = [sample(chance, i, chance.randrange(1, 60)) for i in range(count)]
    owners = sorted(chance.randrange(world) for _ in range(count))
    options = {
        "capacity": chance.choice([64, 128]),
        "pad_to_multiple_of": chance.choice([1, 4, 8]),
        "microbatch_multiple": chance.choice([1, 1, 3]),
        "strategy": chance.choice(["balanced", "next_fit"]),
        "sync": chance.choice(["microbatch", "step"]),
        "oversize": chance.choice(["truncate", "drop"]),
    }
    if options["strategy"] == "balanced" and chance.random() < 0.3:
        options["context_parallel"] = "auto"
    mine = [everything[i] for i in range(count) if owners[i] == rank]
    given = mine
    if mine and chance.random() < 0.3:
        given = ullage.RaggedBatch.from_samples(mine, per_sequence=["logits"])
    gathered = gather_lengths(np.array([len(each["input_ids"]) for each in mine], np.int64), topology)
    plan = ullage.plan(gathered.lengths, ranks=world, **options)
    got = exchange(plan, given, topology, gathered, per_sequence=["logits"])
    found = {
        "gathered": f"{digest(gathered.lengths.tobytes())} {gathered.counts.tolist()}",
        "plan": digest(plan.to_json()),
        "got": digest(*map(digest_of_batch, got)),
    }
    if count:
        alone = materialize(plan, everything, rank, per_sequence=["logits"])
        found["materialized"] = digest(*map(digest_of_batch, alone))
        full = [batch for batch in got if batch.layout.num_items]
        if full:
            order = chance.choice(["zigzag", "contiguous"])
            parts = [shard(_aligned(full[0]), 2, i, order=order) for i in range(2)]
            held = [f"{digest_of_batch(part.batch)} {part.position_ids.tolist()}" for part in parts]
            found["shards"] = digest(*held)
    return found


def _aligned(batch: Any) -> Any:
    """The batch with slots that two ranks can share."""
    import ullage

    names = sorted(batch.per_sequence)
    return ullage.RaggedBatch.from_samples(batch.samples(), pad_to_multiple_of=4, per_sequence=names)


def iterate(seed: int, number: int, topology: Any) -> dict[str, Any]:
    """The steps of a ``PackedIterator``, and those after the state of the second was loaded into another one."""
    from ullage.exchange import PackedIterator

    world, rank = topology.dp.size, topology.dp.rank
    chance = random.Random(f"iterator {seed} {number} {world}")
    everything = [sample(chance, i, chance.randrange(1, 60)) for i in range(chance.choice([9, 24]))]
    source = chance.choice(["shared", "own", "iterable"])
    options = {"global_batch_size": chance.choice([4, 7]), "capacity": 64, "prefetch": chance.choice([0, 1, 2])}

    def make() -> Any:
        mine = everything[rank::world]
        data = {"shared": everything, "own": mine, "iterable": iter(mine)}[source]
        return PackedIterator(data, topology, per_sequence=["logits"], **options)

    steps: list[str] = []
    state = None
    with make() as iterator:
        for step in iterator:
            figures = f"{step.num_microbatches} {step.num_tokens} {step.sum_squared_lengths}"
            steps.append(digest(figures, step.plan.to_json(), *map(digest_of_batch, step.microbatches)))
            if len(steps) == 2:
                state = iterator.state_dict()
    with make() as iterator:
        iterator.load_state_dict(state)
        again = [digest(*map(digest_of_batch, step.microbatches)) for step in iterator]
    return {"steps": digest(*steps), "number": len(steps), "resumed": digest(*again), "state": digest(repr(state))}


def shared(seed: int, number: int, topology: Any) -> dict[str, Any]:
    """What the other ranks of an axis get of microbatches that one has."""
    import ullage
    from ullage.exchange import share

    world, rank = topology.dp.size, topology.dp.rank
    chance = random.Random(f"share {seed} {number} {world}")
    rows = [[sample(chance, i, chance.randrange(1, 9)) for i in range(3)] for _ in range(2)]
    batches = [ullage.RaggedBatch.from_samples(each, per_sequence=["logits"]) for each in rows]
    source = chance.randrange(world)
    fields = chance.choice([None, ["input_ids", "labels"]])
    got = share(batches if rank == source else None, topology.dp, source, fields=fields)
    return {"got": digest(*map(digest_of_batch, got))}


def attempt(function: Any, *arguments: Any) -> dict[str, Any]:
    """What a case finds, or which error it raises: all ranks raise, so the next case can begin."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"error": said(error)}


def on_rank(seed: int) -> dict[str, Any]:
    """All cases in one process group."""
    import torch.distributed as dist

    from ullage.ranks import Topology

    dist.init_process_group("gloo")
    topology = Topology.from_groups(dp=dist.group.WORLD)
    found = {f"exchange {i:03}": attempt(one, seed, i, topology) for i in range(EXCHANGES)}
    found |= {f"iterator {i:02}": attempt(iterate, seed, i, topology) for i in range(ITERATORS)}
    found |= {f"share {i:02}": attempt(shared, seed, i, topology) for i in range(6)}
    dist.barrier()
    return found


def run(folder: Path, seed: int, jobs: int, only: str = "") -> Cases:
    """Both numbers of ranks, one after the other."""
    import ullage
    import ullage.exchange
    import ullage.ranks

    ullage.plan([3, 5], ranks=2, capacity=8)
    tasks = [Task(f"{world} ranks", lambda _: on_rank(seed), folder / f"ranks{world}", world) for world in (2, 3)]
    cases: Cases = {}
    for name, values in run_all(tasks, jobs, "exchanges").items():
        if any("error" in value for value in values):
            cases[name] = {f"rank {rank}": value.get("error", "") for rank, value in enumerate(values)}
            continue
        for case in values[0]:
            cases[f"{name}, {case}"] = {
                f"rank {rank} {field}": held for rank, value in enumerate(values) for field, held in value[case].items()
            }
    return cases
