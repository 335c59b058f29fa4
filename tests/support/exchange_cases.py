"""What the ranks of the exchange tests run. Kept apart from the tests so that worker processes import no pytest."""

import functools
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ullage
from tests.support.processes import raised
from ullage.exchange import PackedIterator, exchange, gather_lengths, materialize, shard, share, unshard
from ullage.ranks import Axis, Topology

ALL_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def sample(i, length):
    """A sample that no other equals: every value can be told by its id and position."""
    generator = torch.Generator().manual_seed(1000 + i)
    wide = torch.randint(0, 2**31, (length, 2), generator=generator)
    return {
        "input_ids": 10_000 * i + torch.arange(length),
        "labels": 10_000 * i + torch.arange(length),
        **{str(dtype)[6:]: wide[:, 0].to(dtype) for dtype in ALL_DTYPES},
        "hidden": wide.to(torch.bfloat16),
        "reward": float(i) / 7,
        "id": i,
        "logits": torch.full((3,), float(i), dtype=torch.float64),
    }


def dataset(count, seed=0, longest=60):
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    return [sample(i, int(length)) for i, length in enumerate(lengths)]


def lengths_of(samples):
    return np.array([len(s["input_ids"]) for s in samples], np.int64)


def same(got, want):
    """Two batches are equal bit by bit, padding included."""
    assert got.layout == want.layout
    assert got.names == want.names
    assert set(got.per_sequence) == set(want.per_sequence)
    for name in got.names:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


def ids_of(batches):
    return [int(i) for batch in batches for i in batch["id"]]


def flat(lists):
    return [item for part in lists for item in part]


def everywhere(value):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def exchange_in_worlds(rank, world):
    """Every world size up to ``world``, ranks in any order, uneven shares: each token arrives once, where planned."""
    done = 0
    for size in range(1, world + 1):
        ranks = np.random.default_rng(size).permutation(world)[:size].tolist()
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        # torch sorts a group's ranks; coordinates keep the order given.
        topology = Topology(dp=Axis("dp", size, ranks.index(rank), tuple(ranks), group))
        for seed, count in enumerate([0, 1, size // 2, 3 * size, 40]):
            everything = dataset(count, seed)
            owner = np.sort(np.random.default_rng([size, seed]).integers(0, size, count))
            mine = [everything[i] for i in np.flatnonzero(owner == topology.dp.rank)]
            before = [{name: np.array(v) for name, v in s.items() if name == "input_ids"} for s in mine]
            gathered = gather_lengths(lengths_of(mine), topology)
            assert gathered.lengths.tolist() == lengths_of(everything).tolist()
            assert gathered.counts.tolist() == np.bincount(owner, minlength=size).tolist()
            for pad_to_multiple_of, multiple in ((1, 1), (8, 3)):
                options = {"pad_to_multiple_of": pad_to_multiple_of, "microbatch_multiple": multiple}
                plan = ullage.plan(gathered.lengths, ranks=size, capacity=64, **options)
                got = exchange(plan, mine, topology, gathered, per_sequence=["logits"])
                if count:
                    want = materialize(plan, everything, topology.dp.rank, per_sequence=["logits"])
                    assert len(got) == len(want) == plan.num_microbatches
                    for a, b in zip(got, want):
                        same(a, b)
                        a.placeholder()
                        tokens = [t for s in a.samples() for t in s["input_ids"].tolist()]
                        members = [everything[int(i)]["input_ids"].tolist() for i in a["id"]]
                        assert tokens == [t for m in members for t in m]
                box = [None] * size
                dist.all_gather_object(box, ids_of(got) if count else [], group=group)
                assert sorted(i for part in box for i in part) == list(range(count))
                done += 1
            assert all((s["input_ids"].numpy() == b["input_ids"]).all() for s, b in zip(mine, before))
    return done


def exchange_shared_bins(rank, world):
    """A plan in which ranks share bins: each of them gets the whole microbatch."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    everything = dataset(30, longest=200)
    mine = everything[rank::world]
    gathered = gather_lengths(lengths_of(mine), topology)
    ordered = [s for r in range(world) for s in everything[r::world]]
    plan = ullage.plan(gathered.lengths, ranks=world, capacity=128, pad_to_multiple_of=4, context_parallel=2)
    assert (plan.degrees == 2).all()
    got = exchange(plan, mine, topology, gathered, per_sequence=["logits"])
    for a, b in zip(got, materialize(plan, ordered, rank, per_sequence=["logits"]), strict=True):
        same(a, b)
    return ids_of(got)


def dtypes_of_ranks(topology, rank, world):
    """Ranks hold fields in dtypes of their own; all get what one batch of all samples would have."""
    dtypes = [(torch.int64, torch.uint8), (torch.float16, torch.int32), (torch.float32, torch.int64)]

    def held(r):
        w, x = dtypes[r % 3]
        numbers = [torch.arange(2 + (5 * i + r) % 7) for i in range(6)]
        return [{"w": n.to(w), "x": n.to(x), "id": 6 * r + i} for i, n in enumerate(numbers)]

    mine, everything = held(rank), [sample for r in range(world) for sample in held(r)]
    gathered = gather_lengths([len(sample["x"]) for sample in mine], topology)
    plan = ullage.plan(gathered.lengths, ranks=world, capacity=16, pad_to_multiple_of=4)
    batches = [ullage.RaggedBatch.from_samples(part, pad_to_multiple_of=2) for part in (mine[:2], mine[2:])]
    want = materialize(plan, ullage.RaggedBatch.from_samples(everything), rank)
    for given in (mine, ullage.RaggedBatch.from_samples(mine), batches):
        for a, b in zip(exchange(plan, given, topology, gathered), want, strict=True):
            same(a, b)
    return f"w {want[0]['w'].dtype}, x {want[0]['x'].dtype}"


def failures_of_steps(rank, world):
    """What each rank raises when one rank is at fault, by the name of the fault."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    culprit = world - 1
    found = {}

    def attempt(name, run):
        found[name] = raised(run)

    def broken(change):
        samples = [{"input_ids": torch.arange(5 + i), "mask": torch.ones(5 + i), "id": i} for i in range(4)]
        gathered = gather_lengths([len(s["input_ids"]) for s in samples], topology)
        plan = ullage.plan(gathered.lengths, ranks=world, capacity=32)
        if rank == culprit:
            samples, plan = change(samples, plan) or (samples, plan)
        exchange(plan, samples, topology, gathered)

    def with_field(name, make):
        return lambda samples, plan: ([{**s, name: make(s)} for s in samples], plan)

    def without(name, which):
        def change(samples, plan):
            return [{n: v for n, v in s.items() if n != name or i not in which} for i, s in enumerate(samples)], plan

        return change

    attempt("nothing", lambda: broken(lambda samples, plan: None))
    attempt("extra field", lambda: broken(with_field("reward", lambda s: 1.0)))
    found["dtype"] = dtypes_of_ranks(topology, rank, world)
    attempt("shape", lambda: broken(with_field("mask", lambda s: torch.ones(len(s["mask"]), 2))))
    attempt("unit", lambda: broken(with_field("id", lambda s: s["input_ids"])))
    attempt("no field", lambda: broken(without("mask", range(4))))
    attempt("missing key", lambda: broken(without("mask", [2])))
    attempt("another length", lambda: broken(lambda s, p: ([*s[:3], {**s[3], "input_ids": torch.arange(9)}], p)))
    attempt("too few", lambda: broken(lambda s, p: (s[:3], p)))
    attempt("another plan", lambda: broken(lambda s, p: (s, ullage.plan(p.lengths, ranks=world, capacity=64))))
    attempt("a plan of other ranks", lambda: broken(lambda s, p: (s, ullage.plan(p.lengths, ranks=1, capacity=999))))
    attempt("bad lengths", lambda: gather_lengths([-1] if rank == culprit else [3], topology))
    many = {f"field {i} with a long name {'x' * 40}": torch.arange(3) for i in range(40)}
    odd = {**many, "field 39 with a long name " + "x" * 40: torch.ones(3, 2)}
    gathered = gather_lengths([3], topology)
    plan = ullage.plan(gathered.lengths, ranks=world, capacity=32)
    attempt("long header", lambda: exchange(plan, [odd if rank == culprit else many], topology, gathered))
    exchange(plan, [many], topology, gathered)  # and the groups still work
    batch = ullage.RaggedBatch.from_samples([{"input_ids": [1, 2]}])
    attempt("share of nothing", lambda: share(None, Axis.world(), source=culprit))
    got = share([batch] if rank == culprit else None, Axis.world(), source=culprit)
    assert got[0]["input_ids"].tolist() == [1, 2]
    return found


def share_cases(rank, world):
    """Microbatches, empty ones too, from any source, with chosen fields or none."""
    for source in range(world):
        everything = dataset(12, seed=source)
        plan = ullage.plan(lengths_of(everything), ranks=2, capacity=64, pad_to_multiple_of=8, microbatch_multiple=4)
        want = materialize(plan, everything, 0, per_sequence=["logits"])
        mine = want if rank == source else None
        for a, b in zip(share(mine, Axis.world(), source), want, strict=True):
            same(a, b)
        some = share(mine, Axis.world(), source, fields=["labels", "id"])
        assert [batch.names for batch in some] == [("labels", "id")] * len(want)
        assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(some, want))
        none = share(mine, Axis.world(), source, fields=())
        assert [batch.layout for batch in none] == [batch.layout for batch in want]
        assert [batch.names for batch in none] == [()] * len(want)
        assert share([] if rank == source else None, Axis.world(), source) == []
    return True


def packed(source, topology, **options):
    """The iterator over samples of :func:`sample`."""
    return PackedIterator(source, topology, **{"capacity": 64, "per_sequence": ["logits"]} | options)


def source_of(kind, everything, rank, world):
    mine = everything[rank::world]
    return {"shared": everything, "own": mine, "iterable": iter(mine)}[kind]


def iterate(rank, world, streams):
    """All steps over a data-parallel world, by each kind of source; ids by step, the same on every rank."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    return [steps_of(topology, rank, world, *stream) for stream in streams]


def steps_of(topology, rank, world, count, size, options):
    everything = dataset(count, seed=count)
    lengths = lengths_of(everything)
    steps = {}
    for kind in ("shared", "own", "iterable"):
        steps[kind] = []
        with packed(source_of(kind, everything, rank, world), topology, global_batch_size=size, **options) as it:
            for step in it:
                boxes = everywhere(ids_of(step.microbatches))
                ids = [i for box in boxes for i in box]
                assert len(step.microbatches) == step.num_microbatches == step.plan.num_microbatches
                assert step.num_tokens == int(lengths[ids].sum())
                assert step.sum_squared_lengths == int((lengths[ids] ** 2).sum())
                for batch in step.microbatches:
                    for got in batch.samples():
                        for field, value in everything[int(got["id"])].items():
                            assert torch.equal(got[field], torch.as_tensor(value)), field
                steps[kind].append(sorted(ids))
            assert it.position == count
    return steps


def ends_unequally(rank, world, sizes):
    """Iterables of very different lengths, and datasets of each rank's own: steps stay full to the last."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    first = int(np.sum(sizes[:rank]))
    mine = [sample(first + k, 1 + k % 9) for k in range(sizes[rank])]
    seen = []
    for source in (iter(mine), mine):
        with packed(source, topology, global_batch_size=5, capacity=32) as it:
            seen.append([sorted(flat(everywhere(ids_of(step.microbatches)))) for step in it])
    return seen


def resume(rank, world, count, size, turns, kind):
    """By turn (stop, state) the steps after the state, at most ``stop``, and the state then; prefetch runs ahead."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    everything = dataset(count, seed=count)
    found = []
    for stop, state in turns:
        with packed(source_of(kind, everything, rank, world), topology, global_batch_size=size, prefetch=2) as it:
            if state is not None:
                it.load_state_dict(state)
            steps = itertools.islice(it, stop)
            ids = [sorted(flat(everywhere(ids_of(step.microbatches)))) for step in steps]
            found.append((ids, it.state_dict()))
    return found


def counted(spans):
    """Samples whose tokens all say their number, of the numbers in each of some spans."""
    for first, last in spans:
        for i in range(first, last):
            yield {"input_ids": [i] * (1 + i % 7)}


def spans_of(count):
    """Five shards of unequal sizes, one of them empty."""
    cuts = [0, count // 3, count // 3, count // 2, count // 2 + 1, count]
    return list(itertools.pairwise(cuts))


def held_by_all(count):
    """Sources of ``count`` samples that every rank holds: a list, an iterable, and one with shards."""
    import datasets

    from tests.support.story import Stream

    return {
        "map": list(counted([(0, count)])),
        "stream": Stream(list(counted([(0, count)]))),
        "shards": datasets.IterableDataset.from_generator(counted, gen_kwargs={"spans": spans_of(count)}),
    }


def life(rank, world, count, size, stop, states, capacity=64):
    """By source of :func:`held_by_all` the steps after its state, at most ``stop``, as ids, and the state then."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    options = {"global_batch_size": size, "capacity": capacity, "shared": True}
    found = {}
    for name, source in held_by_all(count).items():
        with PackedIterator(source, topology, **options) as it:
            if name in states:
                it.load_state_dict(states[name])
            mine = [[int(s["input_ids"][0]) for b in step.microbatches for s in b.samples()]
                    for step in itertools.islice(it, stop)]  # fmt: skip
            state = it.state_dict()
        boxes = everywhere(mine)
        found[name] = [sorted(flat(parts)) for parts in zip(*boxes, strict=True)], state
    return found


def failures_of_iterator(rank, world):
    """What each rank raises at next() when one is at fault, with the thread and without; closing does not hang."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    culprit = 1
    everything = dataset(40)
    raised = {}

    def attempt(name, samples, prefetch=1, **options):
        try:
            with packed(samples, topology, prefetch=prefetch, **{"global_batch_size": 8} | options) as it:
                steps = sum(1 for _ in it)
            raised[name] = f"{steps} steps"
        except (ullage.UllageError, ZeroDivisionError) as error:
            raised[name] = f"{type(error).__name__}: {error}"

    def fault(k, change):
        samples = everything[rank::world]
        return [change(s) if rank == culprit and i == k else s for i, s in enumerate(samples)]

    def lacking(s):
        return {name: value for name, value in s.items() if name != "labels"}

    def raising():
        for i, s in enumerate(everything[rank::world]):
            if rank == culprit and i == 5:
                raise ZeroDivisionError("the reader broke")
            yield s

    mine = everything[rank::world]
    attempt("nothing", mine)
    for prefetch in (0, 3):
        attempt(f"missing key {prefetch}", fault(6, lacking), prefetch)
    attempt("shape", fault(6, lambda s: {**s, "labels": torch.stack([s["labels"]] * 2, 1)}))
    attempt("required", [lacking(s) for s in mine], fields=("input_ids", "labels"))
    attempt("long", fault(6, lambda s: sample(99, 65)))
    attempt("truncated", fault(6, lambda s: sample(99, 65)), oversize="truncate")
    attempt("reader", raising())
    attempt("no samples", None if rank == culprit else mine)
    attempt("capacity", mine, capacity=64 + (rank == culprit))
    attempt("bad capacity", mine, capacity=0 if rank == culprit else 64)
    attempt("size", mine, global_batch_size=0)
    attempt("option", mine, colour="red")
    attempt("kinds", mine if rank == culprit else iter(mine))
    attempt("random", Random())
    attempt("random, shared", Random(), shared=True)
    attempt("not shared", mine[: 3 + rank], shared=True)
    attempt("cost", mine, cost=broken_cost if rank == culprit else fine_cost)
    return raised


def fine_cost(lengths):
    return lengths


def broken_cost(lengths):
    return lengths[:1]


broken_cost.__qualname__ = "fine_cost"


class Random:
    """A map-style dataset whose samples differ from reading to reading."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"input_ids": torch.randint(0, 2**40, (4,)), "logits": torch.zeros(3), "id": i}


def closes_early(rank, world, prefetch):
    """Steps made ahead are finished by every thread, however far each had come; groups are lent again."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    everything = dataset(60)
    seen = []
    for k in range(4):
        it = packed(everything, topology, global_batch_size=6, prefetch=prefetch)
        seen += [next(it).num_tokens for _ in range(k)]
        time.sleep(0.05 * ((rank + k) % 3))
        it.close()
        it.close()
        try:
            next(it)
        except ullage.InputError as error:
            seen.append(str(error))
    return seen


def two_at_once(rank, world):
    """Two iterators in turn, each with groups and a thread of its own, while the main thread uses the world's group."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    everything = dataset(60)
    sums = []
    with (
        packed(everything, topology, global_batch_size=6) as a,
        packed(everything[::-1], topology, global_batch_size=6) as b,
    ):
        for x, y in zip(a, b, strict=True):
            for _ in range(20):
                total = torch.tensor([x.num_tokens, rank])
                dist.all_reduce(total)
                assert total.tolist() == [x.num_tokens * world, world * (world - 1) // 2]
            sums.append((x.num_tokens, y.num_tokens))
    return sums


def mesh_of(world, sizes, seed):
    """A mesh over the world's ranks in an order of its own."""
    ranks = torch.from_numpy(np.random.default_rng(seed).permutation(world)).view(*sizes.values())
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(sizes))


def whole_topology(rank, world, sizes, owners, order):
    """Shares and slices, put together over cp, are the microbatch of the plan; stages get their fields."""
    topology = Topology.from_device_mesh(mesh_of(world, sizes, seed=world), owners=owners)
    dp, cp, pp = topology.dp, topology.cp, topology.pp
    everything = dataset(30, seed=5)
    mine = iter(everything[dp.rank :: dp.size])
    if not topology.owns_data:
        mine = None
    stages = None
    if owners == "ends":
        stages = {0: ("input_ids", "id"), pp.size - 1: ("labels", "id")}.get
    report = []
    chosen = None if stages is None else lambda stage, _: stages(stage, ("id",) if stage == 1 else ())
    with packed(mine, topology, global_batch_size=12, cp_order=order, stage_fields=chosen) as it:
        for step in it:
            for m, batch in enumerate(step.microbatches):
                assert batch.layout == step.plan.layout(m, dp.rank)
                for got in batch.samples():
                    if "id" in got:
                        for name, value in got.items():
                            assert torch.equal(value, torch.as_tensor(everything[int(got["id"])][name])), name
                if cp.size > 1:
                    part = step.shards[m]
                    assert part.batch.layout.size * cp.size == batch.layout.size
                    parts = [shard(batch, cp.size, r, order) for r in range(cp.size)]
                    assert torch.equal(part.position_ids, parts[cp.rank].position_ids)
                    box = [None] * cp.size
                    dist.all_gather_object(box, part, group=cp.group)
                    same(unshard(box), batch)
            names = [batch.names for batch in step.microbatches]
            ids = ids_of(step.microbatches) if names and "id" in names[0] else None
            report.append([step.num_microbatches, step.num_tokens, step.sum_squared_lengths, step.plan.digest, ids])
        state = it.state_dict()
    place = [axis.rank for axis in topology.axes]
    fields = sorted(names[0]) if names else []
    return {"place": place, "steps": report, "state": state, "fields": fields}


def topologies(rank, world, grids, broken):
    """What a rank found of every topology of its world; on eight where one rank's sample is broken, wherever it stands."""
    found = {"grids": [whole_topology(rank, world, *grid) for grid in grids]}
    if world == 8:
        found["broken"] = [_failure(world, *case) for case in broken]
    if world == 4:
        found |= {"out of step": out_of_step(rank, world), "bad": bad_topologies(rank, world)}
    return found


def _failure(world, sizes, owners, where):
    topology = Topology.from_device_mesh(mesh_of(world, sizes, seed=world), owners=owners)
    everything = [{"input_ids": torch.arange(1 + i % 7), "id": i} for i in range(30)]
    mine = everything[topology.dp.rank :: topology.dp.size]
    if [axis.rank for axis in topology.axes] == where:
        mine[3] = {"input_ids": torch.arange(4)}
    with PackedIterator(iter(mine) if topology.owns_data else None, topology, global_batch_size=8, capacity=32) as it:
        try:
            steps = [step.num_tokens for step in it]
        except ullage.UllageError as error:
            return f"{type(error).__name__}: {error}"
    return steps


def out_of_step(rank, world):
    """The last stage reads other samples than the first: an error everywhere."""
    topology = Topology.from_device_mesh(mesh_of(world, {"dp": world // 2, "pp": 2}, seed=1), owners="ends")
    everything = [{"input_ids": torch.arange(1 + i % 7 + topology.pp.rank), "id": i} for i in range(30)]
    with PackedIterator(everything, topology, global_batch_size=8, capacity=32, shared=True) as it:
        return raised(next, it)


def bad_topologies(rank, world):
    """Sizes that do not multiply to the world, and coordinates that ranks do not agree on."""
    found = []
    iterator = functools.partial(PackedIterator, [{"input_ids": [1]}], global_batch_size=2, capacity=4, shared=True)
    halves = [dist.new_group([r for r in range(world) if r % 2 == k]) for k in range(2)]
    for make in (
        lambda: Topology.from_groups(),
        lambda: Topology.from_groups(dp=halves[rank % 2]),
        lambda: Topology.from_groups(dp=dist.group.WORLD, tp=halves[rank % 2]),
        lambda: Topology.from_device_mesh(DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("banana",))),
        lambda: Topology.from_device_mesh(DeviceMesh("cpu", torch.arange(world - 1), mesh_dim_names=("dp",))),
        lambda: Topology.from_groups(dp=dist.group.WORLD, owners="nobody"),
        lambda: iterator(Topology.grid(rank, dp=world)),
        lambda: iterator(Topology.from_groups(dp=dist.group.WORLD, owners="every" if rank else "ends")),
    ):
        found.append(raised(make))  # noqa: PERF401
    return found


def stalls(rank, world, victim, seconds):
    """One rank's reader does not come back for a while: what the others raise, and after how long."""
    topology = Topology.from_groups(dp=dist.group.WORLD)

    def stream():
        for i in range(20):
            if rank == victim and i == 7:
                time.sleep(seconds)
            yield sample(i, 5)

    started = time.monotonic()
    try:
        with packed(stream(), topology, global_batch_size=3 * world) as it:
            steps = sum(1 for _ in it)
    except ullage.UllageError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return f"{steps} steps", 0.0


def dies(rank, world, folder, victim, step_of_death):
    """Every rank saves its state and ids after each step; one is killed while it reads for a later step."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    everything = dataset(60, seed=60)

    def stream():
        for k, i in enumerate(range(rank, len(everything), world)):
            if rank == victim and k == 3 * step_of_death:
                os.kill(os.getpid(), signal.SIGKILL)
            yield everything[i]

    steps = []
    started = time.monotonic()
    try:
        with packed(stream(), topology, global_batch_size=3 * world) as it:
            for step in it:
                steps.append(sorted(ids_of(step.microbatches)))
                done = Path(folder) / f"{rank}-{len(steps)}.pt"
                torch.save({"state": it.state_dict(), "steps": steps}, done)
    except ullage.UllageError as error:
        return f"{type(error).__name__}: {error}", len(steps), time.monotonic() - started
    return None, len(steps), 0.0


def steps(rank, world):
    """What a rank found in each case of the steps, all in one world."""
    return {case.__name__: case(rank, world) for case in (failures_of_steps, share_cases, steps_that_grow_and_shrink)}


def iterators(rank, world, sizes):
    """Likewise of iterators."""
    found = {case.__name__: case(rank, world) for case in (failures_of_iterator, two_at_once)}
    found |= {"ends_unequally": ends_unequally(rank, world, sizes)}
    return found | {"closes_early": [closes_early(rank, world, prefetch) for prefetch in (0, 3)]}


def steps_that_grow_and_shrink(rank, world):
    """Memory is used again, and made anew where a step is larger; one step is without any sample."""
    topology = Topology.from_groups(dp=dist.new_group(list(range(world))))
    compared = 0
    for step, count in enumerate([5, 40, 0, 80, 3, 80]):
        everything = dataset(count, seed=step)
        mine = everything[rank::world]
        gathered = gather_lengths(lengths_of(mine), topology)
        ordered = [s for r in range(world) for s in everything[r::world]]
        plan = ullage.plan(gathered.lengths, ranks=world, capacity=64, pad_to_multiple_of=4)
        got = exchange(plan, mine, topology, gathered, per_sequence=["logits"])
        for a, b in zip(got, materialize(plan, ordered, rank, per_sequence=["logits"]) if count else got):
            same(a, b)
            compared += 1
    return compared > 6
