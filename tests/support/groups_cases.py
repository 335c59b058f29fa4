"""What the ranks of the tests of process groups run: they make groups after each has made another number of them."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ullage.exchange import PackedIterator
from ullage.ranks import Axis, Topology, together
from ullage.ranks.groups import make_group
from ullage.ranks.wire import gather_objects

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
    return _ids(Topology.from_groups(dp=dist.group.WORLD))


def stages(rank, world):
    """The same over the groups of a pipeline, whose first stage is in one more of Megatron's."""
    from megatron.core import parallel_state as state

    state.initialize_model_parallel(1, world)
    counts = gather_objects(len(c10d._world.pg_names), Axis.world())
    found = _ids(Topology.from_megatron(owners="every"))
    return counts, found


def blocks(rank, world):
    """The groups of dynamic context parallelism after those of another layout, and who is in each."""
    from megatron.core import parallel_state as state

    from ullage.engines.megatron.dynamic import degree_groups

    state.initialize_model_parallel(1, world)
    state.destroy_model_parallel()
    dist.new_group([0, 2])
    counts = gather_objects(len(c10d._world.pg_names), Axis.world())
    state.initialize_model_parallel()
    made = degree_groups(Topology.from_megatron(owners="every", flatten_cp=True).dp, [1, 2, 4])
    found = {}
    for degree, group in sorted(made.items()):
        total = torch.tensor([10**rank])
        dist.all_reduce(total, group=group)
        found[degree] = int(total)
    return counts, found


def _ids(topology):
    samples = [{"input_ids": [i] * (1 + i % 5)} for i in range(12)]
    with PackedIterator(samples, topology, global_batch_size=6, capacity=16, timeout=SHORT) as steps:
        batches = [batch for step in steps for batch in step.microbatches]
    return sorted(int(sample["input_ids"][0]) for batch in batches for sample in batch.samples())
