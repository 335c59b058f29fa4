"""What the ranks of the tests of agreement and of groups run. Kept apart from the tests so that worker processes import no pytest."""

import gc
import os
import time
import weakref
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ullage.core.errors import InputError
from ullage.exchange import PackedIterator
from ullage.ranks import Axis, Topology, gather_agreed, raise_failures, report, together, tried, wire
from ullage.ranks.groups import make_group
from ullage.ranks.wire import gather_int64, gather_objects


def told(run):
    """The line of what ``run`` raises, interrupts included; None without an error."""
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def raising(error, doing="reading", ranks=None):
    """A block in which this rank raises ``error``, if it has one."""
    with together(ranks or Axis.world(), doing):
        if error is not None:
            raise error


def grid(rank, world):
    """dp × tp, two ranks along tp."""
    rows = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    columns = [dist.new_group(list(range(first, world, 2))) for first in (0, 1)]
    return Topology.from_groups(dp=columns[rank % 2], tp=rows[rank // 2])


def blocks(rank, world):
    """What each rank raises after blocks in which some of them fail, by the name of the case."""
    axis, last = Axis.world(), world - 1
    lines = {}
    lines["nobody"] = told(lambda: raising(None))
    lines["one"] = told(lambda: raising(InputError("no such\n file") if rank == 1 else None))
    lines["two"] = told(lambda: raising({0: ValueError("zero"), last: OSError("last")}.get(rank)))
    lines["alike"] = told(lambda: raising(ValueError("full") if rank else None))
    lines["all"] = told(lambda: raising(ValueError(str(rank))))
    lines["without words"] = told(lambda: raising(KeyError() if rank == 1 else None))
    lines["long"] = told(lambda: raising(ValueError("x" * 5000) if rank == 1 else None))
    lines["interrupt"] = told(lambda: raising(KeyboardInterrupt() if rank == 1 else None))
    lines["exit"] = told(lambda: raising(SystemExit(3) if rank == 1 else None))
    lines["stop"] = told(lambda: raising(StopIteration() if rank == 1 else None))

    def nested():
        with together(axis, "the outer work"):
            raising(ValueError("inside") if rank == 1 else None, "the inner work")

    def handled():
        with together(axis, "the outer work"):
            assert told(lambda: raising(ValueError("inside") if rank == 1 else None)) is not None

    lines["nested"], lines["handled"] = told(nested), told(handled)
    lines |= axes(rank, world)
    lines["header"] = told(lambda: gather_agreed({"n": rank}, axis, "counting", tried(lambda: 1 // (rank - 1))[1]))
    assert [record["n"] for record in gather_agreed({"n": rank}, axis, "counting")] == list(range(world))
    assert gather_int64(np.array([rank]), axis).ravel().tolist() == list(range(world))  # and the group still works
    return {"lines": lines, "meetings": meetings(), "alive": kept(rank, world)}


def kept(rank, world):
    """Whether what a failed block held is still there after its error is gone, without the collector of cycles."""
    gc.disable()
    axis, alive = Axis.world(), {}

    def hold(name):
        tensor = torch.zeros(4)
        alive[name] = weakref.ref(tensor)
        return tensor

    def block(name, ranks):
        held = hold(name)
        with together(ranks, "reading"):
            if rank == 1:
                raise ValueError(held.shape)

    def header(name, ranks):
        held = hold(name)
        _, failure = tried(lambda: 1 // (rank - 1))
        try:
            gather_agreed({"shape": list(held.shape)}, ranks, "counting", failure)
        finally:
            failure = None  # this frame's own hold on the error

    told(lambda: block("block", axis))
    told(lambda: block("block of one", Axis("tp")))
    told(lambda: block("block along two axes", grid(rank, world)))
    told(lambda: header("header", axis))
    told(lambda: header("header of one", Axis("tp")))
    return {name: tensor() is not None for name, tensor in alive.items()}


def axes(rank, world):
    """One rank of a grid fails: in its row, in the whole grid, and where a row has failed before the grid meets."""
    topology = grid(rank, world)
    error = ValueError("row") if rank == 3 else None
    lines = {"row": told(lambda: raising(error, "a row's work", topology.tp))}
    lines["grid"] = told(lambda: raising(error, "the grid's work", topology))

    def both():
        with together(topology, "the grid's work"):
            raising(error, "a row's work", topology.tp)

    lines["both"] = told(both)
    return lines


def meetings():
    """Collectives of a block in which nothing fails, along one axis of ranks and along an axis of one."""
    calls = []
    original = wire._all_gather
    wire._all_gather = lambda *args, **options: (calls.append(1), original(*args, **options))
    try:
        raising(None)
        several = len(calls)
        raising(None, ranks=Axis("tp"))
        raise_failures(None, [report(None, Axis.world())], "nothing", Axis.world())
        return several, len(calls) - several
    finally:
        wire._all_gather = original


def death(rank, world):
    """Rank 1 is gone before the block ends: the others raise, and one with an error of its own raises that."""
    # Rank 1 is gone only after the others have formed the group: before, gloo's own forming of it fails.
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([f"formed{other}" for other in range(world) if other != rank])
        os._exit(1)
    store.set(f"formed{rank}", "")
    return told(lambda: raising(InputError("mine") if rank == 0 else None))


SHORT = timedelta(seconds=15)


def unequal(rank):
    """Let rank 0 be in one group more, of which torch knows everywhere, and in one of which it knows there alone."""
    dist.new_group([0])
    if rank == 0:
        dist.new_group([0])
    return len(c10d._world.pg_names)


def groups(rank, world):
    """Groups of several kinds, each used once: who is in it by what a collective says, and its name."""
    counts = gather_objects(unequal(rank), Axis.world())
    assert len(set(counts)) > 1, "the ranks are in equal numbers of groups, so nothing is shown"
    half = [other for other in range(world) if other % 2 == rank % 2]
    made = [make_group(ranks, name=name, timeout=SHORT) for ranks, name in (
        (range(world), "a test"), (range(world), "a test"), (range(world), "another test"), (half[::-1], "a test"),
    )]  # fmt: skip
    if rank == 0:
        made.append(make_group([0], name="a test"))
    found = []
    for group in made:
        total = torch.tensor([10**rank])
        dist.all_reduce(total, group=group)
        found.append([int(total), dist.get_process_group_ranks(group), dist.get_group_rank(group, rank)])
    names = [group.group_name for group in made]
    dist.destroy_process_group(made[0])
    again = make_group(range(world), name="a test", timeout=SHORT)
    return {"found": found, "names": [*names, again.group_name], "ours": Axis.from_group(again).size}


def worlds(rank, world):
    """Groups of two worlds after each other on one store, as torchrun's outlives a world."""
    store = c10d._get_default_store()
    dist.barrier()  # a rank that left at once would close connections that the other is still making
    dist.destroy_process_group()
    found = []
    for turn in range(2):
        kept = dist.PrefixStore(f"world {turn}", store)
        dist.init_process_group("gloo", store=kept, rank=rank, world_size=world, timeout=SHORT)
        # As if this world had been told of the other's store: one name, and it is a round later.
        c10d._world.pg_map[dist.group.WORLD] = (c10d._world.pg_map[dist.group.WORLD][0], store)
        group = make_group(range(world), name="a test", timeout=SHORT)
        found.append([gather_objects(rank, Axis.from_group(group)), group.group_name[-2:]])
        dist.destroy_process_group()
    return found


def absent(rank, world):
    """The error of the ranks that wait for a member that does not come, and how long they wait."""
    begin, said = time.monotonic(), None
    if rank:
        try:
            with together(Axis.world(), "making a group"):  # which nobody may wait in
                make_group(range(world), name="a test", timeout=timedelta(seconds=1))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begin


def iterate(rank, world):
    """The samples that each rank gets of a packed stream whose groups are made after unequal others."""
    unequal(rank)
    topology = Topology.from_groups(dp=dist.group.WORLD)
    samples = [{"input_ids": [i] * (1 + i % 5)} for i in range(12)]
    with PackedIterator(samples, topology, global_batch_size=6, capacity=16, timeout=SHORT) as steps:
        batches = [batch for step in steps for batch in step.microbatches]
    return sorted(int(sample["input_ids"][0]) for batch in batches for sample in batch.samples())
