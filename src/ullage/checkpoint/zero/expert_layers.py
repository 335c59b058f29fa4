"""Experts: the layers that have some, and the flat buffers that hold them, rank by rank.

Two writers are known. DeepSpeed's own layers (``deepspeed.moe.layer.MoE``) name an expert by its number on its rank,
``...deepspeed_experts.0.<parameter>``; in files of weights the number is that among all experts. AutoEP stacks the
experts of a rank in one tensor, ``...experts.w1`` of shape [experts on the rank, ...]. Both save one file per layer and
expert, ``layer_{L}_expert_{E}_mp_rank_{MP}_model_states.pt``, with the weights (not the master weights) of expert E
among all; L counts the layers with experts of one model rank, in the order of its modules.

Experts are read under the names that no layout has a part in: numbers among all experts, and stacks of all of them.
The files of weights tell the number of experts of each layer; the optimizer files tell how many ranks share them.

A parameter group of experts has a flat buffer per expert-parallel rank, with the experts that this rank holds, and the
buffer is cut like any other (``partitions``), but over the ranks that hold the same experts: of W data-parallel ranks
and ``ep`` expert-parallel ones, W / ep ranks, its *expert-data-parallel* group. ``partition_count`` has that number,
group by group. Rank r of W is expert-parallel rank r mod ep and holds partition r div ep; with
``use_data_before_expert_parallelism`` it is rank r div (W / ep), and holds partition r mod (W / ep). All ranks give
their experts the same local names, and ``param_shapes`` are those of one rank. So a group of the file is ``ep`` groups
here, each with the names that its experts have among all.

Source: ``_save_moe_checkpoint`` of ``engine.py``, ``groups.py`` (``_create_expert_and_data_parallel``) and
``stage_1_and_2.py`` (``_configure_moe_settings``) of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ullage.checkpoint.core.inventory import Fragments, Group, Slice, Tensor
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.zero.folder import Folder, collect_problems
from ullage.checkpoint.zero.modules import Kind, whole_tensor
from ullage.checkpoint.zero.shards import ExpertFile, ModelFile, ShardFile

#: Groups: prefix of the layer's experts, number of the expert, name within it.
_NUMBERED = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d+)\.(.+)", re.DOTALL)
_BEFORE = "use_data_before_expert_parallelism"
#: Group 1: the size of expert parallelism for which the writer named a group.
_NAME = re.compile(r"ep_size_(\d+)")


@dataclass(frozen=True)
class Layer:
    """The experts of one layer.

    Attributes:
        prefix: of the names of their parameters, up to the number of the expert, or to the name of the stack.
        total: number of experts.
        stacked: whether the experts of a rank are one tensor (AutoEP).
        placed: by expert-parallel rank, the experts that it holds in its order, where a file says so; else empty, and
            the ranks hold equal shares in the order of the numbers.
        shapes: of the tensors of one expert, by the name within it, as the files of weights have them.
    """

    prefix: str
    total: int
    stacked: bool = False
    placed: tuple[tuple[int, ...], ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def experts_of_rank(self, ep: int, rank: int) -> tuple[int, ...]:
        """The experts that one of ``ep`` ranks holds, by their numbers among all, in the order of its own."""
        share = self.total // ep
        return self.placed[rank] if self.placed else tuple(range(rank * share, (rank + 1) * share))


def local_number(name: str) -> tuple[str, int, str] | None:
    """(prefix of the layer, number of the expert, name within the expert) of a parameter of DeepSpeed's layers."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def _layers_of(folder: Folder, model: ModelFile, tp: int) -> dict[str, Layer]:
    """The layers with experts of one model rank, by prefix; what is wrong with their files becomes problems.

    Args:
        folder: the files read; gets the problems.
        model: the model states of the model rank.
        tp: number of tensor-parallel ranks, each of which must have a file of each expert.
    """
    counts = metadata.integers(model.root.get("num_experts"), "num_experts", model.name)
    mine = {(f.layer, f.expert): f for f in folder.experts.values() if f.model_rank == model.model_rank}
    stacks = _stacks(model)
    if counts and tp > 1 and _spread(folder, model.model_rank, tp):
        raise RefusedFile(
            "experts that are divided among tensor-parallel ranks are not supported",
            where=str(folder.path),
            expected=f"a file of each expert from each of {tp} tensor-parallel ranks",
            hint="train with enable_expert_tensor_parallelism, or with tensor parallelism 1",
        )
    found: dict[str, Layer] = {}
    for number, total in enumerate(counts):
        files = [mine.get((number, expert)) for expert in range(total)]
        _report_missing(folder, model, number, files)
        there = [f for f in files if f is not None]
        prefixes = sorted({p for f in there for p in _prefixes(folder, f)})
        if len(prefixes) > 1:
            what, name = "the files of one layer's experts name several layers", f"layer_{number}_expert_*"
            folder.add_problem(what, file=name, found=", ".join(prefixes[:3]))
        for prefix in prefixes[:1]:
            if prefix in found:
                folder.add_problem("two layers of experts have one name", parameter=prefix)
            shapes = {place_of(n)[2]: tuple(t.shape) for f in there[:1] for n, t in f.tensors.items()}
            layer = found[prefix] = replace(stacks.get(prefix, Layer(prefix, total)), shapes=shapes)
            if layer.total != total:
                what = "the number of experts disagrees with ds_autoep_layers"
                facts: dict[str, Any] = {"expected": str(total), "found": str(layer.total)}
                folder.add_problem(what, file=model.name, parameter=prefix, **facts)
        _compare_shapes(folder, there)
    extra = sorted(f.name for (number, e), f in mine.items() if number >= len(counts) or e >= counts[number])
    if extra:
        folder.add_problem("an expert that the model states do not know", file=extra[0], found=str(len(extra)))
    return found


def _spread(folder: Folder, model_rank: int, tp: int) -> bool:
    """Whether experts have files of some tensor-parallel ranks only, each expert of as many."""
    stage = model_rank // tp
    ranks: dict[tuple[int, int], set[int]] = {}
    for held in folder.experts.values():
        if held.model_rank // tp == stage:
            ranks.setdefault((held.layer, held.expert), set()).add(held.model_rank % tp)
    sizes = {len(held) for held in ranks.values()}
    return len(sizes) == 1 and sizes != {tp}


def _stacks(model: ModelFile) -> dict[str, Layer]:
    """The layers that AutoEP describes, by prefix. Raises ``CheckpointError``."""
    entry, found = "ds_autoep_layers", {}
    for given in metadata.sequence(model.root.get(entry), entry, model.name):
        said = metadata.mapping(given, entry, model.name)
        (prefix,) = metadata.names([said.get("expert_key_prefix")], entry, model.name)
        total = metadata.integer(said.get("num_experts"), entry, model.name, 1)
        placement = metadata.mapping(said.get("expert_placement"), entry, model.name)
        placed: dict[int, tuple[int, ...]] = {}
        for rank in metadata.sequence(placement.get("ranks"), entry, model.name):
            held = metadata.mapping(rank, entry, model.name)
            which = metadata.integers(held.get("experts"), entry, model.name)
            placed[metadata.integer(held.get("rank"), entry, model.name)] = tuple(which)
        every = sorted(expert for held in placed.values() for expert in held)
        if placed and (sorted(placed) != list(range(len(placed))) or every != list(range(total))):
            raise RefusedFile(
                "AutoEP with an expert on several ranks, or on none, is not supported",
                where=f"{model.name}, {prefix}",
                expected=f"each of {total} experts on one rank",
            )
        # Ranks of unequal shares have other shapes than those that the model states of one rank tell.
        if len({len(held) for held in placed.values()}) > 1:
            raise RefusedFile("AutoEP with unequal shares of experts is not supported", where=f"{model.name}, {prefix}")
        found[prefix] = Layer(prefix, total, True, tuple(placed[rank] for rank in sorted(placed)))
    return found


def _report_missing(folder: Folder, model: ModelFile, number: int, files: list[ExpertFile | None]) -> None:
    bad = {problem.file for problem in folder.problems}
    facts: dict[str, Any] = {
        "expected": f"{len(files)} experts, as {model.name} says",
        "found": f"{sum(f is not None for f in files)}",
        "hint": "copy the folder again from where it was saved",
    }
    for expert, held in enumerate(files):
        name = f"layer_{number}_expert_{expert}_mp_rank_{model.model_rank:02d}_model_states.pt"
        # A file that is there and cannot be read is a problem already.
        if held is None and name not in bad:
            folder.add_problem("the file of an expert is missing", file=name, **facts)


def place_of(name: str) -> tuple[str, str, str]:
    """(prefix of the layer, number of the expert, name within it) of a tensor in a file of weights."""
    numbered = local_number(name)
    if numbered:
        return numbered[0], str(numbered[1]), numbered[2]
    stem, _, number = name.rpartition(".")
    prefix, _, own = stem.rpartition(".")
    return prefix, number, own


def _prefixes(folder: Folder, held: ExpertFile) -> set[str]:
    """The layers that the names in a file are of; a name of another expert becomes a problem."""
    places = {name: place_of(name) for name in held.tensors}
    for name, (_, number, _) in places.items():
        if number != str(held.expert):
            expected = f"expert {held.expert}"
            folder.add_problem(
                "the file of an expert holds another one", file=held.name, parameter=name, expected=expected
            )
    return {prefix for prefix, _, _ in places.values()}


def _compare_shapes(folder: Folder, files: list[ExpertFile]) -> None:
    """Find experts whose tensors differ from those of the layer's first expert in name, shape or dtype."""
    held = [{place_of(n)[2]: f"{list(t.shape)} {t.dtype}" for n, t in file.tensors.items()} for file in files]
    for file, found in zip(files[1:], held[1:]):
        name = next((n for n in sorted(held[0].keys() | found.keys()) if held[0].get(n) != found.get(n)), None)
        if name is not None:
            expected = f"{held[0].get(name, 'none')}, as in {files[0].name}"
            facts: dict[str, Any] = {"parameter": name, "expected": expected, "found": found.get(name, "none")}
            folder.add_problem("the experts of a layer differ in shape", file=file.name, **facts)


def untrained_experts(folder: Folder, trained: set[str]) -> list[tuple[int, Tensor]]:
    """Tensors of the files of experts that no optimizer holds, each with its model rank."""
    buffers = {(n[0], n[2]) for m in folder.models.values() for n in map(local_number, m.buffer_names) if n}
    found: list[tuple[int, Tensor]] = []
    stacks: dict[tuple[int, str], dict[int, Tensor]] = {}
    for _, held in sorted(folder.experts.items()):
        for name, ref in held.tensors.items():
            numbered = local_number(name)
            stack = name.rpartition(".")[0]
            if (name if numbered else stack) in trained:
                continue
            kind: Kind = "buffer" if numbered and (numbered[0], numbered[2]) in buffers else "frozen"
            with collect_problems(folder.problems, held.name, parameter=name):
                made = whole_tensor(name, kind, ref, held.file, held.source, kind)
                if numbered:
                    found.append((held.model_rank, made))
                else:
                    stacks.setdefault((held.model_rank, stack), {})[held.expert] = made
    return found + [(rank, _stack(name, parts)) for (rank, name), parts in stacks.items()]


def _stack(name: str, parts: dict[int, Tensor]) -> Tensor:
    """One tensor of the experts' own, by their numbers."""
    first = next(iter(parts.values()))
    rows = [part.slices[0].fragments.moved(expert * first.numel) for expert, part in parts.items()]
    shape = (len(parts), *first.shape)
    whole = Slice(first.slices[0].model_rank, shape, Fragments.join(rows))
    return replace(first, name=name, shape=shape, slices=(whole,))


def router_copies(model: ModelFile) -> dict[str, str]:
    """Second names that AutoEP gives its routers: the name -> the one that the optimizer knows.

    A router is a module under two names, one of them that of the module that it took the place of.
    """
    trained = {name for group in model.param_shapes or [] for name in group}
    module = model.module or {}
    found: dict[str, str] = {}
    for given in metadata.sequence(model.root.get("ds_autoep_layers"), "ds_autoep_layers", model.name):
        (path,) = metadata.names(
            [metadata.mapping(given, "a layer", model.name).get("module_path")], "path", model.name
        )
        under = re.compile(re.escape(path) + r"\.\w+\.(.+)", re.DOTALL)
        for name in module:
            match = under.fullmatch(name) if isinstance(name, str) and name not in trained else None
            owner = f"{path}.router.{match[1]}" if match else name
            if owner != name and owner in module:
                found[name] = owner
    return found


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
        # A buffer with experts 2 and 3 of 4, of 10 elements each: its elements [0, 10) are [20, 30) of the stack, its
        # elements [10, 20) are [30, 40).
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


def dense_ranks(shard: ShardFile, claimed: int | None) -> int:
    """Number of data-parallel ranks, over which parameters that are no expert's are cut.

    ``claimed``: the number in the model states, for a file in which all groups are experts'.
    """
    experts = {n for n, settings in enumerate(shard.settings) if settings.get("moe")}
    dense = [count for count, group in zip(shard.world, shard.group_of) if group not in experts]
    return max(dense) if dense else max([claimed or 0, *shard.world])


@dataclass
class Experts:
    """The experts of one model rank.

    Attributes:
        folder: gets the problems.
        layers: those with experts, by prefix.
        data_before: whether data-parallel ranks of one expert-parallel rank follow one another.
        sizes: of expert parallelism, of all groups.
    """

    folder: Folder
    layers: dict[str, Layer]
    data_before: bool
    sizes: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Folder, model: ModelFile, tp: int) -> Experts:
        """What the model states and the files of weights say. Raises ``CheckpointError``."""
        layers = _layers_of(folder, model, tp)
        config = metadata.mapping(model.root.get("ds_config"), "ds_config", model.name)
        return cls(folder, layers, bool(config.get(_BEFORE)))

    def flat_buffers(
        self,
        index: int,
        named: Shapes,
        mine: dict[int, ShardFile],
        world: int,
        cut: Callable[[Shapes, dict[int, ShardFile], int], Group],
    ) -> Iterator[FlatBuffer]:
        """The flat buffers of one group.

        Args:
            index: number of the group.
            named: shape of each parameter, as the model states list them.
            mine: the optimizer files of the model rank, by data-parallel rank.
            world: number of data-parallel ranks.
            cut: makes the group of parameters, the files that hold it, and the number of its partitions.
        """
        lead = mine[min(mine)]
        if all(local_number(name) is None and self._layer_of(name) is None for name in named):
            placed = [Placed(name, shape) for name, shape in named.items()]
            yield FlatBuffer(cut(named, mine, world), named, placed, mine)
            return
        count = lead.world[index] if index < len(lead.world) else 0
        ep = self._size(lead, index, count, world)
        if ep is None or not self._fits(lead, index, named, ep):
            return
        self.sizes.add(ep)
        # Of 4 ranks, 2 expert-parallel ones: rank 0 of these is ranks 0 and 2, or 0 and 1 with data before experts.
        for rank in range(ep):
            ranks = range(rank * count, (rank + 1) * count) if self.data_before else range(rank, world, ep)
            held = {number: mine[dp_rank] for number, dp_rank in enumerate(ranks) if dp_rank in mine}
            # Files that are missing are problems already; the experts of a rank of which none is there have no tensor.
            if held:
                placed = [self._place(name, shape, ep, rank) for name, shape in named.items()]
                group = replace(cut(named, held, count), names=tuple(p.name for p in placed), ep_rank=rank)
                yield FlatBuffer(group, named, placed, held)

    def _layer_of(self, name: str) -> Layer | None:
        """The layer of which ``name`` is an expert's parameter, or a stack of them."""
        numbered = local_number(name)
        found = self.layers.get(numbered[0] if numbered else name.rpartition(".")[0])
        return found if found is None or found.stacked == (numbered is None) else None

    def _size(self, lead: ShardFile, index: int, count: int, world: int) -> int | None:
        """The size of expert parallelism of a group; None and a problem where the files do not tell."""
        group = lead.group_of[index] if index < len(lead.group_of) else index
        name = lead.settings[group].get("name") if group < len(lead.settings) else None
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if count < 1 or world % count:
            what, found = "the files do not tell the size of expert parallelism", f"{count or 'none'}"
            found += f", in a group named {name}" if match else ""
            expected = f"partition_count of the experts, a divisor of {world} ranks"
            self.folder.add_problem(what, lead, group=index, expected=expected, found=found)
            return None
        ep = world // count
        if match and int(match[1]) != ep:
            # DeepSpeed's loader gives groups the names of the run that they come from; the cut is that of this run.
            note = f"group {index} is named {name}; it is cut for expert parallelism {ep}, which is followed"
            self.folder.notes.append(note)
        return ep

    def _fits(self, lead: ShardFile, index: int, named: Shapes, ep: int) -> bool:
        """Whether the parameters of a group are the experts of one of ``ep`` ranks; a problem where they are not."""
        for name, shape in named.items():
            wrong = self._wrong(name, shape, ep)
            if wrong is not None:
                what, expected, found = wrong
                self.folder.add_problem(what, lead, group=index, parameter=name, expected=expected, found=found)
                return False
        return True

    def _wrong(self, name: str, shape: tuple[int, ...], ep: int) -> tuple[str, str, str | None] | None:
        """What is wrong with a parameter of a group of experts, what is expected, and what was found."""
        layer, numbered = self._layer_of(name), local_number(name)
        if layer is None:
            if numbered is None:
                return "a group holds experts and other parameters", "experts only", None
            return "nothing tells how many experts there are", "files of the experts' weights", None
        share = layer.total // ep
        if layer.total % ep or (layer.placed and len(layer.placed) != ep):
            said = f", placed on {len(layer.placed)}" if layer.placed else ""
            return "experts and expert-parallel ranks do not fit", f"a multiple of {ep}", f"{layer.total} experts{said}"
        if numbered and numbered[1] >= share:
            return "a rank holds more experts than its share", f"{share} experts", str(numbered[1])
        if layer.stacked and (not shape or shape[0] != share):
            return "a stack of experts of another size", f"{share} experts", str(list(shape))
        own = shape if numbered else shape[1:]
        saved = layer.shapes.get(numbered[2] if numbered else name.rpartition(".")[2], own)
        if own != saved:
            return "an expert of another shape", f"{list(saved)}, as in the file of its weights", str(list(own))
        return None

    def _place(self, name: str, shape: tuple[int, ...], ep: int, rank: int) -> Placed:
        layer = self._layer_of(name)
        assert layer is not None
        held, numbered = layer.experts_of_rank(ep, rank), local_number(name)
        if numbered:
            return Placed(f"{layer.prefix}.{held[numbered[1]]}.{numbered[2]}", shape)
        return Placed(name, (layer.total, *shape[1:]), held)
