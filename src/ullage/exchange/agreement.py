"""Comparison of settings, coordinates and sources of all ranks, once before the first step.

One gather of small objects over the whole world, on the caller's thread. What does not agree raises on every rank and
names the one that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.core.errors import DistributedError, InputError
from ullage.exchange.source import MAP, Stream, fingerprint, source_kind
from ullage.ranks import Axis, Topology, agree
from ullage.ranks.wire import gather_objects


def describe(samples: Any, topology: Topology, shared: bool | None) -> dict[str, Any] | None:
    """This rank's source, for the other ranks to compare."""
    if not topology.owns_data:
        return None
    if samples is None:
        raise InputError("a rank that owns data must have samples", where=f"owners {topology.owners!r}", found="None")
    kind = source_kind(samples)
    if kind != MAP:
        return {"kind": kind, "dp": topology.dp.rank}
    # A fingerprint reads samples, so only where it decides something: several readers, and no answer from the caller.
    digest = fingerprint(samples) if shared is None and topology.dp.size > 1 else None
    return {"kind": kind, "size": len(samples), "digest": digest, "dp": topology.dp.rank}


def compare_topologies(
    topology: Topology, record: dict[str, Any] | None, failure: Exception | None
) -> list[dict[str, Any]]:
    """Gather what every rank was given, by global rank; raise on every rank if one failed or if they do not agree.

    Collective over the world. ``record``: this rank's, or its ``failure``.
    """
    places = {axis.name: (axis.size, axis.rank, axis.ranks) for axis in topology.axes}
    mine = {"coordinates": [axis.rank for axis in topology.axes], "sizes": [axis.size for axis in topology.axes]}
    mine |= {"owners": topology.owners, **(record or {})}
    world = Axis("world") if topology.world_size == 1 else Axis.world()
    if topology.world_size > 1:
        for axis in topology.axes:
            if axis.size > 1:
                axis.require_group()
    # Errors first: a rank that failed has no record to compare.
    agree(failure, world, "describing its samples and settings")
    records = gather_objects(mine, world)
    _require_same(records)
    _require_grid(records, places)
    return records


def _require_same(records: Sequence[Mapping[str, Any]]) -> None:
    first = records[0]
    for rank, other in enumerate(records):
        for name, value in other["settings"].items():
            if value != first["settings"][name]:
                raise DistributedError(
                    f"ranks were given different {name}",
                    where=f"rank {rank}",
                    expected=f"{first['settings'][name]} as on rank 0",
                    found=value,
                )
        for name in ("sizes", "owners"):
            if other[name] != first[name]:
                raise DistributedError(
                    f"ranks have topologies of different {name}",
                    where=f"rank {rank}",
                    expected=first[name],
                    found=other[name],
                )


def _require_grid(records: Sequence[Mapping[str, Any]], places: Mapping[str, tuple[int, int, Sequence[int]]]) -> None:
    """Every coordinate is there once, and this rank's axes list the ranks that stand along them."""
    # As many ranks as the grid has places: if no two share one, all places are taken.
    by_place = {tuple(record["coordinates"]): rank for rank, record in enumerate(records)}
    if len(by_place) != len(records):
        raise DistributedError("two ranks have the same coordinates in the topology", expected=f"{len(records)} places")
    here = [place[1] for place in places.values()]
    for number, (name, (size, _, ranks)) in enumerate(places.items()):
        # Walk the axis through this rank: all other coordinates stay.
        along = tuple(by_place[(*here[:number], k, *here[number + 1 :])] for k in range(size))
        if ranks and along != tuple(ranks):
            raise DistributedError(f"ranks disagree on the {name} axis", expected=list(along), found=list(ranks))


def stream_of(records: Sequence[Mapping[str, Any]], topology: Topology, shared: bool | None) -> Stream:
    """The stream that all owners read together. Raises ``DistributedError`` on every rank if they cannot."""
    sources = [(rank, record["source"]) for rank, record in enumerate(records) if record["source"] is not None]
    # Ranks with one dp coordinate read the same samples (tensor-parallel peers, pipeline ends); they count as one
    # reader and must describe the same source.
    by_reader: dict[int, dict[str, Any]] = {}
    for rank, source in sources:
        other = by_reader.setdefault(source["dp"], source)
        if {**source, "digest": None} != {**other, "digest": None} or source["kind"] != sources[0][1]["kind"]:
            raise DistributedError(
                "ranks have different sources", where=f"rank {rank}", expected=sources[0][1]["kind"], found=source
            )
    streams = topology.dp.size
    kind = sources[0][1]["kind"]
    if kind != MAP:
        return Stream(kind, streams, shared=False)
    # Sizes per reader: of its own dataset, or of every ``streams``-th sample of the shared one.
    readers = [by_reader[k] for k in range(streams)]
    sizes = [reader["size"] for reader in readers]
    if shared is None:
        shared = _found_shared([reader["digest"] for reader in readers])
    if shared:
        if len(set(sizes)) > 1:
            raise DistributedError("a shared dataset is not the same on every rank", found=f"lengths {sizes}")
        sizes = [len(range(k, sizes[0], streams)) for k in range(streams)]
    return Stream(kind, streams, tuple(sizes), shared)


def _found_shared(digests: Sequence[str | None]) -> bool:
    if len(digests) == 1:
        return True
    # A digest is empty where two readings of a sample differ, for example by augmentation.
    if "" in digests:
        raise DistributedError(
            "it cannot be told whether ranks hold the same dataset",
            found="samples that differ from one reading to the next",
            hint="pass shared=True if they do, shared=False if each rank has its own",
        )
    return len(set(digests)) == 1
