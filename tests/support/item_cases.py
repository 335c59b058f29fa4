"""Samples with images, and what the ranks of the tests of items run. Imports no pytest."""

import itertools

import numpy as np
import torch
import torch.distributed as dist

import ullage
from tests.support.exchange_cases import flat, ids_of, lengths_of
from ullage.exchange import PackedIterator, exchange, gather_lengths, materialize, share
from ullage.ranks import Axis, Topology


def pictured(i, length, images=(), clip=0, dtype=torch.float32):
    """A sample that no other equals: ``images`` are (height, width); each field has rows of its own.

    Qwen's patches with their grids, crops whose size differs from sample to sample, and a clip.
    """
    generator = torch.Generator().manual_seed(i)
    sample = {"input_ids": 1000 * i + torch.arange(length), "labels": 1000 * i + torch.arange(length), "id": i}
    if images:
        grids = torch.tensor([[1, *image] for image in images])
        sample["pixel_values"] = torch.randn(int(grids.prod(1).sum()), 5, generator=generator).to(dtype)
        sample["image_grid_thw"] = grids
        largest = torch.Size(grids[:, 1:].amax(0).tolist())
        sample["pixel_attention_mask"] = torch.randint(1, 255, (len(images), *largest), generator=generator).byte()
        sample["image_sizes"] = grids[:, 1:]
    if clip:
        sample["pixel_values_videos"] = torch.randn(clip, 2, 1 + i % 3, generator=generator).bfloat16()
    return sample


def pictures(count, seed=0, share_of_images=0.6):
    """Samples of unequal length with none, one or many images."""
    random = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        number = int(random.integers(1, 4)) if random.random() < share_of_images else 0
        images = [tuple(map(int, random.integers(1, 5, 2))) for _ in range(number)]
        samples.append(pictured(i, int(random.integers(1, 30)), images, int(random.random() < 0.3) * 2))
    return samples


def equal_batches(got, want):
    """Two batches are equal bit by bit, whatever the order of their fields, and their items have no holes."""
    assert got.layout == want.layout
    assert set(got.names) == set(want.names)
    assert set(got.per_sequence) == set(want.per_sequence)
    assert got.items == want.items
    for name in want.names:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name
    for name in got.items:
        assert got[name].numel() == sum(sample[name].numel() for sample in got.samples() if name in sample)


def equal_samples(got, want):
    """A sample is what went in: the same fields, and no field that it did not have rows of."""
    want = {name: torch.as_tensor(value) for name, value in want.items()}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def text_and_pictures(rank, world):
    """Exchange is materialize, where ranks have images, or text only, or nothing."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    with_rows = 0
    for seed, texts, count in ((0, (), 40), (1, (0,), 40), (2, range(world), 20), (3, (1, 2), 40), (4, (), 2)):
        held = [pictures(count // world, 10 * seed + r, 0.0 if r in texts else 0.7) for r in range(world)]
        held = [[{**s, "id": 100 * r + s["id"]} for s in part] for r, part in enumerate(held)]
        if 0 in texts:  # not even a clip
            held[0] = [{name: s[name] for name in ("input_ids", "labels", "id")} for s in held[0]]
        batch = [ullage.RaggedBatch.from_samples(half) for half in (held[rank][::2], held[rank][1::2]) if half]
        halves = [*held[rank][::2], *held[rank][1::2]]
        for given in (held[rank], halves):
            gathered = gather_lengths(lengths_of(given), topology)
            ordered = held if given is held[rank] else [[*part[::2], *part[1::2]] for part in held]
            plan = ullage.plan(gathered.lengths, ranks=world, capacity=64, pad_to_multiple_of=4, microbatch_multiple=2)
            want = materialize(plan, flat(ordered), rank)
            for a, b in zip(exchange(plan, given, topology, gathered), want, strict=True):
                equal_batches(a, b)
            if given is halves and batch:
                for a, b in zip(exchange(plan, batch, topology, gathered), want, strict=True):
                    equal_batches(a, b)
            elif given is halves:
                exchange(plan, [], topology, gathered)
        with_rows += sum(bool(batch.items) for batch in want)
    return with_rows


def shared_pictures(rank, world):
    """Microbatches with items, without, and without sequences, from one rank to the others; chosen fields too."""
    everything = pictures(16, seed=5, share_of_images=0.4)
    plan = ullage.plan(lengths_of(everything), ranks=1, capacity=40, pad_to_multiple_of=4)
    want = materialize(plan, everything, 0)
    assert any(batch.items for batch in want)
    assert any(len(batch.items) != len(want[0].items) for batch in want)
    mine = want if rank == 1 else None
    for a, b in zip(share(mine, Axis.world(), 1), want, strict=True):
        equal_batches(a, b)
    for fields in (("input_ids", "image_sizes", "pixel_attention_mask"), ("id",), ()):
        for a, b in zip(share(mine, Axis.world(), 1, fields=fields), want, strict=True):
            equal_batches(a, b.select(fields))
    return True


def iterated(rank, world, turns):
    """Ids by step of iterables that end unequally, with every sample whole; resumed after each of ``turns`` steps."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    everything = pictures(23, seed=7)
    # The last rank has text only, and ends first.
    text = [{name: s[name] for name in ("input_ids", "labels", "id")} for s in everything[20:]]
    everything = everything[:20] + text
    cuts = [0, *np.linspace(10, 20, world - 1).astype(int).tolist(), 23]
    mine = everything[cuts[rank] : cuts[rank + 1]]
    seen, state = [], None
    for stop in turns:
        with PackedIterator(iter(mine), topology, global_batch_size=6, capacity=64) as steps:
            if state is not None:
                steps.load_state_dict(state)
            for step in itertools.islice(steps, stop):
                for got in (got for batch in step.microbatches for got in batch.samples()):
                    equal_samples(got, everything[int(got["id"])])
                box = [None] * world
                dist.all_gather_object(box, ids_of(step.microbatches))
                seen.append(sorted(flat(box)))
            state = steps.state_dict()
    return seen


def refusals(rank, world):
    """What every rank raises by fault, where only rank 1 is at fault."""
    topology = Topology.from_groups(dp=dist.group.WORLD)
    found = {}

    def attempt(name, fault, **options):
        mine = [pictured(10 * rank + k, 6 + k, [(2, 2)] if rank else ()) for k in range(3)]
        if rank == 1:
            fault(mine)
        gathered = gather_lengths(lengths_of(mine), topology)
        plan = ullage.plan(gathered.lengths, ranks=world, **{"capacity": 40} | options)
        try:
            got = exchange(plan, mine, topology, gathered)
        except ullage.UllageError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = sorted(ids_of(got))

    def longer(mine):
        mine[1] = pictured(11, 30, [(2, 2)])

    def longer_text(mine):
        mine[1] = pictured(11, 30)

    def fewer_dims(mine):
        mine[2]["pixel_values"] = mine[2]["pixel_values"][:, 0]

    def flattened(mine):
        for sample in mine:
            sample["pixel_values"] = sample["pixel_values"][:, 0]

    attempt("cut", longer, capacity=20, oversize="truncate")
    attempt("cut text", longer_text, capacity=20, oversize="truncate")
    attempt("dropped", longer, capacity=20, oversize="drop")
    attempt("dims of a sample", fewer_dims)
    attempt("dims of a rank", flattened)
    return found


def cut_for_context(rank, world):
    """The error of an iterator whose context-parallel ranks would cut images apart."""
    topology = Topology.from_groups(cp=dist.group.WORLD)
    steps = PackedIterator(pictures(6, seed=1), topology, global_batch_size=3, capacity=64)
    try:
        next(steps)
    except ullage.UllageError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        steps.close()


def everything(rank, world):
    """What a rank found in each case, all in one world."""
    cases = (text_and_pictures, shared_pictures, refusals, cut_for_context)
    return {case.__name__: case(rank, world) for case in cases} | {"iterated": iterated(rank, world, [1, 2, 99])}
