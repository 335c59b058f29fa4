"""What the ranks of the tests of agreement run. Kept apart from the tests so that worker processes import no pytest."""

import gc
import os
import weakref

import numpy as np
import torch
import torch.distributed as dist

from ullage.core.errors import InputError
from ullage.ranks import Axis, Topology, gather_agreed, raise_failures, report, together, tried, wire
from ullage.ranks.wire import gather_int64


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
    lines["header"] = told(lambda: gather_agreed({"n": rank}, axis, "counting", tried(lambda: 1 // (rank - 1))[1]))
    assert [record["n"] for record in gather_agreed({"n": rank}, axis, "counting")] == list(range(world))
    assert gather_int64(np.array([rank]), axis).ravel().tolist() == list(range(world))  # and the group still works
    return lines


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


def meetings(rank, world):
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
