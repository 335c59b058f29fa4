"""Flat buffers of experts: over which ranks they are cut, and which experts lie in each.

A parameter group of experts has a flat buffer per expert-parallel rank, with the experts that this rank holds, and the
buffer is cut like any other (``partitions``), but over the ranks that hold the same experts: of W data-parallel ranks
and ``ep`` expert-parallel ones, W / ep ranks, its *expert-data-parallel* group. ``partition_count`` has that number,
group by group. Rank r of W is expert-parallel rank r mod ep and holds partition r div ep; with
``use_data_before_expert_parallelism`` it is rank r div (W / ep), and holds partition r mod (W / ep). All ranks give
their experts the same local names, and ``param_shapes`` are those of one rank.

So a group of the file is ``ep`` groups here, each with the names that its experts have among all. Source: ``groups.py``
(``_create_expert_and_data_parallel``) and ``stage_1_and_2.py`` (``_configure_moe_settings``) of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.inventory import Fragments, Group
from ullage.checkpoint.zero.experts import Layer, is_expert, layer_of, local_number
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.shards import ModelFile, ShardFile

_BEFORE = "use_data_before_expert_parallelism"
#: Group 1: the size of expert parallelism for which the writer named a group.
_NAME = re.compile(r"ep_size_(\d+)")


@dataclass(frozen=True)
class Placed:
    """A parameter of one flat buffer as it is known among all experts.

    ``rows``: of a stack, which experts the buffer has, in its order; ``shape`` is then that of all of them.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None

    def moved(self, fragments: Fragments, item_bytes: int) -> Fragments:
        """The fragments of the buffer's part, at their elements of the whole."""
        if self.rows is None:
            return fragments
        row = int(np.prod(self.shape[1:], dtype=np.int64))
        parts = [
            fragments.window(at * row, (at + 1) * row, item_bytes).moved((expert - at) * row)
            for at, expert in enumerate(self.rows)
        ]
        return Fragments.join(parts)


@dataclass
class FlatBuffer:
    """One flat buffer: of a group, or of what one expert-parallel rank holds of a group.

    Attributes:
        group: the buffer and its cut; names are those among all experts.
        local: its parameters as the files name and shape them.
        placed: the same, as they are known among all experts.
        mine: the optimizer files that hold it, by the number of their partition.
    """

    group: Group
    local: Shapes
    placed: list[Placed]
    mine: dict[int, ShardFile]


@dataclass
class Experts:
    """What is known of the experts of one model rank."""

    layers: dict[str, Layer] = field(default_factory=dict)
    #: sizes of expert parallelism, of all groups
    sizes: set[int] = field(default_factory=set)
    #: data-parallel ranks of one expert-parallel rank follow one another
    data_before: bool = False


def experts_of(model: ModelFile, layers: dict[str, Layer]) -> Experts:
    """What the model states say beside the layers. Raises ``CheckpointError``."""
    config = metadata.mapping(model.root.get("ds_config"), "ds_config", model.name)
    return Experts(layers, data_before=bool(config.get(_BEFORE)))


def dense_ranks(shard: ShardFile, claimed: int | None) -> int:
    """Number of data-parallel ranks, over which parameters that are no expert's are cut.

    ``claimed``: the number in the model states, for a file in which all groups are experts'.
    """
    dense = [count for count, group in zip(shard.world, shard.group_of) if not _is_marked(shard, group)]
    return max(dense) if dense else max([claimed or 0, *shard.world])


def _is_marked(shard: ShardFile, group: int) -> bool:
    return group < len(shard.settings) and bool(shard.settings[group].get("moe"))


def parts_of(
    folder: Folder,
    index: int,
    named: Shapes,
    mine: dict[int, ShardFile],
    world: int,
    experts: Experts,
    cut: Callable[[Shapes, dict[int, ShardFile], int], Group],
) -> Iterator[FlatBuffer]:
    """The flat buffers of one group of one model rank.

    Args:
        folder: gets the problems.
        index: number of the group.
        named: shape of each parameter, as the model states list them.
        mine: the optimizer files of the model rank, by data-parallel rank.
        world: number of data-parallel ranks.
        experts: those of the model rank; gets the size of expert parallelism.
        cut: makes the group of parameters, the files that hold it, and the number of its partitions.
    """
    lead = mine[min(mine)]
    theirs = [name for name in named if is_expert(name, experts.layers)]
    if not theirs:
        placed = [Placed(name, shape) for name, shape in named.items()]
        yield FlatBuffer(cut(named, mine, world), named, placed, mine)
        return
    count = lead.world[index] if index < len(lead.world) else 0
    ep = _size(folder, lead, index, count, world)
    if ep is None or not _fits(folder, lead, index, named, ep, experts):
        return
    experts.sizes.add(ep)
    for rank in range(ep):
        ranks = range(rank * count, (rank + 1) * count) if experts.data_before else range(rank, world, ep)
        held = {number: mine[dp_rank] for number, dp_rank in enumerate(ranks) if dp_rank in mine}
        # Files that are missing are problems already; the experts of a rank of which none is there have no tensor.
        if held:
            placed = [_placed(name, shape, experts.layers, ep, rank) for name, shape in named.items()]
            group = replace(cut(named, held, count), names=tuple(p.name for p in placed), ep_rank=rank)
            yield FlatBuffer(group, named, placed, held)


def _size(folder: Folder, lead: ShardFile, index: int, count: int, world: int) -> int | None:
    """The size of expert parallelism of a group; None and a problem where the files do not tell."""
    group = lead.group_of[index] if index < len(lead.group_of) else index
    name = lead.settings[group].get("name") if group < len(lead.settings) else None
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if count < 1 or world % count:
        folder.add_problem(
            "the files do not tell the size of expert parallelism",
            lead,
            group=index,
            expected=f"partition_count of the experts, a divisor of {world} ranks",
            found=f"{count or 'none'}{f', in a group named {name}' if match else ''}",
        )
        return None
    ep = world // count
    if match and int(match[1]) != ep:
        # DeepSpeed's loader gives groups the names of the run that they come from; the cut is that of this run.
        folder.notes.append(f"group {index} is named {name}; it is cut for expert parallelism {ep}, which is followed")
    return ep


def _fits(folder: Folder, lead: ShardFile, index: int, named: Shapes, ep: int, experts: Experts) -> bool:
    """Whether the parameters of a group are the experts of one of ``ep`` ranks; a problem where they are not."""

    def add_problem(what: str, name: str, expected: str | None, found: str | None) -> bool:
        folder.add_problem(what, lead, group=index, parameter=name, expected=expected, found=found)
        return False

    for name, shape in named.items():
        layer = layer_of(name, experts.layers)
        if layer is None:
            if not is_expert(name, experts.layers):
                return add_problem("a group holds experts and other parameters", name, "experts only", None)
            return add_problem("nothing tells how many experts there are", name, "files of the experts' weights", None)
        share = layer.total // ep
        if layer.total % ep or (layer.placed and len(layer.placed) != ep):
            said = f", placed on {len(layer.placed)}" if layer.placed else ""
            found = f"{layer.total} experts{said}"
            return add_problem("experts and expert-parallel ranks do not fit", name, f"a multiple of {ep}", found)
        numbered = local_number(name)
        if numbered and numbered[1] >= share:
            return add_problem("a rank holds more experts than its share", name, f"{share} experts", str(numbered[1]))
        if layer.stacked and (not shape or shape[0] != share):
            return add_problem("a stack of experts of another size", name, f"{share} experts", str(list(shape)))
        own = shape if numbered else shape[1:]
        saved = layer.shapes.get(numbered[2] if numbered else name.rpartition(".")[2], own)
        if own != saved:
            expected = f"{list(saved)}, as in the file of its weights"
            return add_problem("an expert of another shape", name, expected, str(list(own)))
    return True


def _placed(name: str, shape: tuple[int, ...], layers: dict[str, Layer], ep: int, rank: int) -> Placed:
    layer = layer_of(name, layers)
    assert layer is not None
    held, numbered = layer.held(ep, rank), local_number(name)
    if numbered:
        return Placed(f"{layer.prefix}.{held[numbered[1]]}.{numbered[2]}", shape)
    return Placed(name, (layer.total, *shape[1:]), held)
